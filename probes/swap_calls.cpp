#include "probes/swap_calls.h"

#include <algorithm>

#include "probes/recorder.h"

namespace forkpoint {
namespace {

using collective::CollectiveSpec;

SwapCommunicator::Launch launch_of(const SwapCalled& one) {
  const NcclCall& call = one.call.call;
  return {one.known.get(), one.call.spec, call.input.data, const_cast<void*>(call.output.data),
          static_cast<CUstream>(call.stream)};
}

NcclResult call_real(const NcclLibrary& library, const NcclCall& call) {
  void* out = const_cast<void*>(call.output.data);
  switch (call.swap) {
    case NcclCall::Swap::all_reduce:
      return library.AllReduce(call.input.data, out, call.count, call.type, call.reduction, call.comm, call.stream);
    case NcclCall::Swap::reduce_scatter:
      return library.ReduceScatter(call.input.data, out, call.count, call.type, call.reduction, call.comm, call.stream);
    default:
      return library.Reduce(call.input.data, out, call.count, call.type, call.reduction, call.root, call.comm,
                            call.stream);
  }
}

}  // namespace

bool swap_takes(const NcclCall& call) {
  const DType* dtype = nccl_dtype(call.type);
  return call.swap != NcclCall::Swap::none && call.comm && call.reduction >= 0 && dtype &&
         collective::has_collective(*dtype, swap_mode().tree);
}

bool make_swap_spec(const NcclCall& call, CollectiveSpec* spec) {
  spec->kind = static_cast<collective::Kind>(static_cast<int>(call.swap) - 1);
  spec->dtype = *nccl_dtype(call.type);
  spec->wide = swap_mode().wide;
  spec->tree = swap_mode().tree;
  spec->count = call.count;
  spec->root = call.root < 0 ? 0 : static_cast<uint32_t>(call.root);
  spec->op = static_cast<collective::Op>(call.reduction);
  if (call.reduction < kNcclBuiltInReductions) return true;
  spec->op = collective::Op::scaled_sum;
  NcclCommunicators::Reduction known;
  const Guard guard;
  if (!guard.entered() || !nccl_communicators.find_reduction(guard.token(), call.comm, call.reduction, &known))
    return false;
  spec->factor = known.bits;
  spec->factor_at = known.on_device ? known.address : nullptr;
  return known.type == call.type;
}

NcclResult launch_swaps(const std::vector<SwapCalled>& all) {
  std::vector<std::vector<const SwapCalled*>> bundles;
  for (const SwapCalled& one : all) {
    const auto fits = [&](const std::vector<const SwapCalled*>& bundle) {
      return bundle[0]->known->is_kin_of(*one.known) &&
             std::none_of(bundle.begin(), bundle.end(), [&](const auto* other) { return other->known == one.known; });
    };
    const auto found = std::find_if(bundles.begin(), bundles.end(), fits);
    if (found == bundles.end())
      bundles.push_back({&one});
    else
      found->push_back(&one);
  }
  NcclResult result = kNcclSuccess;
  for (const auto& bundle : bundles) {
    std::vector<SwapCommunicator::Launch> calls;
    for (const SwapCalled* one : bundle) calls.push_back(launch_of(*one));
    const NcclResult own = SwapCommunicator::launch(calls);
    if (own != kNcclSuccess) result = own;
  }
  return result;
}

NcclResult call_unswapped(const std::vector<SwapCall>& calls) {
  if (calls.empty()) return kNcclSuccess;
  const NcclLibrary& library = *calls[0].library;
  NcclResult result = library.GroupStart();
  for (const SwapCall& one : calls) {
    if (result == kNcclSuccess) result = call_real(*one.library, one.call);
  }
  const NcclResult ended = library.GroupEnd();
  return result == kNcclSuccess ? ended : result;
}

}  // namespace forkpoint
