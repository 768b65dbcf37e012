// NCCL's calls as the probe records them, in programs that use a libnccl on host memory.
#include <algorithm>
#include <numeric>

#include "tests/probe/nccl_harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;
using nccl_program::kCount;
using nccl_program::start_values;

namespace {

std::vector<float> sum_of(const std::vector<std::vector<float>>& all) {
  std::vector<float> sum(all[0].size(), 0.0f);
  for (const auto& values : all) std::transform(sum.begin(), sum.end(), values.begin(), sum.begin(), std::plus<>());
  return sum;
}

std::vector<float> part(const std::vector<float>& values, size_t first, size_t count) {
  return {values.begin() + static_cast<long>(first), values.begin() + static_cast<long>(first + count)};
}

std::vector<float> joined(const std::vector<float>& left, const std::vector<float>& right) {
  std::vector<float> both = left;
  both.insert(both.end(), right.begin(), right.end());
  return both;
}

// The only record of that op and tensor.
Row only(const std::vector<Row>& rows, const std::string& op, const std::string& tensor) {
  const std::vector<Row> found = rows_of_op(rows, op, tensor);
  INFO(op << " " << tensor);
  REQUIRE(found.size() == 1);
  return found[0];
}

void check_value(const Row& row, const std::vector<float>& values, const std::vector<int64_t>& shape) {
  INFO(row.site.op << " " << row.site.tensor);
  CHECK(row.record.digest == digest_of_floats(values));
  CHECK(row.layout.shape == shape);
  CHECK(row.layout.dtype == DType::f32);
  CHECK(row.site.kind == Kind::collective);
  CHECK(row.site.phase == Phase::collective);
  CHECK(row.site.role == (row.site.tensor.starts_with("input") ? Role::input : Role::output));
}

double argument(const std::vector<Row>& rows, const std::string& op, const std::string& name, size_t at = 0) {
  const std::vector<Row> found = rows_of_op(rows, op, name);
  REQUIRE(found.size() > at);
  CHECK(found[at].site.kind == Kind::scalar);
  CHECK(found[at].site.role == Role::scalar);
  CHECK(found[at].site.communicator == "world");
  return scalar_value(found[at].record.digest);
}

}  // namespace

TEST_CASE("every call leaves what went in, what came out, and what was asked") {
  for (const char* mode : {"at_once", "slow"}) {
    NcclRun recorded;
    record_nccl(&recorded, "all", 2, {{"FAKE_CUDA_MODE", mode}, {"FORKPOINT_LEVEL", "step"}});
    CHECK(recorded.outcome.err == "");
    const int64_t n = kCount;
    const std::vector<float> zero = start_values(0, 2 * kCount), one = start_values(1, 2 * kCount);
    for (const int rank : {0, 1}) {
      const std::vector<Row> rows = recorded.rows(rank);
      CHECK(open_stream(recorded.path(), rank)->gaps().empty());
      const std::vector<float>& own = rank == 0 ? zero : one;
      const size_t at = static_cast<size_t>(rank) * kCount;
      const std::vector<float> own_first = part(own, 0, kCount);

      const auto all_reduces = rows_of_op(rows, "all_reduce", "input");
      REQUIRE(all_reduces.size() == 2);  // the second one of nothing
      check_value(all_reduces[0], own_first, {n});
      CHECK(all_reduces[1].layout.shape == std::vector<int64_t>{0});
      CHECK(all_reduces[1].record.call == 1);
      const std::vector<float> sum = sum_of({part(zero, 0, kCount), part(one, 0, kCount)});
      check_value(rows_of_op(rows, "all_reduce", "output").at(0), sum, {n});
      CHECK(argument(rows, "all_reduce", "reduction") == 0);

      check_value(only(rows, "reduce_scatter", "input"), own, {2, n});
      std::vector<float> mean = part(sum_of({zero, one}), at, kCount);
      for (float& value : mean) value /= 2;
      check_value(only(rows, "reduce_scatter", "output"), mean, {n});
      CHECK(argument(rows, "reduce_scatter", "reduction") == 4);

      check_value(only(rows, "reduce", "input"), own_first, {n});
      CHECK(rows_of_op(rows, "reduce", "output").size() == (rank == 1 ? 1 : 0));
      if (rank == 1) check_value(only(rows, "reduce", "output"), part(one, 0, kCount), {n});
      CHECK(argument(rows, "reduce", "reduction") == 2);
      CHECK(argument(rows, "reduce", "root") == 1);

      const auto broadcasts = rows_of_op(rows, "broadcast", "output");
      REQUIRE(broadcasts.size() == 2);  // ncclBcast is one, although it calls ncclBroadcast
      check_value(broadcasts[0], part(zero, 0, kCount), {n});
      CHECK(rows_of_op(rows, "broadcast", "input").size() == 1);  // each rank is the root once
      CHECK(argument(rows, "broadcast", "root", 1) == 1);

      check_value(only(rows, "all_gather", "input"), own_first, {n});
      check_value(only(rows, "all_gather", "output"), joined(part(zero, 0, kCount), part(one, 0, kCount)), {2, n});
      check_value(only(rows, "all_to_all", "input"), own, {2, n});
      check_value(only(rows, "all_to_all", "output"), joined(part(zero, at, kCount), part(one, at, kCount)), {2, n});
      check_value(only(rows, "gather", "input"), own_first, {n});
      CHECK(rows_of_op(rows, "gather", "output").size() == (rank == 0 ? 1 : 0));
      CHECK(rows_of_op(rows, "scatter", "input").size() == (rank == 1 ? 1 : 0));
      check_value(only(rows, "scatter", "output"), part(one, at, kCount), {n});
      if (rank == 0) check_value(only(rows, "send", "input to 1"), own_first, {n});
      if (rank == 1) check_value(only(rows, "recv", "output from 0"), part(zero, 0, kCount), {n});
      for (const Row& row : rows) {
        CHECK(row.step == 0);
        CHECK(row.site.communicator == "world");
        CHECK(row.site.layer == "");
      }
    }
  }
}

TEST_CASE("the program sees the same results and calls, whether it is recorded, dormant or alone") {
  for (const char* program : {"nccl_client", "nccl_loader"}) {
    const Environment common = {{"NCCL_SCENARIOS", client_path("fake_nccl_scenarios.so")}, {"SHOW_CALLS", "1"}};
    std::vector<Outcome> outcomes;
    for (const char* how : {"alone", "dormant", "recorded", "rank not wanted", "step not wanted"}) {
      const TempFolder folder;
      Environment environment = common;
      const std::string kind = how;
      if (kind != "alone") environment["LD_PRELOAD"] = preload();
      if (kind != "alone" && kind != "dormant") environment["FORKPOINT_RUN"] = folder.run();
      if (kind == "rank not wanted") environment["FORKPOINT_RANKS"] = "7";
      if (kind == "step not wanted") environment["FORKPOINT_STEPS"] = "5:6";
      outcomes.push_back(run_program(ranks_of("all", 2, folder.path(), program), environment));
      INFO(how << ", " << program << ": " << outcomes.back().out << outcomes.back().err);
      CHECK(outcomes.back().status == 0);
      CHECK(outcomes.back().err == "");
      // Two ranks print in any order.
      std::string in_order = outcomes.back().out, first = outcomes[0].out;
      std::sort(in_order.begin(), in_order.end());
      std::sort(first.begin(), first.end());
      CHECK(in_order == first);
      if (kind.ends_with("not wanted")) CHECK_THROWS(open_stream(folder.run(), 0));
      if (kind == "recorded") CHECK_FALSE(all_rows(*open_stream(folder.run(), 1)).empty());
    }
  }
}

TEST_CASE("an NCCL that a plug-in brings along (RTLD_LOCAL) is found, also when there are two") {
  for (const auto& [copy, other] :
       {std::pair("fake_nccl", "other_fake_nccl"), std::pair("other_fake_nccl", "fake_nccl")}) {
    NcclRun run;
    record_nccl(&run, "in_place", 2,
                {{"NCCL_SCENARIOS", client_path(std::string(copy) + "_scenarios.so")},
                 {"NCCL_SCENARIOS_TOO", client_path(std::string(other) + "_scenarios.so")},
                 {"SHOW_CALLS", "1"}},
                "nccl_loader");
    CHECK(run.outcome.out == "calls 3\ncalls 3\n");
    CHECK(rows_of_op(run.rows(1), "all_reduce", "input").size() == 2);
  }
}

TEST_CASE("in place: what went in is what was there before the call") {
  NcclRun run;
  record_nccl(&run, "in_place", 2, {{"FAKE_CUDA_MODE", "slow"}});
  const std::vector<float> sum = sum_of({start_values(0, kCount), start_values(1, kCount)});
  const std::vector<float> twice = sum_of({sum, sum});
  for (const int rank : {0, 1}) {
    const auto inputs = rows_of_op(run.rows(rank), "all_reduce", "input");
    const auto outputs = rows_of_op(run.rows(rank), "all_reduce", "output");
    REQUIRE(inputs.size() == 2);
    REQUIRE(outputs.size() == 2);
    check_value(inputs[0], start_values(rank, kCount), {kCount});
    check_value(outputs[0], sum, {kCount});
    check_value(inputs[1], sum, {kCount});
    check_value(outputs[1], twice, {kCount});
    CHECK(outputs[1].record.call == 1);
  }
}

TEST_CASE("in a group outputs are taken after its outermost end, in the order of the calls") {
  for (const char* mode : {"at_once", "slow", "deferred"}) {
    NcclRun run;
    record_nccl(&run, "group", 2, {{"FAKE_CUDA_MODE", mode}});
    CHECK(run.outcome.err == "");
    for (const int rank : {0, 1}) {
      const std::vector<Row> rows = run.rows(rank);
      std::vector<std::string> outputs;
      for (const Row& row : rows) {
        if (row.site.role == Role::output) outputs.push_back(row.site.op + " " + row.site.tensor);
      }
      CHECK(outputs == std::vector<std::string>{"all_reduce output", "all_reduce output",
                                                rank == 0 ? "recv output from 1" : "recv output from 0"});
      const auto all_reduced = rows_of_op(rows, "all_reduce", "output");
      check_value(all_reduced.at(0), sum_of({start_values(0, kCount), start_values(1, kCount)}), {kCount});
      check_value(all_reduced.at(1), start_values(11, kCount), {kCount});
      // The input of the send is what lay there before the group, although an all-reduce of the group writes it.
      check_value(rows_of_op(rows, "send").at(0), start_values(10 + rank, kCount), {kCount});
    }
  }
}

TEST_CASE("a call that fails has no output, a group that fails has none, and a simulated one neither") {
  for (const char* fails : {"AllReduce", "GroupEnd"}) {
    NcclRun run;
    Environment more = {{"FAKE_NCCL_FAIL", fails}};
    if (std::string(fails) == "GroupEnd") more["IN_GROUP"] = "1";
    record_nccl(&run, "failing", 2, more);
    const std::vector<Row> rows = run.rows(0);
    CHECK(rows_of_op(rows, "all_reduce", "input").size() == 2);
    CHECK(rows_of_op(rows, "all_reduce", "output").empty());
    CHECK(open_stream(run.path(), 0)->gaps().empty());
  }
}

TEST_CASE("a collective that the program reports itself is recorded once") {
  NcclRun run;
  record_nccl(&run, "reported", 2);
  const std::vector<Row> rows = run.rows(0);
  CHECK(rows_of(rows, "weight.grad").size() == 2);
  const auto inputs = rows_of_op(rows, "all_reduce", "input");
  REQUIRE(inputs.size() == 1);  // of the second call, which nobody reported
  CHECK(inputs[0].site.layer == "blocks.0");
  CHECK(inputs[0].site.phase == Phase::collective);
  // The program's "world" and NCCL's are one.
  CHECK(inputs[0].site.communicator == "world");
}

TEST_CASE("a non-blocking communicator is waited for, and its split is known") {
  NcclRun run;
  record_nccl(&run, "nonblocking", 2);
  CHECK(run.outcome.err == "");
  const std::vector<float> sum = sum_of({start_values(0, kCount), start_values(1, kCount)});
  for (const int rank : {0, 1}) {
    const std::vector<Row> rows = run.rows(rank);
    const auto outputs = rows_of_op(rows, "all_reduce", "output");
    REQUIRE(outputs.size() == 3);
    check_value(outputs[0], sum, {kCount});
    check_value(outputs[1], sum, {kCount});
    check_value(outputs[2], sum_of({sum, sum}), {kCount});
    CHECK(outputs[2].site.communicator == "split 1 of world");
    CHECK(open_stream(run.path(), rank)->gaps().empty());
    const auto communicators = open_stream(run.path(), rank)->communicators();
    REQUIRE(communicators.size() == 2);
    CHECK(communicators[1].own_rank == 1 - rank);  // the split was asked for in the other order
  }
}

TEST_CASE("a non-blocking call that does not come to an end is a gap, and the program goes on") {
  NcclRun run;
  record_nccl(&run, "nonblocking", 1, {{"STUCK", "1"}, {"FAKE_NCCL_DELAY_MS", "-1"}});
  CHECK(line_count(run.outcome.err) == 1);
  CHECK(run.outcome.seconds > 5);
  CHECK(run.outcome.seconds < 9);  // further calls wait less
  const auto stream = open_stream(run.path(), 0);
  CHECK(has_gap(*stream, "still in progress after 5 s"));
  CHECK(records_lost(*stream) == 21);
  CHECK(rows_of_op(all_rows(*stream), "all_reduce", "output").empty());
}

TEST_CASE("factors of reductions that the program made are recorded, from the host and from the device") {
  NcclRun run;
  record_nccl(&run, "premul", 2);
  CHECK(run.outcome.err == "");
  const std::vector<Row> rows = run.rows(1);
  CHECK(argument(rows, "all_reduce", "reduction", 0) == 5);
  CHECK(argument(rows, "all_reduce", "reduction", 1) == 5);
  const auto factors = rows_of_op(rows, "all_reduce", "premul.scale");
  REQUIRE(factors.size() == 2);
  CHECK(scalar_value(factors[0].record.digest) == 0.5);
  CHECK(factors[1].site.role == Role::input);
  CHECK(factors[1].record.digest == digest_of_floats({0.125f}));
  std::vector<float> expected = sum_of({start_values(0, kCount), start_values(1, kCount)});
  for (float& value : expected) value *= 0.5f * 0.125f * 2;
  check_value(rows_of_op(rows, "all_reduce", "output").at(1), expected, {kCount});
}

TEST_CASE("without NCCL a call through the probe's symbol fails with one line, and does not crash") {
  // python3 finds ncclGroupStart in the preloaded probe; no libnccl is there.
  const TempFolder folder;
  const std::string script =
      "import ctypes\n"
      "own = ctypes.CDLL(None)\n"
      "print([own.ncclGroupStart(), own.ncclGroupEnd(), own.ncclAllReduce(None, None, 1, 7, 0, None, None)])\n";
  const Outcome outcome = run_program({"python3", "-c", script}, under_probe(folder.run()));
  CHECK(outcome.status == 0);
  CHECK(outcome.out == "[2, 2, 2]\n");
  CHECK(line_count(outcome.err) == 1);
  CHECK(outcome.err.find("ncclGroupStart was called, but no NCCL") != std::string::npos);
}

TEST_CASE("plain programs under the preload are silent") {
  for (const bool active : {false, true}) {
    const TempFolder folder;
    Environment environment = {{"LD_PRELOAD", preload()}};
    if (active) environment = under_probe(folder.run(), {{"FORKPOINT_STEP_ON", "step"}});
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"bash", "-c", "echo hi"}, {"python3", "-c", "print('hi')"}}) {
      const Outcome outcome = run_program(command, environment);
      CHECK(outcome.status == 0);
      CHECK(outcome.out == "hi\n");
      CHECK(outcome.err == "");
    }
  }
}
