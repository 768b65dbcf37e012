// Moving and adding runs of bytes, 16 at a time: the threads that share a run take its vectors in turn, a few at once
// so that their loads are on their way together. Slots of the staging memory are aligned; buffers of the program lie
// anywhere, and are read and written element by element (or byte by byte) where they do not lie well.
#pragma once

#include "kernels/collective_staging.h"

// Loops whose number of rounds only the call knows stay as they are: compilers would write four rounds each, and what a
// kernel runs once in a call costs most by being fetched.
#ifdef __CUDACC__
#define FORKPOINT_UNROLL _Pragma("unroll")
#define FORKPOINT_ROLLED _Pragma("unroll 1")
#define FORKPOINT_APART __noinline__
#else
#define FORKPOINT_APART
#define FORKPOINT_UNROLL _Pragma("GCC unroll 16")
#define FORKPOINT_ROLLED
#endif

namespace forkpoint::collective {

struct alignas(16) Vector {
  uint32_t word[4];
};

// Which vectors of a run a thread takes: first, first + step, ...
struct Share {
  uint32_t first, step;
};

// A run in the program's memory.
template <typename Char>
struct ProgramRun {
  Char* data;
  uint32_t bytes;
  uint32_t grain;  // largest power of two up to 16 by which data is aligned
  FORKPOINT_HD ProgramRun(Char* data, uint32_t bytes) : data(data), bytes(bytes) {
    const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data)) & 15;
    grain = low == 0 ? 16 : low & (0u - low);
  }
  FORKPOINT_HD uint32_t whole_vectors() const { return bytes / kVectorBytes; }
  FORKPOINT_HD uint32_t rest_bytes() const { return bytes % kVectorBytes; }
};
using InputRun = ProgramRun<const char>;
using OutputRun = ProgramRun<char>;

template <typename Word>
FORKPOINT_HD inline void copy_words(char* to, const char* from, uint32_t bytes) {
  FORKPOINT_ROLLED
  for (uint32_t i = 0; i < bytes; i += sizeof(Word)) {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
#else
    memcpy(to + i, from + i, sizeof(Word));
#endif
  }
}

// 8 aligned bytes.
FORKPOINT_HD inline uint64_t load_word(const char* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const uint64_t*>(from);
#else
  uint64_t word;
  memcpy(&word, from, sizeof(word));
  return word;
#endif
}
FORKPOINT_HD inline void store_word(char* to, uint64_t word) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<uint64_t*>(to) = word;
#else
  memcpy(to, &word, sizeof(word));
#endif
}

// bytes: a multiple of the element, which `grain` is the alignment of, or less than that. Apart: it is the way of few,
// and would be inlined in many places.
FORKPOINT_HD FORKPOINT_APART inline void copy_by_grain(char* to, const char* from, uint32_t bytes, uint32_t grain) {
  while (grain > 1 && bytes % grain != 0) grain /= 2;
  if (grain >= 8)
    copy_words<uint64_t>(to, from, bytes);
  else if (grain == 4)
    copy_words<uint32_t>(to, from, bytes);
  else if (grain == 2)
    copy_words<uint16_t>(to, from, bytes);
  else
    copy_words<uint8_t>(to, from, bytes);
}

template <typename Machine>
FORKPOINT_HD inline Vector load(const InputRun& run, uint32_t index, uint32_t bytes = kVectorBytes) {
  const char* from = run.data + static_cast<size_t>(index) * kVectorBytes;
  if (run.grain == 16 && bytes == kVectorBytes) return Machine::load_program(from);
  Vector vector = {};
  copy_by_grain(reinterpret_cast<char*>(&vector), from, bytes, run.grain);
  return vector;
}

template <typename Machine>
FORKPOINT_HD inline void store(const OutputRun& run, uint32_t index, Vector vector, uint32_t bytes = kVectorBytes) {
  char* to = run.data + static_cast<size_t>(index) * kVectorBytes;
  if (run.grain == 16 && bytes == kVectorBytes) return Machine::store_program(to, vector);
  copy_by_grain(to, reinterpret_cast<const char*>(&vector), bytes, run.grain);
}

// Calls body(first) for the share's vectors from `begin` to `end`, kAtOnce at a time: first, first + step, ... as far
// as they are less than end.
template <int kAtOnce, typename Body>
FORKPOINT_HD inline void each_batch(Share share, uint32_t begin, uint32_t end, Body body) {
  FORKPOINT_ROLLED
  for (uint32_t first = begin + share.first; first < end; first += kAtOnce * share.step) body(first);
}
FORKPOINT_HD inline uint32_t vectors_of(uint32_t bytes) { return (bytes + kVectorBytes - 1) / kVectorBytes; }
FORKPOINT_HD inline uint32_t bytes_at(uint32_t index, uint32_t run_bytes) {
  const uint32_t left = run_bytes - index * kVectorBytes;
  return left < kVectorBytes ? left : kVectorBytes;
}

// Calls load(index) and then store(index, vector) for each of the share's vectors.
template <int kAtOnce, typename Load, typename Store>
FORKPOINT_HD inline void each_vector(Share share, uint32_t begin, uint32_t end, Load load, Store store) {
  each_batch<kAtOnce>(share, begin, end, [&](uint32_t first) {
    Vector vectors[kAtOnce];
    FORKPOINT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * share.step < end) vectors[i] = load(first + i * share.step);
    }
    FORKPOINT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * share.step < end) store(first + i * share.step, vectors[i]);
    }
  });
}

// What lies well goes whole vectors at a time, a few at once; the rest, or all of what does not, one by one. Few
// instructions count: each block runs all of them for the first time in each call.
inline constexpr int kCopyAtOnce = 4;
template <typename Machine>
FORKPOINT_HD inline void copy_to_staging(Share share, InputRun from, char* to) {
  const uint32_t well = from.grain == kVectorBytes ? from.whole_vectors() : 0;
  const auto store = [&](uint32_t index, const Vector& vector) {
    Machine::store_staging(to + size_t{index} * kVectorBytes, vector);
  };
  each_vector<kCopyAtOnce>(
      share, 0, well, [&](uint32_t index) { return Machine::load_program(from.data + size_t{index} * kVectorBytes); },
      store);
  each_vector<1>(
      share, well, vectors_of(from.bytes),
      [&](uint32_t index) { return load<Machine>(from, index, bytes_at(index, from.bytes)); }, store);
}
template <typename Machine>
FORKPOINT_HD inline void copy_from_staging(Share share, const char* from, OutputRun to) {
  const uint32_t well = to.grain == kVectorBytes ? to.whole_vectors() : 0;
  const auto load = [&](uint32_t index) { return Machine::load_staging(from + size_t{index} * kVectorBytes); };
  each_vector<kCopyAtOnce>(share, 0, well, load, [&](uint32_t index, const Vector& vector) {
    Machine::store_program(to.data + size_t{index} * kVectorBytes, vector);
  });
  each_vector<1>(share, well, vectors_of(to.bytes), load, [&](uint32_t index, const Vector& vector) {
    store<Machine>(to, index, vector, bytes_at(index, to.bytes));
  });
}

// ---- Adding: what one vector (or a line's 8 bytes) of every rank comes to. Ops are Op, or one that is known when this
// is compiled: then the others cost no instructions.
template <Op kOp>
struct Fixed {
  FORKPOINT_HD constexpr operator Op() const { return kOp; }
};
template <typename A, uint32_t kBytes>
struct Accumulator {
  static constexpr uint32_t kElements = kBytes / sizeof(typename A::Stored);
  using Value = typename A::Value;
  Value value[kElements] = {};

  template <typename AnOp>
  FORKPOINT_HD static void prepare(AnOp op, Value factor, const Vector& vector, Value (&out)[kElements]) {
    typename A::Stored stored[kElements];
    memcpy(stored, &vector, kBytes);
    FORKPOINT_UNROLL
    for (uint32_t i = 0; i < kElements; ++i) out[i] = A::load(stored[i]);
    if (op != Op::scaled_sum) return;
    FORKPOINT_UNROLL
    for (uint32_t i = 0; i < kElements; ++i) out[i] = A::settle(A::multiply(out[i], factor));
  }
  template <typename AnOp>
  FORKPOINT_HD void begin(AnOp op, Value factor, const Vector& vector) {
    prepare(op, factor, vector, value);
  }
  template <typename AnOp>
  FORKPOINT_HD void add(AnOp op, Value factor, const Vector& vector) {
    Value next[kElements];
    prepare(op, factor, vector, next);
    combine(op, next);
  }
  // The op is looked at once a vector, not once an element.
  template <typename AnOp>
  FORKPOINT_HD void combine(AnOp op, const Value (&next)[kElements]) {
    switch (static_cast<Op>(op)) {
      case Op::product:
        return combine_each([](Value a, Value b) { return A::settle(A::multiply(a, b)); }, next);
      case Op::maximum:
        return combine_each([](Value a, Value b) { return A::pick(a, b, false); }, next);
      case Op::minimum:
        return combine_each([](Value a, Value b) { return A::pick(a, b, true); }, next);
      default:
        return combine_each([](Value a, Value b) { return A::settle(A::add(a, b)); }, next);
    }
  }
  template <typename AnOp>
  FORKPOINT_HD Vector finish(AnOp op, uint32_t ranks) const {
    typename A::Stored stored[kElements];
    FORKPOINT_UNROLL
    for (uint32_t i = 0; i < kElements; ++i)
      stored[i] = A::store(op == Op::average ? A::divide(value[i], ranks) : value[i]);
    Vector vector = {};
    memcpy(&vector, stored, kBytes);
    return vector;
  }

 private:
  template <typename Combine>
  FORKPOINT_HD void combine_each(Combine combine, const Value (&next)[kElements]) {
    FORKPOINT_UNROLL
    for (uint32_t i = 0; i < kElements; ++i) value[i] = combine(value[i], next[i]);
  }
};

// Takes the ranks' vectors in rank order, whichever order of additions the rule is asked for.
template <typename A, uint32_t kBytes, bool kTree>
struct RankSum {
  Accumulator<A, kBytes> sum;
  template <typename AnOp>
  FORKPOINT_HD void take(AnOp op, typename A::Value factor, uint32_t rank, const Vector& vector) {
    if (rank == 0)
      sum.begin(op, factor, vector);
    else
      sum.add(op, factor, vector);
  }
  template <typename AnOp>
  FORKPOINT_HD Vector finish(AnOp op, uint32_t ranks) {
    return sum.finish(op, ranks);
  }
};

// level[l]: the sum of the last 2^l ranks that is not part of a larger one yet, as the bits of the number of ranks say.
template <typename A, uint32_t kBytes>
struct RankSum<A, kBytes, true> {
  static constexpr uint32_t kLevels = 7;  // 2^(kLevels-1) ranks
  Accumulator<A, kBytes> level[kLevels];
  template <typename AnOp>
  FORKPOINT_HD void take(AnOp op, typename A::Value factor, uint32_t rank, const Vector& vector) {
    Accumulator<A, kBytes> carried;
    carried.begin(op, factor, vector);
    bool placed = false;
    FORKPOINT_UNROLL
    for (uint32_t l = 0; l < kLevels; ++l) {
      if (placed) continue;
      if (rank >> l & 1) {
        Accumulator<A, kBytes> left = level[l];
        left.combine(op, carried.value);
        carried = left;
      } else {
        level[l] = carried;
        placed = true;
      }
    }
  }
  template <typename AnOp>
  FORKPOINT_HD Vector finish(AnOp op, uint32_t ranks) {
    Accumulator<A, kBytes> sum;
    bool any = false;
    FORKPOINT_UNROLL
    for (uint32_t l = 0; l < kLevels; ++l) {
      if (!(ranks >> l & 1)) continue;
      if (any) {
        Accumulator<A, kBytes> left = level[l];
        left.combine(op, sum.value);
        sum = left;
      } else {
        sum = level[l];
        any = true;
      }
    }
    return sum.finish(op, ranks);
  }
};

}  // namespace forkpoint::collective
