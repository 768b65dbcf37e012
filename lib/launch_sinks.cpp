#include "lib/launch_sinks.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/error.h"
#include "lib/launch_words.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

struct Sinks {
  uint64_t copies = 0, undigested = 0;
  std::string first;
};

bool is_digested(const LaunchRow& row, const BufferRow* buffers) {
  return std::any_of(buffers, buffers + row.buffers, [](const BufferRow& buffer) {
    return buffer.place == kPlaceSource && (buffer.flags & kBufferNoDigest) == 0;
  });
}

void count(const HashStreamReader& stream, size_t step, Sinks* sinks) {
  LaunchColumns launches;
  stream.read_launches(step, &launches);
  const BufferRow* buffer = launches.buffers.data();
  for (size_t i = 0; i < launches.rows.size(); ++i) {
    const LaunchRow& row = launches.rows[i];
    if (row.kind == LaunchKind::copy && (row.flags & kLaunchToHost) != 0) {
      ++sinks->copies;
      if (!is_digested(row, buffer) && sinks->undigested++ == 0) {
        sinks->first = fmt::format("rank {}, launch {} of {}", stream.header().rank, i, step_name(stream.steps()[step].step));
      }
    }
    buffer += row.buffers;
  }
}

Sinks count_all(const OriginInput& input, bool in_b) {
  Sinks sinks;
  for (const RankPair& pair : input.alignment.ranks) {
    for (const StepPair& step : pair.steps) {
      try {
        count(in_b ? *pair.b : *pair.a, in_b ? step.b : step.a, &sinks);
      } catch (const Error&) {
      }
    }
  }
  return sinks;
}

}  // namespace

std::vector<std::string> undigested_sinks(const OriginInput& input) {
  std::vector<std::string> out;
  if (input.alignment.level != Level::launch) return out;
  for (const bool in_b : {false, true}) {
    const Sinks sinks = count_all(input, in_b);
    if (sinks.undigested == 0) continue;
    out.push_back(fmt::format("of {} of {} copies to the host in run {} no digest was taken (first: {}), so what left the device "
                              "was not compared",
                              grouped(sinks.undigested), grouped(sinks.copies), in_b ? 'B' : 'A', sinks.first));
  }
  return out;
}

}  // namespace forkpoint
