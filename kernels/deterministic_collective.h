// All-reduce, reduce-scatter and reduce whose result is a function of the inputs in rank order alone: not of algorithm,
// protocol, channels, ring order, topology, multicast or hosts. Guarantee: gpu_to_gpu, because every element is
// computed by one thread by the rule of collective_rule.h, and nothing else is done to it but moved.
//
// Without any CUDA header: the planner fills a CollectiveLaunch, and whoever has a CUDA API launches it:
//
//   StagingShape shape = staging_for(n);  // the same on all ranks
//   ... each rank allocates shape.total_bytes() on its device, zeroes them, and maps those of the others;
//   ... each rank knows that all have done so, before the first launch
//   CollectiveLaunch launch;
//   if (plan_collective(spec, place, &launch) && launch.grid > 0)
//     cuLaunchKernel(function[launch.kernel], launch.grid, 1, 1, launch.block, 1, 1, 0, stream,
//                    launch.arguments(), nullptr);
//
// All ranks must make the same calls in the same order, as with NCCL; a rank's kernels must run one after another (one
// stream, or ordered by events). Captured calls may be replayed, by all ranks alike. The kernels allocate nothing and
// wait for their peers only. A kernel whose *abort becomes non-zero ends soon, with nothing promised of its output; the
// staging memory cannot be used again. Between devices they store and load (16 bytes, of which halves of 8 must stay
// whole; fences and flags of system scope) and need no atomic operation. Planning is pure, thread-safe, never allocates.
//
// Why these waits end. A block waits for the same block of the other ranks, so all of a call must be on its device at
// once, together with whatever else waits there. A communicator therefore uses no more than the blocks that
// blocks_for_communicator() let its ranks have (the least of them, for all: shape.blocks), so that all blocks of all
// communicators of a device have room at once and leave 32 multiprocessors untouched, one for each block of a kernel of
// NCCL's. What keeps a kernel of ours, or of NCCL's, from its device then ends:
//   - Kernels that end by themselves, however large, make room.
//   - Ours and one of NCCL's are there at once on every device, in whatever order each device began them: none waits
//     for the room of another. Nor do ours of several communicators.
// Not covered: kernels that wait for other devices, the program's or those of NCCL's calls on several communicators
// that overlap, and together need more than 32 multiprocessors; and processes that share a device through MPS, of which
// neither knows the other's blocks: the probe gives such a device none.
#pragma once

#include "kernels/collective_staging.h"

namespace forkpoint::collective {

// What is asked for; equal on all ranks but for the addresses.
struct CollectiveSpec {
  Kind kind = Kind::all_reduce;
  Op op = Op::sum;
  DType dtype = DType::f32;
  bool wide = false;   // 16- and 8-bit floats are added up in fp32 and rounded once; of other types without effect
  bool tree = false;   // floats are added as a balanced tree over the ranks; there is none for those of 8 bits
  uint64_t count = 0;  // elements, as NCCL counts them: of the input; reduce_scatter: of the output
  uint32_t root = 0;
  uint64_t factor = 0;              // scaled_sum: the bits of an element of dtype ...
  const void* factor_at = nullptr;  // ... or where it lies on the device when the kernel runs
};

// One rank's part.
struct CollectivePlace {
  StagingShape shape;
  uint32_t rank = 0;
  void* const* staging = nullptr;  // shape.ranks addresses, as this rank's device reaches them
  const uint32_t* abort = nullptr;
  const void* in = nullptr;
  void* out = nullptr;  // may be in, or this rank's part of it
};

// Equal on all ranks. Moves the work about; no result depends on it.
struct CollectiveTuning {
  uint32_t low_latency_bytes = 512 << 10;  // most that a rank pushes in the low-latency protocol; 0: never
  uint32_t chunks = 1;                     // that each block is to have at least of each owner ...
  uint32_t least_chunk_bytes = 16 << 10;   // ... if they do not get smaller than this
  uint32_t lag = 1;                        // CollectiveParams::lag
  uint32_t all_own_ranks = 2;              // up to how many ranks each adds up all of an all_reduce; at least 2
};

struct CollectiveLaunch {
  int kernel = 0;     // index into kCollectiveKernelNames
  uint32_t grid = 0;  // 0: there is nothing to do
  uint32_t block = kBlockThreads;
  CollectiveParams params;
  void** arguments() { return argument_[0] = &params, argument_; }

 private:
  void* argument_[1] = {};
};

inline constexpr int kCollectiveKernelCount = 22;
extern const char* const kCollectiveKernelNames[kCollectiveKernelCount];

// 18 MB for two ranks, some 40 MB for many.
StagingShape staging_for(uint32_t ranks);
// For one more communicator on a device of that many multiprocessors, of which `taken` blocks are other communicators'.
// At most `wanted`; 0: there is too little left, and the kernels must not be used.
uint32_t blocks_for_communicator(uint32_t multiprocessors, uint32_t taken, uint32_t wanted);
// Is there a kernel for it? All types that NCCL has, with every op; as a tree not the 8-bit floats.
bool has_collective(DType dtype, bool tree = false);
// false: has_collective says no, or the shape is none (ranks 1 to kMostRanks, blocks up to kMostBlocks, slots a power
// of two, at least 4).
bool plan_collective(const CollectiveSpec& spec, const CollectivePlace& place, CollectiveLaunch* launch,
                     const CollectiveTuning& tuning = {});
// Adds up what lies on this device already: inputs[rank] each with spec.count elements. blocks: of the grid.
bool plan_local_sum(const CollectiveSpec& spec, const void* const* inputs, uint32_t ranks, void* out, uint32_t blocks,
                    CollectiveLaunch* launch);

// The rule on the host's memory: what `rank` gets, from every rank's input (each as long as its call would have it).
// out may be one of the inputs. For tests, and where there is no GPU.
void collect_on_host(const CollectiveSpec& spec, const void* const* inputs, uint32_t ranks, uint32_t rank, void* out);

}  // namespace forkpoint::collective
