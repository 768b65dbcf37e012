// The low-latency protocol (collective_staging.h): each line carries 8 bytes of data and, in both halves, the number of
// the call, so that whoever reads it knows by itself that it is there.
//
// Two sets of lines in turn are enough: a rank that is in call k has heard from every rank in call k-1, so all of them
// have left call k-2, whose lines it writes now. A block's lines and its count of calls are its own, whatever the size
// of a call.
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

  FORKPOINT_HD LineBlock(Machine& machine, const CollectiveParams& call, uint32_t block)
      : machine_(machine), call_(call), block_(block), own_(call.staging[call.rank]) {
    number_ = *reinterpret_cast<const uint64_t*>(own_ + call.shape.calls_done(block)) + 1;
    if (call.factor_at)
      factor_ = A::load(*static_cast<const typename A::Stored*>(call.factor_at));
    else
      memcpy(&factor_, &call.factor, sizeof(factor_));
  }

  // share: of all threads of the block.
  FORKPOINT_HD void work(Share share) {
    if ((number_ & (Machine::kLinePeriod - 1)) < 2) clear_other_lines(share);
    for (uint32_t index = share.first; index < kBlockThreads; index += share.step) {
      const uint64_t offset = uint64_t{block_} * kBlockLineData + index * kLineData;
      if (offset >= call_.part_bytes) return;
      const uint64_t left = call_.part_bytes - offset;
      const uint32_t bytes = left < kLineData ? static_cast<uint32_t>(left) : kLineData;
      push(index, offset, bytes);
      if (!add(index, offset, bytes)) return;
    }
  }

  // Once all threads are through, by one.
  FORKPOINT_HD void advance_calls() { *reinterpret_cast<uint64_t*>(own_ + call_.shape.calls_done(block_)) = number_; }

 private:
  // Never 0, which is what a cleared line bears.
  FORKPOINT_HD uint32_t mark() const {
    return static_cast<uint32_t>(number_ & (2 * Machine::kLinePeriod - 1)) | 0x80000000u;
  }
  FORKPOINT_HD void clear_other_lines(Share share) {
    for (uint32_t rank = 0; rank < call_.shape.ranks; ++rank) {
      for (uint32_t index = share.first; index < kBlockThreads; index += share.step) {
        Machine::store_line(own_ + call_.shape.line(block_, ~number_ & 1, rank, index), 0, 0, 0);
      }
    }
    machine_.barrier();
  }

  FORKPOINT_HD Vector own_input(uint32_t part, uint64_t offset, uint32_t bytes) {
    const bool parts = call_.kind == Kind::reduce_scatter;
    const InputRun run(call_.in + (parts ? part * call_.part_bytes : 0) + offset, bytes);
    if (bytes == kLineData && run.grain >= kLineData) {
      const uint64_t word = load_word(run.data);
      return {{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32), 0, 0}};
    }
    Vector vector = {};
    copy_by_grain(reinterpret_cast<char*>(&vector), run.data, bytes, run.grain);
    return vector;
  }

  // To every rank, in a reduce too: what a rank hears tells it that the others have left the call before the last.
  FORKPOINT_HD void push(uint32_t index, uint64_t offset, uint32_t bytes) {
    const uint64_t line = call_.shape.line(block_, number_ & 1, call_.rank, index);
    Vector data = own_input(0, offset, bytes);
    for (uint32_t distance = 1; distance < call_.shape.ranks; ++distance) {
      const uint32_t rank = (call_.rank + distance) % call_.shape.ranks;
      if (call_.kind == Kind::reduce_scatter) data = own_input(rank, offset, bytes);
      Machine::store_line(call_.staging[rank] + line, data.word[0], data.word[1], mark());
    }
  }

  FORKPOINT_HD bool add(uint32_t index, uint64_t offset, uint32_t bytes) {
    RankSum<A, kLineData, kTree> sum;
    for (uint32_t rank = 0; rank < call_.shape.ranks; ++rank) {
      Vector vector = {};
      if (rank == call_.rank)
        vector = own_input(rank, offset, bytes);
      else if (!take_line(own_ + call_.shape.line(block_, number_ & 1, rank, index), &vector))
        return false;
      sum.take(call_.op, factor_, rank, vector);
    }
    if (!is_owner(call_, call_.rank)) return true;
    const Vector result = sum.finish(call_.op, call_.shape.ranks);
    const OutputRun run(call_.out + offset, bytes);
    if (bytes == kLineData && run.grain >= kLineData) {
      store_word(run.data, result.word[0] | uint64_t{result.word[1]} << 32);
      return true;
    }
    const Vector apart = result;  // in memory, where it is needed
    copy_by_grain(run.data, reinterpret_cast<const char*>(&apart), bytes, run.grain);
    return true;
  }

  FORKPOINT_HD bool take_line(const char* line, Vector* vector) {
    const uint32_t wanted = mark();
    while (!Machine::load_line(line, wanted, &vector->word[0], &vector->word[1])) {
      if (!machine_.still_waiting()) return false;
    }
    return true;
  }

  Machine& machine_;
  const CollectiveParams& call_;
  const uint32_t block_;
  char* const own_;
  uint64_t number_ = 0;
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
  for (uint64_t index = share.first; index < count; index += share.step) {
    const uint64_t offset = index * kVectorBytes, left = call.part_bytes - offset;
    const uint32_t bytes = left < kVectorBytes ? static_cast<uint32_t>(left) : kVectorBytes;
    RankSum<A, kVectorBytes, kTree> sum;
    for (uint32_t rank = 0; rank < call.shape.ranks; ++rank) {
      sum.take(call.op, factor, rank, load<Machine>(InputRun(call.staging[rank] + offset, bytes), 0, bytes));
    }
    store<Machine>(OutputRun(call.out + offset, bytes), 0, sum.finish(call.op, call.shape.ranks), bytes);
  }
}

}  // namespace forkpoint::collective
