// How the ranks' blocks work together (collective_staging.h has the picture), written once over a Machine: the device's
// (collective_machine.cuh) or the host's threads, with which tests run the protocol without a GPU.
//
// A worker is what acts as one: a warp, or a thread of the host. In each block two workers only signal, so that those
// which move data never wait until what they wrote has arrived; the others push inputs, add, or copy results out.
//
// Machine:
//   share(first_worker, workers)    which vectors this thread takes of a run that these workers share
//   load_program, store_program     16 aligned bytes of the program's memory
//   load_staging, store_staging     16 aligned bytes of staging memory: own, or (stores) another rank's
//   publish(progress, count)        this worker is through with `count` chunks: what it did comes before
//   await_progress(progress, workers, count)
//                                   until all of them are; false: abort
//   signal(address, value)          all of the worker's threads call it, with an address of their own or nullptr: what
//                                   was done before, and awaited, comes before it on every device
//   await_signals(base, count, except, value)
//                                   until `count` 64-bit signals, but one, are at least value; false: abort
// and for low latency (collective_lines.h):
//   store_line, load_line           two 8-byte halves, each of them whole
//   still_waiting()                 in a loop that waits for lines; false: abort
//   barrier()                       of all threads of the block; what each wrote comes before what any does next
//   kLinePeriod                     calls after which stale lines are cleared; a power of two
#pragma once

#include "kernels/collective_vectors.h"

namespace forkpoint::collective {

// Who does what in a block, by the number of the worker: 0 and 1 signal, then those that push, add, copy.
struct Roles {
  uint32_t pushers, adders, copiers;
  FORKPOINT_HD constexpr uint32_t first_pusher() const { return 2; }
  FORKPOINT_HD constexpr uint32_t first_adder() const { return 2 + pushers; }
  FORKPOINT_HD constexpr uint32_t first_copier() const { return 2 + pushers + adders; }
  FORKPOINT_HD constexpr uint32_t count() const { return 2 + pushers + adders + copiers; }
};

// A block of one rank, as one of its workers sees it. progress: an entry a worker, zero at first, shared by the block.
template <typename Machine, typename A, bool kTree>
class Block {
 public:
  using Value = typename A::Value;
  // Vectors whose loads are on their way together; what adds holds them as wide values.
  static constexpr int kAddAtOnce = kTree ? 1 : sizeof(typename A::Stored) == 1 ? 2 : 4;

  FORKPOINT_HD Block(Machine& machine, const CollectiveParams& call, Roles roles, uint32_t block, uint32_t* progress)
      : machine_(machine),
        call_(call),
        roles_(roles),
        block_(block),
        progress_(progress),
        own_(call.staging[call.rank]) {
    first_chunk_ = *reinterpret_cast<const uint64_t*>(own_ + call.shape.chunks_done(block));
    const uint64_t tiles = tile_count(call);
    chunks_ = tiles > block ? static_cast<uint32_t>((tiles - block + call.blocks - 1) / call.blocks) : 0;
    factor_ =
        call.factor_at ? A::load(*static_cast<const typename A::Stored*>(call.factor_at)) : factor_of(call.factor);
  }

  FORKPOINT_HD void work(uint32_t worker) {
    if (worker == 0) return signal_inputs();
    if (worker == 1) return signal_results();
    if (worker < roles_.first_adder()) return push_inputs(worker);
    if (worker < roles_.first_copier()) return add_chunks(worker);
    copy_results(worker);
  }

  // Once all workers are through, by one thread.
  FORKPOINT_HD void advance_chunks() {
    *reinterpret_cast<uint64_t*>(own_ + call_.shape.chunks_done(block_)) = first_chunk_ + chunks_;
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
  FORKPOINT_HD bool owns() const { return is_owner(call_, call_.rank); }
  FORKPOINT_HD bool pushes_results() const { return call_.kind == Kind::all_reduce; }

  FORKPOINT_HD void push_inputs(uint32_t worker) {
    const Share share = machine_.share(worker - roles_.first_pusher(), roles_.pushers);
    for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t* copied = progress_ + roles_.first_copier();
      const uint32_t slots = call_.shape.slots;
      if (chunk >= slots && !machine_.await_progress(copied, roles_.copiers, chunk - slots + 1)) return;
      for (uint32_t distance = 1; distance < ranks(); ++distance) {
        const uint32_t owner = after(distance);
        if (is_owner(call_, owner)) push_input(share, chunk, owner);
      }
      machine_.publish(progress_ + worker, chunk + 1);
    }
  }

  FORKPOINT_HD void push_input(Share share, uint32_t chunk, uint32_t owner) {
    const Piece piece = piece_of(call_, tile(chunk), owner);
    copy_to_staging<Machine>(share, InputRun(call_.in + piece.in_offset, piece.bytes),
                             call_.staging[owner] + call_.shape.input(block_, call_.rank, first_chunk_ + chunk));
  }

  FORKPOINT_HD void signal_inputs() {
    for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (!machine_.await_progress(progress_ + roles_.first_pusher(), roles_.pushers, chunk + 1)) return;
      signal_others(call_.shape.input_arrived(block_, call_.rank), chunk, false);
    }
  }
  FORKPOINT_HD void signal_results() {
    if (!owns()) return;
    for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
      if (!machine_.await_progress(progress_ + roles_.first_adder(), roles_.adders, chunk + 1)) return;
      signal_others(call_.shape.result_arrived(block_, call_.rank), chunk, true);
    }
  }
  // Each thread of the worker a rank of its own.
  FORKPOINT_HD void signal_others(uint64_t offset, uint32_t chunk, bool to_all) {
    const Share share = machine_.share(0, 1);
    for (uint32_t base = 0; base < ranks(); base += share.step) {
      const uint32_t rank = base + share.first;
      const bool wanted = rank < ranks() && rank != call_.rank && (to_all || is_owner(call_, rank));
      machine_.signal(wanted ? call_.staging[rank] + offset : nullptr, first_chunk_ + chunk + 1);
    }
  }

  FORKPOINT_HD void add_chunks(uint32_t worker) {
    if (!owns()) return;
    const Share share = machine_.share(worker - roles_.first_adder(), roles_.adders);
    for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
      const char* arrived = own_ + call_.shape.input_arrived(block_, 0);
      if (!machine_.await_signals(arrived, ranks(), call_.rank, first_chunk_ + chunk + 1)) return;
      add_chunk(share, chunk);
      machine_.publish(progress_ + worker, chunk + 1);
    }
  }

  FORKPOINT_HD void add_chunk(Share share, uint32_t chunk) {
    const Piece piece = piece_of(call_, tile(chunk), call_.rank);
    const InputRun from(call_.in + piece.in_offset, piece.bytes);
    const OutputRun to(call_.out + piece.out_offset, piece.bytes);
    each_batch<kAddAtOnce>(share, piece.bytes, [&](uint32_t first, uint32_t count) {
      RankSum<A, kVectorBytes, kTree> sums[kAddAtOnce];
      for (uint32_t rank = 0; rank < ranks(); ++rank) take(sums, from, rank, chunk, first, share.step, count);
      FORKPOINT_UNROLL
      for (int i = 0; i < kAddAtOnce; ++i) {
        const uint32_t index = first + i * share.step;
        if (index < count) give(to, chunk, index, sums[i].finish(call_.op, ranks()));
      }
    });
  }

  FORKPOINT_HD void take(RankSum<A, kVectorBytes, kTree> (&sums)[kAddAtOnce], const InputRun& from, uint32_t rank,
                         uint32_t chunk, uint32_t first, uint32_t step, uint32_t count) {
    Vector vectors[kAddAtOnce];
    const char* slot = own_ + call_.shape.input(block_, rank, first_chunk_ + chunk);
    FORKPOINT_UNROLL
    for (int i = 0; i < kAddAtOnce; ++i) {
      const uint32_t index = first + i * step;
      vectors[i] = {};
      if (index >= count) continue;
      if (rank == call_.rank)
        vectors[i] = load<Machine>(from, index, bytes_at(index, from.bytes));
      else
        vectors[i] = Machine::load_staging(slot + size_t{index} * kVectorBytes);
    }
    FORKPOINT_UNROLL
    for (int i = 0; i < kAddAtOnce; ++i) sums[i].take(call_.op, factor_, rank, vectors[i]);
  }

  FORKPOINT_HD void give(const OutputRun& to, uint32_t chunk, uint32_t index, const Vector& sum) {
    store<Machine>(to, index, sum, bytes_at(index, to.bytes));
    if (!pushes_results()) return;
    const uint64_t slot = call_.shape.result(block_, call_.rank, first_chunk_ + chunk) + size_t{index} * kVectorBytes;
    for (uint32_t distance = 1; distance < ranks(); ++distance) {
      Machine::store_staging(call_.staging[after(distance)] + slot, sum);
    }
  }

  // Where there are no results for this rank, the signals still say that the inputs were taken.
  FORKPOINT_HD void copy_results(uint32_t worker) {
    const Share share = machine_.share(worker - roles_.first_copier(), roles_.copiers);
    for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
      for (uint32_t distance = 1; distance < ranks(); ++distance) {
        const uint32_t owner = after(distance);
        if (!is_owner(call_, owner)) continue;
        const char* arrived = own_ + call_.shape.result_arrived(block_, owner);
        if (!machine_.await_signals(arrived, 1, 1, first_chunk_ + chunk + 1)) return;
        if (pushes_results()) copy_result(share, chunk, owner);
      }
      machine_.publish(progress_ + worker, chunk + 1);
    }
  }

  FORKPOINT_HD void copy_result(Share share, uint32_t chunk, uint32_t owner) {
    const Piece piece = piece_of(call_, tile(chunk), owner);
    copy_from_staging<Machine>(share, own_ + call_.shape.result(block_, owner, first_chunk_ + chunk),
                               OutputRun(call_.out + piece.out_offset, piece.bytes));
  }

  Machine& machine_;
  const CollectiveParams& call_;
  const Roles roles_;
  const uint32_t block_;
  uint32_t* const progress_;
  char* const own_;
  uint64_t first_chunk_ = 0;
  uint32_t chunks_ = 0;
  Value factor_;
};

}  // namespace forkpoint::collective
