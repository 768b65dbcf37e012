#include "probes/swap_communicator.h"

#include "probes/os.h"

namespace forkpoint {

using collective::CollectivePlace;

// What comes before the call's own work on its stream, and behind it.
NcclResult SwapCommunicator::begin_launch(Launch& call) {
  if (ended_.load()) return kNcclSystemError;
  const CollectivePlace place{shape_,   static_cast<uint32_t>(place_),
                              reached_, reinterpret_cast<const uint32_t*>(means_->host_on_device),
                              call.in,  call.out};
  const InContext here(driver_, context_);
  if (!collective::plan_collective(call.spec, place, &call.planned) || !here.entered()) return kNcclCudaError;
  if (call.planned.grid == 0) return kNcclSuccess;
  const bool ordered = order_.capture_of(call.stream, &call.capture) == CUDA_SUCCESS &&
                       order_.before(*means_, call.stream, call.capture) == CUDA_SUCCESS;
  if (!ordered) return kNcclCudaError;
  return by_messages() || means_->kernels->run(driver_, call.planned, call.stream) ? kNcclSuccess : kNcclCudaError;
}
NcclResult SwapCommunicator::end_launch(const Launch& call) {
  const InContext here(driver_, context_);
  if (call.planned.grid == 0) return kNcclSuccess;
  return order_.behind(*means_, call.stream, call.capture) == CUDA_SUCCESS ? kNcclSuccess : kNcclCudaError;
}

NcclResult SwapCommunicator::launch(std::span<Launch> calls) {
  NcclResult result = kNcclSuccess;
  size_t begun = 0;
  for (; begun < calls.size() && result == kNcclSuccess; ++begun) result = calls[begun].one->begin_launch(calls[begun]);
  if (result == kNcclSuccess && calls[0].one->by_messages() && calls[0].planned.grid > 0) result = send_and_add(calls);
  // Also where it failed halfway: part of it may be under way.
  for (size_t i = 0; i < begun; ++i) {
    const NcclResult ended = calls[i].one->end_launch(calls[i]);
    if (result == kNcclSuccess) result = ended;
  }
  return result;
}

SwapMessages SwapCommunicator::messages_on(CUstream stream) const {
  return {.library = library_,
          .driver = driver_,
          .comm = handle.load(),
          .place = place_,
          .ranks = static_cast<uint32_t>(size_),
          .context = context_,
          .kernels = means_->kernels,
          .staging = reinterpret_cast<char*>(means_->staging),
          .stream = stream};
}

NcclResult SwapCommunicator::send_and_add(std::span<Launch> calls) {
  std::vector<SwapMessages> parts;
  for (const Launch& call : calls) {
    parts.push_back(call.one->messages_on(call.stream));
    parts.back().spec = call.spec;
    parts.back().params = call.planned.params;
  }
  return add_by_messages(parts);
}

// ---- Ending

void SwapCommunicator::end(bool aborts) {
  ended_.store(true);
  // The thread that decides leaves NCCL alone from now on; inside NCCL it is the abort that ends its wait.
  static constinit std::atomic<uint32_t> nobody_wakes{0};
  for (int tries = 0; tries < 1000 && busy_.test(); ++tries) futex_wait(nobody_wakes, 0, 100'000);
  if (!aborts || !is_decided() || !means_ || !means_->host) return;
  {
    // Of a call that ends early nobody knows who still writes to this member's memory.
    const InContext here(driver_, context_);
    lost_ = !here.entered() || (order_.any_launch() && driver_.cuEventQuery_(means_->last) != CUDA_SUCCESS);
  }
  __atomic_store_n(reinterpret_cast<uint32_t*>(means_->host), 1u, __ATOMIC_RELEASE);
  aborted_ = true;
}

SwapCommunicator::~SwapCommunicator() {
  if (!means_) return;
  // A graph may still be replayed: its kernels wait for others, and their blocks are theirs for ever, unless they end
  // at once. Nobody else may count on what they take up.
  const bool may_wait = order_.any_capture() && !aborted_;
  const bool is_left = lost_ || order_.any_capture();
  if (means_->blocks > 0 && is_left && !may_wait) means_->kernels->give_back(means_->blocks);
  const bool is_gone = means_->context == 0 || number_of_context(driver_, context_) != means_->context;
  if (is_left || is_gone) {
    delete means_;
    return;
  }
  const InContext here(driver_, context_);
  if (here.entered()) leave_swap_means(driver_, means_);
}

}  // namespace forkpoint
