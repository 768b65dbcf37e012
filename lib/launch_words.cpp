#include "lib/launch_words.h"

#include <fmt/format.h>

#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// Where the newest allocation row of this ordinal stands; empty: it was made before the recording, or unrecorded.
std::string allocation_text(const HashStreamReader& stream, uint64_t allocation, size_t last_step) {
  LaunchColumns launches;
  for (size_t s = last_step + 1; s-- > 0;) {
    try {
      stream.read_launches(s, &launches);
    } catch (const Error&) {
      return {};
    }
    for (size_t i = 0; i < launches.rows.size(); ++i) {
      if (launches.rows[i].kind == LaunchKind::allocate && launches.rows[i].object == allocation) {
        return fmt::format("allocated at launch {} of {}", i, step_name(stream.steps()[s].step));
      }
    }
  }
  return {};
}

}  // namespace

std::string place_name(uint32_t place) {
  switch (place) {
    case kPlaceSource:
      return "source";
    case kPlaceTarget:
      return "target";
    case kPlaceGlobal:
      return "device variable";
    default:
      return fmt::format("buffer at parameter byte {}", place);
  }
}

std::string step_name(int64_t step) { return step == kPrologueStep ? "the prologue" : fmt::format("step {}", step); }

std::string kernel_name(const HashStreamReader& stream, size_t step_index, uint32_t row) {
  if (row == kNoRow) return {};
  LaunchColumns launches;
  try {
    stream.read_launches(step_index, &launches);
  } catch (const Error&) {
    return {};
  }
  if (row >= launches.rows.size()) return {};
  const LaunchRow& at = launches.rows[row];
  return at.kind == LaunchKind::record ? std::string() : stream.sites()[at.site].tensor;
}

std::string launch_text(const HashStreamReader& stream, size_t step_index, uint32_t row) {
  const std::string name = short_kernel_name(kernel_name(stream, step_index, row));
  return fmt::format("{} (launch {} of {})", name.empty() ? "a record" : name, row,
                     step_name(stream.steps()[step_index].step));
}

std::string sink_text(const LaunchJoin& join, const RankPair& pair, const DataNode& sink) {
  const StepPair& step = pair.steps[sink.pair_step];
  const std::string name = short_kernel_name(join.names.name(sink.kernel));
  const char* how = (sink.flags & kLaunchToHost) != 0 ? "copies to the host" : "leaves where another device sees it";
  return fmt::format("what {} {} (launch {} of {})", name, how, sink.row_a, step_name(step.step));
}

std::string live_text(const LaunchJoin& join, const RankPair& pair, const LiveDifference& difference) {
  const HashStreamReader& stream = join.stream(false);
  const LaunchRef& writer = difference.a.writer;
  const std::string allocated = allocation_text(stream, difference.allocation_a, writer.step);
  const char* how = is_found(difference) ? "differed already when a launch was first handed it, " : "last written by ";
  return fmt::format(
      "rank {}: a buffer of {} bytes differs and is still there where the recording ends (allocation {} of run A{}; "
      "{}{})",
      pair.rank, grouped(difference.a.bytes), difference.allocation_a, allocated.empty() ? "" : ", " + allocated, how,
      launch_text(stream, writer.step, writer.row));
}

}  // namespace forkpoint
