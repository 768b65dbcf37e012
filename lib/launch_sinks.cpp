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

std::string counted_copies(uint64_t copies) { return counted(copies, "copy"); }

void add(const Sinks& part, Sinks* total) {
  if (total->undigested == 0) total->first = part.first;
  total->copies += part.copies, total->undigested += part.undigested;
}

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

struct Both {
  Sinks a, b;
  std::string uneven;  // the first step in which one run copies more than the other
};

Both count_all(const OriginInput& input) {
  Both both;
  for (const RankPair& pair : input.alignment.ranks) {
    for (const StepPair& step : pair.steps) {
      Sinks a, b;
      try {
        count(*pair.a, step.a, &a);
        count(*pair.b, step.b, &b);
      } catch (const Error&) {
        continue;
      }
      if (step.complete && a.copies != b.copies && both.uneven.empty()) {
        both.uneven = fmt::format("rank {} makes {} to the host in {} of run A, {} in run B", pair.rank,
                                  counted_copies(a.copies), step_name(step.step), grouped(b.copies));
      }
      add(a, &both.a);
      add(b, &both.b);
    }
  }
  return both;
}

}  // namespace

std::vector<std::string> sink_blockers(const OriginInput& input, uint64_t records_compared, uint64_t single) {
  std::vector<std::string> out;
  if (input.alignment.level != Level::launch) return out;
  const Both both = count_all(input);
  for (const auto& [sinks, run] : {std::pair(&both.a, 'A'), std::pair(&both.b, 'B')}) {
    if (sinks->undigested == 0) continue;
    out.push_back(fmt::format("of {} of {} copies to the host in run {} no digest was taken (first: {}), so what left the device "
                              "was not compared",
                              grouped(sinks->undigested), grouped(sinks->copies), run, sinks->first));
  }
  if (!both.uneven.empty()) out.push_back(both.uneven + ": what only one run copies was not compared");
  if (both.a.copies + both.b.copies + records_compared == 0 && single > 0) {
    out.push_back(fmt::format("{} in one run only, and neither run has a record or a copy to the host to compare "
                              "what they led to",
                              counted(single, "launch") + (single == 1 ? " is" : " are")));
  }
  return out;
}

}  // namespace forkpoint
