// Communicators whose members no rank knows: joined over the streams by the hash of what they were made from, so that a
// collective is judged with all of its members, whatever they call it.
#include "lib/communicators.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

constexpr uint64_t kRunA = 100, kRunB = 200;

Communicator place_in(const std::string& name, uint64_t id, int place, int size) {
  Communicator communicator;
  communicator.name = name;
  communicator.id = {id, id + 1};
  communicator.own_rank = place;
  communicator.size = size;
  return communicator;
}

// What one rank gives into and gets out of an all-reduce on its communicator, in step 1.
struct Call {
  Communicator on;
  uint64_t input = 1, output = 2;
  std::string layer = "";
};

void plant_all_reduce(RankBuilder* rank, const Call& call) {
  rank->collective("all_reduce", call.on, call.layer)
      .input("input", value(call.input))
      .output("output", value(call.output));
}

Verdict compare(const RunBuilder& a, const RunBuilder& b) {
  const TemporaryFolder folder;
  return diff_folders(a.write(folder / "a"), b.write(folder / "b"));
}

// Four ranks in two groups of two; every group has the name that it has on all of its members.
void plant_two_groups(RunBuilder* run, uint64_t id, const std::function<void(int rank, Call*)>& change = {}) {
  for (int rank = 0; rank < 4; ++rank) {
    Call call{place_in("nccl 1 of 2 ranks", id + static_cast<uint64_t>(rank / 2), rank % 2, 2),
              10 + static_cast<uint64_t>(rank), 20 + static_cast<uint64_t>(rank / 2), ""};
    if (change) change(rank, &call);
    run->rank(rank).step(0).forward("fc").output("output", value(5));
    run->rank(rank).step(1);
    plant_all_reduce(&run->rank(rank), call);
    run->rank(rank).step(2).forward("fc").output("output", value(call.output + 1000));
  }
}

}  // namespace

TEST_CASE("the members of a communicator are the ranks whose streams hold its id, in the order of their places") {
  RunBuilder run(4);
  const int places[] = {2, 0, 3, 1};
  for (int rank = 0; rank < 4; ++rank) {
    run.rank(rank).step(0);
    plant_all_reduce(&run.rank(rank), {place_in("nccl 1 of 4 ranks", 7, places[rank], 4)});
    run.rank(rank).collective("all_gather", place_in("pair", 30, rank % 2, 2)).input("input", value(1));
  }
  const TemporaryFolder folder;
  const Run opened = Run::open(run.write(folder / "run"));
  const Communicator& read = opened.streams()[2]->communicators()[0];
  CHECK(read == place_in("nccl 1 of 4 ranks", 7, 3, 4));
  const Communicators::Group* group = opened.communicators().find({7, 8});
  REQUIRE(group != nullptr);
  CHECK(group->whole);
  CHECK(group->members == std::vector<int>{1, 3, 0, 2});
  CHECK(group->ranks() == std::vector<int>{0, 1, 2, 3});
  CHECK(opened.communicators().find({7, 9}) == nullptr);
  CHECK(opened.communicators().find({}) == nullptr);
  // Two ranks that claim one place contradict each other.
  REQUIRE(opened.communicators().find({30, 31}) != nullptr);
  CHECK_FALSE(opened.communicators().find({30, 31})->whole);
}

TEST_CASE("names of tensors tell the place and the peer of a call") {
  CHECK(called_tensor("input").base == "input");
  CHECK(called_tensor("input").place == -1);
  CHECK(called_tensor("rank 3: output").base == "output");
  CHECK(called_tensor("rank 3: output").place == 3);
  CHECK(called_tensor("output from 12").base == "output");
  CHECK(called_tensor("output from 12").peer == 12);
  const CalledTensor both = called_tensor("rank 1: input to 0");
  CHECK(both.base == "input");
  CHECK(both.place == 1);
  CHECK(both.peer == 0);
  for (const char* other : {"rank x: output", "weight.grad", "input to nobody", "rank : "}) {
    CHECK(called_tensor(other).base == other);
    CHECK(called_tensor(other).place == -1);
    CHECK(called_tensor(other).peer == -1);
  }
}

TEST_CASE("another id in each run is no difference") {
  RunBuilder a(4), b(4);
  plant_two_groups(&a, kRunA);
  plant_two_groups(&b, kRunB);
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
}

TEST_CASE("two groups of one name are two collectives: the other group's inputs do not count") {
  RunBuilder a(4), b(4);
  plant_two_groups(&a, kRunA);
  plant_two_groups(&b, kRunB, [](int rank, Call* call) {
    if (rank >= 2) call->output = 99;  // group {2, 3}: inputs agree, outputs do not
    if (rank == 0) call->input = 77;   // the other group: its own trouble
    if (rank < 2) call->output = 78;
  });
  const Verdict v = compare(a, b);
  INFO(dump(v));
  REQUIRE(first_of(v).op == "all_reduce");
  // Rank 0's input is an origin of its own, and reached rank 1; group {2, 3} is judged by its own members.
  std::vector<Divergence> all = v.also_first;
  all.push_back(first_of(v));
  const auto count = [&](const std::string& tensor, int rank) {
    return std::count_if(all.begin(), all.end(),
                         [&](const Divergence& at) { return at.tensor == tensor && at.rank == rank; });
  };
  CHECK(all.size() == 2);
  CHECK(count("input", 0) == 1);
  CHECK(count("output", -1) == 1);
}

TEST_CASE("a group's altered output is judged by its two members and by them alone") {
  RunBuilder a(4), b(4);
  plant_two_groups(&a, kRunA);
  plant_two_groups(&b, kRunB, [](int rank, Call* call) { call->output = rank >= 2 ? 99 : call->output; });
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "output"));
  CHECK(v.also_first.empty());
  CHECK(holds(v.cause.evidence, "the recorded inputs agree on every member (ranks 2, 3)"));
  CHECK(v.ranks_diverged == std::vector<int>{2, 3});
}

TEST_CASE("one communicator that two ranks call by different names is one collective") {
  const auto plant = [](RunBuilder* run, uint64_t id, uint64_t input_of_1, uint64_t output) {
    plant_two_groups(run, id, [&](int rank, Call* call) {
      if (rank == 1) call->on.name = "nccl 2 of 2 ranks", call->input = input_of_1;
      if (rank < 2) call->output = output;
    });
  };
  RunBuilder a(4), altered(4), fed(4);
  plant(&a, kRunA, 11, 20);
  plant(&altered, kRunB, 11, 50);
  plant(&fed, kRunB, 12, 51);
  SUBCASE("an output that differs alike is one origin") {
    const Verdict v = compare(a, altered);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "output"));
    CHECK(v.also_first.empty());
    CHECK(holds(v.cause.evidence, "agree on every member (ranks 0, 1)"));
  }
  SUBCASE("an input that differs on one reaches the other") {
    const Verdict v = compare(a, fed);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 1, 1, Phase::collective, "", "input"));
    CHECK(v.also_first.empty());
    CHECK(holds(v.cause.evidence, "rank 0 was reached through all_reduce at step 1, from rank 1"));
  }
}

TEST_CASE("calls from other layers and micro-steps on each rank are joined in the order of the communicator") {
  const auto plant = [](RunBuilder* run, uint64_t id, uint64_t second_input_of_1, uint64_t second_output) {
    for (int rank = 0; rank < 2; ++rank) {
      const Communicator on = place_in("world", id, rank, 2);
      const std::string own = rank == 0 ? "stage0" : "stage1";
      run->rank(rank).step(1);
      plant_all_reduce(&run->rank(rank), {on, 1, 2, own + ".a"});
      run->rank(rank).micro(rank);
      plant_all_reduce(&run->rank(rank), {on, rank == 1 ? second_input_of_1 : 3, second_output, own + ".b"});
    }
  };
  RunBuilder a(2), fed(2), altered(2);
  plant(&a, kRunA, 3, 4);
  plant(&fed, kRunB, 33, 44);
  plant(&altered, kRunB, 3, 44);
  SUBCASE("reached from the other rank") {
    const Verdict v = compare(a, fed);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 1, 1, Phase::collective, "stage1.b", "input"));
    CHECK(v.also_first.empty());
  }
  SUBCASE("altered alike") {
    const Verdict v = compare(a, altered);
    INFO(dump(v));
    CHECK(first_of(v).tensor == "output");
    CHECK(first_of(v).rank == -1);
    CHECK(v.also_first.empty());
    CHECK(holds(v.cause.evidence, "agree on every member (ranks 0, 1)"));
  }
}

TEST_CASE("ranks that did not issue equally many calls are not joined by counting") {
  RunBuilder a(2), b(2);
  for (auto [run, id, output] : {std::tuple(&a, kRunA, uint64_t{2}), std::tuple(&b, kRunB, uint64_t{22})}) {
    for (int rank = 0; rank < 2; ++rank) {
      run->rank(rank).step(1);
      const Communicator on = place_in("world", id, rank, 2);
      if (rank == 1) plant_all_reduce(&run->rank(rank), {on, 8, 9, "lost on the other"});
      plant_all_reduce(&run->rank(rank), {on, 1, output, rank == 0 ? "left" : "right"});
    }
  }
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.evidence, "not known"));
}

TEST_CASE("without the stream of a member the collective is not judged") {
  const auto plant = [](RunBuilder* run, uint64_t id, uint64_t output) {
    for (int rank = 0; rank < 3; ++rank) {
      run->rank(rank).step(1);
      plant_all_reduce(&run->rank(rank), {place_in("world", id, rank, 3), 1, output, ""});
    }
    run->manifest().ranks = {0, 1};  // recorded on purpose
    run->leave_out(2);
  };
  RunBuilder a(3), b(3);
  plant(&a, kRunA, 2);
  plant(&b, kRunB, 3);
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(v.cause.cls == "unknown");
  CHECK(holds(v.cause.evidence, "the inputs of rank 2 are not known"));
  CHECK_FALSE(holds(v.cause.evidence, "agree on every member"));
}

TEST_CASE("what was received is held against what was sent, call by call") {
  const auto plant = [](RunBuilder* run, uint64_t id, uint64_t sent, uint64_t received) {
    for (int rank = 0; rank < 3; ++rank) {
      const Communicator on = place_in("world", id, rank, 3);
      run->rank(rank).step(1);
      if (rank == 0) {
        run->rank(rank).collective("send", on).input("input to 1", value(1)).input("input to 2", value(sent + 1));
        run->rank(rank).input("input to 1", value(sent));
      } else if (rank == 1) {
        run->rank(rank)
            .collective("recv", on)
            .output("output from 0", value(1))
            .output("output from 0", value(received));
      } else {
        run->rank(rank).collective("recv", on).output("output from 0", value(10 + 1));
      }
    }
  };
  RunBuilder a(3), altered(3), fed(3);
  plant(&a, kRunA, 10, 10);
  plant(&altered, kRunB, 10, 60);
  plant(&fed, kRunB, 61, 61);
  SUBCASE("altered on the way: the receive is the origin, judged by the two") {
    const Verdict v = compare(a, altered);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 1, 1, Phase::collective, "", "output from 0"));
    CHECK(v.cause.cls == "nondeterministic_op");
    CHECK(holds(v.cause.evidence, "agree on every member (ranks 0, 1)"));
  }
  SUBCASE("sent otherwise: the sender is named") {
    const Verdict v = compare(a, fed);
    INFO(dump(v));
    CHECK(first_of(v).rank == 0);
    CHECK(first_of(v).op == "send");
    CHECK(holds(v.cause.evidence, "rank 1 was reached through recv at step 1, from rank 0"));
  }
}

TEST_CASE("all places that one process holds count: as inputs, and as replicas") {
  const auto plant = [](RunBuilder* run, uint64_t id, uint64_t input_of_2, uint64_t output_of_2, uint64_t output) {
    run->rank(0).step(1);
    for (int place = 0; place < 4; ++place) {
      const std::string prefix = place == 0 ? "" : "rank " + std::to_string(place) + ": ";
      run->rank(0).collective("all_reduce", place_in("nccl 1 of 4 ranks", id, place, 4));
      run->rank(0).input(prefix + "input", value(place == 2 ? input_of_2 : 1));
    }
    for (int place = 0; place < 4; ++place) {
      const std::string prefix = place == 0 ? "" : "rank " + std::to_string(place) + ": ";
      run->rank(0).output(prefix + "output", value(place == 2 ? output_of_2 : output));
    }
  };
  RunBuilder a, altered, alike, fed;
  plant(&a, kRunA, 1, 9, 9);
  plant(&altered, kRunB, 1, 8, 9);
  plant(&alike, kRunB, 1, 8, 8);
  plant(&fed, kRunB, 2, 8, 8);
  SUBCASE("one place's output") {
    const Verdict v = compare(a, altered);
    INFO(dump(v));
    CHECK(first_of(v).tensor == "rank 2: output");
    CHECK(v.cause.cls == "missing_sync");
    CHECK(holds(v.cause.evidence, "the members hold the same in run A and do not in run B"));
  }
  SUBCASE("all outputs alike") {
    const Verdict v = compare(a, alike);
    INFO(dump(v));
    CHECK(first_of(v).tensor == "output");
    CHECK_FALSE(holds(v.cause.evidence, "do not in run B"));
  }
  SUBCASE("one place's input") {
    const Verdict v = compare(a, fed);
    INFO(dump(v));
    CHECK(first_of(v).tensor == "rank 2: input");
  }
}

TEST_CASE("a collective of another count is named as a message of another size") {
  RunBuilder a(2), b(2);
  for (auto [run, id, count] : {std::tuple(&a, kRunA, int64_t{64}), std::tuple(&b, kRunB, int64_t{32})}) {
    for (int rank = 0; rank < 2; ++rank) {
      run->rank(rank).step(1).collective("all_reduce", place_in("world", id, rank, 2));
      run->rank(rank).scalar("reduction", 0).input("input", value(1, {{count}})).output("output", value(2, {{count}}));
    }
  }
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(first_of(v).kind == Kind::structure);
  CHECK(first_of(v).op == "all_reduce");
  CHECK(holds(v.notes, "all_reduce: input is a message of f32[64] in run A and f32[32] in run B"));
}

TEST_CASE("a collective that is asked to do something else is named by what it was asked") {
  RunBuilder a(2), b(2);
  for (auto [run, id, reduction, output] :
       {std::tuple(&a, kRunA, 0.0, uint64_t{2}), std::tuple(&b, kRunB, 2.0, uint64_t{3})}) {
    for (int rank = 0; rank < 2; ++rank) {
      run->rank(rank).step(1).collective("all_reduce", place_in("world", id, rank, 2));
      run->rank(rank).scalar("reduction", reduction).input("input", value(1)).output("output", value(output));
    }
  }
  const Verdict v = compare(a, b);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "reduction"));
  CHECK(first_of(v).op == "all_reduce");
  CHECK(v.cause.cls == "structure");
  CHECK(holds(v.cause.evidence, "the scalar reduction differs: 0 in run A, 2 in run B"));
}
