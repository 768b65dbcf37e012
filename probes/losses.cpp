#include "probes/losses.h"

#include <array>

#include "lib/evaluation.h"
#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr std::array<const char*, static_cast<size_t>(Loss::count_)> kReasons = {
    "ring full longer than FORKPOINT_RING_WAIT_MS",
    "a step's begin or end found the ring full, so that what followed has no place",
    "a call from within the probe (a signal handler or an allocator hook)",
    "the process ended during a call to the probe",
    "too many distinct names, sites or shapes",
    "no memory",
    "an error inside the probe",
    "a tensor descriptor is NULL or its struct_size is too small",
    "a tensor, scalar or state without a name",
    "a tensor's dtype is not one of enum forkpoint_dtype",
    "a role is not one of enum forkpoint_role",
    "a tensor's device is not one of enum forkpoint_device",
    "a tensor's ndim is not in 0..16, its shape is NULL or negative, or its size overflows",
    "a tensor's data is NULL",
    "a tensor's strides reach further than the address space",
    "a shard's box is not inside its global shape",
    "a step's number is negative",
    "a collective's members are NULL or negative",
    "a state's data is NULL",
    "too many records between two steps",
    "digests were not computed on the device before the process ended",
    "the CUDA context was destroyed before digests were computed",
    "a CUDA tensor, but libcuda.so.1 is not loaded or too old",
    "a CUDA tensor, but the probe was built without CUDA",
    "the first CUDA tensor of a context came while its stream was being captured",
    "a CUDA tensor without a usable CUDA context",
    "a CUDA tensor whose memory is not (wholly) known to CUDA",
    "the digest kernels could not be loaded into the CUDA context",
    "the digest kernel could not be launched",
    "digests were not computed on the device within FORKPOINT_RING_WAIT_MS",
    "a CUDA tensor of a form that the digest kernels cannot read",
    "too many launches on their way",
    "digests of a launch were not computed on the device before the process ended",
    "more digests inside CUDA graphs than there is room for (FORKPOINT_RING_SLOTS)",
    "the ring for digests inside CUDA graphs could not be set up",
    "a call on an NCCL communicator that could not be identified",
    "a non-blocking NCCL call was still in progress after 5 s",
    "an NCCL reduction whose factor was not seen",
    "more kinds of trouble in the program's layers than there is room for",
};

// Each field only moves outwards, whatever the order of the threads.
void lower(std::atomic<int64_t>& target, int64_t value) {
  int64_t known = target.load(std::memory_order_relaxed);
  while (value < known && !target.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}
void raise(std::atomic<int64_t>& target, int64_t value) {
  int64_t known = target.load(std::memory_order_relaxed);
  while (value > known && !target.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void StepRange::add(int64_t step) {
  lower(first_, step);
  raise(last_, step);
}

bool StepRange::take(int64_t* first, int64_t* last) {
  if (first_.load(std::memory_order_relaxed) == INT64_MAX) return false;
  *first = first_.exchange(INT64_MAX, std::memory_order_relaxed);
  *last = last_.exchange(INT64_MIN, std::memory_order_relaxed);
  if (*first == INT64_MAX) return false;
  // One place that is not known makes the range one that is not known.
  if (*last == INT64_MIN || *first == kPrologueStep) *last = *first;
  return true;
}

void StepRange::reset() {
  first_.store(INT64_MAX, std::memory_order_relaxed);
  last_.store(INT64_MIN, std::memory_order_relaxed);
}

const char* loss_reason(Loss loss) { return kReasons[static_cast<size_t>(loss)]; }

void LossLog::add(Loss loss, int64_t step, uint64_t records, int detail) {
  Counter& counter = counters_[static_cast<size_t>(loss)];
  counter.steps.add(step);
  if (detail) counter.detail.store(detail, std::memory_order_relaxed);
  counter.records.fetch_add(records, std::memory_order_release);
  say_once(loss, detail);
}

void LossLog::say_once(Loss loss, int detail) {
  Counter& counter = counters_[static_cast<size_t>(loss)];
  if (counter.said.load(std::memory_order_relaxed) || counter.said.exchange(true)) return;
  if (detail) {
    say("not recorded: %s (CUDA error %d); noted as a gap in the run", loss_reason(loss), detail);
  } else {
    say("not recorded: %s; noted as a gap in the run", loss_reason(loss));
  }
}

bool LossLog::take(Loss loss, Taken* taken) {
  Counter& counter = counters_[static_cast<size_t>(loss)];
  if (counter.records.load(std::memory_order_relaxed) == 0) return false;
  taken->gap.records_lost = counter.records.exchange(0, std::memory_order_acquire);
  // A thread between its steps and its count has lost its range to the call before: where is then not known.
  if (!counter.steps.take(&taken->gap.first_step, &taken->gap.last_step)) {
    taken->gap.first_step = taken->gap.last_step = kPrologueStep;
  }
  taken->detail = counter.detail.load(std::memory_order_relaxed);
  return true;
}

void LossLog::reset() {
  for (Counter& counter : counters_) {
    counter.records.store(0, std::memory_order_relaxed);
    counter.steps.reset();
  }
}

CoverageLimit coverage_limit(Limit limit) {
  switch (limit) {
    case Limit::graph_replay:
      return {"tensor recorded inside CUDA graph capture is not seen at replay",
              "record it outside the captured region, or run without CUDA graphs"};
    case Limit::launch_level: return {"kernel launches are not recorded", "the run is as fine as level layer"};
    case Limit::graph_unseen:
      return {"CUDA graph captured before recording began", "what its nodes did at each replay was not seen"};
    case Limit::graph_partial:
      return {"CUDA graph with nodes that were added or changed one by one, or that several executables share",
              "those nodes were not seen at replay"};
    case Limit::graph_conditional:
      return {"CUDA graph body captured for a conditional node", "how often it ran and what it did was not seen"};
    case Limit::extents:
      return {"buffers cut out of a large allocation by an allocator that says no extents",
              "a window of 256 KiB from the pointer on was hashed"};
    case Limit::params:
      return {"kernels whose parameters the driver does not describe", "the buffers that they were handed were not seen"};
    case Limit::arrays: return {"copies from and to CUDA arrays, and of three dimensions", "they were not hashed"};
    case Limit::cupti_taken:
      return {"kernel launches were not recorded: another tool holds CUPTI", "run without that profiler"};
    case Limit::cupti_absent:
      return {"kernel launches were not recorded: libcupti was not found", "set FORKPOINT_CUPTI to its path"};
    case Limit::cupti_refused:
      return {"kernel launches were not recorded: CUPTI refused", "what it said is on the job's stderr"};
    case Limit::nccl_unseen:
      return {"NCCL calls that did not come through the probe (resolved by dlsym, or statically linked)",
              "its kernels were recorded as launches only"};
    case Limit::nvtx_taken:
      return {"NVTX ranges are not seen: NVTX_INJECTION64_PATH names another library", "layers and steps from them are missing"};
    case Limit::nvtx_names:
      return {"more than 12,000 distinct names of NVTX ranges", "ranges of further names are not part of a layer's path"};
    case Limit::retry_failed: return {"the launch to be repeated could not be", "the reason is on the job's stderr"};
    case Limit::stream_values:
      return {"values that streams write to memory or wait for there (cuStreamWriteValue, cuStreamWaitValue, cuStreamBatchMemOp)",
              "what they wrote and which work they ordered was not seen"};
    case Limit::long_evaluation:
      return {std::string(kEvaluationLimit) + " beyond 131,072 between two steps", "they are compared up to there"};
    case Limit::notes_full:
      return {"more things that were not seen than there is room for", "256 of them are listed"};
    case Limit::peers:
      return {"memory of another device that a launch was handed", "it was not hashed there"};
    case Limit::rounded_extents:
      return {"blocks of PyTorch's caching allocator are larger than their tensors",
              "what lies behind a tensor in its block was hashed with it"};
    case Limit::globals:
      return {"device memory that kernels reach without being handed a pointer",
              "__device__ variables and tables of addresses in device memory"};
    case Limit::scope_depth: return {"scopes nested deeper than 64", "their records stand under the 64th scope"};
    case Limit::implied_end:
      return {"the program ends no step itself: the last one is taken to be whole", "call forkpoint_step_end() at its end"};
    case Limit::after_last_step:
    default:
      return {std::string(kBehindLastStepLimit), "record them before the step ends"};
  }
}

}  // namespace forkpoint
