// Several contiguous tensors, each by adjacent blocks; see digest_tensors.h.
#pragma once

#include <cstdint>

#include "kernels/digest_flat.cuh"
#include "kernels/digest_pieces.cuh"
#include "kernels/digest_tensors.h"

namespace forkpoint::device {

template <int kCapacity>
__device__ uint32_t blocks_at(const DigestTensors<kCapacity>& tensors, int place) {
  const uint32_t next = place + 1 < tensors.kPlaces ? tensors.first_block[place + 1] : tensors.kNoBlock;
  return min(next, gridDim.x) - tensors.first_block[place];
}

__device__ inline DigestFlat run_of(const DigestTensor& tensor, const DigestTensorRule& rule, uint32_t blocks) {
  DigestFlat run = {};
  run.data = tensor.data;
  run.size_bytes = tensor.size_bytes;
  run.first_byte = tensor.first_byte;
  run.largest_finite = rule.largest_finite;
  run.mask = rule.mask;
  run.parts = blocks;
  run.target.slot = tensor.slot;
  run.target.scratch = tensor.scratch;
  run.target.ticket = tensor.ticket;
  return run;
}

template <int kCapacity>
__device__ void digest_tensor(const DigestTensors<kCapacity>& tensors, FlatShared& shared) {
  const int place = piece_of(tensors, blockIdx.x);
  const DigestTensor& tensor = tensors.tensor[place];
  const DigestTensorRule& rule = tensors.rule[tensor.rule];
  const uint32_t part = blockIdx.x - tensors.first_block[place], blocks = blocks_at(tensors, place);
  const DigestFlat run = run_of(tensor, rule, blocks);
  switch (rule.loop) {
    case kLoopNone:
      return digest_flat<kLoopNone>(run, part, blocks, shared);
    case kLoopMasked8:
      return digest_flat<kLoopMasked8>(run, part, blocks, shared);
    case kLoopMasked16:
      return digest_flat<kLoopMasked16>(run, part, blocks, shared);
    case kLoopMasked32:
      return digest_flat<kLoopMasked32>(run, part, blocks, shared);
    case kLoopMasked64:
      return digest_flat<kLoopMasked64>(run, part, blocks, shared);
    case kLoopAbsolute8:
      return digest_flat<kLoopAbsolute8>(run, part, blocks, shared);
    case kLoopAbsolute16:
      return digest_flat<kLoopAbsolute16>(run, part, blocks, shared);
    case kLoopAbsolute32:
      return digest_flat<kLoopAbsolute32>(run, part, blocks, shared);
    default:
      return digest_flat<kLoopAbsolute64>(run, part, blocks, shared);
  }
}

}  // namespace forkpoint::device
