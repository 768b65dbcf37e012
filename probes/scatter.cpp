#include "probes/scatter.h"

#include <atomic>
#include <new>

#include "kernels/scatter_fatbin.h"
#include "probes/cuda_driver.h"

namespace forkpoint {
namespace {

// The kernels in one context. Never freed; two threads that come first both load them, and one wins.
struct LoadedScatter {
  CUcontext context = nullptr;
  unsigned long long id = 0;  // a destroyed context's address comes back for another one, its number does not
  CUfunction kernels[kScatterKernelCount] = {};
  int multiprocessors = 0;
  LoadedScatter* next = nullptr;
};
constinit std::atomic<LoadedScatter*> newest{nullptr};

const CudaDriver* find_driver() {
  const Guard guard;
  return guard.entered() ? find_cuda_driver(guard.token()) : nullptr;
}

CUresult load(const CudaDriver& driver, LoadedScatter* loaded) {
  const Guard guard;  // loading is ours, and no launch
  const RelaxedCapture relaxed(driver);
  CUdevice device = 0;
  CUmodule module = nullptr;
  CUresult result = driver.cuCtxGetDevice_(&device);
  if (result == CUDA_SUCCESS) {
    result = driver.cuDeviceGetAttribute_(&loaded->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  }
  if (result == CUDA_SUCCESS) result = driver.cuModuleLoadData_(&module, forkpoint_scatter_fatbin_data);
  for (int i = 0; i < kScatterKernelCount && result == CUDA_SUCCESS; ++i) {
    result = driver.cuModuleGetFunction_(&loaded->kernels[i], module, kScatterKernelNames[i]);
    int registers = 0;  // a driver without cuFuncLoad loads what it is asked about
    if (result == CUDA_SUCCESS) {
      result = driver.cuFuncLoad_
                   ? driver.cuFuncLoad_(loaded->kernels[i])
                   : driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, loaded->kernels[i]);
    }
  }
  return result;
}

CUresult find_or_load(const CudaDriver& driver, const LoadedScatter** found) {
  CUcontext context = nullptr;
  CUresult result = driver.cuCtxGetCurrent_(&context);
  if (result != CUDA_SUCCESS) return result;
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  unsigned long long id = 0;
  if (driver.cuCtxGetId_ && driver.cuCtxGetId_(context, &id) != CUDA_SUCCESS) id = 0;
  for (LoadedScatter* known = newest.load(std::memory_order_acquire); known; known = known->next) {
    if (known->context == context && known->id == id) return *found = known, CUDA_SUCCESS;
  }
  auto* loaded = new (std::nothrow) LoadedScatter;
  if (!loaded) return CUDA_ERROR_OUT_OF_MEMORY;
  loaded->context = context;
  loaded->id = id;
  result = load(driver, loaded);
  if (result != CUDA_SUCCESS) return delete loaded, result;
  loaded->next = newest.load(std::memory_order_relaxed);
  while (!newest.compare_exchange_weak(loaded->next, loaded, std::memory_order_acq_rel)) {
  }
  *found = loaded;
  return CUDA_SUCCESS;
}

// As launch_scatter.
int launch_plan(const CudaDriver& driver, const LoadedScatter& loaded, const ScatterCall& call) {
  ScatterPlan plan = plan_scatter(call.type, call.work, loaded.multiprocessors);
  void* parameters[] = {&plan.work};
  for (const ScatterLaunch& launch : plan.launches) {
    if (launch.grid_x == 0) continue;
    // The first writes scratch alone; with the second begins what it is all about.
    const bool torn = &launch > &plan.launches[1];
    const CUresult result =
        driver.cuLaunchKernel_(loaded.kernels[launch.kernel], launch.grid_x, launch.grid_y, 1, launch.block, 1, 1, 0,
                               static_cast<CUstream>(call.stream), parameters, nullptr);
    if (result != CUDA_SUCCESS) return static_cast<int>(result) + (torn ? kScatterTorn : 0);
  }
  return 0;
}

int launch_plan(const CudaDriver& driver, const LoadedScatter& loaded, const SortCall& call) {
  SortPlan plan = plan_sort(call.work);
  for (int digit = 0; digit < plan.digit_count; ++digit) {
    void* parameters[] = {&plan.digits[digit]};
    for (const int kernel : {kSortCount, kSortMove}) {
      if (kernel == kSortCount && plan.digits[digit].alone) continue;
      const CUresult result = driver.cuLaunchKernel_(loaded.kernels[kernel], plan.blocks, 1, 1, scatter::kSortThreads,
                                                     1, 1, 0, static_cast<CUstream>(call.stream), parameters, nullptr);
      if (result != CUDA_SUCCESS) return static_cast<int>(result);
    }
  }
  return 0;
}

// function(driver, kernels)
template <typename Function>
int with_kernels(Function function) {
  const CudaDriver* driver = find_driver();
  if (!driver) return -1;
  const LoadedScatter* loaded = nullptr;
  const CUresult result = find_or_load(*driver, &loaded);
  return result == CUDA_SUCCESS ? function(*driver, *loaded) : static_cast<int>(result);
}

}  // namespace

int launch_scatter(const ScatterCall& call) {
  return with_kernels(
      [&](const CudaDriver& driver, const LoadedScatter& loaded) { return launch_plan(driver, loaded, call); });
}

int launch_sort(const SortCall& call) {
  return with_kernels(
      [&](const CudaDriver& driver, const LoadedScatter& loaded) { return launch_plan(driver, loaded, call); });
}

int launch_scatter_by_index(const ScatterCall& call, const scatter::IndexView& index, void* scratch) {
  const int64_t count = index.count();
  const ScatterScratch at = lay_out_scratch(call.type, count, call.work.columns);
  const auto part = [&](size_t bytes) { return static_cast<void*>(static_cast<char*>(scratch) + bytes); };
  SortCall sort{call.stream, {}};
  sort.work.index = index;
  sort.work.keys = static_cast<uint32_t*>(part(at.keys));
  sort.work.places = part(at.places);
  sort.work.scratch = static_cast<uint32_t*>(part(at.sort));
  ScatterCall sums = call;
  sums.work.rows = part(at.places);
  sums.work.narrow_rows = true;
  sums.work.starts = static_cast<uint32_t*>(part(at.starts));
  sums.work.partials = part(at.partials);
  sums.work.keys = {part(at.keys), count, false};
  sums.work.out_rows = index.limit();
  return with_kernels([&](const CudaDriver& driver, const LoadedScatter& loaded) {
    const int error = launch_plan(driver, loaded, sort);
    return error == 0 ? launch_plan(driver, loaded, sums) : error;
  });
}

int load_scatter() {
  const CudaDriver* driver = find_driver();
  const LoadedScatter* loaded = nullptr;
  return driver ? static_cast<int>(find_or_load(*driver, &loaded)) : -1;
}

}  // namespace forkpoint
