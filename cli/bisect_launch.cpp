// The launch that a verdict names, found in the streams of both runs: its index is what --launch and --save-operands
// take.
#include <fmt/format.h>

#include "cli/bisect_stages.h"
#include "lib/launch.h"
#include "lib/run.h"

namespace forkpoint {
namespace {

std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

// The only launch of the kernel in that step that left a buffer of this digest; nothing: there is none, or several.
std::optional<int64_t> find_launch(const std::string& run_directory, int rank, const Divergence& first,
                                   const std::string& digest) {
  const Run run = Run::open(run_directory);
  const HashStreamReader* stream = run.stream_of(rank);
  if (stream == nullptr) return std::nullopt;
  std::optional<int64_t> found;
  for (size_t i = 0; i < stream->steps().size(); ++i) {
    if (stream->steps()[i].step != first.step) continue;
    LaunchColumns launches;
    stream->read_launches(i, &launches);
    size_t buffer = 0;
    for (size_t row = 0; row < launches.rows.size(); ++row) {
      const LaunchRow& launch = launches.rows[row];
      bool left = false;
      for (const size_t end = buffer + launch.buffers; buffer < end; ++buffer) {
        const BufferRow& held = launches.buffers[buffer];
        left = left || (!(held.flags & (kBufferBefore | kBufferNoDigest)) && hex(held.digest) == digest);
      }
      if (!left || !is_work(launch.kind) || demangled(stream->sites()[launch.site].tensor) != first.kernel) continue;
      if (found) return std::nullopt;
      found = static_cast<int64_t>(row);
    }
  }
  return found;
}

}  // namespace

LaunchPlace find_launch(const std::pair<WindowDone, WindowDone>& runs, const Divergence& first, int rank) {
  if (first.kind != Kind::launch || first.before.empty() || first.after.empty()) return {};
  return {find_launch(runs.first.run, rank, first, first.before),
          find_launch(runs.second.run, rank, first, first.after)};
}

}  // namespace forkpoint
