// The last look before `identical`: that the files are what their writers wrote, and that the sums by which steps were found
// equal are the sums of the records that stand in the file. A torn copy of two files has frames with right checksums, but of
// two runs.
#include <fmt/format.h>

#include <algorithm>

#include "lib/diff_parallel.h"
#include "lib/diff_verdict.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

struct NamedStream {
  char run;
  const HashStreamReader* stream;
};

std::vector<NamedStream> wanted_streams(const Run& a, const Run& b, const DiffOptions& options) {
  std::vector<NamedStream> streams;
  const auto add = [&](const Run& run, char which) {
    for (const auto& stream : run.streams()) {
      const auto& ranks = options.ranks;
      const bool wanted = ranks.empty() || std::find(ranks.begin(), ranks.end(), stream->header().rank) != ranks.end();
      if (wanted) streams.push_back({which, stream.get()});
    }
  };
  add(a, 'A');
  add(b, 'B');
  return streams;
}

// A sentence where the launches of a step are not those that its summary was made of.
std::string check_launch_sum(const HashStreamReader& stream, size_t step_index, LaunchColumns* launches,
                             Verified::Launches* counts) {
  const StepSummary& summary = stream.steps()[step_index];
  if (!summary.complete || summary.launches == 0) return {};
  try {
    stream.read_launches(step_index, launches);
  } catch (const Error& error) {
    return error.what();
  }
  Digest sum;
  size_t first_buffer = 0;
  for (size_t i = 0; i < launches->rows.size(); ++i) {
    const LaunchRow& row = launches->rows[i];
    sum += launch_leaf(stream.site_keys()[row.site], i, row, launches->buffers.data() + first_buffer);
    if (is_work(row.kind)) {
      ++counts->work;
      for (uint32_t k = 0; k < row.buffers; ++k) {
        const uint8_t flags = launches->buffers[first_buffer + k].flags;
        counts->buffers += (flags & (kBufferBefore | kBufferNoDigest | kBufferAddresses)) == 0 ? 1 : 0;
      }
    }
    first_buffer += row.buffers;
  }
  if (sum == summary.launch_sum && launches->rows.size() == summary.launches) return {};
  return fmt::format(
      "{}: the launches of step {} ({} in all) do not add up to the step's summary: frames of two runs are mixed in this "
      "file (a copy that was interrupted?). Restore it from a copy, or record again.",
      stream.path(), summary.step, launches->rows.size());
}

// A sentence where the records of a step are not those that its summary was made of.
std::string check_sum(const HashStreamReader& stream, size_t step_index, StepColumns* columns) {
  const StepSummary& summary = stream.steps()[step_index];
  if (!summary.complete) return {};  // summed up from the records when it was opened
  try {
    stream.read_step(step_index, columns);
  } catch (const Error& error) {
    return error.what();
  }
  Digest sum;
  uint64_t records = 0;
  for (size_t row = 0; row < columns->size(); ++row) {
    if ((columns->flags[row] & kRecordEval) != 0) continue;
    sum += tree_leaf(stream.site_keys()[columns->site[row]], stream.layout_keys()[columns->layout[row]], columns->row(row));
    ++records;
  }
  if (sum == summary.digest && records == summary.records) return {};
  return fmt::format("{}: the records of step {} ({} in all) do not add up to the step's summary: frames of two runs are mixed in this "
                     "file (a copy that was interrupted?). Restore it from a copy, or record again.",
                     stream.path(), summary.step, records);
}

}  // namespace

Verified verify_runs(const Run& a, const Run& b, const DiffOptions& options) {
  Verified out;
  const std::vector<NamedStream> streams = wanted_streams(a, b, options);
  const int threads = thread_count(options.threads);
  std::vector<std::string>& damage = out.damage;
  damage.resize(streams.size());
  std::vector<uint64_t> checked(streams.size(), 0);
  std::vector<std::vector<Verified::Launches>> counts(streams.size());
  std::vector<LaunchColumns> launches(static_cast<size_t>(threads));
  std::vector<StepColumns> columns(static_cast<size_t>(threads));
  parallel_for(threads, streams.size(), [&](size_t i, int worker) {
    const HashStreamReader& stream = *streams[i].stream;
    std::string found = stream.verify(&checked[i]);
    counts[i].resize(stream.steps().size());
    for (size_t step = 0; found.empty() && step < stream.steps().size(); ++step) {
      found = check_sum(stream, step, &columns[static_cast<size_t>(worker)]);
      if (found.empty() && options.launches)
        found = check_launch_sum(stream, step, &launches[static_cast<size_t>(worker)], &counts[i][step]);
    }
    if (!found.empty()) damage[i] = fmt::format("run {}, rank {}: {}", streams[i].run, stream.header().rank, found);
  });
  for (const uint64_t count : checked) out.frames += count;
  for (size_t i = 0; i < streams.size(); ++i) {
    if (streams[i].run == 'A') out.launches[streams[i].stream->header().rank] = std::move(counts[i]);
  }
  damage.erase(std::remove(damage.begin(), damage.end(), std::string()), damage.end());
  return out;
}

}  // namespace forkpoint
