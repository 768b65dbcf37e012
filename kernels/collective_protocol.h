// How the ranks' blocks work together (collective_staging.h has the picture), written once over a Machine: the device's
// (collective_machine.cuh) or the host's threads, with which tests run the protocol without a GPU.
//
// All threads of a block do the same: each pushes, adds and copies its share of the vectors. They meet once a step,
// before its signal, which one worker (a warp, or a thread of the host) sends while the others go on.
//
// Machine:
//   load_program, store_program     16 aligned bytes of the program's memory
//   load_staging, store_staging     16 aligned bytes of staging memory: own, or (stores) another rank's; loads of the
//                                   program's memory too
//   meet()                          of all threads of the block; what each did comes before what any does next
//   is_signaller(), team()          is this thread of the worker that signals? Which of its threads it is
//   signal(address, value)          all of the worker's threads call it, with an address of their own or nullptr: what
//                                   was done before they met comes before it on every device
//   await_signals(base, count, except, value)
//                                   until `count` 64-bit signals, but one, are at least value; false: abort
// and for low latency (collective_lines.h):
//   store_line, load_line           two 8-byte halves, each of them whole
//   still_waiting()                 in a loop that waits for lines; false: abort
//   settle()                        what this thread wrote has arrived before it goes on
//   kLinePeriod                     calls after which stale lines are cleared; a power of two
#pragma once

#include "kernels/collective_vectors.h"

namespace forkpoint::collective {

// A block of one rank, as one of its threads sees it.
template <typename Machine, typename A, bool kTree>
class Block {
 public:
  using Value = typename A::Value;
  using Sum = RankSum<A, kVectorBytes, kTree>;
  // Vectors whose loads are on their way together; what adds holds them as wide values.
  static constexpr int kAddAtOnce = kTree ? 1 : sizeof(typename A::Stored) == 1 ? 2 : 4;
  // The types of training have instructions of their own for the ops of training.
  static constexpr bool kOpsApart = !kTree && !std::is_integral_v<Value> && sizeof(typename A::Stored) > 1;

  FORKPOINT_HD Block(Machine& machine, const CollectiveParams& call, uint32_t block)
      : machine_(machine), call_(call), block_(block), own_(call.staging[call.rank]) {
    other_bytes_ = call.shape.slots * call.room;
    block_at_ = uint64_t{block} * call.shape.others() * other_bytes_;
    first_chunk_ = *reinterpret_cast<const uint64_t*>(own_ + call.shape.chunks_done(block));
    first_signal_ = *reinterpret_cast<const uint64_t*>(own_ + call.shape.signals_done(block));
    const uint64_t tiles = tile_count(call);
    chunks_ = tiles > block ? static_cast<uint32_t>((tiles - block + call.blocks - 1) / call.blocks) : 0;
    factor_ =
        call.factor_at ? A::load(*static_cast<const typename A::Stored*>(call.factor_at)) : factor_of(call.factor);
  }

  // share: of all threads of the block. false: told to end; nothing else of the block is of use.
  FORKPOINT_HD bool work(Share share) {
    const uint32_t lag = call_.lag, results = is_split(call_) ? lag + 1 : 0;
    FORKPOINT_ROLLED
    for (uint32_t step = 0; step < chunks_ + lag + results; ++step) {
      if (step < chunks_) push_inputs(share, step);
      if (step < chunks_ + results) publish(step);
      if (step < lag) continue;
      if (!await(step - lag)) return false;
      if (step < chunks_ + lag) add_chunk(share, step - lag);
      if (results > 0 && step >= lag + results) copy_results(share, step - lag - results);
    }
    return true;
  }

  // Once all threads are through, by one.
  FORKPOINT_HD void advance() {
    *reinterpret_cast<uint64_t*>(own_ + call_.shape.chunks_done(block_)) = first_chunk_ + chunks_;
    *reinterpret_cast<uint64_t*>(own_ + call_.shape.signals_done(block_)) =
        first_signal_ + chunks_ + (is_split(call_) ? call_.lag + 1 : 0);
  }

 private:
  FORKPOINT_HD static Value factor_of(uint64_t bits) {
    Value value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  FORKPOINT_HD uint32_t ranks() const { return call_.shape.ranks; }
  FORKPOINT_HD uint32_t after(uint32_t distance) const {
    const uint32_t rank = call_.rank + distance;
    return rank < ranks() ? rank : rank - ranks();
  }
  FORKPOINT_HD uint64_t tile(uint32_t chunk) const { return block_ + uint64_t{chunk} * call_.blocks; }
  // Where `from` puts what it has for `of`: StagingShape::input and result, in fewer instructions.
  FORKPOINT_HD char* slot(uint64_t begin, uint32_t of, uint32_t from, uint32_t chunk) const {
    const uint32_t index = static_cast<uint32_t>(first_chunk_ + chunk) & (call_.shape.slots - 1);
    return call_.staging[of] + begin + block_at_ + StagingShape::other(of, from) * other_bytes_ + index * call_.room;
  }
  FORKPOINT_HD char* input_slot(uint32_t of, uint32_t from, uint32_t chunk) const {
    return slot(call_.inputs_at, of, from, chunk);
  }
  FORKPOINT_HD char* result_slot(uint32_t of, uint32_t from, uint32_t chunk) const {
    return slot(call_.results_at, of, from, chunk);
  }

  FORKPOINT_HD void push_inputs(Share share, uint32_t chunk) {
    FORKPOINT_ROLLED
    for (uint32_t distance = 1; distance < ranks(); ++distance) {
      const uint32_t owner = after(distance);
      if (!is_owner(call_, owner)) continue;
      const Piece piece = piece_of(call_, tile(chunk), owner);
      copy_to_staging<Machine>(share, InputRun(call_.in + piece.in_offset, piece.bytes),
                               input_slot(owner, call_.rank, chunk));
    }
  }

  // To every rank, whether or not it is to get data: slots are filled again on the strength of it.
  FORKPOINT_HD void publish(uint32_t step) {
    machine_.meet();
    if (!machine_.is_signaller()) return;
    const Share team = machine_.team();
    FORKPOINT_ROLLED
    for (uint32_t base = 0; base < ranks(); base += team.step) {
      const uint32_t rank = base + team.first;
      const bool wanted = rank < ranks() && rank != call_.rank;
      machine_.signal(wanted ? call_.staging[rank] + call_.shape.signals(block_, call_.rank) : nullptr,
                      first_signal_ + step + 1);
    }
  }
  FORKPOINT_HD bool await(uint32_t step) {
    return machine_.await_signals(own_ + call_.shape.signals(block_, 0), ranks(), call_.rank, first_signal_ + step + 1);
  }

  FORKPOINT_HD void add_chunk(Share share, uint32_t chunk) {
    if (!is_owner(call_, call_.rank)) return;
    const Piece piece = piece_of(call_, tile(chunk), call_.rank);
    const InputRun from(call_.in + piece.in_offset, piece.bytes);
    const OutputRun to(call_.out + piece.out_offset, piece.bytes);
    const bool lies_well = from.grain == kVectorBytes && to.grain == kVectorBytes;
    uint32_t done = 0;
    if constexpr (kOpsApart) {
      if (lies_well && call_.op == Op::sum)
        add_vectors<kAddAtOnce, true>(Fixed<Op::sum>{}, share, from, to, chunk, 0, done = from.whole_vectors());
      else if (lies_well && call_.op == Op::scaled_sum)
        add_vectors<kAddAtOnce, true>(Fixed<Op::scaled_sum>{}, share, from, to, chunk, 0, done = from.whole_vectors());
    }
    add_vectors<kOpsApart ? 1 : kAddAtOnce, false>(call_.op, share, from, to, chunk, done, vectors_of(piece.bytes));
  }

  // kWell: whole vectors that lie well.
  template <int kAtOnce, bool kWell, typename AnOp>
  FORKPOINT_HD void add_vectors(AnOp op, Share share, const InputRun& from, const OutputRun& to, uint32_t chunk,
                                uint32_t begin, uint32_t end) {
    each_batch<kAtOnce>(share, begin, end, [&](uint32_t first) {
      Sum sums[kAtOnce];
      Vector vectors[kAtOnce], next[kAtOnce] = {};
      fetch<kAtOnce, kWell>(vectors, from, 0, chunk, first, share.step, end);
      FORKPOINT_ROLLED
      for (uint32_t rank = 0; rank < ranks(); ++rank) {
        if (rank + 1 < ranks()) fetch<kAtOnce, kWell>(next, from, rank + 1, chunk, first, share.step, end);
        FORKPOINT_UNROLL
        for (int i = 0; i < kAtOnce; ++i) sums[i].take(op, factor_, rank, vectors[i]), vectors[i] = next[i];
      }
      FORKPOINT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t index = first + i * share.step;
        if (index < end) give<kWell>(to, chunk, index, sums[i].finish(op, ranks()));
      }
    });
  }

  template <int kAtOnce, bool kWell>
  FORKPOINT_HD void fetch(Vector (&vectors)[kAtOnce], const InputRun& from, uint32_t rank, uint32_t chunk,
                          uint32_t first, uint32_t step, uint32_t end) {
    const bool is_own = rank == call_.rank;
    const char* at = is_own ? from.data : input_slot(call_.rank, rank, chunk);
    FORKPOINT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t index = first + i * step;
      if (index >= end) continue;
      vectors[i] = kWell || !is_own ? Machine::load_staging(at + size_t{index} * kVectorBytes)
                                    : load<Machine>(from, index, bytes_at(index, from.bytes));
    }
  }

  template <bool kWell>
  FORKPOINT_HD void give(const OutputRun& to, uint32_t chunk, uint32_t index, const Vector& sum) {
    if (kWell)
      Machine::store_program(to.data + size_t{index} * kVectorBytes, sum);
    else
      store<Machine>(to, index, sum, bytes_at(index, to.bytes));
    if (!is_split(call_)) return;
    FORKPOINT_ROLLED
    for (uint32_t distance = 1; distance < ranks(); ++distance) {
      Machine::store_staging(result_slot(after(distance), call_.rank, chunk) + size_t{index} * kVectorBytes, sum);
    }
  }

  FORKPOINT_HD void copy_results(Share share, uint32_t chunk) {
    FORKPOINT_ROLLED
    for (uint32_t distance = 1; distance < ranks(); ++distance) {
      const uint32_t owner = after(distance);
      const Piece piece = piece_of(call_, tile(chunk), owner);
      copy_from_staging<Machine>(share, result_slot(call_.rank, owner, chunk),
                                 OutputRun(call_.out + piece.out_offset, piece.bytes));
    }
  }

  Machine& machine_;
  const CollectiveParams& call_;
  const uint32_t block_;
  char* const own_;
  uint64_t first_chunk_ = 0, first_signal_ = 0;
  uint64_t block_at_ = 0;     // of its slots behind the first block's
  uint32_t other_bytes_ = 0;  // of all slots of one of the others
  uint32_t chunks_ = 0;
  Value factor_;
};

}  // namespace forkpoint::collective
