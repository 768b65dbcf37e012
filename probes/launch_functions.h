// What the probe knows of a kernel of the host's: its name and the form of its parameter block. Asked of the driver once.
// Any thread. An entry lives on: one is made anew only when a handle has come round again for another kernel.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "probes/cuda_driver.h"
#include "probes/guard.h"
#include "probes/names.h"

namespace forkpoint {

inline constexpr uint32_t kMostParamBytes = 32764;  // of a launch, since CUDA 12.1; 4,096 before

struct KernelParam {
  uint32_t offset;
  uint32_t size_bytes;
};

struct KernelFacts {
  std::atomic<uint64_t> generation{0};
  const Name* name = nullptr;
  bool params_known = false;
  bool is_nccl = false;
  bool begins_step = false;   // FORKPOINT_STEP_ON
  uint32_t param_bytes = 0;   // of the block
  uint32_t param_count = 0;
  KernelParam* params = nullptr;
};

// nullptr: no memory, or too many names. function: also a CUkernel, as the launch calls take it.
const KernelFacts* kernel_facts(const Token& token, const CudaDriver& driver, NameTables& names, CUfunction function);
// A module or library goes: its handles may come round again for other kernels.
void forget_kernels();

}  // namespace forkpoint
