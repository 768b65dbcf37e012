// The probe built without CUDA: every CUDA tensor becomes a Gap.
#include "probes/cuda_digest.h"
#include "probes/nccl_swap.h"
#include "probes/operands.h"
#include "probes/scatter.h"

namespace forkpoint {

DeviceOutcome enqueue_device_digest(const Token&, const DeviceTensor&, uint32_t) {
  return {DeviceOutcome::Kind::lost, nullptr, Loss::cuda_not_built, 0};
}
void enqueue_device_digests(const Token& token, const DeviceTensor* const* tensors, size_t count, uint32_t slots,
                            DeviceOutcome* outcomes) {
  for (size_t i = 0; i < count; ++i) outcomes[i] = enqueue_device_digest(token, *tensors[i], slots);
}
CudaContext* make_digest_context(const Token&, CUctx_st*, uint32_t, int*) { return nullptr; }
DevicePoll poll_device_slot(const DeviceSlot&, DigestResult*) { return DevicePoll::gone; }
void release_device_slot(DeviceSlot&, bool) {}
bool describe_device(const Token&, char*, size_t, char*, size_t) { return false; }
void forget_devices_in_child() {}
bool copy_from_device(const Token&, const void*, size_t, CUstream_st*, void*, int* error) { return *error = 0, false; }
int launch_scatter(const ScatterCall&) { return -1; }
int launch_sort(const SortCall&) { return -1; }
int launch_scatter_by_index(const ScatterCall&, const scatter::IndexView&, void*) { return -1; }
int load_scatter() { return -1; }

void set_nccl_swap(const Settings&) {}
bool nccl_swap_is_on() { return false; }
void nccl_swap_made(const NcclLibrary&, const NcclSwapMaking&, NcclResult) {}
void nccl_swap_asked(NcclComm, NcclResult*) {}
void nccl_swap_prepare(const NcclLibrary&, const NcclCall&) {}
bool nccl_swap_call(const NcclLibrary&, const NcclCall&, NcclResult*) { return false; }
int nccl_swap_does(const NcclCall&) { return 0; }
NcclResult nccl_swap_end_group(NcclResult result, bool) { return result; }
void nccl_swap_forget(NcclComm, bool) {}
void forget_nccl_swap_in_child() {}

}  // namespace forkpoint
