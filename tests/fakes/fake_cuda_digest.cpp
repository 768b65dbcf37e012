#include "tests/fakes/fake_cuda_digest.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "kernels/digest_flush.h"
#include "kernels/digest_pieces.h"
#include "kernels/digest_tensors.h"
#include "lib/digest_raw.h"
#include "tests/fakes/fake_cuda_memory.h"

namespace forkpoint::fake {
namespace {

// On a device this is an illegal address, which destroys the program's context.
void require_memory(uint64_t address, uint64_t size_bytes) {
  if (Memory::get().is_there(address, size_bytes)) return;
  fprintf(stderr, "fake_cuda: a digest reads %llu bytes at %#llx, which no allocation holds\n",
          static_cast<unsigned long long>(size_bytes), static_cast<unsigned long long>(address));
  abort();
}

void put(uint64_t* words, int low, uint64_t value) {
  words[low] = static_cast<uint32_t>(value);
  words[low + 1] = value >> 32;
}

// As a digest travels.
struct Words {
  uint64_t word[kWordCount] = {};
};
Words words_of(const RawDigest& raw) {
  Words words;
  put(words.word, kWordA, raw.digest.a);
  put(words.word, kWordB, raw.digest.b);
  words.word[kWordSum] = fold_word_sum(raw.word_sum);
  return words;
}

void write_slot(DigestSlot* slot, uint32_t ticket, Words sums, uint32_t node, uint32_t ordinal) {
  uint64_t (&words)[kWordCount] = sums.word;
  words[kWordNode] = node | uint64_t{ordinal} << 32;
  for (int i = 0; i < kSlotCells; ++i) {
    const uint64_t half = static_cast<uint32_t>(words[i / 2] >> (32 * (i % 2)));
    __atomic_store_n(&slot->cell[i], half | uint64_t{ticket} << 32, __ATOMIC_RELEASE);
  }
}

void drop_result(DigestRing& ring) { __atomic_store_n(ring.dropped, ++ring.dropped_count, __ATOMIC_RELEASE); }

void write_to_ring(DigestRing& ring, DigestScratch& scratch, const Words& words, uint32_t node) {
  require_memory(reinterpret_cast<uint64_t>(&ring), sizeof(DigestRing));
  const uint32_t ordinal = scratch.ordinal++;
  if (ring.taken - __atomic_load_n(ring.consumed, __ATOMIC_ACQUIRE) >= ring.capacity) return drop_result(ring);
  const uint64_t mine = ring.taken++;
  write_slot(ring.slots + mine % ring.capacity, ring_ticket(mine, ring.capacity), words, node, ordinal);
}

// As kernels/digest_finish.cuh does it.
void answer(const DigestTarget& target, const RawDigest& raw) {
  const Words words = words_of(raw);
  if (!target.ring && target.slot) return write_slot(target.slot, target.ticket, words, target.node, 0);
  require_memory(reinterpret_cast<uint64_t>(target.scratch), sizeof(DigestScratch));
  if (target.ring) return write_to_ring(*target.ring, *target.scratch, words, target.node);
  for (int i = 0; i < kWordSums; ++i) target.scratch->word[i] += words.word[i] + (kAllCounted << kWordBits);
}

// As kernels/digest_flush.cuh does it.
void flush_node(const DigestFlush& flush, uint32_t node) {
  DigestScratch& scratch = flush.scratch[node];
  require_memory(reinterpret_cast<uint64_t>(&scratch), sizeof(DigestScratch));
  Words words;
  for (int i = 0; i < kWordSums; ++i) {
    if (scratch.word[i] >> kWordBits != kAllCounted) scratch.broken = 1;
    words.word[i] = scratch.word[i] & ((uint64_t{1} << kWordBits) - 1);
  }
  if (scratch.broken != 0) return drop_result(*flush.ring);
  for (uint64_t& word : scratch.word) word = 0;
  write_to_ring(*flush.ring, scratch, words, node);
}

void add_run(const DigestFlat& run, RawDigest& raw) {
  require_memory(reinterpret_cast<uint64_t>(run.data), run.size_bytes);
  add_contiguous(run.data, run.size_bytes, DType::raw, run.first_byte, raw);
}

RawDigest digest_of(const void* data, uint64_t size_bytes) {
  DigestFlat run = {};
  run.data = data;
  run.size_bytes = size_bytes;
  RawDigest raw;
  add_run(run, raw);
  return raw;
}

void add_bytes(uint64_t address, uint64_t size_bytes, uint64_t position, RawDigest& raw) {
  add_contiguous(reinterpret_cast<const void*>(address), size_bytes, DType::raw, position, raw);
}

// What a thread of the kernel takes: up to 64 adjacent bytes, or elements that lie apart.
void add_unit(const DigestUnits& units, uint64_t row, uint64_t position, uint64_t index, RawDigest& raw) {
  const uint64_t run = units.common.size_bytes;
  if (units.element_bytes == 0) {
    const int64_t offset = static_cast<int64_t>(index * 64) - static_cast<int64_t>(position % 64);
    const auto begin = static_cast<uint64_t>(std::max<int64_t>(offset, 0));
    const uint64_t end = std::min(run, static_cast<uint64_t>(offset + 64));
    if (begin < end) add_bytes(row + begin, end - begin, position + begin, raw);
    return;
  }
  const auto size = static_cast<uint64_t>(units.element_bytes);
  for (uint64_t i = 0; i < 16 / size && index * 16 + i * size < run; ++i) {
    add_bytes(row + i * static_cast<uint64_t>(units.run_stride_bytes), size, position + i * size, raw);
  }
}

RawDigest digest_of(const DigestUnits& units) {
  require_memory(units.lowest_address, units.end_address - units.lowest_address);
  RawDigest raw;
  for (uint64_t i = 0; i < units.units; ++i) {
    uint64_t rest = i, index = 0, row = reinterpret_cast<uint64_t>(units.common.data),
             position = units.common.first_byte;
    for (int d = 0; d < units.dims; ++d) {
      const uint64_t at = rest % units.extent[d];
      rest /= units.extent[d];
      row += at * static_cast<uint64_t>(units.stride_bytes[d]);
      position += at * units.position_bytes[d];
      if (d == units.unit_dim) index = at;
    }
    add_unit(units, row, position, index, raw);
  }
  return raw;
}

template <typename Params>
const Params& params_of(const FakeKernelCall* call) {
  return *reinterpret_cast<const Params*>(call->params);
}

void run_flat(const FakeKernelCall* call, void*) {
  const auto& run = params_of<DigestFlat>(call);
  RawDigest raw;
  add_run(run, raw);
  answer(run.target, raw);
}

void run_units(const FakeKernelCall* call, void*) {
  const auto& units = params_of<DigestUnits>(call);
  answer(units.common.target, digest_of(units));
}

void run_batch(const FakeKernelCall* call, void*) {
  const DigestFlat* pieces = params_of<DigestBatch>(call).pieces;
  std::map<const DigestScratch*, std::pair<RawDigest, uint32_t>> sums;
  for (uint32_t i = 0; i < call->grid[0]; ++i) {
    auto& [raw, parts] = sums[pieces[i].target.scratch];
    add_run(pieces[i], raw);
    if (++parts == pieces[i].parts) answer(pieces[i].target, raw);
  }
}

template <int kCapacity>
void run_pieces(const FakeKernelCall* call, void*) {
  const auto& pieces = params_of<DigestPieces<kCapacity>>(call);
  for (int i = 0; i < kCapacity && pieces.first_block[i] != pieces.kNoBlock; ++i) {
    const DigestPiece& piece = pieces.piece[i];
    DigestTarget target;
    target.slot = static_cast<DigestSlot*>(piece.slot_or_ring);
    target.ring = piece.ticket == 0 ? static_cast<DigestRing*>(piece.slot_or_ring) : nullptr;
    target.scratch = piece.scratch;
    target.ticket = piece.ticket;
    target.node = piece.node;
    answer(target, digest_of(piece.data, piece.size_bytes));
  }
}

template <int kCapacity>
void run_tensors(const FakeKernelCall* call, void*) {
  const auto& tensors = params_of<DigestTensors<kCapacity>>(call);
  for (int i = 0; i < kCapacity && tensors.first_block[i] != tensors.kNoBlock; ++i) {
    const DigestTensor& tensor = tensors.tensor[i];
    DigestFlat run = {};
    run.data = tensor.data;
    run.size_bytes = tensor.size_bytes;
    run.first_byte = tensor.first_byte;
    run.target.slot = tensor.slot;
    run.target.scratch = tensor.scratch;
    run.target.ticket = tensor.ticket;
    RawDigest raw;
    add_run(run, raw);
    answer(run.target, raw);
  }
}

void run_flush(const FakeKernelCall* call, void*) {
  const auto& flush = params_of<DigestFlush>(call);
  for (uint32_t i = 0; i < flush.count; ++i) {
    if (flush.node[i] != 0) flush_node(flush, flush.node[i]);
  }
}

KernelDefinition definition(int number) {
  const auto made = [&](FakeKernel kernel, size_t param_bytes) {
    return KernelDefinition{kDigestKernelNames[number], kernel, nullptr, {{0, param_bytes}}};
  };
  if (number < static_cast<int>(kLoopCount)) return made(run_flat, sizeof(DigestFlat));
  if (number < kDigestBatchKernel) return made(run_units, sizeof(DigestUnits));
  if (number == kDigestBatchKernel) return made(run_batch, sizeof(DigestBatch));
  if (number == kDigestPiecesKernel) return made(run_pieces<4>, sizeof(DigestPieces<4>));
  if (number == kDigestPiecesKernel + 1) return made(run_pieces<16>, sizeof(DigestPieces<16>));
  if (number == kDigestPiecesKernel + 2) return made(run_pieces<48>, sizeof(DigestPieces<48>));
  if (number == kDigestTensorsKernel) return made(run_tensors<kFewTensors>, sizeof(DigestTensors<kFewTensors>));
  if (number == kDigestTensorsKernel + 1) return made(run_tensors<kMostTensors>, sizeof(DigestTensors<kMostTensors>));
  return made(run_flush, sizeof(DigestFlush));
}

}  // namespace

const KernelDefinition* digest_kernel(const char* name) {
  static const auto* all = [] {
    auto* made = new std::vector<KernelDefinition>;
    for (int i = 0; i < kDigestKernelCount; ++i) made->push_back(definition(i));
    return made;
  }();
  for (const KernelDefinition& one : *all) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

}  // namespace forkpoint::fake
