// diff --replicas and show --anomalies: what one run says by itself.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/support/run_builder.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Runs {
  TemporaryFolder folder;
  std::string good = make("good", -1, false), apart = make("apart", 2, false), nan = make("nan", -1, true),
              lost = folder / "lost";
  Runs() {
    RunBuilder run(1);
    run.rank(0).step(0).forward("fc").output("output", value(1)).gap(0, 0, "ring full for 10000 ms");
    run.write(lost);
  }

 private:
  std::string make(const std::string& name, int64_t desync, bool with_nan_value) {
    RunBuilder run(3);
    for (int rank = 0; rank < 3; ++rank) {
      for (int64_t step = 0; step < 4; ++step) {
        const uint64_t seed = static_cast<uint64_t>(10 + step) + (step == desync && rank == 1 ? 50 : 0);
        RankBuilder& builder = run.rank(rank).step(step).forward("fc");
        builder.output("output",
                       with_nan_value && step == 3 && rank == 2 ? with_nan(1) : value(static_cast<uint64_t>(rank)));
        builder.at(Phase::optimizer, "fc").add(Role::parameter, "weight", value(seed));
      }
    }
    return run.write(folder / name);
  }
};
const Runs& runs() {
  static const Runs made;
  return made;
}

}  // namespace

TEST_CASE("diff --replicas has the exit status and the first line of a verdict") {
  const ProgramResult good = run_forkpoint({"diff", "--replicas", runs().good});
  CHECK(good.status == 0);
  CHECK(good.out.starts_with("identical between replicas: 12 records in 4 steps on 3 ranks agree"));
  const ProgramResult apart = run_forkpoint({"diff", "--replicas", runs().apart});
  CHECK(apart.status == 1);
  CHECK(apart.out.starts_with("diverged at step 2, rank 1, optimizer, fc: weight\n"));
  CHECK(contains(apart.out, "missing_sync"));
  CHECK(!contains(apart.out, "run B"));
  const auto json = nlohmann::json::parse(run_forkpoint({"diff", "--replicas", "--json", runs().apart}).out);
  CHECK(json["first"]["rank"] == 1);
  CHECK(json["ranks_diverged"] == std::vector<int>{1});
  CHECK(run_forkpoint({"diff", "--replicas", runs().lost}).status == 2);
}

TEST_CASE("diff asks for one run with --replicas and for two without") {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"diff", runs().good},
                                             {"diff", "--replicas", runs().good, runs().apart},
                                             {"diff", "--replicas", "--html", "x.html", runs().good}}) {
    const ProgramResult result = run_forkpoint(words);
    CHECK(result.status == 2);
    CHECK(contains(result.err, "--replicas"));
    CHECK(result.out.empty());
  }
}

TEST_CASE("show --anomalies answers in its first line and by its exit status") {
  const ProgramResult good = run_forkpoint({"show", "--anomalies", runs().good});
  CHECK(good.status == 0);
  CHECK(good.out.starts_with("nothing anomalous in 4 steps of 3 ranks (24 tensors looked at)"));
  CHECK(contains(good.out, "\n  rule "));
  const ProgramResult nan = run_forkpoint({"show", "--anomalies", runs().nan});
  CHECK(nan.status == 1);
  CHECK(nan.out.starts_with("first non-finite value at step 3, rank 2, forward, fc: output (1 of 32 elements)\n"));
  CHECK(contains(nan.out, "no loss was recorded"));
  const auto json = nlohmann::json::parse(run_forkpoint({"show", "--anomalies", "--json", runs().nan}).out);
  CHECK(json["anomalous"] == true);
  CHECK(json["first_nonfinite"]["layer"] == "fc");
  CHECK(json["first_magnitude"].is_null());
  const ProgramResult lost = run_forkpoint({"show", "--anomalies", runs().lost});
  CHECK(lost.status == 2);
  CHECK(contains(lost.out, "ring full"));
  CHECK(run_forkpoint({"show", "--anomalies", "--layer", "x", runs().good}).status == 2);
}

}  // namespace forkpoint
