// The bridge into PyTorch without a PyTorch: what its native module records of objects with a tensor's attributes, and how
// little a Python notices of being taken in.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

Outcome scenario(const std::string& name, const TempFolder& folder, const Environment& more = {}) {
  return run_program({"python3", FORKPOINT_TEST_PYTHON_CLIENT, name}, under_probe(folder.run(), more));
}

Row only(const std::vector<Row>& rows, const std::string& tensor) {
  const auto found = rows_of(rows, tensor);
  REQUIRE_MESSAGE(found.size() == 1, tensor);
  return found[0];
}

std::vector<float> floats(size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

Digest digest_of(const std::vector<float>& values) {
  return digest_bytes(values.data(), values.size() * sizeof(float), DType::f32).digest;
}

// As some_bytes of the client.
Digest digest_of_bytes(size_t count, DType dtype) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>((7 * i + 3) % 251);
  return digest_bytes(bytes.data(), bytes.size(), dtype).digest;
}

}  // namespace

TEST_CASE("a tensor's digest is that of its elements in logical order, whatever its strides") {
  const TempFolder folder;
  const Outcome outcome = scenario("forms", folder);
  REQUIRE(outcome.status == 0);
  CHECK(outcome.err == "");
  CHECK(outcome.out.find("False") == std::string::npos);
  const auto stream = open_stream(folder.run());
  CHECK(stream->gaps().empty());
  const auto rows = all_rows(*stream);
  const auto is = [&](const char* name, const std::vector<int64_t>& shape, const std::vector<float>& values) {
    INFO(name);
    const Row row = only(rows, name);
    CHECK(row.layout.dtype == DType::f32);
    CHECK(row.layout.shape == shape);
    CHECK(row.record.digest == digest_of(values));
  };
  is("plain", {3, 4}, floats(12));
  is("transposed", {4, 3}, {0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11});
  CHECK(only(rows, "transposed").layout.strides == std::vector<int64_t>{1, 4});
  is("every other", {3, 2}, {0, 2, 4, 6, 8, 10});
  is("expanded", {3, 4}, {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3});
  is("offset", {2, 4}, {4, 5, 6, 7, 8, 9, 10, 11});
  is("number", {}, {0});
  is("empty", {0, 4}, {});
  is("parameter", {3, 4}, floats(12));
  is("16 dimensions", {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4}, floats(4));

  const Row shard = only(rows, "shard");
  CHECK(to_string(shard.layout) == "f32[2, 4] of [6, 4] at [2, 0]");
  CHECK(shard.record.digest == digest_bytes(floats(8).data(), 32, DType::f32, 2 * 4 * sizeof(float)).digest);
}

TEST_CASE("each element type of torch is the one of the same bytes, and complex numbers stay whole") {
  const TempFolder folder;
  REQUIRE(scenario("forms", folder).status == 0);
  const auto rows = all_rows(*open_stream(folder.run()));
  const std::pair<const char*, DType> kTypes[] = {
      {"uint8", DType::u8},     {"int8", DType::i8},       {"int16", DType::i16},     {"int32", DType::i32},
      {"int64", DType::i64},    {"uint16", DType::u16},    {"uint32", DType::u32},    {"uint64", DType::u64},
      {"bool", DType::boolean}, {"float16", DType::f16},   {"bfloat16", DType::bf16}, {"float64", DType::f64},
      {"complex64", DType::c64}, {"complex128", DType::c128}, {"float8_e4m3fn", DType::f8e4m3},
      {"float8_e5m2", DType::f8e5m2}, {"float8_e8m0fnu", DType::raw}};
  for (const auto& [name, dtype] : kTypes) {
    INFO(name);
    const Row row = only(rows, name);
    CHECK(row.layout.dtype == dtype);
    CHECK(row.layout.shape == std::vector<int64_t>{2, 5});
    CHECK(row.record.digest == digest_of_bytes(10 * static_cast<size_t>(size_bytes(dtype)), dtype));
  }
  // Half-precision complex numbers have no type here: they are their parts.
  CHECK(to_string(only(rows, "complex32").layout) == "f16[2, 5, 2]");
  CHECK(only(rows, "complex32").record.digest == digest_of_bytes(40, DType::f16));
  CHECK(to_string(only(rows, "complex32 shard").layout) == "f16[2, 5, 2] of [2, 10, 2] at [0, 5, 0]");
}

TEST_CASE("a tensor without memory of its own is told apart and not read") {
  const TempFolder folder;
  const Outcome outcome = scenario("unreadable", folder);
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "[1]\nNone\n");
  CHECK(outcome.err == "");
  const auto stream = open_stream(folder.run());
  CHECK(stream->gaps().empty());
  std::string names;
  for (const Row& row : all_rows(*stream)) names += row.site.tensor;
  CHECK(names == "acd");
}

TEST_CASE("neither a subclass nor a mode is told of what the bridge asks a tensor") {
  const TempFolder folder;
  const Outcome outcome = scenario("overridden", folder);
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "depth 1\nTrue 0\nTrue [1] 0\n");
  CHECK(all_rows(*open_stream(folder.run())).size() == 2);
}

TEST_CASE("records carry the frame, role, micro-step and flags that they were given") {
  const TempFolder folder;
  const Outcome outcome = scenario("records", folder, {{"FORKPOINT_OPS", "blocks.*,head"}, {"FORKPOINT_FIRST_STEP", "7"},
                                                       {"FORKPOINT_WATCH", "replicas,nan"}, {"FORKPOINT_ON_TRIGGER", "deepen"}});
  REQUIRE(outcome.status == 0);
  CHECK(outcome.out == "1 blocks.*,head 7 nan,replicas deepen True True\nTrue False False False\nTrue False\n");
  // Nobody watches here: `forkpoint record` did not start this program.
  CHECK(outcome.err == "forkpoint: FORKPOINT_WATCH is set, but nobody watches this run: `forkpoint record --watch` does, and it has not made " +
                           folder.run() + "\nforkpoint: a line\n");
  const auto stream = open_stream(folder.run());
  CHECK(stream->header().step_base == "scheduler");
  CHECK(stream->header().world_size == 2);
  CHECK(std::count(stream->header().facts.begin(), stream->header().facts.end(), std::pair<std::string, std::string>{"tp_rank", "1"}) == 1);
  REQUIRE(stream->steps().size() == 2);
  const auto rows = all_rows(*stream);

  // Calls of training count by themselves, whatever an evaluation records in between.
  std::vector<Row> inputs;
  for (const Row& row : rows_of(rows, "input")) {
    if (row.site.phase == Phase::forward) inputs.push_back(row);
  }
  const auto told = [&](const Row& row) {
    return std::to_string(row.step) + (row.record.flags == kRecordEval ? "e" : row.record.flags == kRecordRecompute ? "r" : "t") +
           std::to_string(row.record.micro_step) + std::to_string(row.record.call);
  };
  std::string all;
  for (const Row& row : inputs) all += told(row) + " ";
  CHECK(all == "7t00 7e00 7r01 7t10 7e10 8t00 8e00 8e01 8r01 8t10 8e10 ");
  CHECK(stream->steps()[0].eval_records + 1 == stream->steps()[1].eval_records);
  CHECK(stream->steps()[0].digest == stream->steps()[1].digest);

  CHECK(inputs[0].site.layer == "blocks.0.fc");
  CHECK(inputs[0].site.role == Role::input);
  const auto collective = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.site.kind == Kind::collective; });
  REQUIRE(collective != rows.end());
  CHECK(collective->site.op == "all_reduce");
  CHECK(collective->site.communicator == "dp");
  CHECK(rows_of(rows, "output")[0].site.op == "aten::mm");
  CHECK(scalar_value(rows_of(rows, "lr")[0].record.digest) == 0.125);
  CHECK(rows_of(rows, "lr")[0].site.phase == Phase::optimizer);
  CHECK(rows_of(rows, "loss")[0].record.flags == kRecordEval);
  CHECK(rows_of(rows, "rng")[0].record.digest == rows_of(rows, "view")[0].record.digest);
  CHECK(rows_of(rows, "rng")[0].site.role == Role::rng);
  CHECK(rows_of(rows, "in scope")[0].site.layer == "outer");
  CHECK(rows_of(rows, "in scope")[0].record.flags == kRecordEval);
  CHECK(rows_of(rows, "out of scope")[0].site.layer == "");
  CHECK(rows_of(rows, "out of scope")[0].record.flags == 0);
}

TEST_CASE("what the bridge declares in words is written once, with where it was for a gap") {
  const TempFolder folder;
  REQUIRE(scenario("records", folder).status == 0);
  const auto stream = open_stream(folder.run());
  const auto limits = stream->coverage_limits();
  CHECK(std::count(limits.begin(), limits.end(), CoverageLimit{"something: of a layer", "its detail"}) == 1);
  REQUIRE(!stream->gaps().empty());
  for (const Gap& gap : stream->gaps()) CHECK(gap.reason == "an error in a hook: ValueError");
  CHECK(stream->gaps().front().first_step == 7);
  CHECK(stream->gaps().back().last_step == 8);

  const TempFolder masked;
  REQUIRE(scenario("records", masked, {{"FORKPOINT_MASK_NAMES", "1"}}).status == 0);
  const auto hidden = open_stream(masked.run());
  CHECK(has_limit(*hidden, "something"));
  CHECK_FALSE(has_limit(*hidden, "layer"));
  CHECK(has_gap(*hidden, "an error in a hook"));
  CHECK_FALSE(has_gap(*hidden, "ValueError"));
}

TEST_CASE("of too many words some are kept, and that there were more is said") {
  const TempFolder folder;
  REQUIRE(scenario("many_notes", folder).status == 0);
  const auto stream = open_stream(folder.run());
  CHECK(has_limit(*stream, "limit 255"));
  CHECK_FALSE(has_limit(*stream, "limit 256"));
  CHECK(has_limit(*stream, "more things that were not seen"));
  CHECK(has_gap(*stream, "gap 255"));
  CHECK_FALSE(has_gap(*stream, "gap 256"));
  CHECK(has_gap(*stream, "more kinds of trouble"));
}

TEST_CASE("wrong arguments raise as in any module, and record nothing") {
  const TempFolder folder;
  const Outcome outcome = scenario("errors", folder);
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("False") == std::string::npos);
  CHECK(line_count(outcome.out) == 3);
  const auto rows = all_rows(*open_stream(folder.run()));
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].site.tensor == "no such frame");
}

TEST_CASE("at level step the inputs and outputs of layers are left out") {
  const TempFolder folder;
  REQUIRE(scenario("level", folder, {{"FORKPOINT_LEVEL", "step"}}).status == 0);
  const auto rows = all_rows(*open_stream(folder.run()));
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].site.tensor == "weight");
}

TEST_CASE("threads record at once, each in the scope that it has opened") {
  const TempFolder folder;
  REQUIRE(scenario("threads", folder).status == 0);
  const auto rows = all_rows(*open_stream(folder.run()));
  CHECK(rows.size() == 800);
  for (int i = 0; i < 4; ++i) {
    CHECK(std::count_if(rows.begin(), rows.end(), [&](const Row& row) { return row.site.layer == "thread." + std::to_string(i); }) == 200);
  }
}

TEST_CASE("the child of a rank that forks records nothing") {
  const TempFolder folder;
  const Outcome outcome = scenario("fork", folder);
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "0\n");
  const auto rows = all_rows(*open_stream(folder.run()));
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].site.tensor == "before");
  CHECK(rows[1].site.tensor == "after");
}

TEST_CASE("calls after the end of recording do nothing") {
  const TempFolder folder;
  const Outcome outcome = scenario("ended", folder, {{"FORKPOINT_MAX_SIZE_BYTES", "20000"}});
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "False False True None None\n");
  CHECK(has_gap(*open_stream(folder.run()), "reached its limit"));
}
