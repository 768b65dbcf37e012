// How the members of a communicator agree on deterministic collectives, and what becomes of it where something is not as
// it should be: all of them do the same, the sums are right, and nobody waits for ever.
#include "tests/probe/nccl_harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

const Environment kSwapped = {
    {"FORKPOINT_DETERMINISTIC", "collectives"}, {"FAKE_CUDA_SHARED", "1"}, {"FAKE_CUDA_MODE", "slow"}};

Environment swapped_and(const Environment& more) {
  Environment all = more;
  all.insert(kSwapped.begin(), kSwapped.end());
  return all;
}

bool is_declared(const NcclRun& run, int rank, const std::string& limit) {
  const auto stream = open_stream(run.path(), rank);
  for (const CoverageLimit& one : stream->coverage_limits()) {
    if (one.what.find(limit) != std::string::npos) return true;
  }
  return false;
}

// Of two ranks: what the members ask each other is three calls; a message costs more of them; NCCL's own sum one more.
enum class Way { kernels, messages, nccl, divided };
Way way_of(const std::string& out, const std::string& what) {
  if (count_of(out, what + " right\n") != 2) return Way::divided;
  if (count_of(out, what + " calls 3\n") == 2) return Way::kernels;
  if (count_of(out, what + " calls 4\n") == 2) return Way::nccl;
  return count_of(out, what + " calls 3\n") + count_of(out, what + " calls 4\n") == 0 ? Way::messages : Way::divided;
}

Way way_with(const Environment& more) {
  NcclRun recorded;
  record_nccl(&recorded, "one_sum", 2, swapped_and(more));
  const Way way = way_of(recorded.outcome.out, "sum");
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(way != Way::divided);
  for (const int rank : {0, 1}) {
    CHECK(is_declared(recorded, rank, "reductions in NCCL's own order") == (way == Way::nccl));
    CHECK(open_stream(recorded.path(), rank)->gaps().empty());
  }
  return way;
}

}  // namespace

TEST_CASE("stores that go astray on one member are found by all, and no kernel relies on them") {
  for (const char* rank : {"0", "1"}) CHECK(way_with({{"FAKE_CUDA_ASTRAY", rank}}) == Way::messages);
}

TEST_CASE("which links the kernels use is what the driver says of them and what NCCL is allowed") {
  CHECK(way_with({{"FAKE_CUDA_LINK", "none"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_LINK", "none"}, {"NCCL_P2P_LEVEL", "SYS"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_LINK", "pcie"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_LINK", "pcie"}, {"NCCL_P2P_LEVEL", "PXB"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_LINK", "pcie"}, {"NCCL_P2P_LEVEL", "SYS"}}) == Way::kernels);
  CHECK(way_with({{"FAKE_CUDA_LINK", "nvlink"}}) == Way::kernels);
  CHECK(way_with({{"FAKE_CUDA_LINK", "nvlink"}, {"NCCL_P2P_LEVEL", "NVL"}}) == Way::kernels);
  CHECK(way_with({{"FAKE_CUDA_LINK", "nvlink"}, {"NCCL_P2P_LEVEL", "LOC"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_LINK", "nvlink"}, {"NCCL_P2P_DISABLE", "1"}}) == Way::messages);
}

TEST_CASE("a device that is not visible is reached all the same where nothing forbids it, else by messages") {
  CHECK(way_with({}) == Way::kernels);
  CHECK(way_with({{"NCCL_P2P_LEVEL", "NVL"}}) == Way::messages);
  CHECK(way_with({{"FAKE_CUDA_NO_PEERS", "0"}}) == Way::messages);
}

TEST_CASE("for tests the probe says which way a communicator goes") {
  for (const std::string way : {"kernels", "messages"}) {
    NcclRun recorded;
    const std::string test = way == "kernels" ? "say" : "messages,say";
    record_nccl(&recorded, "one_sum", 2, swapped_and({{"FORKPOINT_TEST_COLLECTIVES", test}}));
    CHECK(count_of(recorded.outcome.err, "a communicator of 2 ranks adds by " + way + "\n") == 2);
    CHECK(count_of(recorded.outcome.err, "\n") == 2);
  }
}

TEST_CASE("where one member lacks memory it says so to the others, and all use NCCL") {
  for (const char* lacks : {"1:cuMemAlloc:17000000:21000000:0:9", "0:cuMemHostRegister:1:65536:0:9"}) {
    CHECK(way_with({{"FAKE_CUDA_FAILS", lacks}}) == Way::nccl);
  }
  CHECK(way_with({{"FAKE_CUDA_FAILS", "1:cuMemAlloc:33280:33280:0:9"}}) == Way::kernels);  // the host's serves as well
}

TEST_CASE("a member whose device does not give or take data for a moment is heard, whichever round that is in") {
  for (const char* round : {"0", "1", "2", "3"}) {
    const std::string once = std::string(round) + ":1";
    CHECK(way_with({{"FAKE_CUDA_FAILS", "1:cuMemcpyDtoHAsync:200:1200:" + once}}) == Way::kernels);
    CHECK(way_with({{"FAKE_CUDA_FAILS", "0:cuStreamQuery:0:0:" + once}}) == Way::kernels);
  }
  for (const char* round : {"0", "1", "2"}) {
    const std::string once = std::string(round) + ":1";
    CHECK(way_with({{"FAKE_CUDA_FAILS", "1:cuMemcpyHtoDAsync:200:512:" + once}}) == Way::nccl);
  }
}

TEST_CASE("a member that stays deaf before the last round says no in it, and all use NCCL") {
  CHECK(way_with({{"FAKE_CUDA_FAILS", "1:cuMemcpyDtoHAsync:200:1200:0:1000000"}}) == Way::nccl);
}

TEST_CASE("a member that cannot ask, or hear what all have agreed upon, fails and does not go its own way") {
  for (const char* how : {"cannot ask", "cannot hear"}) {
    Environment more = {{"FAKE_CUDA_FAILS", "1:cuMemcpyDtoHAsync:200:1200:2:1000000"}};
    if (std::string(how) == "cannot ask")
      more = {{"FAKE_CUDA_FAILS", "1:cuMemHostRegister:1:65536:0:9"}, {"FAKE_CUDA_NO_RECORDS", "1"}};
    NcclRun recorded;
    record_nccl(&recorded, "failing_member", 2, swapped_and(more));
    INFO(how << recorded.outcome.out << recorded.outcome.err);
    CHECK(count_of(recorded.outcome.out, "rank 1: result 0") == 0);
    CHECK(count_of(recorded.outcome.out, "rank 1: result ") == 1);
    CHECK(count_of(recorded.outcome.out, ", right") == 0);
    CHECK(count_of(recorded.outcome.err, "a reduction fails") >= 1);
  }
}

TEST_CASE("a capture of another thread is neither broken by the decision nor divides the members") {
  NcclRun recorded;
  record_nccl(&recorded, "captured_elsewhere", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "the other capture right\n") == 2);
  CHECK(way_of(recorded.outcome.out, "sum") == Way::kernels);
}

TEST_CASE("the first reduction of a communicator may be captured") {
  NcclRun recorded;
  record_nccl(&recorded, "captured_first", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(recorded.outcome.out == "sum of a graph right\nsum of a graph right\n");
}

TEST_CASE("first reductions of several communicators in one group wait for nobody, whatever their order in it") {
  NcclRun recorded;
  record_nccl(&recorded, "group_orders", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "sum of a group right\n") == 4);
}

TEST_CASE("communicators that one rank makes in a group and the other one by one wait for nobody") {
  NcclRun recorded;
  record_nccl(&recorded, "made_apart", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "sum right\n") == 4);
  CHECK(count_of(recorded.outcome.out, "sum calls 3\n") == 4);
}

TEST_CASE("a member that never comes is waited for until the communicator is aborted, by host and kernels") {
  for (const Environment& when : {Environment{}, Environment{{"SECOND", "1"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "abandoned", 2, swapped_and(when));
    INFO(recorded.outcome.out << recorded.outcome.err);
    CHECK(count_of(recorded.outcome.out, " soon\n") == 1);
    CHECK(count_of(recorded.outcome.out, when.empty() ? "given up with 2" : "given up with 0") == 1);
  }
}

TEST_CASE("an error that NCCL knows of ends the wait for the members, and is what the program gets") {
  for (const Environment& how : {Environment{}, Environment{{"NONBLOCKING", "1"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "failing_nccl", 2, swapped_and(how));
    INFO(recorded.outcome.out << recorded.outcome.err);
    CHECK(recorded.outcome.out == "failed with 6\n");
  }
}

TEST_CASE("kernels that wait share what a device has room for, further communicators go by messages, on all members") {
  for (const Environment& how :
       {Environment{}, Environment{{"FAKE_CUDA_FEW", "1"}}, Environment{{"FAKE_CUDA_MPS", "0"}}}) {
    NcclRun recorded;
    record_nccl(&recorded, "many", 2, swapped_and(how));
    const std::string& out = recorded.outcome.out;
    INFO(out << recorded.outcome.err);
    for (int i = 0; i < 4; ++i) {
      CHECK(way_of(out, "number " + std::to_string(i)) == (how.empty() && i < 2 ? Way::kernels : Way::messages));
    }
    CHECK(way_of(out, "another") == (how.empty() ? Way::kernels : Way::messages));
  }
}

TEST_CASE("communicators that come and go leave nothing behind, destroyed or aborted") {
  NcclRun recorded;
  record_nccl(&recorded, "again_and_again", 2, swapped_and({}));
  CHECK(recorded.outcome.out == "device memory kept\ndevice memory kept\n");
}

TEST_CASE("nothing of a context that is gone is used in the one that has its address") {
  NcclRun recorded;
  record_nccl(&recorded, "new_context", 2, {{"FORKPOINT_DETERMINISTIC", "collectives"}, {"FAKE_CUDA_SHARED", "1"}});
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(way_of(recorded.outcome.out, "before") == Way::kernels);
  CHECK(way_of(recorded.outcome.out, "behind") == Way::kernels);
}

TEST_CASE("a program may have as many factors as it likes") {
  NcclRun recorded;
  record_nccl(&recorded, "many_factors", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "by the last factor right\n") == 2);
}

TEST_CASE("a communicator whose parent went while it was made is known, and so is the one with the parent's address") {
  NcclRun recorded;
  record_nccl(&recorded, "parent_goes", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(way_of(recorded.outcome.out, "child") == Way::kernels);
  CHECK(way_of(recorded.outcome.out, "next") == Way::kernels);
}
