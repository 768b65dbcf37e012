// The protocol of the deterministic collectives on threads, against the rule, bit by bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "tests/collectives/world.h"

namespace forkpoint::collective {
namespace {

#ifdef FORKPOINT_FEW_TYPES
constexpr int kRounds = 1;
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::i8};
#else
constexpr int kRounds = 4;
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::i8,  DType::f64,    DType::f16,    DType::u64,
                            DType::i32, DType::u8,   DType::i64, DType::f8e4m3, DType::f8e5m2, DType::u32};
#endif

constexpr Op kOps[] = {Op::sum, Op::average, Op::maximum, Op::scaled_sum, Op::sum, Op::minimum, Op::product};
constexpr Kind kKinds[] = {Kind::all_reduce, Kind::reduce_scatter, Kind::all_reduce, Kind::reduce};

// A rank's memory in one call: room before and behind, which nobody may touch.
struct Buffer {
  static constexpr size_t kGuard = 64;
  std::vector<char> bytes;
  size_t begin = 0, size = 0;

  Buffer(size_t size, size_t misplaced, std::mt19937_64& random) : bytes(size + 2 * kGuard + 16), begin(0), size(size) {
    const auto lies = reinterpret_cast<uintptr_t>(bytes.data()) % 16;
    begin = kGuard + (16 - lies) % 16 + misplaced;
    for (char& byte : bytes) byte = static_cast<char>(random());
  }
  char* data() { return bytes.data() + begin; }
  bool differs_only_inside(const std::vector<char>& before) const {
    return std::equal(bytes.begin(), bytes.begin() + static_cast<long>(begin), before.begin()) &&
           std::equal(bytes.begin() + static_cast<long>(begin + size), bytes.end(),
                      before.begin() + static_cast<long>(begin + size));
  }
};

// One call with everything that must come of it.
struct Case {
  CollectiveSpec spec;
  bool in_place = false;
  std::vector<Buffer> in, out;                                     // of each rank; in place: out is not used
  std::vector<std::vector<char>> in_before, out_before, expected;  // expected: of the output; empty: it has none

  Case(CollectiveSpec spec, uint32_t ranks, bool in_place, size_t misplaced_in, size_t misplaced_out,
       std::mt19937_64& random)
      : spec(spec), in_place(in_place) {
    const size_t part = spec.count * static_cast<size_t>(size_bytes(spec.dtype));
    const size_t in_bytes = spec.kind == Kind::reduce_scatter ? part * ranks : part;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      in.emplace_back(in_bytes, misplaced_in, random);
      out.emplace_back(part, misplaced_out, random);
      in_before.push_back(in.back().bytes);
      out_before.push_back(out.back().bytes);
    }
    std::vector<const void*> inputs;
    for (Buffer& buffer : in) inputs.push_back(buffer.data());
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      expected.emplace_back(spec.kind == Kind::reduce && rank != spec.root ? 0 : part);
      if (!expected.back().empty()) collect_on_host(spec, inputs.data(), ranks, rank, expected.back().data());
    }
  }

  char* output(uint32_t rank) {
    if (!in_place) return out[rank].data();
    return in[rank].data() + (spec.kind == Kind::reduce_scatter ? rank * expected[rank].size() : 0);
  }
  World::Rank buffers(uint32_t rank) {
    const bool none = spec.kind == Kind::reduce && rank != spec.root;
    return {in[rank].data(), none ? nullptr : output(rank)};
  }

  bool is_right(uint32_t rank) {
    const std::vector<char>& wanted = expected[rank];
    if (!wanted.empty() && memcmp(output(rank), wanted.data(), wanted.size()) != 0) return false;
    if (!out[rank].differs_only_inside(out_before[rank])) return false;
    if (!in_place || wanted.empty()) return in[rank].bytes == in_before[rank];
    const auto from = output(rank) - in[rank].bytes.data();
    std::copy_n(output(rank), wanted.size(), in_before[rank].begin() + from);  // only the output has changed
    return in[rank].bytes == in_before[rank];
  }
};

// Calls of all kinds on one communicator, one after another.
struct Arrangement {
  uint32_t ranks, workers, slots;
  World::Tunings tunings;
};
void check_calls(const Arrangement& arrangement, const std::vector<uint64_t>& counts, uint64_t seed,
                 bool expects_lines) {
  const uint32_t ranks = arrangement.ranks;
  std::mt19937_64 random(seed);
  World world({.ranks = ranks, .blocks = 2, .slots = arrangement.slots, .tile_bytes = 128 * ranks}, arrangement.workers,
              true);
  std::vector<Case> cases;
  for (const uint64_t count : counts) {
    CollectiveSpec spec;
    spec.kind = kKinds[random() % std::size(kKinds)];
    spec.dtype = kTypes[random() % std::size(kTypes)];
    spec.op = kOps[random() % std::size(kOps)];
    spec.wide = random() % 3 == 0;
    spec.tree = random() % 4 == 0 && has_collective(spec.dtype, true);
    spec.count = count;
    spec.root = static_cast<uint32_t>(random() % ranks);
    if (spec.op == Op::scaled_sum) spec.factor = 0x3fe;  // small, whatever the type
    const auto element = static_cast<size_t>(size_bytes(spec.dtype));
    const size_t misplaced[] = {0, element, 4 * element % 16, random() % 16};
    cases.emplace_back(spec, ranks, random() % 3 == 0, misplaced[random() % 4], misplaced[random() % 4], random);
  }
  World::Calls calls;
  for (Case& one : cases) {
    std::vector<World::Rank> buffers;
    for (uint32_t rank = 0; rank < ranks; ++rank) buffers.push_back(one.buffers(rank));
    calls.push_back({one.spec, buffers});
  }
  world.run(calls, arrangement.tunings);
  for (size_t i = 0; i < cases.size(); ++i) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      CAPTURE(i);
      CAPTURE(ranks);
      CAPTURE(rank);
      CAPTURE(static_cast<int>(cases[i].spec.kind));
      CAPTURE(name(cases[i].spec.dtype));
      CAPTURE(static_cast<int>(cases[i].spec.op));
      CAPTURE(cases[i].spec.count);
      CHECK(cases[i].is_right(rank));
    }
  }
  CHECK((world.low_latency_calls() > 0) == expects_lines);
  CHECK((world.pipelined_calls() > 0) == !expects_lines);
}

std::vector<uint64_t> some_counts(uint64_t seed, size_t how_many, uint64_t most) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> counts = {0, 1, 2, 3, 7};
  while (counts.size() < how_many) counts.push_back(random() % (random() % 2 ? most : 40));
  std::shuffle(counts.begin(), counts.end(), random);
  return counts;
}

constexpr CollectiveTuning kPipelined{.low_latency_bytes = 0, .chunks = 1, .least_chunk_bytes = 128};
constexpr CollectiveTuning kLines{.low_latency_bytes = 1u << 30};

CollectiveTuning with(CollectiveTuning tuning, uint32_t lag, uint32_t all_own_ranks) {
  tuning.lag = lag, tuning.all_own_ranks = all_own_ranks;
  return tuning;
}

}  // namespace

TEST_CASE("pipelined calls of every kind, type, place and length give every rank what the rule says") {
  for (const uint32_t ranks : {1u, 2u, 3u, 5u, 8u, 11u}) {
    const int rounds = ranks > 5 ? 1 : kRounds;
    for (int round = 0; round < rounds; ++round) {
      check_calls({ranks, 2, 4, {kPipelined}}, some_counts(ranks * 100 + round, ranks > 5 ? 8 : 14, 1500),
                  ranks * 17 + round, false);
    }
  }
}

TEST_CASE("with more workers the runs are shared out without a gap") {
  for (int round = 0; round < kRounds; ++round) {
    check_calls({2, 7, 4, {kPipelined}}, some_counts(round, 12, 4000), 1000 + round, false);
  }
}

// Slots are as few as the protocol allows, chunks many, and calls follow each other with other steps between a chunk
// and its addition, so that whoever fills a slot too early spoils what is still to be read from it.
TEST_CASE("slots are filled again only when they were read, whatever the lag and whoever owns, also between calls") {
  for (const uint32_t ranks : {2u, 3u, 4u}) {
    for (const uint32_t slots : {4u, 8u}) {
      World::Tunings tunings;
      for (uint32_t i = 0; i < 6; ++i) tunings.push_back(with(kPipelined, 1 + i % 3, i % 2 ? 2 : 3));
      for (int round = 0; round < kRounds; ++round) {
        std::vector<uint64_t> counts;
        for (uint64_t i = 0; i < 18; ++i)
          counts.push_back(i % 3 == static_cast<uint64_t>(round) % 3 ? 40 + i : 1500 + 100 * i);
        check_calls({ranks, 2, slots, tunings}, counts, 500 * ranks + slots + round, false);
      }
    }
  }
}

TEST_CASE("three ranks may each add up everything, as two do") {
  for (int round = 0; round < kRounds; ++round) {
    check_calls({3, 2, 4, {with(kPipelined, 1, 3)}}, some_counts(70 + round, 12, 3000), 80 + round, false);
  }
}

TEST_CASE("low-latency calls give what the rule says, also when the numbers of their lines come round") {
  for (const uint32_t ranks : {2u, 3u, 8u}) {
    for (int round = 0; round < kRounds; ++round) {
      // Long and short ones in turn: lines of the long ones stay while several periods of short ones pass.
      std::vector<uint64_t> counts;
      for (int i = 0; i < 40; ++i) counts.push_back(i % 16 < 2 ? 470 + i : i % 5 + 1);
      check_calls({ranks, 2, 4, {kLines}}, counts, 77 * ranks + round, true);
    }
  }
}

TEST_CASE("a communicator may change between the protocols from call to call") {
  std::mt19937_64 random(5);
  World world({.ranks = 3, .blocks = 2, .tile_bytes = 3 * 128}, 2, true);
  for (int round = 0; round < 6; ++round) {
    const uint64_t count = round % 2 ? 900 : 20;
    Case one({.dtype = DType::f32, .count = count}, 3, false, 0, 4, random);
    world.run({{one.spec, {one.buffers(0), one.buffers(1), one.buffers(2)}}},
              {{.low_latency_bytes = 200, .chunks = 1, .least_chunk_bytes = 128}});
    for (uint32_t rank = 0; rank < 3; ++rank) CHECK(one.is_right(rank));
  }
  CHECK(world.low_latency_calls() == 9);
  CHECK(world.pipelined_calls() == 9);
}

TEST_CASE("ranks whose peer never comes leave when they are told to") {
  std::mt19937_64 random(6);
  for (const CollectiveTuning& tuning : {kPipelined, kLines}) {
    World world({.ranks = 3, .blocks = 2, .tile_bytes = 3 * 128}, 2, false);
    Case one({.dtype = DType::f32, .count = 700}, 3, false, 0, 0, random);
    world.run({{one.spec, {one.buffers(0), one.buffers(1), one.buffers(2)}}}, {tuning}, 1);
    CHECK(world.aborted());
    CHECK_FALSE(one.is_right(0));
  }
}

TEST_CASE("adding up what lies on one device follows the rule") {
  std::mt19937_64 random(7);
  for (const DType dtype : kTypes) {
    CollectiveSpec spec{.op = Op::average, .dtype = dtype, .count = 333};
    Case one(spec, 5, false, 0, static_cast<size_t>(size_bytes(dtype)), random);
    std::vector<const void*> inputs;
    for (Buffer& buffer : one.in) inputs.push_back(buffer.data());
    CollectiveLaunch launch;
    REQUIRE(plan_local_sum(spec, inputs.data(), 5, one.out[0].data(), 8, &launch));
    REQUIRE(launch.params.protocol == Protocol::local);
    if (dtype == DType::bf16) {
      add_local<HostMachine, Arithmetic<DType::bf16, false>, false>(launch.params, {0, 1});
      CHECK(one.is_right(0));
    }
    if (dtype == DType::i64) {
      add_local<HostMachine, Arithmetic<DType::i64, false>, false>(launch.params, {0, 1});
      CHECK(one.is_right(0));
    }
  }
}

TEST_CASE("the cut of a call covers each byte once, with room for each chunk") {
  std::mt19937_64 random(8);
  for (int round = 0; round < 400; ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(random() % kMostRanks);
    CollectiveSpec spec{
        .kind = kKinds[random() % 4], .dtype = DType::u8, .count = 1 + random() % (1 << (random() % 22))};
    std::vector<void*> staging(ranks, nullptr);
    CollectivePlace place{{.ranks = ranks}, 0, staging.data(), nullptr, nullptr, nullptr};
    CollectiveLaunch launch;
    REQUIRE(plan_collective(spec, place, &launch,
                            {.low_latency_bytes = 0,
                             .chunks = static_cast<uint32_t>(random() % 6),
                             .least_chunk_bytes = static_cast<uint32_t>(random() % 9000),
                             .lag = static_cast<uint32_t>(random() % 9),
                             .all_own_ranks = static_cast<uint32_t>(random() % 9)}));
    const CollectiveParams& call = launch.params;
    REQUIRE(call.chunk_bytes <= call.shape.room());
    REQUIRE(call.chunk_bytes % kVectorBytes == 0);
    REQUIRE((call.lag >= 1 && call.shape.slots >= 2 * call.lag + 2));
    REQUIRE((call.blocks >= 1 && call.blocks <= tile_count(call)));
    uint64_t covered = 0;
    for (uint64_t tile = 0; tile < tile_count(call); ++tile) {
      for (uint32_t owner = 0; owner < (is_split(call) ? ranks : 1); ++owner) {
        const Piece piece = piece_of(call, tile, owner);
        if (piece.bytes == 0) continue;
        REQUIRE(piece.out_offset == covered);
        covered += piece.bytes;
      }
    }
    REQUIRE(covered == spec.count);
  }
}

TEST_CASE("no two places in the staging memory overlap") {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u, 63u, 64u}) {
    const StagingShape shape = staging_for(ranks);
    REQUIRE(shape.ranks == ranks);
    const uint32_t last = std::max(ranks, 2u) - 2;  // of the others
    CHECK(shape.signals(kMostBlocks - 1, kMostRanks - 1) < shape.chunks_done(0));
    CHECK(shape.chunks_done(0) < shape.signals_done(0));
    CHECK(shape.signals_done(0) < shape.calls_done(0));
    CHECK(shape.calls_done(0) < shape.chunks_done(1));
    CHECK(shape.calls_done(kMostBlocks - 1) < shape.line(0, 0, 0, 0));
    CHECK(shape.line_blocks() <= kMostBlocks);
    if (ranks == 1) continue;
    if (ranks > 2) CHECK(shape.result(shape.blocks - 1, last, shape.slots - 1) + shape.room() <= shape.total_bytes());
    CHECK(shape.line(0, 0, last, shape.block_lines() - 1) < shape.line(0, 1, 0, 0));
    CHECK(shape.line(shape.line_blocks() - 1, 1, last, shape.block_lines() - 1) + kLineBytes <= shape.input(0, 0, 0));
    CHECK(shape.input(shape.blocks - 1, last, shape.slots - 1) + shape.room() <= shape.result(0, 0, 0));
    CHECK(shape.result(0, 0, 0) <= shape.total_bytes());
    CHECK(shape.input(0, 0, 0) % 128 == 0);
    CHECK(shape.total_bytes() < (uint64_t{44} << 20));
    CHECK(shape.input(0, 0, 3) == shape.input(0, 0, 3 + shape.slots));
  }
}

TEST_CASE("communicators of one device have room at once, and beside a kernel of NCCL's, on every device") {
  for (uint32_t multiprocessors = 0; multiprocessors <= 200; ++multiprocessors) {
    for (const uint32_t wanted : {64u, 128u}) {
      uint32_t taken = 0, communicators = 0;
      while (const uint32_t blocks = blocks_for_communicator(multiprocessors, taken, wanted)) {
        CHECK(blocks >= 24);
        CHECK(blocks <= wanted);
        taken += blocks;
        REQUIRE(++communicators < 20);
      }
      CHECK(taken + 32 <= std::max(multiprocessors, 32u));
      CHECK((communicators > 0) == (multiprocessors >= 56));
      if (multiprocessors >= 80) CHECK(communicators >= 2);
    }
  }
  CHECK(blocks_for_communicator(132, 0, 128) == 76);
  CHECK(blocks_for_communicator(132, 76, 128) == 24);
  CHECK(blocks_for_communicator(132, 100, 128) == 0);
}

TEST_CASE("staging memory for all blocks holds that of fewer") {
  for (const uint32_t ranks : {2u, 3u, 8u, 9u, 64u}) {
    StagingShape fewer = staging_for(ranks);
    for (uint64_t before = fewer.total_bytes(); fewer.blocks > 1; before = fewer.total_bytes()) {
      --fewer.blocks;
      CHECK(fewer.total_bytes() <= before);
      CHECK(fewer.input(fewer.blocks - 1, ranks - 2, fewer.slots - 1) + fewer.room() <= fewer.total_bytes());
    }
  }
}

}  // namespace forkpoint::collective
