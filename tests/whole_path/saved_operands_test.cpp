// `forkpoint record --save-operands`, on minigpt with and without a planted fault: the values that are kept are those that
// the job computed, and the element that the fault changed is found.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>

#include "lib/operand_compare.h"
#include "tests/cli/program.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

const std::string kFault = "--fault bitflip@step=3,rank=1,layer=1,target=activation";

struct Recording {
  std::string run;
  ProgramResult result;
};

Recording record(const TemporaryFolder& folder, const std::string& name, const std::string& what, const std::string& options = "",
                 const std::string& record_options = "--level layer") {
  const std::string run = folder / name;
  return {run, run_shell("$FORKPOINT record " + record_options + " --save-operands '" + what + "' -o " + run + " -- " BUILD_DIRECTORY
                         "/samples/minigpt --ranks 2 --steps 5 --layers 2 --dim 16 --seq 16 --seed 3 " + options)};
}

const OperandPair* find(const std::vector<OperandPair>& pairs, int rank, const std::string& tensor) {
  const auto found = std::find_if(pairs.begin(), pairs.end(), [&](const OperandPair& pair) {
    return pair.key.rank == rank && pair.key.tensor == tensor;
  });
  return found == pairs.end() ? nullptr : &*found;
}

const std::string kForward = "step=3;phase=forward;layer=blocks.1.mlp.fc1";

}  // namespace

TEST_CASE("the operands of the layer in which a bit was flipped differ in that one element, and only on that rank") {
  const TemporaryFolder folder;
  const Recording good = record(folder, "good", kForward), bad = record(folder, "bad", kForward, kFault);
  INFO(good.result.err << bad.result.err);
  REQUIRE(good.result.status == 0);
  REQUIRE(bad.result.status == 0);
  const auto pairs = compare_operands(good.run, bad.run);
  const OperandPair *input = find(pairs, 1, "input"), *output = find(pairs, 1, "output"), *elsewhere = find(pairs, 0, "output");
  REQUIRE(input);
  REQUIRE(output);
  REQUIRE(elsewhere);
  CHECK(!input->differs());
  REQUIRE(output->report);
  CHECK(output->report->differing == 1);
  CHECK(sentence(*output->report, output->shape).starts_with("1 of "));
  CHECK(!elsewhere->differs());
}

TEST_CASE("nothing but the step, the phase and the layer that were asked for is kept, and the records are as without") {
  const TemporaryFolder folder;
  const Recording run = record(folder, "run", kForward);
  const auto operands = list_operands(run.run);
  REQUIRE(!operands.empty());
  for (const Operand& operand : operands) {
    CHECK(operand.key.step == 3);
    CHECK(operand.key.phase == Phase::forward);
    CHECK(operand.key.layer == "blocks.1.mlp.fc1");
  }
  const auto plain = run_shell("$FORKPOINT record --level layer -o " + (folder / "plain") + " -- " BUILD_DIRECTORY
                               "/samples/minigpt --ranks 2 --steps 5 --layers 2 --dim 16 --seq 16 --seed 3");
  REQUIRE(plain.status == 0);
  CHECK(run_shell("$FORKPOINT diff " + run.run + " " + (folder / "plain")).status == 0);
}

TEST_CASE("the values that are kept have the digests that the stream has") {
  const TemporaryFolder folder;
  const Recording run = record(folder, "run", kForward);
  const auto shown = run_shell("$FORKPOINT show --records --steps 3 --ranks 1 --json " + run.run);
  for (const Operand& operand : list_operands(run.run)) {
    if (operand.key.rank != 1) continue;
    const Digest digest = digest_bytes(load_operand(operand).data(), operand.size_bytes, operand.dtype).digest;
    char text[40];
    snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(digest.a), static_cast<unsigned long long>(digest.b));
    INFO(text << " " << operand.key.tensor);
    CHECK(shown.out.find(text) != std::string::npos);
  }
}

TEST_CASE("what cannot be meant is refused before the job runs") {
  const TemporaryFolder folder;
  for (const char* what : {"", "step=3", "layer=a", "step=x;layer=a", "step=3;launch=1;layer=a", "step=3;phase=sideways"}) {
    const Recording run = record(folder, "run", what);
    INFO(run.result.err);
    CHECK(run.result.status == 125);
    CHECK(run.result.err.find("--save-operands") != std::string::npos);
    CHECK(!std::filesystem::exists(run.run));
  }
  const Recording masked = record(folder, "run", kForward, "", "--mask-names");
  CHECK(masked.result.status == 125);
}
