#include "probes/swap_means.h"

#include <sched.h>

#include <new>

#include "kernels/collective_fatbin.h"

namespace forkpoint {
namespace {

constinit std::atomic<SwapKernels*> all_kernels{nullptr};

constinit std::atomic_flag locked = ATOMIC_FLAG_INIT;
constinit SwapMeans* left_over = nullptr;  // under it

// All that lies there, or nullptr.
SwapMeans* take_list() {
  while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
  SwapMeans* list = left_over;
  left_over = nullptr;
  locked.clear(std::memory_order_release);
  return list;
}
void give_list(SwapMeans* list) {
  if (!list) return;
  SwapMeans* last = list;
  while (last->next) last = last->next;
  while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
  last->next = left_over;
  left_over = list;
  locked.clear(std::memory_order_release);
}

// A kernel of ours that has ended has heard from every member, so nobody writes to its memory any more.
bool is_idle(const CudaDriver& driver, const SwapMeans& means) {
  return (!driver.cuStreamQuery_ || driver.cuStreamQuery_(means.exchange) == CUDA_SUCCESS) &&
         (!means.last || driver.cuEventQuery_(means.last) == CUDA_SUCCESS);
}

void settle(const CudaDriver& driver, SwapMeans& means) {
  for (CUdeviceptr& opened : means.opened) {
    if (opened) driver.cuIpcCloseMemHandle_(opened);
    opened = 0;
  }
  if (means.blocks > 0) means.kernels->give_back(means.blocks);
  means.blocks = 0;
}

// Kernels of other processes that share the device through MPS may be there at once.
bool is_shared(const CudaDriver& driver, CUdevice device) {
  constexpr auto kMpsEnabled = static_cast<CUdevice_attribute>(133);  // of CUDA 12.4 and later
  int enabled = 0;
  return driver.cuDeviceGetAttribute_(&enabled, kMpsEnabled, device) == CUDA_SUCCESS && enabled != 0;
}

bool load_kernel(const CudaDriver& driver, CUmodule module, int index, CUfunction* function) {
  if (driver.cuModuleGetFunction_(function, module, collective::kCollectiveKernelNames[index]) != CUDA_SUCCESS)
    return false;
  int registers = 0;
  const CUresult result = driver.cuFuncLoad_
                              ? driver.cuFuncLoad_(*function)
                              : driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, *function);
  return result == CUDA_SUCCESS;
}

}  // namespace

InContext::InContext(const CudaDriver& driver, CUcontext context) : driver_(driver), relaxed_(driver) {
  CUcontext before = nullptr;
  if (driver_.cuCtxGetCurrent_(&before) != CUDA_SUCCESS) return;
  pushed_ = before != context && driver_.cuCtxPushCurrent_(context) == CUDA_SUCCESS;
  entered_ = pushed_ || before == context;
}
InContext::~InContext() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent_(&popped);
}

uint64_t number_of_context(const CudaDriver& driver, CUcontext context) {
  unsigned long long number = 0;
  return driver.cuCtxGetId_ && driver.cuCtxGetId_(context, &number) == CUDA_SUCCESS ? number : 0;
}

uint32_t SwapKernels::reserve(uint32_t wanted) {
  uint32_t taken = reserved.load(), share = 0;
  do share = collective::blocks_for_communicator(multiprocessors, taken, wanted);
  while (!reserved.compare_exchange_weak(taken, taken + share));
  return share;
}

bool SwapKernels::run(const CudaDriver& driver, collective::CollectiveLaunch& launch, CUstream stream) const {
  return driver.cuLaunchKernel_(function[launch.kernel], launch.grid, 1, 1, launch.block, 1, 1, 0, stream,
                                launch.arguments(), nullptr) == CUDA_SUCCESS;
}

namespace {

SwapKernels* find_kernels(uint64_t context) {
  for (SwapKernels* known = all_kernels.load(std::memory_order_acquire); known; known = known->next) {
    if (known->context == context) return known;
  }
  return nullptr;
}

}  // namespace

// Loaded now and not at their first launch, which may wait for the device while a peer waits for it.
SwapKernels* swap_kernels(const CudaDriver& driver, uint64_t context, CUdevice device) {
  if (SwapKernels* known = find_kernels(context)) return known;
  CUmodule module = nullptr;
  if (driver.cuModuleLoadData_(&module, forkpoint_collective_fatbin_data) != CUDA_SUCCESS) return nullptr;
  auto* made = new (std::nothrow) SwapKernels;
  bool good = made;
  for (int i = 0; good && i < collective::kCollectiveKernelCount; ++i)
    good = load_kernel(driver, module, i, &made->function[i]);
  int multiprocessors = 0;
  good = good && driver.cuDeviceGetAttribute_(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) ==
                     CUDA_SUCCESS;
  if (!good) return delete made, nullptr;
  made->context = context;
  made->multiprocessors = is_shared(driver, device) ? 0 : static_cast<uint32_t>(multiprocessors);
  made->next = all_kernels.load();
  do {
    // Another thread's: two would give away the same blocks.
    if (SwapKernels* known = find_kernels(context)) return delete made, known;
  } while (!all_kernels.compare_exchange_weak(made->next, made));
  return made;
}

SwapMeans* take_swap_means(const CudaDriver& driver, uint64_t context, uint64_t staging_bytes) {
  SwapMeans *kept = nullptr, *found = nullptr;
  for (SwapMeans *one = take_list(), *next = nullptr; one; one = next) {
    next = one->next;
    const bool idle = context != 0 && one->context == context && is_idle(driver, *one);
    if (idle) settle(driver, *one);
    const bool fits = idle && !found && (one->staging == 0 || one->staging_bytes == staging_bytes);
    SwapMeans*& list = fits ? found : kept;
    one->next = fits ? nullptr : kept;
    list = one;
  }
  give_list(kept);
  if (!found) found = new (std::nothrow) SwapMeans;
  if (found) found->context = context;
  return found;
}

void leave_swap_means(const CudaDriver& driver, SwapMeans* means) {
  if (is_idle(driver, *means)) settle(driver, *means);
  give_list(means);
}

void forget_swap_means_in_child() {
  all_kernels.store(nullptr);
  locked.clear();
  left_over = nullptr;
}

}  // namespace forkpoint
