// NCCL's reductions done by the deterministic kernels under FORKPOINT_DETERMINISTIC, in programs that use a libnccl and
// a libcuda on host memory. The program looks at each result itself, and counts what NCCL was given.
#include "tests/probe/nccl_harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

double argument(const Row& row) { return scalar_value(row.record.digest); }

const Environment kSwapped = {{"FORKPOINT_DETERMINISTIC", "collectives"}, {"FAKE_CUDA_SHARED", "1"}};
// Kernels run beside the program.
const Environment kSlow = {
    {"FORKPOINT_DETERMINISTIC", "collectives"}, {"FAKE_CUDA_SHARED", "1"}, {"FAKE_CUDA_MODE", "slow"}};

Environment joined(Environment left, const Environment& right) {
  left.insert(right.begin(), right.end());
  return left;
}

}  // namespace

TEST_CASE("reductions on every kind of communicator are the kernels', and nothing else is") {
  for (const char* mode : {"at_once", "slow"}) {
    NcclRun recorded;
    record_nccl(&recorded, "reductions", 2, joined(kSwapped, {{"FAKE_CUDA_MODE", mode}}));
    const std::string& out = recorded.outcome.out;
    INFO(out);
    CHECK(recorded.outcome.err == "");
    CHECK(count_of(out, "WRONG") == 0);
    CHECK(count_of(out, " right\n") == 2 * (5 * 3 + 3 + 2) + 5);  // reduce has an output at one of the ranks
    // What the members ask each other is all that NCCL is given.
    for (const char* calls : {"world calls 3\n", "child calls 3\n", "grouped calls 3\n", "gather calls 1\n"}) {
      CHECK(count_of(out, calls) == 2);
    }
    for (const int rank : {0, 1}) {
      CHECK(open_stream(recorded.path(), rank)->gaps().empty());
      const std::vector<Row> rows = recorded.rows(rank);
      const std::vector<Row> ways = rows_of_op(rows, "all_reduce", "in rank order");
      CHECK(ways.size() > 8);
      for (const Row& way : ways) CHECK(argument(way) == 1);
      const std::vector<Row> inputs = rows_of_op(rows, "all_reduce", "input");
      CHECK(inputs.size() == ways.size() + 1);  // the first on the one that does not block: it was not known yet
      CHECK(rows_of_op(rows, "all_reduce", "output").size() == inputs.size());
      CHECK(inputs[0].record.digest == digest_of_floats(nccl_program::start_values(rank, nccl_program::kCount)));
    }
    const auto sum = rows_of_op(recorded.rows(0), "all_reduce", "output")[0].record.digest;
    CHECK(sum == rows_of_op(recorded.rows(1), "all_reduce", "output")[0].record.digest);
    std::vector<float> expected = nccl_program::start_values(0, nccl_program::kCount);
    const std::vector<float> more = nccl_program::start_values(1, nccl_program::kCount);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += more[i];
    CHECK(sum == digest_of_floats(expected));
  }
}

TEST_CASE("without the knob nothing is swapped, asked or recorded about it") {
  NcclRun recorded;
  record_nccl(&recorded, "reductions", 2, {{"FEW_BYTES", "1"}, {"FORKPOINT_DETERMINISTIC", "cublas"}});
  CHECK(recorded.outcome.err == "");
  CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
  CHECK(count_of(recorded.outcome.out, "child calls 4\n") == 2);
  CHECK(count_of(recorded.outcome.out, "grouped calls 4\n") == 2);
  CHECK(rows_of_op(recorded.rows(0), "all_reduce", "in rank order").empty());
}

TEST_CASE("where one device does not reach another one's memory, the same sums come by messages") {
  for (const Environment& why :
       {Environment{{"FAKE_CUDA_NO_PEERS", "1"}}, Environment{{"FORKPOINT_TEST_COLLECTIVES", "messages"}},
        Environment{{"NCCL_P2P_DISABLE", "1"}}, Environment{{"NCCL_P2P_LEVEL", "NVL"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "reductions", 2, joined(why, kSwapped));
    const std::string& out = recorded.outcome.out;
    INFO(out);
    CHECK(recorded.outcome.err == "");
    CHECK(count_of(out, "WRONG") == 0);
    CHECK(count_of(out, " right\n") == 45);
    CHECK(count_of(out, "child calls ") == 2);
    CHECK(count_of(out, "child calls 3\n") == 0);
    CHECK(count_of(out, "child calls 7\n") == 0);
    for (const Row& way : rows_of_op(recorded.rows(0), "all_reduce", "in rank order")) CHECK(argument(way) == 1);
  }
}

TEST_CASE("where one member cannot, all use NCCL and say so") {
  NcclRun recorded;
  record_nccl(&recorded, "reductions", 2, joined(kSwapped, {{"FEW_BYTES", "1"}, {"FAKE_CUDA_NO_COLLECTIVES", "1"}}));
  INFO(recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
  CHECK(count_of(recorded.outcome.out, "child calls 7\n") == 2);
  CHECK(count_of(recorded.outcome.err, "left to NCCL") ==
        2);  // one line a process, though there are four communicators
  CHECK(count_of(recorded.outcome.err, "the kernels could not be loaded") == 2);
  for (const int rank : {0, 1}) {
    for (const Row& way : rows_of_op(recorded.rows(rank), "all_reduce", "in rank order")) CHECK(argument(way) == 0);
    bool declared = false;
    const auto stream = open_stream(recorded.path(), rank);
    for (const CoverageLimit& limit : stream->coverage_limits())
      declared |= limit.what.find("reductions in NCCL's own order") != std::string::npos;
    CHECK(declared);
  }
}

TEST_CASE("members that one thread holds agree, also while NCCL makes them in the background") {
  for (const Environment& how : {Environment{}, Environment{{"NONBLOCKING", "1"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "members", 2, joined(how, joined(kSlow, {{"NO_CALLS", "1"}})));
    CHECK(recorded.outcome.err == "");
    CHECK(recorded.outcome.out == "ready\nready\n");
  }
}

TEST_CASE("messages of members that one thread holds leave together, also of several calls of one group") {
  for (const Environment& how : {Environment{}, Environment{{"NONBLOCKING", "1"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "members", 2, joined(how, joined(kSlow, {{"FORKPOINT_TEST_COLLECTIVES", "messages"}})));
    INFO(recorded.outcome.out);
    CHECK(count_of(recorded.outcome.out, "member's sum right\n") == 8);
    CHECK(recorded.outcome.err == "");
    for (const Row& way : rows_of_op(recorded.rows(0), "all_reduce", "rank 0: in rank order")) CHECK(argument(way) == 1);
  }
}

TEST_CASE("a communicator that does not block is decided on while the program asks for it") {
  NcclRun recorded;
  record_nccl(&recorded, "asked", 2, kSlow);
  INFO(recorded.outcome.out);
  CHECK(recorded.outcome.err == "");
  CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
  CHECK(count_of(recorded.outcome.out, " right\n") == 2 * 4);
  for (const int rank : {0, 1}) {
    CHECK(rows_of_op(recorded.rows(rank), "all_reduce", "output").size() == 3);
    CHECK(open_stream(recorded.path(), rank)->gaps().empty());
  }
}

TEST_CASE("the first reduction of a communicator that does not block returns before the other members come to theirs") {
  NcclRun recorded;
  record_nccl(&recorded, "asked", 2, joined(kSlow, {{"LATE", "1"}}));
  INFO(recorded.outcome.out);
  CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
  CHECK(count_of(recorded.outcome.out, " right\n") == 2 * 4);
}

TEST_CASE("a factor that is dropped inside the group which uses it is still the call's") {
  NcclRun recorded;
  record_nccl(&recorded, "scaled_in_group", 2, kSwapped);
  INFO(recorded.outcome.out);
  CHECK(count_of(recorded.outcome.out, "scaled in a group right\n") == 2);
}

TEST_CASE("where one member cannot even say what it can, the others hear that and all use NCCL") {
  NcclRun recorded;
  record_nccl(&recorded, "reductions", 2, joined(kSwapped, {{"FEW_BYTES", "1"}, {"FAKE_CUDA_FAILS", "1:cuMemcpyHtoDAsync:200:512:0:1000"}}));
  INFO(recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
  CHECK(count_of(recorded.outcome.out, "child calls 7\n") == 2);
  CHECK(count_of(recorded.outcome.err, "left to NCCL") == 2);
}

TEST_CASE("calls of one communicator follow each other within a graph, and before and behind its replays") {
  for (const Environment& how : {Environment{}, Environment{{"BEHIND", "1"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "in_graphs", 2, joined(how, kSwapped));
    INFO(recorded.outcome.out << recorded.outcome.err);
    CHECK(count_of(recorded.outcome.out, "WRONG") == 0);
    CHECK(count_of(recorded.outcome.out, " right\n") == (how.empty() ? 6 : 8));
  }
}
