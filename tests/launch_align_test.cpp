// Which launch of one run is which of the other.
#include <random>

#include "lib/launch_align.h"
#include "lib/launch_sequence.h"
#include "tests/support/launch_training.h"

using namespace forkpoint;

namespace {

using Tokens = std::vector<uint64_t>;

size_t common(const Tokens& a, const Tokens& b, std::vector<uint32_t>* in_b) {
  in_b->assign(a.size(), kNoRow);
  REQUIRE(add_common(a, b, 1000, *in_b, 0));
  size_t count = 0, last = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if ((*in_b)[i] == kNoRow) continue;
    CHECK(a[i] == b[(*in_b)[i]]);
    CHECK((count == 0 || (*in_b)[i] > last));
    last = (*in_b)[i];
    ++count;
  }
  return count;
}

size_t by_table(const Tokens& a, const Tokens& b) {
  std::vector<std::vector<size_t>> best(a.size() + 1, std::vector<size_t>(b.size() + 1, 0));
  for (size_t i = a.size(); i-- > 0;) {
    for (size_t j = b.size(); j-- > 0;) {
      best[i][j] = a[i] == b[j] ? best[i + 1][j + 1] + 1 : std::max(best[i + 1][j], best[i][j + 1]);
    }
  }
  return best[0][0];
}

// Two recordings, and which launch of the one is which of the other in their first step.
struct Paired {
  explicit Paired(LaunchProgram& a, LaunchProgram& b, int64_t number = 0)
      : run_a(Run::open(LaunchRun({&a}).write(folder / "a"))),
        run_b(Run::open(LaunchRun({&b}).write(folder / "b"))),
        sites(*run_a.streams()[0], *run_b.streams()[0], Level::launch),
        join(sites) {
    for (const auto& [run, step] : {std::pair(&run_a, &in_a), std::pair(&run_b, &in_b)}) {
      const HashStreamReader& stream = *run->streams()[0];
      for (size_t s = 0; s < stream.steps().size(); ++s) {
        if (stream.steps()[s].step == number) step->read(stream, s);
      }
    }
    pairs = pair_launches(join, in_a, in_b);
  }
  const std::string& name(bool of_b, uint32_t row) const {
    return join.site_of(of_b, (of_b ? in_b : in_a).row(row)).tensor;
  }
  TemporaryFolder folder;
  Run run_a, run_b;
  StreamJoin sites;
  LaunchJoin join;
  LaunchStep in_a, in_b;
  LaunchPairs pairs;
};

}  // namespace

TEST_CASE("the common subsequence is a longest one") {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Tokens a(random() % 30), b(random() % 30);
    const unsigned kinds = 1 + random() % 6;
    for (uint64_t& token : a) token = random() % kinds;
    for (uint64_t& token : b) token = random() % kinds;
    std::vector<uint32_t> in_b;
    CHECK(common(a, b, &in_b) == by_table(a, b));
  }
}

TEST_CASE("sequences with too little in common are given up, and nothing is left of the attempt") {
  const Tokens a = {1, 2, 3, 4}, b = {5, 6, 7, 8, 9};
  std::vector<uint32_t> in_b(a.size(), kNoRow);
  CHECK_FALSE(add_common(a, b, 3, in_b, 0));
  CHECK(in_b == std::vector<uint32_t>(a.size(), kNoRow));
  const Tokens c = {9, 1, 2, 9, 3}, d = {1, 7, 7, 2, 8, 3, 8};
  in_b.assign(c.size(), kNoRow);
  add_unique(c, d, in_b, 10);
  CHECK(in_b == std::vector<uint32_t>{kNoRow, 10, 13, kNoRow, 15});
}

TEST_CASE("streams are joined by what runs on them, whatever the order in which the host feeds them") {
  const auto run = [](const Machine& machine, bool interleaved) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const uint32_t one = program->stream(true), two = program->stream(true);
    const DeviceBuffer x = program->allocate(8), y = program->allocate(8), z = program->allocate(8);
    program->step(0);
    const auto launch = [&](uint32_t stream, int k) {
      program->use(stream);
      program->kernel(k % 2 == 0 ? "even" : "odd", {to(x), to(stream == one ? y : z), word(static_cast<uint32_t>(k))},
                      combined());
    };
    for (int k = 0; k < 20; ++k) {
      if (interleaved)
        launch(k % 2 == 0 ? one : two, k / 2);
      else
        launch(k < 10 ? two : one, k % 10);
    }
    return program;
  };
  const auto a = run({}, true), b = run(another_machine({}), false);
  const Paired paired(*a, *b);
  CHECK(paired.pairs.only_a == 0);
  CHECK(paired.pairs.only_b == 0);
  for (uint32_t i = 0; i < paired.in_a.size(); ++i) {
    const uint32_t j = paired.pairs.in_b[i];
    REQUIRE(j != kNoRow);
    CHECK(paired.in_a.row(i).params == paired.in_b.row(j).params);
  }
}

TEST_CASE("of several equal kernels, the one that was put in is found by its buffers, also when every value differs") {
  for (const auto& [in_place, seed] : {std::pair(false, 1), std::pair(true, 1), std::pair(false, 2)}) {
    const auto run = [in_place = in_place](const Machine& machine, int extra, uint64_t seed) {
      auto program = std::make_unique<LaunchProgram>(machine);
      std::vector<DeviceBuffer> chain;
      for (int k = 0; k < 12; ++k) chain.push_back(program->allocate(8));
      const DeviceBuffer other = program->allocate(8);
      program->copy_from_host(chain[0], words_of(seed, 8));
      program->step(0);
      for (size_t k = 0; k + 1 < chain.size(); ++k) {
        program->kernel("add", {to(chain[k]), to(chain[k + 1])}, combined());
        if (static_cast<int>(k) != extra) continue;
        program->kernel("add", {to(chain[k + 1]), to(in_place ? chain[k + 1] : other)}, [](KernelCall&) {});
      }
      program->kernel("last", {to(chain.back()), to(other)}, combined());
      return program;
    };
    for (int extra = 0; extra < 11; ++extra) {
      const auto a = run({}, -1, 1), b = run(another_machine({}), extra, static_cast<uint64_t>(seed));
      const Paired paired(*a, *b);
      CHECK(paired.pairs.only_b == 1);
      CHECK(paired.pairs.only_a == 0);
      INFO(extra << " " << in_place << " " << seed);
      CHECK(paired.pairs.in_a[static_cast<size_t>(extra) + 1] == kNoRow);
    }
  }
}

TEST_CASE("a kernel replaced by others lies in one gap with them") {
  const auto run = [](const Machine& machine, bool split) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const DeviceBuffer x = program->allocate(8), y = program->allocate(8);
    program->step(0).kernel("first", {to(x), to(y)}, combined());
    if (split) program->kernel("splitk", {to(x), to(y)}, combined());
    program->kernel(split ? "splitk_reduce" : "gemm", {to(x), to(y)}, combined());
    program->kernel("last", {to(y), to(x)}, combined());
    program->kernel(split ? "tail_b" : "tail_a", {to(y), to(x)}, combined());
    return program;
  };
  const auto a = run({}, false), b = run(another_machine({}), true);
  const Paired paired(*a, *b);
  CHECK(paired.pairs.paired == 2);
  CHECK(paired.pairs.gaps == 2);
  CHECK(paired.pairs.gap_a[1] == paired.pairs.gap_b[1]);
  CHECK(paired.pairs.gap_b[1] == paired.pairs.gap_b[2]);
  CHECK(paired.pairs.gap_a[3] == paired.pairs.gap_b[4]);
  CHECK(paired.pairs.gap_a[3] != paired.pairs.gap_a[1]);
}

TEST_CASE("a launch that runs on another stream in the other run is the same launch") {
  const auto run = [](const Machine& machine, bool moved) {
    auto program = std::make_unique<LaunchProgram>(machine);
    const uint32_t one = program->stream(true), two = program->stream(true);
    const DeviceBuffer x = program->allocate(8), y = program->allocate(8);
    program->step(0);
    for (int k = 0; k < 8; ++k) {
      program->use(k == 5 ? (moved ? two : one) : k % 2 == 0 ? one : two);
      program->kernel(k == 5 ? "side" : "main", {to(x), to(y), word(static_cast<uint32_t>(k))}, combined());
    }
    return program;
  };
  const auto a = run({}, false), b = run(another_machine({}), true);
  const Paired paired(*a, *b);
  CHECK(paired.pairs.only_a == 0);
  CHECK(paired.pairs.only_b == 0);
  for (uint32_t i = 0; i < paired.in_a.size(); ++i) CHECK(paired.pairs.in_b[i] == i);
}
