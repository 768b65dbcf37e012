// All-reduces that one run lays out differently: the layout is forgiven, never a value. Each run here is a data-parallel step
// whose gradients are sent in messages as a layout says; what is tested is what becomes of the verdict when something in
// them is altered.
#include <bit>
#include <cstring>
#include <functional>

#include "lib/digest_mix.h"
#include "tests/support/verdict_check.h"

using namespace forkpoint;

namespace {

using Elements = std::vector<uint32_t>;          // bits, of 16-bit types the low half
using Layouts = std::vector<std::vector<size_t>>;  // parameters of each message, in order

constexpr size_t kParameters = 5;
constexpr size_t kSizes[kParameters] = {7, 12, 1, 33, 12};  // odd ones: 16-bit elements pair otherwise in each layout
const Layouts kInitial = {{4, 3, 2, 1, 0}}, kRebuilt = {{2, 0, 3}, {1, 4}};

Value of_elements(const Elements& elements, DType dtype) {
  const auto size = static_cast<size_t>(size_bytes(dtype));
  std::vector<uint8_t> data(elements.size() * size);
  for (size_t i = 0; i < elements.size(); ++i) std::memcpy(&data[i * size], &elements[i], size);
  const DigestResult result = digest_bytes(data.data(), data.size(), dtype);
  return {{dtype, {static_cast<int64_t>(elements.size())}, {}, {}, {}}, result.digest, result.stats};
}

// A gradient's element: positive, below 1.
uint32_t drawn(uint64_t seed, DType dtype) {
  const float number = 0.25f + static_cast<float>(mix64(seed) % 100000) / 3e5f;
  const auto bits = std::bit_cast<uint32_t>(number);
  return dtype == DType::bf16 ? bits >> 16 : dtype == DType::i32 ? static_cast<uint32_t>(mix64(seed) % 1000) : bits;
}

struct Job {
  int ranks = 2;
  int64_t first_step = 0, steps = 3;
  DType dtype = DType::f32;
  int64_t relaid_step = -1;  // from which on the messages are as `initial` says, else as `usual`
  int64_t relaid_steps = 1;
  int64_t map_step = -1;  // in which a map of used parameters is reduced ahead of them
  uint32_t map_input = 1;
  int only_rank = -1;        // of this rank alone
  Layouts initial = kInitial, usual = kRebuilt;
  bool backward = true;      // gradients of each rank are recorded before the reduction
  bool behind = true;        // what the optimizer consumes and leaves is recorded
  bool outputs = true;
  bool by_order = false;     // the sum depends on the layout, as a ring's of three and more
  uint64_t id = 0;           // of the communicator: as NCCL's are known
  // What is altered between backward and message (in), or in what came out (out): by rank and step.
  std::function<void(int rank, int64_t step, std::vector<Elements>* gradients)> in, out;
};

std::vector<Elements> gradients_of(const Job& job, int rank, int64_t step) {
  std::vector<Elements> all(kParameters);
  for (size_t p = 0; p < kParameters; ++p) {
    for (size_t i = 0; i < kSizes[p]; ++i) {
      all[p].push_back(drawn(static_cast<uint64_t>(((step * 16 + rank) * 16 + static_cast<int64_t>(p)) * 64) + i, job.dtype));
    }
  }
  return all;
}

// Stands in for a sum: of what went in on all ranks at this place, whichever rank's it was.
std::vector<Elements> reduced(const Job& job, int64_t step, uint64_t order) {
  std::vector<Elements> sum(kParameters);
  for (int rank = 0; rank < job.ranks; ++rank) {
    auto own = gradients_of(job, rank, step);
    if (job.in) job.in(rank, step, &own);
    for (size_t p = 0; p < kParameters; ++p) {
      sum[p].resize(kSizes[p]);
      for (size_t i = 0; i < kSizes[p]; ++i) sum[p][i] += own[p][i];
    }
  }
  for (auto& elements : sum) {
    for (auto& element : elements) element = drawn(element * 31 + order, job.dtype);
  }
  return sum;
}

void send(RankBuilder* at, const Job& job, const Layouts& layouts, const std::vector<Elements>& all, bool input) {
  for (const auto& message : layouts) {
    Elements flat;
    for (const size_t p : message) flat.insert(flat.end(), all[p].begin(), all[p].end());
    if (input) at->scalar("reduction", 0).input("input", of_elements(flat, job.dtype));
    else at->output("output", of_elements(flat, job.dtype));
  }
}

void plant(RunBuilder* run, const Job& job) {
  for (int64_t step = job.first_step; step < job.steps; ++step) {
    for (int rank = 0; rank < job.ranks; ++rank) {
      const bool in_relaid =
          step >= job.relaid_step && step < job.relaid_step + job.relaid_steps && job.relaid_step >= 0;
      const bool relaid = in_relaid && (job.only_rank < 0 || rank == job.only_rank);
      const Layouts& layouts = relaid ? job.initial : job.usual;
      RankBuilder& at = run->rank(rank);
      auto own = gradients_of(job, rank, step);
      at.step(step);
      for (size_t p = 0; p < kParameters && job.backward; ++p)
        at.backward("fc" + std::to_string(p)).add(Role::gradient, "weight.grad", of_elements(own[p], job.dtype));
      if (job.in) job.in(rank, step, &own);
      auto sum = reduced(job, step, job.by_order && relaid ? 1 : 0);
      if (job.out) job.out(rank, step, &sum);
      std::vector<int> members;
      for (int member = 0; member < job.ranks; ++member) members.push_back(member);
      at.collective("all_reduce", {"world", job.id ? std::vector<int>{} : members, {job.id, job.id}, rank, job.ranks});
      if (step == job.map_step) {
        if (job.map_input != 0)
          at.scalar("reduction", 0).input("input", of_elements({0, job.map_input, job.map_input}, DType::i32));
        at.output("output", of_elements({0, 2 * job.map_input, 2 * job.map_input}, DType::i32));
      }
      send(&at, job, layouts, own, true);
      if (job.outputs) send(&at, job, layouts, sum, false);
      for (size_t p = 0; p < kParameters && job.behind; ++p) {
        at.at(Phase::optimizer, "fc" + std::to_string(p)).add(Role::gradient, "weight.grad", of_elements(sum[p], job.dtype));
      }
      for (size_t p = 0; p < kParameters && job.behind; ++p) {
        at.at(Phase::optimizer, "fc" + std::to_string(p)).add(Role::parameter, "weight", of_elements(sum[p], job.dtype));
      }
    }
  }
}

Verdict diff_jobs(const Job& a, const Job& b) {
  RunBuilder run_a(a.ranks), run_b(b.ranks);
  plant(&run_a, a);
  plant(&run_b, b);
  const TemporaryFolder folder;
  return diff_folders(run_a.write(folder / "a"), run_b.write(folder / "b"));
}

// The straight run against one that was resumed at `step`, whose first messages are as kInitial says.
Verdict diff_resumed(const Job& straight, int64_t step, bool swap, const decltype(Job::in)& in = {}) {
  Job resumed = straight;
  resumed.in = in;
  resumed.relaid_step = resumed.first_step = step;
  if (straight.map_step >= 0) resumed.map_step = step;
  const auto write = [](const Job& job, bool loads, const std::string& to) {
    RunBuilder run(job.ranks);
    for (int rank = 0; rank < job.ranks; ++rank) run.rank(rank).prologue();
    for (size_t p = 0; p < kParameters; ++p) {
      for (int rank = 0; rank < job.ranks; ++rank) {
        const Value value = loads ? of_elements(reduced(job, job.first_step - 1, 0)[p], job.dtype) : forkpoint::value(p);
        run.rank(rank).at(Phase::load, "fc" + std::to_string(p)).add(Role::parameter, "weight", value);
      }
    }
    plant(&run, job);
    return run.write(to);
  };
  const TemporaryFolder folder;
  const std::string one = write(straight, false, folder / "a"), other = write(resumed, true, folder / "b");
  return swap ? diff_folders(other, one) : diff_folders(one, other);
}

Job relaid_in(int64_t step, Job job = {}) {
  job.relaid_step = step;
  return job;
}

void exchange(std::vector<Elements>* all, size_t p, size_t i, size_t q, size_t j) { std::swap((*all)[p][i], (*all)[q][j]); }

}  // namespace

TEST_CASE("the same gradients in other messages are no divergence, and are not said to be compared bit by bit") {
  const Verdict equal = diff_jobs({}, {});
  const Verdict v = diff_jobs({}, relaid_in(1));
  INFO(dump(v));
  REQUIRE(equal.outcome == Outcome::identical);
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "2 collectives of step 1 carry the same elements in another layout: all_reduce of f32[41], f32[24] in run "
                       "A and of f32[65] in run B"));
  // Of 2 ranks: two inputs and two outputs, and of the settings the second one.
  CHECK(equal.coverage.records_compared - v.coverage.records_compared == 2 * 5);
  CHECK(holds(v.coverage.limits, "the bits of 4 collectives that are laid out in another way in each run: the sums of their "
                                 "elements were compared"));
  CHECK_FALSE(holds(equal.coverage.limits, "laid out"));
}

TEST_CASE("it does not matter which run has more messages, nor how the members of the communicator are known") {
  Job named;
  named.id = 77;
  Job other = relaid_in(1, named);
  other.id = 78;
  CHECK(diff_jobs(named, other).outcome == Outcome::identical);
  CHECK(diff_jobs(other, named).outcome == Outcome::identical);
}

TEST_CASE("16-bit elements pair otherwise in each layout, and are still the same elements") {
  Job job;
  job.dtype = DType::bf16;
  const Verdict v = diff_jobs(job, relaid_in(1, job));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  Job altered = relaid_in(1, job);
  altered.in = [](int rank, int64_t step, std::vector<Elements>* own) {
    if (rank == 1 && step == 1) (*own)[3][5] ^= 1;
  };
  const Verdict found = diff_jobs(job, altered);
  INFO(dump(found));
  CHECK(is_at(first_of(found), 1, 1, Phase::collective, "", "input"));
}

TEST_CASE("a run that was resumed right at its checkpoint continues the straight one") {
  Job straight;
  straight.relaid_step = 0;
  for (const bool swap : {false, true}) {
    const Verdict v = diff_resumed(straight, 2, swap);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(holds(v.notes, "2 collectives of step 2 carry the same elements in another layout"));
  }
}

TEST_CASE("messages of the same sizes count as laid out anew only where one run begins and the other goes on") {
  Job job, later;
  job.usual = later.usual = {{0, 1}, {4, 3, 2}};
  job.initial = later.initial = {{4, 0}, {2, 3, 1}};  // parameters 1 and 4 are of one size
  const Verdict v = diff_resumed(job, 2, false);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "2 collectives of step 2 carry the same elements in another order"));
  for (const int64_t step : {0, 1}) {  // both begin at step 0
    later.relaid_step = step;
    const Verdict found = diff_jobs(job, later);
    INFO(dump(found));
    CHECK(found.outcome == Outcome::diverged);
    CHECK(is_at(first_of(found), step, -1, Phase::collective, "", "input"));
  }
}

TEST_CASE("the one message of a small model may hold its gradients in another order in a resumed process's first step") {
  Job job;
  job.usual = {{0, 1, 2, 3, 4}};
  const Verdict v = diff_resumed(job, 2, false);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "1 collective of step 2 carries the same elements in another order"));
}

TEST_CASE("with a static graph a resumed process's second step is as the first, and no later one") {
  Job job;
  job.usual = {{0, 1, 2, 3, 4}};
  job.steps = 5;
  job.relaid_steps = 2;
  const Verdict v = diff_resumed(job, 2, false);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::identical);
  CHECK(holds(v.notes, "1 collective of step 3 carries the same elements in another order"));
  job.relaid_steps = 3;
  const Verdict found = diff_resumed(job, 2, false);
  INFO(dump(found));
  CHECK(found.outcome == Outcome::diverged);
  CHECK(is_at(first_of(found), 4, -1, Phase::collective, "", "input"));
}

TEST_CASE(
    "the map of used parameters that a resumed process reduces in its first step is named and compared with nothing") {
  Job job;
  job.map_step = 0;
  for (const bool swap : {false, true}) {
    const Verdict v = diff_resumed(job, 2, swap);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::identical);
    CHECK(v.reason.starts_with("every record that both runs have agrees"));
    CHECK(
        holds(v.notes, "6 records of all-reduces of int32, 0 or 1 on each rank, that one run alone called in step 2"));
  }
  Job number = job, other = job;
  number.map_input = 2;
  CHECK(diff_resumed(number, 2, false).outcome == Outcome::diverged);
  number.map_input = 0;  // what went in was not recorded
  CHECK(diff_resumed(number, 2, false).outcome == Outcome::diverged);
  other.map_step = -1;  // of two that begin together it is another structure
  CHECK(diff_jobs(job, other).outcome == Outcome::diverged);
  CHECK(diff_jobs(other, job).outcome == Outcome::diverged);
  other.map_step = 1;
  CHECK(diff_jobs(job, other).outcome == Outcome::diverged);
  const auto alter = [](int rank, int64_t step,
                        std::vector<Elements>* all) {  // a value in the messages behind it still shows
    if (rank == 1 && step == 2) (*all)[3][5] ^= 0x40000;
  };
  const Verdict found = diff_resumed(job, 2, false, alter);
  INFO(dump(found));
  CHECK(is_at(first_of(found), 2, 1, Phase::collective, "", "input"));
}

TEST_CASE("calls that one rank issues in another order are told where they begin, at its inputs") {
  Job job, other;
  job.usual = {{1}, {4}}, other = job;  // of one size
  other.relaid_step = 1, other.initial = {{4}, {1}}, other.only_rank = 0;
  const Verdict v = diff_jobs(job, other);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(is_at(first_of(v), 1, 0, Phase::collective, "", "input"));
}

TEST_CASE("what is behind one message is no witness of another: there must be enough for all") {
  Job job;
  job.usual = {{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}};  // twice what the optimizer uses
  job.initial = {{4, 3, 2, 1, 0}, {4, 3, 2, 1, 0}};
  const Verdict v = diff_resumed(job, 2, false);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
}

TEST_CASE("a value altered on its way into a message that is laid out anew is found, on its rank") {
  for (const bool backward : {true, false}) {
    Job job;
    job.backward = backward;
    Job altered = relaid_in(1, job);
    altered.in = [](int rank, int64_t step, std::vector<Elements>* own) {
      if (rank == 1 && step == 1) (*own)[1][3] ^= 1u << 20;
    };
    const Verdict v = diff_jobs(job, altered);
    INFO(dump(v));
    CHECK(is_at(first_of(v), 1, 1, Phase::collective, "", "input"));
    CHECK(first_of(v).kind == Kind::collective);
    CHECK(v.also_first.empty());
    CHECK(v.ranks_diverged == std::vector<int>{0, 1});
    CHECK(holds(v.cause.evidence, "its messages are laid out in another way in each run; the elements of all of them together are "
                                  "not the same"));
    CHECK(holds(v.cause.evidence, "rank 0 was reached through all_reduce at step 1, from rank 1"));
    CHECK_FALSE(holds(v.notes, "carry the same elements"));
  }
}

TEST_CASE("elements exchanged between ranks are found though the sum of both is the same") {
  Job altered = relaid_in(1);
  altered.in = [](int rank, int64_t step, std::vector<Elements>* own) {
    if (step == 1) (*own)[0][2] = gradients_of({}, 1 - rank, step)[0][2];
  };
  const Verdict v = diff_jobs({}, altered);
  INFO(dump(v));
  CHECK(v.outcome == Outcome::diverged);
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "input"));
}

TEST_CASE("elements exchanged within one rank's messages are found by what came out") {
  Job altered = relaid_in(1);
  altered.in = [](int rank, int64_t step, std::vector<Elements>* own) {
    if (rank == 0 && step == 1) exchange(own, 0, 2, 3, 8);
  };
  const Verdict v = diff_jobs({}, altered);
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "output"));
  CHECK(v.cause.cls == "unknown");  // that each input is as it was is not known
  CHECK(holds(v.cause.evidence, "(ranks 0, 1) hold the same elements together"));
  CHECK_FALSE(holds(v.cause.evidence, "the recorded inputs agree"));
}

TEST_CASE("an output that is wrong on one rank is found by the sum") {
  Job straight;
  straight.out = [](int rank, int64_t step, std::vector<Elements>* sum) {
    if (rank == 1 && step == 1) (*sum)[3][20] ^= 1u << 13;
  };
  const Verdict v = diff_jobs(straight, relaid_in(1));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 1, Phase::collective, "", "output"));
  CHECK(v.also_first.empty());
  CHECK(v.ranks_diverged == std::vector<int>{1});
  CHECK(holds(v.cause.evidence, "the inputs of every member (ranks 0, 1) hold the same elements together"));
}

TEST_CASE("an output that is wrong on one rank and adds up alike is found by the gradients behind it") {
  Job straight;
  straight.out = [](int rank, int64_t step, std::vector<Elements>* sum) {
    if (rank == 1 && step == 1) exchange(sum, 1, 3, 3, 20);
  };
  const Verdict v = diff_jobs(straight, relaid_in(1));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, 1, Phase::optimizer, "fc1", "weight.grad"));
  CHECK(v.ranks_diverged == std::vector<int>{1});
}

TEST_CASE("sums alone prove nothing: without gradients behind them the runs cannot be told equal") {
  Job job;
  job.behind = false;
  const Verdict v = diff_jobs(job, relaid_in(1, job));
  INFO(dump(v));
  CHECK(v.outcome == Outcome::incomparable);
  CHECK(v.reason.find("too few gradients were recorded behind it") != std::string::npos);
}

TEST_CASE("where the layout changes the order of the sums, that is the cause, on all ranks") {
  Job job;
  job.ranks = 4, job.by_order = true;
  const Verdict v = diff_jobs(job, relaid_in(1, job));
  INFO(dump(v));
  CHECK(is_at(first_of(v), 1, -1, Phase::collective, "", "output"));
  CHECK(v.cause.cls == "reduction_order");
  CHECK(holds(v.cause.evidence, "the inputs of every member (ranks 0-3) hold the same elements together"));
  CHECK(holds(v.cause.evidence, "its messages are laid out in another way in each run"));
}

TEST_CASE("messages that hold another number of elements together are structure, as are whole numbers and other settings") {
  SUBCASE("a gradient that is not sent") {
    Job other = relaid_in(1);
    other.initial = {{4, 3, 2, 1}};
    const Verdict v = diff_jobs({}, other);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).kind == Kind::structure);
    CHECK(holds(v.notes, "structure: collective, all_reduce: input is a message of f32[41] in run A and f32[58] in run B"));
  }
  SUBCASE("counts, not gradients") {
    Job job;
    job.dtype = DType::i32;
    const Verdict v = diff_jobs(job, relaid_in(1, job));
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).kind == Kind::structure);
  }
  SUBCASE("outputs that one run has not recorded") {
    Job other = relaid_in(1);
    other.outputs = false;
    const Verdict v = diff_jobs({}, other);
    INFO(dump(v));
    CHECK(v.outcome == Outcome::diverged);
    CHECK(first_of(v).kind == Kind::structure);
  }
}
