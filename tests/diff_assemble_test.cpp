// Sharded tensors: put together over ranks, so that other world sizes and other cuts compare.
#include "lib/assemble.h"

#include <deque>

#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

Piece piece(int rank, const Value& value) {
  static std::deque<Layout> layouts;  // pieces point to them
  layouts.push_back(value.layout);
  return {rank, 0, &layouts.back(), nullptr, value.digest};
}

std::vector<Piece> quarters(uint64_t seed) {
  return {piece(0, shard(seed, {8, 6}, {0, 0}, {4, 3})), piece(1, shard(seed, {8, 6}, {0, 3}, {4, 3})),
          piece(2, shard(seed, {8, 6}, {4, 0}, {4, 3})), piece(3, shard(seed, {8, 6}, {4, 3}, {4, 3}))};
}

// One step in which a weight is cut in `ranks` rows and an activation is replicated.
RunBuilder cut_in(int ranks, uint64_t weight, uint64_t activation) {
  RunBuilder run(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t rows = 16 / ranks;
    run.rank(rank)
        .step(0)
        .forward("fc")
        .input("input", value(5))
        .input("weight", shard(weight, {16, 4}, {rank * rows, 0}, {rows, 4}));
    run.rank(rank).output("output", value(activation));
  }
  return run;
}

}  // namespace

TEST_CASE("boxes that tile a tensor add up to its digest") {
  const Assembled whole = assemble(quarters(1));
  REQUIRE(whole.ok);
  CHECK(whole.digest == value(1, {{8, 6}, DType::f32}).digest);
  CHECK(whole.shape == std::vector<int64_t>{8, 6});
}

TEST_CASE("replicas of a box count once, and must agree") {
  auto pieces = quarters(1);
  pieces.push_back(piece(4, shard(1, {8, 6}, {0, 3}, {4, 3})));
  CHECK(assemble(pieces).digest == value(1, {{8, 6}, DType::f32}).digest);
  pieces.push_back(piece(5, shard(2, {8, 6}, {0, 3}, {4, 3})));
  const Assembled torn = assemble(pieces);
  CHECK_FALSE(torn.ok);
  CHECK(torn.why == "it is not the same on ranks 1 and 5");
}

TEST_CASE("boxes that leave a hole or overlap are not comparable") {
  auto pieces = quarters(1);
  pieces.pop_back();
  CHECK(assemble(pieces).why == "the shards hold 36 of 48 elements");
  pieces.push_back(piece(3, shard(1, {8, 6}, {3, 3}, {4, 3})));
  CHECK(assemble(pieces).why == "the shards of ranks 1 and 3 overlap in part");
  auto other = quarters(1);
  other[2] = piece(2, shard(1, {8, 7}, {4, 0}, {4, 3}));
  CHECK_FALSE(assemble(other).ok);
  other[2] = piece(2, value(1, {{8, 6}, DType::f32}));  // whole among shards
  CHECK_FALSE(assemble(other).ok);
  CHECK_FALSE(assemble({}).ok);
}

TEST_CASE("a tensor that is not sharded must be the same on all ranks that hold it") {
  CHECK(assemble(std::vector<Piece>{piece(0, value(1)), piece(1, value(1))}).digest == value(1).digest);
  CHECK_FALSE(assemble(std::vector<Piece>{piece(0, value(1)), piece(1, value(2))}).ok);
}

TEST_CASE("runs of two world sizes compare by assembled tensors") {
  const TemporaryFolder folder;
  const std::string two = cut_in(2, 1, 7).write(folder / "two"), four = cut_in(4, 1, 7).write(folder / "four");
  const Verdict equal = diff_folders(two, four);
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(equal.coverage.records_compared == 3);

  const Verdict weight = diff_folders(two, cut_in(4, 2, 7).write(folder / "other-weight"));
  INFO(dump(weight));
  CHECK(is_at(first_of(weight), 0, -1, Phase::forward, "fc", "weight"));
  CHECK(weight.ranks_diverged == std::vector<int>{0, 1, 2, 3});

  const Verdict output = diff_folders(two, cut_in(4, 1, 8).write(folder / "other-output"));
  INFO(dump(output));
  CHECK(is_at(first_of(output), 0, -1, Phase::forward, "fc", "output"));
  CHECK(holds(output.cause.evidence, "recorded inputs of this op agree: input, weight"));
  CHECK(holds(output.cause.class_candidates, "reduction_order"));
}

TEST_CASE("what cannot be put together keeps runs of two world sizes from being identical") {
  RunBuilder two = cut_in(2, 1, 7), four = cut_in(4, 1, 7);
  for (int rank = 0; rank < 2; ++rank)
    two.rank(rank).at(Phase::data).add(Role::batch, "tokens", value(20 + static_cast<uint64_t>(rank)));
  for (int rank = 0; rank < 4; ++rank)
    four.rank(rank).at(Phase::data).add(Role::batch, "tokens", value(30 + static_cast<uint64_t>(rank)));
  const TemporaryFolder folder;
  const Verdict v = diff_folders(two.write(folder / "two"), four.write(folder / "four"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("1 of 4 tensors could not be put together") != std::string::npos);
  CHECK(v.reason.find("data: tokens") != std::string::npos);
}

TEST_CASE("buffers of collectives, which the number of ranks lays out, are left out between two world sizes and declared") {
  const auto gathered = [](int ranks, uint64_t total) {
    RunBuilder run = cut_in(ranks, 1, 7);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int> members(static_cast<size_t>(ranks));
      for (int member = 0; member < ranks; ++member) members[static_cast<size_t>(member)] = member;
      run.rank(rank).collective("all_gather", "fc", "world", members).input("input", value(40 + static_cast<uint64_t>(rank)));
      run.rank(rank).output("output", value(50, {{4, 9 + ranks}, DType::f32}));
      run.rank(rank).collective("all_reduce", "fc", "world", members).output("output", value(total));
    }
    return run;
  };
  const TemporaryFolder folder;
  const std::string two = gathered(2, 60).write(folder / "two");
  const Verdict equal = diff_folders(two, gathered(4, 60).write(folder / "four"));
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(holds(equal.coverage.limits, "of collectives not compared"));

  const Verdict total = diff_folders(two, gathered(4, 61).write(folder / "other-total"));  // all ranks have the whole
  INFO(dump(total));
  CHECK(is_at(first_of(total), 0, -1, Phase::collective, "fc", "output"));
}

TEST_CASE("an activation of another shape may be a part of one, and is no divergence between two world sizes") {
  RunBuilder two = cut_in(2, 1, 7), four = cut_in(4, 1, 7);
  for (int rank = 0; rank < 2; ++rank) two.rank(rank).forward("relu").input("input", zeros({{4, 8}, DType::f32}));
  for (int rank = 0; rank < 4; ++rank) four.rank(rank).forward("relu").input("input", zeros({{4, 4}, DType::f32}));
  const TemporaryFolder folder;
  const Verdict v = diff_folders(two.write(folder / "two"), four.write(folder / "four"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("it may be a part of a tensor") != std::string::npos);
}

TEST_CASE("steps that both of two world sizes hold twice are not passed over") {
  RunBuilder a(2), b(1);
  for (RunBuilder* run : {&a, &b}) {
    for (int rank = 0; rank < (run == &a ? 2 : 1); ++rank) {
      for (const int64_t step : {0, 1, 2, 1, 2, 3}) {  // rolled back once
        const bool differs = run == &b && (step == 1 || step == 2);
        run->rank(rank).step(step).forward("fc").output("output", value(differs ? 9 : 1));
      }
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("2 steps were not compared, first step 1") != std::string::npos);
}

TEST_CASE("a step that one of two world sizes lacks keeps them from being identical") {
  RunBuilder two = cut_in(2, 1, 7), four = cut_in(4, 1, 7);
  for (int rank = 0; rank < 2; ++rank) two.rank(rank).step(1).forward("fc").output("output", value(3));
  const TemporaryFolder folder;
  const Verdict v = diff_folders(two.write(folder / "two"), four.write(folder / "four"));
  CHECK(v.outcome == Outcome::incomparable);
}

TEST_CASE("lost records keep runs of two world sizes from being compared in that step") {
  RunBuilder two = cut_in(2, 1, 7),
             four = cut_in(4, 1, 8);  // the outputs differ, but nothing of the step can be trusted
  four.rank(2).gap(0, 0, "ring full");
  const TemporaryFolder folder;
  const Verdict v = diff_folders(two.write(folder / "two"), four.write(folder / "four"));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.gaps.size() == 1);
}

TEST_CASE("shards cut differently in runs of one world size are put together, the rest is compared by rank") {
  const auto run = [](bool by_rows, uint64_t weight, uint64_t own) {
    RunBuilder builder(2);
    for (int rank = 0; rank < 2; ++rank) {
      const auto at = static_cast<int64_t>(rank);
      builder.rank(rank).step(0).at(Phase::data).add(Role::batch, "tokens", value(own + static_cast<uint64_t>(rank)));
      builder.rank(rank).forward("fc").input("weight", by_rows ? shard(weight, {8, 6}, {at * 4, 0}, {4, 6})
                                                               : shard(weight, {8, 6}, {0, at * 3}, {8, 3}));
      builder.rank(rank).output("output", value(9));
    }
    return builder;
  };
  const TemporaryFolder folder;
  const std::string rows = run(true, 1, 50).write(folder / "rows");
  const Verdict equal = diff_folders(rows, run(false, 1, 50).write(folder / "columns"));
  INFO(dump(equal));
  CHECK(equal.outcome == Outcome::identical);
  CHECK(equal.coverage.records_compared == 5);  // 2 batches, 2 outputs, one weight

  const Verdict weight = diff_folders(rows, run(false, 2, 50).write(folder / "other-weight"));
  INFO(dump(weight));
  CHECK(is_at(first_of(weight), 0, -1, Phase::forward, "fc", "weight"));
  CHECK(weight.also_first.empty());

  const Verdict batch = diff_folders(rows, run(false, 2, 60).write(folder / "other-batch"));
  INFO(dump(batch));
  CHECK(first_of(batch).phase == Phase::data);  // it came before the weight
}

TEST_CASE("a shard's single changed word is placed in the global tensor") {
  RunBuilder a(2), b(2);
  const auto whole = [](bool other) {
    return other ? flipped(1, 6 * 6 + 2, 20, {{8, 6}, DType::f32}) : value(1, {{8, 6}, DType::f32});
  };
  for (RunBuilder* run : {&a, &b}) {
    for (int rank = 0; rank < 2; ++rank) {
      Value part = shard(1, {8, 6}, {rank * 4, 0}, {4, 6});
      if (rank == 1 && run == &b) part.digest = part.digest + (whole(true).digest - whole(false).digest);
      run->rank(rank).step(0).forward("fc").input("input", value(3)).output("output", part);
    }
  }
  const TemporaryFolder folder;
  const Verdict v = diff_folders(a.write(folder / "a"), b.write(folder / "b"));
  INFO(dump(v));
  CHECK(first_of(v).rank == 1);
  REQUIRE(first_of(v).pointing.has_value());
  CHECK(first_of(v).pointing->tensor_index == std::vector<int64_t>{6, 2});
}
