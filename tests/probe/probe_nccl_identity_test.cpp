// Which communicator is which, and who its members are: recorded runs of several ranks, compared with each other.
#include <chrono>
#include <filesystem>
#include <thread>

#include "lib/diff.h"
#include "lib/run.h"
#include "lib/verdict.h"
#include "tests/probe/nccl_harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;
using nccl_program::kCount;

namespace {

Verdict compare(const NcclRun& a, const NcclRun& b) {
  return forkpoint::diff(Run::open(a.path()), Run::open(b.path()), DiffOptions{});
}

bool holds(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

std::string all_of(const Verdict& v) {
  std::string text = headline(v) + "\n" + v.reason + "\n" + v.cause.cls + "\n";
  for (const auto* list : {&v.cause.evidence, &v.notes, &v.gaps}) {
    for (const std::string& line : *list) text += "  " + line + "\n";
  }
  return text;
}

// A recorded run and another of the same program, with more variables.
struct TwoRuns {
  NcclRun a, b;
  TwoRuns(const std::string& scenario, int ranks, const Environment& in_b, const Environment& in_both = {}) {
    Environment more = in_both;
    record_nccl(&a, scenario, ranks, more);
    more.insert(in_b.begin(), in_b.end());
    record_nccl(&b, scenario, ranks, more);
  }
  Verdict diff() const { return compare(a, b); }
};

std::vector<Communicator> communicators(const NcclRun& run, int rank) {
  const auto stream = open_stream(run.path(), rank);
  return {stream->communicators().begin(), stream->communicators().end()};
}

}  // namespace

TEST_CASE("a communicator has one id on all its ranks, and another in another run") {
  TwoRuns runs("train", 4, {});
  const Run run = Run::open(runs.a.path());
  const Communicator world = communicators(runs.a, 2)[0], half = communicators(runs.a, 2)[1];
  CHECK(world.name == "world");
  CHECK(world.own_rank == 2);
  CHECK(world.size == 4);
  CHECK(half.name == "split 1 of world");
  CHECK(half.own_rank == 0);
  CHECK(half.size == 2);
  REQUIRE(run.communicators().find(world.id) != nullptr);
  CHECK(run.communicators().find(world.id)->members == std::vector<int>{0, 1, 2, 3});
  REQUIRE(run.communicators().find(half.id) != nullptr);
  CHECK(run.communicators().find(half.id)->members == std::vector<int>{2, 3});
  const Communicator lower = communicators(runs.a, 0)[1];
  CHECK(lower.name == half.name);
  CHECK(run.communicators().find(lower.id)->members == std::vector<int>{0, 1});
  CHECK_FALSE(communicators(runs.b, 2)[0].id == world.id);
  const Verdict v = runs.diff();
  INFO(all_of(v));
  CHECK(v.outcome == forkpoint::Outcome::identical);
}

TEST_CASE("a job that slept as it made its communicators is attached, and its calls are those of one that was recorded") {
  const Environment pace = {{"TRAIN_STEPS", "150"}, {"TRAIN_PAUSE_MS", "30"}};
  NcclRun whole, attached;
  record_nccl(&whole, "train", 4, {{"TRAIN_STEPS", "150"}});
  const TempFolder sockets;
  std::thread job([&] {
    Environment asleep = pace;
    asleep["LD_PRELOAD"] = preload(), asleep["FORKPOINT_SOCKETS"] = sockets.path();
    attached.outcome = run_program(ranks_of("train", 4, attached.folder.path()), asleep);
  });
  const auto attach = [&] {
    return run_program({FORKPOINT_PROGRAM, "attach", "--all", "--steps", "3", "--level", "layer", "-o", attached.path()},
                       {{"FORKPOINT_SOCKETS", sockets.path()}});
  };
  auto told = attach();
  for (int i = 0; i < 40 && told.status != 0 && !std::filesystem::exists(attached.path()); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // not all ranks are there yet
    told = attach();
  }
  job.join();
  INFO(told.err << attached.outcome.out << attached.outcome.err);
  REQUIRE(told.status == 0);
  REQUIRE(attached.outcome.status == 0);
  CHECK(communicators(attached, 2)[0].name == "world");
  CHECK(communicators(attached, 2)[1].name == "split 1 of world");
  const Verdict v = compare(whole, attached);
  INFO(all_of(v));
  CHECK_FALSE(v.first);
  CHECK(v.reason.find("the 3 common steps are equal") != std::string::npos);
  CHECK(v.coverage.records_compared == 4 * 3 * 6);
}

TEST_CASE("an all-reduce whose result is altered on one rank is named, with that rank") {
  TwoRuns runs("train", 4, {{"FAKE_NCCL_ALTER", "2:1"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->step == 1);
  CHECK(v.first->rank == 2);
  CHECK(v.first->op == "all_reduce");
  CHECK(v.first->tensor == "output");
  CHECK(v.first->kind == Kind::collective);
  CHECK(v.also_first.empty());
  CHECK(holds(v.cause.evidence, "the recorded inputs agree on every member (ranks 0-3)"));
  CHECK(holds(v.cause.evidence, "the members hold the same in run A and do not in run B"));
  CHECK(holds(v.cause.evidence, "rank 3 was reached through all_reduce at step 1, from rank 2"));
}

TEST_CASE("an altered result is not judged while the stream of a member is missing") {
  TwoRuns runs("train", 4, {{"FAKE_NCCL_ALTER", "1:1"}}, {{"FORKPOINT_RANKS", "0-2"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->rank == 1);
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.evidence, "the inputs of rank 3 are not known"));
}

TEST_CASE("a collective that is asked for another reduction is named by it, on all ranks") {
  TwoRuns runs("train", 4, {{"OTHER_REDUCTION", "1"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->step == 1);
  CHECK(v.first->rank == -1);
  CHECK(v.first->op == "all_reduce");
  CHECK(v.first->tensor == "reduction");
  CHECK(v.cause.cls == "structure");
  CHECK(holds(v.cause.evidence, "the scalar reduction differs: 0 in run A, 2 in run B"));
}

TEST_CASE("another factor of a reduction is a hyperparameter") {
  TwoRuns runs("premul", 2, {{"OTHER_FACTOR", "1"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->tensor == "premul.scale");
  CHECK(v.cause.cls == "hyperparameter");
  CHECK(holds(v.cause.evidence, "0.5 in run A, 0.25 in run B"));
}

TEST_CASE("groups of one name are kept apart: only the group's own members are reached") {
  TwoRuns runs("sub_groups", 4, {{"OTHER_INPUT", "3"}});
  for (const int rank : {0, 1, 2, 3}) CHECK(communicators(runs.a, rank)[0].name == "nccl 1 of 2 ranks");
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->rank == 3);
  CHECK(v.first->tensor == "input");
  CHECK(v.also_first.empty());
  CHECK(v.ranks_diverged == std::vector<int>{2, 3});
  CHECK(holds(v.cause.evidence, "rank 2 was reached through all_reduce at step 0, from rank 3"));
}

TEST_CASE("ranks that call a communicator by different names are its members all the same") {
  TwoRuns runs("sub_groups", 4, {{"OTHER_INPUT", "1"}}, {{"EXTRA_COMMUNICATOR", "1"}});
  CHECK(communicators(runs.a, 0)[0].name == "nccl 1 of 2 ranks");
  CHECK(communicators(runs.a, 1)[0].name == "nccl 2 of 2 ranks");
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->rank == 1);
  CHECK(v.first->tensor == "input");
  CHECK(v.also_first.empty());
  CHECK(holds(v.cause.evidence, "rank 0 was reached through all_reduce at step 0, from rank 1"));
}

TEST_CASE("calls from other layers on each rank are one collective") {
  TwoRuns runs("from_scopes", 2, {{"FAKE_NCCL_ALTER", "1:1"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->rank == 1);
  CHECK(v.first->layer == "of rank 1.b");
  CHECK(v.first->tensor == "output");
  CHECK(holds(v.cause.evidence, "the recorded inputs agree on every member (ranks 0, 1)"));
  CHECK(holds(v.cause.evidence, "the members hold the same in run A and do not in run B"));
}

TEST_CASE("what is altered between a send and its receive is named at the receive") {
  TwoRuns runs("all", 2, {{"FAKE_NCCL_ALTER", "1:8"}});
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->rank == 1);
  CHECK(v.first->op == "recv");
  CHECK(v.first->tensor == "output from 0");
  CHECK(holds(v.cause.evidence, "the recorded inputs agree on every member (ranks 0, 1)"));
}

TEST_CASE("threads as ranks: one stream, and each place's tensors by its number") {
  TwoRuns runs("threads", 1, {{"FAKE_NCCL_ALTER", "2:0"}}, {{"NO_LAUNCHER", "1"}, {"FAKE_CUDA_MODE", "slow"}});
  const auto stream = open_stream(runs.a.path(), 0);
  CHECK(stream->header().world_size == 1);
  const std::vector<Row> rows = all_rows(*stream);
  for (const int place : {0, 1, 2, 3}) {
    const auto inputs = rows_of_op(rows, "all_reduce", "rank " + std::to_string(place) + ": input");
    REQUIRE(inputs.size() == 1);
    CHECK(inputs[0].record.digest == digest_of_floats(nccl_program::start_values(place, kCount)));
    CHECK(inputs[0].site.communicator == "nccl 1 of 4 ranks");
    // The order in which threads call is another in each run: nothing of a call may be told by its order alone.
    CHECK(rows_of_op(rows, "all_reduce", "rank " + std::to_string(place) + ": reduction").size() == 1);
  }
  CHECK(rows_of_op(rows, "all_reduce", "reduction").empty());
  CHECK(stream->communicators().size() == 4);
  const Verdict v = runs.diff();
  INFO(all_of(v));
  REQUIRE(v.first);
  CHECK(v.first->tensor == "rank 2: output");
  CHECK(v.also_first.empty());
  CHECK(holds(v.cause.evidence, "the members hold the same in run A and do not in run B"));
}

TEST_CASE("ncclCommInitAll: all places of the process are in one stream") {
  TwoRuns runs("init_all", 1, {}, {{"NO_LAUNCHER", "1"}});
  const std::vector<Row> rows = runs.a.rows(0);
  for (const int place : {0, 1, 2}) {
    CHECK(rows_of_op(rows, "all_reduce", "rank " + std::to_string(place) + ": output").size() == 1);
  }
  const Verdict v = runs.diff();
  INFO(all_of(v));
  CHECK(v.outcome == forkpoint::Outcome::identical);
}

TEST_CASE("without a launcher's variables the first communicator tells the rank") {
  NcclRun run;
  record_nccl(&run, "in_place", 2, {{"NO_LAUNCHER", "1"}});
  CHECK(run.outcome.err == "");
  for (const int rank : {0, 1}) {
    const auto stream = open_stream(run.path(), rank);
    CHECK(stream->header().world_size == 2);
    CHECK(communicators(run, rank)[0].name == "world");
    CHECK(rows_of_op(run.rows(rank), "all_reduce", "input").at(0).record.digest ==
          digest_of_floats(nccl_program::start_values(rank, kCount)));
  }
  CHECK(Run::open(run.path()).missing_ranks().empty());
}

TEST_CASE("a rank that a communicator tells, and that is not wanted, records nothing") {
  NcclRun run;
  record_nccl(&run, "in_place", 2, {{"NO_LAUNCHER", "1"}, {"FORKPOINT_RANKS", "1"}});
  CHECK(run.outcome.err == "");
  CHECK_THROWS(open_stream(run.path(), 0));
  CHECK(rows_of_op(run.rows(1), "all_reduce", "output").size() == 2);
}

TEST_CASE("processes with two GPUs each are a rank each") {
  NcclRun run;
  record_nccl(&run, "two_each", 2, {{"NO_LAUNCHER", "1"}});
  CHECK(run.outcome.err == "");
  for (const int rank : {0, 1}) {
    CHECK(open_stream(run.path(), rank)->header().world_size == 2);
    const std::string first = "rank " + std::to_string(2 * rank), second = "rank " + std::to_string(2 * rank + 1);
    CHECK(rows_of_op(run.rows(rank), "all_reduce", first + ": output").size() == 1);
    CHECK(rows_of_op(run.rows(rank), "all_reduce", second + ": output").size() == 1);
  }
  const Run opened = Run::open(run.path());
  const Digest id = communicators(run, 0)[0].id;
  REQUIRE(opened.communicators().find(id) != nullptr);
  CHECK(opened.communicators().find(id)->members == std::vector<int>{0, 0, 1, 1});
}

TEST_CASE("what the launcher says counts before what a communicator says") {
  NcclRun run;
  // Both processes are told to be ranks of a larger world, by variables that the program does not read.
  record_nccl(&run, "sub_groups", 4, {});
  CHECK(open_stream(run.path(), 3)->header().world_size == 4);
  CHECK(communicators(run, 3)[0].size == 2);
}

TEST_CASE("a communicator that is made again at the same address is another one") {
  NcclRun run;
  record_nccl(&run, "made_again", 2);
  const auto all = communicators(run, 0);
  REQUIRE(all.size() == 3);
  CHECK(all[0].name == "world");
  CHECK(all[1].name == "world 2");
  CHECK(all[2].name == "world 3");
  CHECK_FALSE(all[0].id == all[1].id);
}

TEST_CASE("a shrunk communicator has the members that are left") {
  NcclRun run;
  record_nccl(&run, "shrink", 3);
  const Communicator smaller = communicators(run, 2)[0];
  CHECK(smaller.name == "shrink 1 of world");
  CHECK(smaller.own_rank == 1);
  CHECK(smaller.size == 2);
  // Rank 1 has recorded nothing and left no stream.
  const Run opened = Run::open(run.path());
  REQUIRE(opened.communicators().find(smaller.id) != nullptr);
  CHECK(opened.communicators().find(smaller.id)->members == std::vector<int>{0, 2});
}
