// The kernels: one a type and accumulation, in rank order and as a tree. Names: deterministic_collective.h.
#include "kernels/collective_machine.cuh"

namespace forkpoint::collective {

template <typename Work>
__device__ void run_block(Work work) {
  if (!work.work(DeviceMachine::share())) return;
  __syncthreads();
  if (threadIdx.x == 0) work.advance();
}

template <DType kType, bool kWide, bool kTree>
__device__ void run(const CollectiveParams& call) {
  using A = Arithmetic<kType, kWide>;
  DeviceMachine machine(call.abort);
  if (call.protocol == Protocol::local)
    add_local<DeviceMachine, A, kTree>(call, {blockIdx.x * kBlockThreads + threadIdx.x, gridDim.x * kBlockThreads});
  else if (call.protocol == Protocol::low_latency)
    run_block(LineBlock<DeviceMachine, A, kTree>(machine, call, blockIdx.x));
  else
    run_block(Block<DeviceMachine, A, kTree>(machine, call, blockIdx.x));
}

}  // namespace forkpoint::collective

#define FORKPOINT_COLLECTIVE_KERNEL(name, type, wide, tree)                             \
  extern "C" __global__ void __launch_bounds__(forkpoint::collective::kBlockThreads, 2) \
      name(const __grid_constant__ forkpoint::collective::CollectiveParams call) {      \
    forkpoint::collective::run<forkpoint::DType::type, wide, tree>(call);               \
  }
#define FORKPOINT_COLLECTIVE_KERNELS(type, wide, name)                        \
  FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_##name, type, wide, false) \
  FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_##name##_tree, type, wide, true)

// Integers come to the same in any order; of the 8-bit floats there is no tree.
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_i8, i8, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_u8, u8, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_i32, i32, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_u32, u32, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_i64, i64, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_u64, u64, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_f8e4m3, f8e4m3, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_f8e5m2, f8e5m2, false, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_f8e4m3_wide, f8e4m3, true, false)
FORKPOINT_COLLECTIVE_KERNEL(forkpoint_collective_f8e5m2_wide, f8e5m2, true, false)
FORKPOINT_COLLECTIVE_KERNELS(f32, false, f32)
FORKPOINT_COLLECTIVE_KERNELS(f64, false, f64)
FORKPOINT_COLLECTIVE_KERNELS(f16, false, f16)
FORKPOINT_COLLECTIVE_KERNELS(bf16, false, bf16)
FORKPOINT_COLLECTIVE_KERNELS(f16, true, f16_wide)
FORKPOINT_COLLECTIVE_KERNELS(bf16, true, bf16_wide)
