// What was lost and what was not seen, counted without lock or allocation by any thread, and written by the writer thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/record.h"

namespace forkpoint {

// The steps in which something happened, since it was last asked. Any thread may add, one takes.
class StepRange {
 public:
  void add(int64_t step);
  // false: nothing was added.
  bool take(int64_t* first, int64_t* last);
  void reset();

 private:
  std::atomic<int64_t> first_{INT64_MAX};
  std::atomic<int64_t> last_{INT64_MIN};
};

// Each kind of loss becomes a Gap with the text of loss_reason(), and one line on stderr a process.
enum class Loss : uint8_t {
  ring_full, step_lost, reentrant, unfinished, names_full, no_memory, internal,
  bad_descriptor, bad_name, bad_dtype, bad_role, bad_device, bad_shape, bad_data, bad_strides, bad_shard, bad_step,
  bad_collective, bad_state,
  pending_full, device_late, device_gone,
  cuda_absent, cuda_not_built, cuda_capturing, cuda_no_context, cuda_bad_address, cuda_setup, cuda_launch, cuda_slots,
  cuda_view,
  launch_row, launch_arrival, graph_dropped, graph_setup,
  nccl_communicator, nccl_in_progress, nccl_reduction,
  notes_full,
  count_
};
const char* loss_reason(Loss loss);

class LossLog {
 public:
  // step: the current one, or kPrologueStep (before the first, or not known which). records: how many. detail: a foreign error code, 0: none.
  void add(Loss loss, int64_t step, uint64_t records = 1, int detail = 0);
  // Says the loss on stderr, if it was not said before in this process.
  void say_once(Loss loss, int detail = 0);

  struct Taken {
    Gap gap;          // reason is not filled in
    int detail = 0;
  };
  // Takes what was counted since the last call; false: nothing. One thread.
  bool take(Loss loss, Taken* taken);
  // In the child of a fork: nothing was lost here yet.
  void reset();

 private:
  struct Counter {
    std::atomic<uint64_t> records{0};
    StepRange steps;
    std::atomic<int> detail{0};
    std::atomic<bool> said{false};
  };
  Counter counters_[static_cast<int>(Loss::count_)];
};

// Things declared as not seen.
enum class Limit : uint8_t {
  graph_replay, launch_level, scope_depth, after_last_step, implied_end,
  // Of the launch level.
  graph_unseen, graph_partial, graph_conditional, extents, params, arrays, cupti_taken, cupti_absent, cupti_refused,
  nccl_unseen, retry_failed, globals, rounded_extents, peers,
  nvtx_taken, nvtx_names,
  stream_values,
  long_evaluation,
  notes_full,
  count_
};
CoverageLimit coverage_limit(Limit limit);

class LimitSet {
 public:
  void add(Limit limit) { bits_.fetch_or(1u << static_cast<int>(limit), std::memory_order_relaxed); }
  uint32_t bits() const { return bits_.load(std::memory_order_relaxed); }
  void reset() { bits_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> bits_{0};
};

}  // namespace forkpoint
