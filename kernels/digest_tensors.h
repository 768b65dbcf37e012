// Several contiguous tensors, of whatever dtypes and sizes, in one launch, with all that plan_digest gives of each (digest,
// absmax, non-finite count, word sum). Everything is in the kernel's parameters: no table on the device, no copy, no
// allocation. What a training step holds (parameters, gradients, optimizer state: hundreds of tensors, most of them small)
// costs a launch for every kMostTensors of them in place of one each.
//
//   for (size_t done = 0; done < count; done += covered) {
//     covered = plan_digest_tensors(runs + done, count - done, multiprocessors, &launch);
//     void* arguments[] = {launch.params()};
//     cuLaunchKernel(function[launch.kernel], launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream,
//                    arguments, nullptr);
//   }
//
// Guarantee: gpu_to_gpu, for the reason in kernels/digest_launch.h: the same bits as the same tensors one by one. Planning
// is pure and thread-safe, allocates nothing and never fails.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint {

inline constexpr int kFewTensors = 8;
inline constexpr int kMostTensors = 64;
inline constexpr int kMostRules = 16;  // no fewer than there are different ones (lib/digest_magnitude.h)

// ---- Kernel parameters: passed by value, filled by the planner.

struct alignas(16) DigestTensor {
  const void* data;
  uint64_t size_bytes;
  uint64_t first_byte;  // place of data[0] in the logical tensor
  DigestSlot* slot;
  DigestScratch* scratch;
  uint32_t ticket;
  uint32_t rule;  // of DigestTensors::rule
};

struct DigestTensorRule {  // as in DigestFlat
  uint64_t largest_finite;
  uint32_t mask;
  uint32_t loop;
};

// A tensor is shared by adjacent blocks.
template <int kCapacity>
struct DigestTensors {
  static constexpr uint32_t kNoBlock = 0xFFFFFFFFu;
  static constexpr int kPlaces = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kCapacity)));
  uint32_t first_block[kPlaces];  // ascending; kNoBlock behind the last tensor
  DigestTensorRule rule[kMostRules];
  DigestTensor tensor[kCapacity];
};
static_assert(sizeof(DigestTensor) == 48);
static_assert(sizeof(DigestTensors<kMostTensors>) <= 4096, "of what every driver takes as parameters");

struct DigestTensorsLaunch {
  int kernel = 0;  // index into kDigestKernelNames
  uint32_t grid = 0;
  uint32_t block = 0;
  uint32_t shared_bytes = 0;
  union {
    DigestFlat flat;  // one tensor
    DigestTensors<kFewTensors> few;
    DigestTensors<kMostTensors> many;
  };
  DigestTensorsLaunch() {}          // no more than is needed is written, by the planner
  void* params() { return &many; }  // the kernel's only parameter
  size_t param_bytes() const;       // of it
  const char* name() const { return kDigestKernelNames[kernel]; }
};

// How many of the first runs *launch covers: 0 for none, else at least 1. The caller loops over the rest.
// runs: DigestLaunch::flat of what plan_digest or plan_digest_bytes made, where it is_flat(). REQUIRES: each has a slot of
// its own, and no ring. The slot's node is 0, whatever DigestTarget::node says.
size_t plan_digest_tensors(const DigestFlat* runs, size_t count, int multiprocessors, DigestTensorsLaunch* launch);

}  // namespace forkpoint
