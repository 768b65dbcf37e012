#include "probes/launch_level.h"

#include <cuda.h>

#include <cstdlib>
#include <cstring>

#include "probes/allocations.h"
#include "probes/cupti_hooks.h"
#include "probes/graphs.h"
#include "probes/launch_functions.h"
#include "probes/launch_recorder.h"
#include "probes/launch_streams.h"
#include "probes/nvtx_hooks.h"
#include "probes/os.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr char kCudaInjection[] = "CUDA_INJECTION64_PATH";

bool create_tables() { return memory.create() && stream_numbers.create() && graphs.create() && recorder.names().create(); }

void watch(const Token& token, const Settings& settings) {
  if (is_watching()) return;
  // A rank that nobody has told yet is watched: what it records is up to the recorder, which asks again.
  int32_t world = 0;
  const int32_t rank = recorder.known_rank(&world);
  if (rank >= 0 && !settings.wants_rank(rank)) return;
  if (!create_tables()) return recorder.lose_row(Loss::no_memory);
  // What was released, unloaded or destroyed while nobody watched is not known. (Blocks of PyTorch's are told all the time.)
  static constinit std::atomic<bool> watched_before{false};
  if (watched_before.exchange(true)) {
    memory.allocations.clear();
    forget_kernels();
    graphs.forget();
  }
  launch_recorder.set_up(&settings);
  switch (start_watching(token, settings)) {
    case Watching::on:
    case Watching::under_way:
    case Watching::unusable: break;
    case Watching::absent: recorder.limit(Limit::cupti_absent); break;
    case Watching::taken: recorder.limit(Limit::cupti_taken); break;
    case Watching::refused: recorder.limit(Limit::cupti_refused); break;
  }
}

// Marks in kernels and ranges are seen only while we watch.
bool watches_from_the_start(const Settings& settings) { return settings.first_wanted_step == 0 || has_step_mark(); }

}  // namespace

void offer_injection(const Settings& settings, const char* own_path) {
  offer_nvtx_injection(own_path);
  if (settings.level != Level::launch) return;
  const char* other = getenv(kCudaInjection);
  if (!other || !*other) {
    setenv(kCudaInjection, own_path, 1);
  } else if (strcmp(other, own_path) != 0) {
    recorder.limit(Limit::cupti_taken);
  }
}

void cuda_initialised(const Token& token, const Settings& settings) {
  note_cuda_initialised();
  if (settings.state != Settings::State::ready || settings.level != Level::launch) return;
  if (watches_from_the_start(settings)) watch(token, settings);
}

void launch_level_at_step(const Token& token, const Settings& settings, int64_t step) {
  if (settings.level != Level::launch) return;
  if (step > settings.last_wanted_step) return stop_watching(token);
  const CudaDriver* driver = step >= settings.first_wanted_step && !is_watching() ? find_cuda_driver(token) : nullptr;
  CUcontext current = nullptr;
  if (!driver) return;
  // Our kernels now, at the step's border, and not within a call of the host's.
  int error = 0;
  if (driver->cuCtxGetCurrent_(&current) == CUDA_SUCCESS && current) recorder.digest_context(token, current, &error);
  watch(token, settings);
}

LaunchPacket* launch_row_of_record(const Token& token, void* stream, const void* data, int64_t lowest_offset, int64_t end_offset) {
  if (!is_watching()) return nullptr;
  CallPlace place;
  const CudaDriver* driver = find_cuda_driver(token);
  if (!driver || driver->cuCtxGetCurrent_(&place.context) != CUDA_SUCCESS) return nullptr;
  place.stream = static_cast<CUstream>(stream);
  return launch_recorder.record_row(token, place, static_cast<const char*>(data) + lowest_offset,
                                    static_cast<uint64_t>(end_offset - lowest_offset));
}

void declare_launch_limits(LimitSet& limits) { limits.add(Limit::globals); }

void launch_level_outside_callbacks(const Token& token) { end_marked_watching(token); }

void launch_level_in_child() {
  launch_recorder.after_fork_in_child();
  forget_watching_in_child();
}

}  // namespace forkpoint
