// The verdict's words: headline, JSON, pointing, lists.
#include "lib/verdict.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "lib/pointing.h"
#include "lib/verdict_text.h"
#include "tests/support/run_builder.h"

using namespace forkpoint;

TEST_CASE("the headline of a divergence names step, rank, phase, layer and tensor") {
  Verdict verdict;
  verdict.outcome = Outcome::diverged;
  Divergence at;
  at.step = 7, at.rank = 2, at.phase = Phase::backward, at.layer = "blocks.3.mlp.fc1", at.tensor = "grad_input";
  verdict.first = at;
  CHECK(headline(verdict) == "diverged at step 7, rank 2, backward, blocks.3.mlp.fc1: grad_input");
  verdict.first->rank = -1;
  verdict.first->phase = Phase::optimizer;
  verdict.first->layer.clear();
  verdict.first->tensor = "lr";
  CHECK(headline(verdict) == "diverged at step 7, all ranks, optimizer: lr");
}

TEST_CASE("what differs before the first step is not said to differ in a step") {
  Verdict verdict;
  verdict.outcome = Outcome::diverged;
  Divergence at;
  at.step = 0, at.rank = 1, at.phase = Phase::load, at.layer = "fc", at.tensor = "weight", at.in_prologue = true;
  verdict.first = at;
  CHECK(headline(verdict) == "diverged before the first step, rank 1, load, fc: weight");
  verdict.first->step = 100;
  CHECK(headline(verdict) == "diverged before step 100, rank 1, load, fc: weight");
}

TEST_CASE("identical runs whose commands failed are said to be so only until then") {
  Verdict verdict;
  verdict.outcome = Outcome::identical;
  verdict.coverage.level = "step", verdict.coverage.frames_verified = 5, verdict.coverage.ranks_compared = 1;
  verdict.coverage.records_compared = 3, verdict.coverage.steps_compared = 1, verdict.coverage.launches_compared = 1;
  verdict.until = "up to where both commands failed (exit status 1)";
  CHECK(headline(verdict) == "identical up to where both commands failed (exit status 1): 3 records and 1 launch in 1 step on "
                             "1 rank agree (level step)");
}

TEST_CASE("the headlines of the other outcomes") {
  Verdict verdict;
  verdict.outcome = Outcome::identical;
  verdict.coverage.records_compared = 12'800'000, verdict.coverage.steps_compared = 100,
  verdict.coverage.ranks_compared = 64;
  verdict.coverage.level = "layer";
  verdict.coverage.frames_verified = 0;
  CHECK(headline(verdict).ends_with("(level layer; the files were not verified)"));
  verdict.coverage.frames_verified = 5;
  CHECK(headline(verdict) == "identical: 12,800,000 records in 100 steps on 64 ranks agree (level layer)");
  verdict.coverage.records_compared = verdict.coverage.steps_compared = 1, verdict.coverage.ranks_compared = 1;
  CHECK(headline(verdict) == "identical: 1 record in 1 step on 1 rank agree (level layer)");
  verdict.outcome = Outcome::incomparable;
  verdict.reason = "run B ended at step 7, run A goes on to step 9; the 8 common steps are equal";
  CHECK(headline(verdict) == "incomparable: " + verdict.reason);
  CHECK(exit_code(Outcome::identical) == 0);
  CHECK(exit_code(Outcome::diverged) == 1);
  CHECK(exit_code(Outcome::incomparable) == 2);
}

TEST_CASE("the JSON form has every field, and null where one does not apply") {
  Verdict verdict;
  verdict.outcome = Outcome::identical;
  verdict.cause.cls.clear();
  const auto identical = to_json(verdict);
  for (const char* field : {"verdict", "reason", "first", "also_first", "ranks_diverged", "cause", "propagated", "gaps",
                            "coverage", "records_compared"}) {
    CHECK(identical.contains(field));
  }
  CHECK(identical["verdict"] == "identical");
  CHECK(identical["first"].is_null());
  CHECK(identical["also_first"].is_array());
  CHECK(identical["cause"]["class"].is_null());
  CHECK(identical["cause"]["next"].is_null());

  verdict.outcome = Outcome::diverged;
  Divergence at;
  at.step = 7, at.phase = Phase::optimizer, at.tensor = "lr", at.kind = Kind::scalar;
  verdict.first = at;
  at.rank = 3, at.pointing = Pointing{17, {2, 1}, -8, 3, 1};
  verdict.also_first = {at};
  verdict.cause = {"hyperparameter", {"hyperparameter"}, {"0.1 vs 0.2"}, "forkpoint show b"};
  const auto json = to_json(verdict);
  const auto& first = json["first"];
  for (const char* field : {"step", "micro_step", "rank", "phase", "layer", "op", "tensor", "kind", "kernel"})
    CHECK(first.contains(field));
  CHECK(first["step"] == 7);
  CHECK(first["rank"].is_null());
  CHECK(first["layer"].is_null());
  CHECK(first["op"].is_null());
  CHECK(first["kernel"].is_null());
  CHECK(first["kind"] == "scalar");
  CHECK(first["pointing"].is_null());
  CHECK(json["also_first"][0]["rank"] == 3);
  CHECK(json["also_first"][0]["pointing"]["delta"] == -8);
  CHECK(json["cause"]["class_candidates"].size() == 1);
}

TEST_CASE("pointing gives word, index, change and bit") {
  const Value before = value(1, {{5, 7}, DType::f32});
  const auto pointing = point(before.digest, flipped(1, 17, 20, {{5, 7}, DType::f32}).digest, before.layout);
  REQUIRE(pointing.has_value());
  CHECK(pointing->word == 17);
  CHECK(pointing->tensor_index == std::vector<int64_t>{2, 3});
  CHECK(std::abs(pointing->delta) == 1 << 20);
  CHECK(pointing->bit == 20);
  CHECK(pointing->elements == 1);
  const std::string text = to_sentence(*pointing, before.layout);
  CHECK(text.find("word 17, element [2, 3]") != std::string::npos);
  CHECK(text.find(
            "one word, consistent with a flipped bit (bit 20 of the element; a change of 2^20 ulp looks the same)") !=
        std::string::npos);
}

TEST_CASE("elements that share a word are said to") {
  const ValueShape half = {{4, 6}, DType::bf16};
  const auto pointing = point(value(1, half).digest, flipped(1, 4, 16, half).digest, value(1, half).layout);
  REQUIRE(pointing.has_value());
  CHECK(pointing->elements == 2);
  CHECK(pointing->tensor_index == std::vector<int64_t>{1, 2});
  const std::string text = to_sentence(*pointing, value(1, half).layout);
  CHECK(text.find("or one of the 1 after it") != std::string::npos);
  CHECK(text.find("bit 0 of the element at byte 2 of the word; 1 ulp looks the same") != std::string::npos);
}

TEST_CASE("a double's half word is placed at its element") {
  const ValueShape form = {{6}, DType::f64};
  const auto pointing = point(value(1, form).digest, flipped(1, 7, 3, form).digest, value(1, form).layout);
  REQUIRE(pointing.has_value());
  CHECK(pointing->tensor_index == std::vector<int64_t>{3});
}

TEST_CASE("two changed words are not one") {
  CHECK_FALSE(point(value(1).digest, permuted(1).digest, value(1).layout).has_value());
  CHECK_FALSE(point(value(1).digest, value(2).digest, value(1).layout).has_value());
  CHECK_FALSE(point(value(1).digest, value(1).digest, value(1).layout).has_value());
}

TEST_CASE("a change that is no power of two is not called a flipped bit") {
  Value after = value(1);
  after.digest =
      after.digest + (flipped(1, 3, 4).digest - value(1).digest) + (flipped(1, 3, 6).digest - value(1).digest);
  const auto pointing = point(value(1).digest, after.digest, after.layout);
  REQUIRE(pointing.has_value());
  if (std::abs(pointing->delta) != 64 - 16) CHECK(std::abs(pointing->delta) == 64 + 16);
  CHECK(pointing->bit == -1);
  CHECK(to_sentence(*pointing, after.layout).find("flipped") == std::string::npos);
}

TEST_CASE("a word that a shard does not hold is not pointed at") {
  const Value part = shard(1, {8, 6}, {4, 0}, {4, 6});
  const Digest outside = flipped(1, 2, 20, {{8, 6}, DType::f32}).digest - value(1, {{8, 6}, DType::f32}).digest;
  CHECK_FALSE(point(part.digest, part.digest + outside, part.layout).has_value());
}

TEST_CASE("a shape from a damaged file is not searched for ever") {
  Layout absurd;
  absurd.dtype = DType::f32;
  absurd.shape = {INT64_MAX / 2, INT64_MAX / 2};
  CHECK_FALSE(point({1, 2}, {3, 4}, absurd).has_value());
}

TEST_CASE("numbers and lists read well") {
  CHECK(counted(1, "launch") == "1 launch");
  CHECK(counted(2'000, "launch") == "2,000 launches");
  CHECK(counted(0, "copy") == "0 copies");
  CHECK(counted(1, "copy") == "1 copy");
  CHECK(counted(2, "key") == "2 keys");
  CHECK(counted(2, "class") == "2 classes");
  CHECK(counted(3, "later record") == "3 later records");
  CHECK(grouped(0) == "0");
  CHECK(grouped(999) == "999");
  CHECK(grouped(1000) == "1,000");
  CHECK(grouped(12800000) == "12,800,000");
  CHECK(rank_list({3}) == "rank 3");
  CHECK(rank_list({0, 2, 3, 4, 7, 8}) == "ranks 0, 2-4, 7, 8");
}
