// Which communicators the deterministic collectives know, however they were made, and that a program hears of a
// reduction that was put off only when it is launched.
#include "tests/probe/nccl_harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

Environment swapped_and(const Environment& more) {
  Environment all = {{"FORKPOINT_DETERMINISTIC", "collectives"}, {"FAKE_CUDA_SHARED", "1"}, {"FAKE_CUDA_MODE", "slow"}};
  all.insert(more.begin(), more.end());
  return all;
}

const Environment kByMessages = {{"FORKPOINT_TEST_COLLECTIVES", "messages"}};

}  // namespace

TEST_CASE(
    "members that nobody saw made know each other once they have asked, and several communicators from each other") {
  NcclRun recorded;
  record_nccl(&recorded, "unseen", 2, swapped_and(kByMessages));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(recorded.outcome.err == "");
  CHECK(count_of(recorded.outcome.out, "member's sum right\n") == 2 * 2 * 4);
  for (const int rank : {0, 1}) {
    size_t ways = 0;
    for (const Row& row : recorded.rows(rank)) {
      if (row.site.op != "all_reduce" || row.site.tensor.find("in rank order") == std::string::npos) continue;
      ++ways;
      CHECK(scalar_value(row.record.digest) == 1);
    }
    CHECK(ways == 4);  // the first sums were not decided on yet
  }
}

TEST_CASE(
    "a child's calls wait or do not as it was asked for, though its parent's do not and it is made in the background") {
  for (const Environment& how : {Environment{}, kByMessages}) {
    NcclRun recorded;
    record_nccl(&recorded, "children", 2, swapped_and(how));
    INFO(recorded.outcome.out << recorded.outcome.err);
    CHECK(recorded.outcome.err == "");
    CHECK(count_of(recorded.outcome.out, "same returns 7\n") == 2);
    CHECK(count_of(recorded.outcome.out, "other returns 0\n") == 2);
    CHECK(count_of(recorded.outcome.out, " right\n") == 4);
  }
}

TEST_CASE("a communicator that the environment keeps from blocking does not block") {
  NcclRun recorded;
  record_nccl(&recorded, "environment_decides", 2, swapped_and({}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "sum returns 7\n") == 2);
  CHECK(count_of(recorded.outcome.out, "sum right\n") == 2);
}

TEST_CASE("a reduction is in progress for every thread that asks until the one which launches it is through") {
  NcclRun recorded;
  record_nccl(&recorded, "two_ask", 2, swapped_and({{"FAKE_CUDA_STALL", "0:forkpoint_collective_f32:200"}}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.out, "caught\n") == 1);
  CHECK(count_of(recorded.outcome.out, "sum right\n") == 2 * 6);
}

TEST_CASE("by messages, too, whoever asks whether a reduction is through waits for no other member") {
  NcclRun recorded;
  // The recorder would ask on its own, and more often.
  record_nccl(
      &recorded, "slow_partner", 2,
      swapped_and(
          {{"FORKPOINT_TEST_COLLECTIVES", "messages,say"}, {"FORKPOINT_RANKS", "7"}, {"FAKE_NCCL_DELAY_MS", "5"}}));
  INFO(recorded.outcome.out << recorded.outcome.err);
  CHECK(count_of(recorded.outcome.err, "adds by messages\n") == 2);
  CHECK(count_of(recorded.outcome.out, "sum right\n") == 2);
  CHECK(count_of(recorded.outcome.out, "rank 0 was free\n") == 1);
}

TEST_CASE(
    "what a graph's kernels take up on a device is nobody else's when their communicator is gone, unless they end at "
    "once") {
  for (const Environment& how : {Environment{}, Environment{{"ABORTED", "1"}}}) {
    NcclRun recorded;
    Environment more = {{"FORKPOINT_TEST_COLLECTIVES", "say"}};
    more.insert(how.begin(), how.end());
    record_nccl(&recorded, "graph_stays", 2, swapped_and(more));
    INFO(recorded.outcome.out << recorded.outcome.err);
    CHECK(count_of(recorded.outcome.out, " right\n") == 2 * (how.empty() ? 4 : 3));
    CHECK(count_of(recorded.outcome.err, "adds by kernels\n") == 2 * (how.empty() ? 2 : 3));
    CHECK(count_of(recorded.outcome.err, "adds by messages\n") == 2 * (how.empty() ? 1 : 0));
  }
}
