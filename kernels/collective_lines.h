// The low-latency protocol (collective_staging.h): each line carries 8 bytes of data and, in both halves, the number of
// the call, so that whoever reads it knows by itself that it is there.
//
// Two sets of lines in turn are enough: a rank that is in call k has heard from every rank in call k-1, so all of them
// have left call k-2, whose lines it writes now. A block's lines and its count of calls are its own, whatever the size
// of a call. A thread has a few lines on their way at once.
//
// A line that no call reached for long still bears an old number. Numbers are told apart for 2 * kLinePeriod calls, and
// each kLinePeriod calls a rank clears its own lines: those of the other parity, which nobody writes before he has
// heard of this call.
#pragma once

#include "kernels/collective_vectors.h"

namespace forkpoint::collective {

template <typename Machine, typename A, bool kTree>
class LineBlock {
 public:
  using Value = typename A::Value;
  static constexpr int kAtOnce = 2;

  FORKPOINT_HD LineBlock(Machine& machine, const CollectiveParams& call, uint32_t block)
      : machine_(machine), call_(call), block_(block), own_(call.staging[call.rank]) {
    number_ = *reinterpret_cast<const uint64_t*>(own_ + call.shape.calls_done(block)) + 1;
    lines_at_ = call.shape.line(block, static_cast<uint32_t>(number_ & 1), 0, 0);
    other_bytes_ = call.shape.block_lines() * kLineBytes;
    if (call.factor_at)
      factor_ = A::load(*static_cast<const typename A::Stored*>(call.factor_at));
    else
      memcpy(&factor_, &call.factor, sizeof(factor_));
  }

  // share: of all threads of the block. false: told to end.
  FORKPOINT_HD bool work(Share share) {
    if ((number_ & (Machine::kLinePeriod - 1)) < 2) clear_other_lines(share);
    const uint64_t begin = uint64_t{block_} * call_.chunk_bytes;
    if (begin >= call_.part_bytes) return true;
    const uint64_t left = call_.part_bytes - begin;
    run_bytes_ = left < call_.chunk_bytes ? static_cast<uint32_t>(left) : call_.chunk_bytes;
    begin_ = begin;
    const uint32_t lines = (run_bytes_ + kLineData - 1) / kLineData;
    const bool well =
        ((reinterpret_cast<uintptr_t>(call_.in) | reinterpret_cast<uintptr_t>(call_.out) | call_.part_bytes) &
         (kLineData - 1)) == 0;
    if constexpr (!kTree) {
      if (well && call_.op == Op::sum) return work_on<kAtOnce, true>(Fixed<Op::sum>{}, share, lines);
    }
    return work_on<1, false>(call_.op, share, lines);
  }

  // Once all threads are through, by one.
  FORKPOINT_HD void advance() { *reinterpret_cast<uint64_t*>(own_ + call_.shape.calls_done(block_)) = number_; }

 private:
  // Never 0, which is what a cleared line bears.
  FORKPOINT_HD uint32_t mark() const {
    return static_cast<uint32_t>(number_ & (2 * Machine::kLinePeriod - 1)) | 0x80000000u;
  }
  // Of `of`, where `from` writes it in this call: StagingShape::line, in fewer instructions.
  FORKPOINT_HD char* line(uint32_t of, uint32_t from, uint32_t index) const {
    return call_.staging[of] + lines_at_ + StagingShape::other(of, from) * other_bytes_ + index * kLineBytes;
  }
  FORKPOINT_HD void clear_other_lines(Share share) {
    FORKPOINT_ROLLED
    for (uint32_t other = 0; other < call_.shape.others(); ++other) {
      FORKPOINT_ROLLED
      for (uint32_t index = share.first; index < call_.shape.block_lines(); index += share.step) {
        Machine::store_line(own_ + call_.shape.line(block_, ~number_ & 1, other, index), 0, 0, 0);
      }
    }
    Machine::settle();
    machine_.meet();
  }

  FORKPOINT_HD uint32_t bytes_of(uint32_t index) const {
    const uint32_t left = run_bytes_ - index * kLineData;
    return left < kLineData ? left : kLineData;
  }
  // What this rank has for `part`, which only a reduce_scatter tells apart. kWell: all lines are whole and lie well.
  template <bool kWell>
  FORKPOINT_HD Vector own_input(uint32_t part, uint32_t index) const {
    const bool parts = call_.kind == Kind::reduce_scatter;
    const char* data = call_.in + (parts ? part * call_.part_bytes : 0) + begin_ + index * kLineData;
    if (kWell) {
      const uint64_t word = load_word(data);
      return {{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32), 0, 0}};
    }
    const InputRun run(data, bytes_of(index));
    Vector vector = {};
    copy_by_grain(reinterpret_cast<char*>(&vector), run.data, run.bytes, run.grain);
    return vector;
  }

  template <int kLines, bool kWell, typename AnOp>
  FORKPOINT_HD bool work_on(AnOp op, Share share, uint32_t lines) {
    FORKPOINT_ROLLED
    for (uint32_t first = share.first; first < lines; first += kLines * share.step) {
      Vector own[kLines];
      push<kLines, kWell>(first, share.step, lines, own);
      if (!add<kLines, kWell>(op, first, share.step, lines, own)) return false;
    }
    return true;
  }

  // To every rank, in a reduce too: what a rank hears tells it that the others have left the call before the last.
  // own: what it keeps for itself.
  template <int kLines, bool kWell>
  FORKPOINT_HD void push(uint32_t first, uint32_t step, uint32_t lines, Vector (&own)[kLines]) const {
    load_lines<kLines, kWell>(call_.rank, first, step, lines, own);
    FORKPOINT_ROLLED
    for (uint32_t distance = 1; distance < call_.shape.ranks; ++distance) {
      const uint32_t next = call_.rank + distance, rank = next < call_.shape.ranks ? next : next - call_.shape.ranks;
      Vector data[kLines];
      FORKPOINT_UNROLL
      for (int i = 0; i < kLines; ++i) data[i] = own[i];
      if (call_.kind == Kind::reduce_scatter) load_lines<kLines, kWell>(rank, first, step, lines, data);
      FORKPOINT_UNROLL
      for (int i = 0; i < kLines; ++i) {
        if (first + i * step >= lines) continue;
        Machine::store_line(line(rank, call_.rank, first + i * step), data[i].word[0], data[i].word[1], mark());
      }
    }
  }
  template <int kLines, bool kWell>
  FORKPOINT_HD void load_lines(uint32_t part, uint32_t first, uint32_t step, uint32_t lines,
                               Vector (&data)[kLines]) const {
    FORKPOINT_UNROLL
    for (int i = 0; i < kLines; ++i) {
      if (first + i * step < lines) data[i] = own_input<kWell>(part, first + i * step);
    }
  }

  template <int kLines, bool kWell, typename AnOp>
  FORKPOINT_HD bool add(AnOp op, uint32_t first, uint32_t step, uint32_t lines, const Vector (&own)[kLines]) {
    RankSum<A, kLineData, kTree> sums[kLines];
    FORKPOINT_ROLLED
    for (uint32_t rank = 0; rank < call_.shape.ranks; ++rank) {
      Vector vectors[kLines] = {};
      if (rank != call_.rank && !take_lines<kLines>(rank, first, step, lines, vectors)) return false;
      FORKPOINT_UNROLL
      for (int i = 0; i < kLines; ++i) sums[i].take(op, factor_, rank, rank == call_.rank ? own[i] : vectors[i]);
    }
    if (!is_owner(call_, call_.rank)) return true;
    FORKPOINT_UNROLL
    for (int i = 0; i < kLines; ++i) {
      if (first + i * step < lines) give<kWell>(first + i * step, sums[i].finish(op, call_.shape.ranks));
    }
    return true;
  }

  template <bool kWell>
  FORKPOINT_HD void give(uint32_t index, const Vector& result) const {
    char* to = call_.out + begin_ + index * kLineData;
    if (kWell) return store_word(to, result.word[0] | uint64_t{result.word[1]} << 32);
    const OutputRun run(to, bytes_of(index));
    const Vector apart = result;  // in memory, where it is needed
    copy_by_grain(run.data, reinterpret_cast<const char*>(&apart), run.bytes, run.grain);
  }

  // All of them are asked for before the first is waited for.
  template <int kLines>
  FORKPOINT_HD bool take_lines(uint32_t rank, uint32_t first, uint32_t step, uint32_t lines,
                               Vector (&vectors)[kLines]) {
    for (;;) {
      bool all = true;
      FORKPOINT_UNROLL
      for (int i = 0; i < kLines; ++i) {
        if (first + i * step >= lines) continue;
        const bool there = Machine::load_line(line(call_.rank, rank, first + i * step), mark(), &vectors[i].word[0],
                                              &vectors[i].word[1]);
        all = all && there;
      }
      if (all) return true;
      if (!machine_.still_waiting()) return false;
    }
  }

  Machine& machine_;
  const CollectiveParams& call_;
  const uint32_t block_;
  char* const own_;
  uint64_t number_ = 0;
  uint64_t begin_ = 0;  // of the block's data in a part
  uint32_t run_bytes_ = 0;
  uint64_t lines_at_ = 0;     // of this call's, in each rank's staging memory
  uint32_t other_bytes_ = 0;  // of the lines of one of the others
  Value factor_;
};

// Protocol::local: the inputs lie at staging[0 .. ranks). share: of all threads of the grid.
template <typename Machine, typename A, bool kTree>
FORKPOINT_HD void add_local(const CollectiveParams& call, Share share) {
  typename A::Value factor;
  if (call.factor_at)
    factor = A::load(*static_cast<const typename A::Stored*>(call.factor_at));
  else
    memcpy(&factor, &call.factor, sizeof(factor));
  const uint64_t count = (call.part_bytes + kVectorBytes - 1) / kVectorBytes;
  FORKPOINT_ROLLED
  for (uint64_t index = share.first; index < count; index += share.step) {
    const uint64_t offset = index * kVectorBytes, left = call.part_bytes - offset;
    const uint32_t bytes = left < kVectorBytes ? static_cast<uint32_t>(left) : kVectorBytes;
    RankSum<A, kVectorBytes, kTree> sum;
    FORKPOINT_ROLLED
    for (uint32_t rank = 0; rank < call.shape.ranks; ++rank) {
      sum.take(call.op, factor, rank, load<Machine>(InputRun(call.staging[rank] + offset, bytes), 0, bytes));
    }
    store<Machine>(OutputRun(call.out + offset, bytes), 0, sum.finish(call.op, call.shape.ranks), bytes);
  }
}

}  // namespace forkpoint::collective
