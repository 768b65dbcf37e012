// --deterministic of record, replay, check and bisect, on programs that read variables only.
#include <doctest/doctest.h>

#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace {

using Words = std::vector<std::string>;

constexpr char kPrint[] = "env | grep -E '^(CUBLAS|NCCL_ALGO|PYTHONHASHSEED|XLA_FLAGS|FORKPOINT_DETERMINISTIC)' | sort; exec \"$0\" \"$@\"";

// Of sh, which prints the variables of interest and becomes the trainer.
Words printing(const Words& trainer) { return words({"sh", "-c", kPrint}, trainer); }

ProgramOptions with(const std::map<std::string, std::string>& variables) {
  ProgramOptions options;
  for (const char* name : {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_NVLS_ENABLE", "PYTHONHASHSEED", "XLA_FLAGS", "HOME", "NCCL_CONF_FILE"}) {
    options.environment[name] = std::nullopt;
  }
  for (const auto& [name, value] : variables) options.environment[name] = value;
  return options;
}

ProgramResult record(const std::string& run, const Words& options, const Words& trainer, const ProgramOptions& how) {
  return run_forkpoint(words(words({"record", "-o", run}, options), words({"--"}, printing(trainer))), how);
}

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

nlohmann::json manifest(const std::string& run) { return nlohmann::json::parse(file_content(run + "/run.json")); }

}  // namespace

TEST_CASE("the command gets the variables of the knobs, the run lists them, and show says them") {
  const TemporaryFolder folder;
  const ProgramResult result = record(folder / "run", {"--deterministic=cublas,python-hash,seeds"}, {TINY_TRAINER, "3"}, with({}));
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  CHECK(result.out == "CUBLAS_WORKSPACE_CONFIG=:4096:8\nFORKPOINT_DETERMINISTIC=cublas,python-hash,seeds\nPYTHONHASHSEED=0\n");
  CHECK(holds(result.err, "deterministic: cublas,python-hash,seeds"));
  const nlohmann::json knobs = manifest(folder / "run")["knobs"];
  REQUIRE(knobs.size() == 3);
  CHECK(knobs[0] == nlohmann::json{{"name", "cublas"}, {"state", "set"}, {"value", "CUBLAS_WORKSPACE_CONFIG=:4096:8"}});
  CHECK(knobs[2]["value"] == "in process");
  CHECK(manifest(folder / "run")["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8");
  CHECK(holds(run_forkpoint({"show", folder / "run"}).out, "in force: cublas (CUBLAS_WORKSPACE_CONFIG=:4096:8), python-hash"));
}

TEST_CASE("without the option nothing is set, whatever the environment asks the probe for") {
  const TemporaryFolder folder;
  const ProgramResult result = record(folder / "run", {}, {TINY_TRAINER, "3"}, with({{"FORKPOINT_DETERMINISTIC", "cublas"}}));
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  CHECK(result.out.empty());
  CHECK_FALSE(manifest(folder / "run").contains("knobs"));
  CHECK_FALSE(holds(result.err, "deterministic"));
}

TEST_CASE("plain --deterministic stands before the command's dashes and is the default set") {
  const TemporaryFolder folder;
  const ProgramResult result = record(folder / "run", {"--deterministic"}, {TINY_TRAINER, "3"}, with({{"XLA_FLAGS", "--xla_dump_to=x"}}));
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  CHECK(holds(result.out, "NCCL_ALGO=Ring\n"));
  CHECK(holds(result.out, "XLA_FLAGS=--xla_dump_to=x --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0\n"));
  CHECK_FALSE(holds(result.out, "torch-fill"));
}

TEST_CASE("a value of the user's own that does not fit stays, and that is said on stderr, in the run and by show") {
  const TemporaryFolder folder;
  const ProgramResult result =
      record(folder / "run", {"--deterministic=cublas,python-hash"}, {TINY_TRAINER, "3"}, with({{"CUBLAS_WORKSPACE_CONFIG", ":0:0"}}));
  INFO(result.err << result.out);
  REQUIRE(result.status == 0);
  CHECK(result.out == "CUBLAS_WORKSPACE_CONFIG=:0:0\nFORKPOINT_DETERMINISTIC=python-hash\nPYTHONHASHSEED=0\n");
  const std::string problem = "The knob cublas is not in force: CUBLAS_WORKSPACE_CONFIG=:0:0 is set; :4096:8 or :16:8 would be needed.";
  CHECK(holds(result.err, problem));
  const nlohmann::json knobs = manifest(folder / "run")["knobs"];
  CHECK(knobs[0]["state"] == "conflict");
  CHECK(knobs[0]["problem"] == problem);
  CHECK(holds(run_forkpoint({"show", folder / "run"}).out, "The knob cublas is not in force"));
}

TEST_CASE("what NCCL's own file says is the user's word too") {
  const TemporaryFolder folder;
  std::ofstream(folder / "nccl.conf") << "# ours\n NCCL_ALGO = NVLS # the switch\n";
  const ProgramResult result = record(folder / "run", {"--deterministic=nccl"}, {TINY_TRAINER, "3"}, with({{"NCCL_CONF_FILE", folder / "nccl.conf"}}));
  INFO(result.err << result.out);
  CHECK(result.out.empty());
  CHECK(holds(result.err, "The knob nccl is not in force: NCCL_ALGO=NVLS is set"));
}

TEST_CASE("an unknown knob is refused by every verb, with the nearest name") {
  for (const Words& verb : {Words{"record"}, Words{"check", "--reference", "x"}, Words{"price"}, Words{"resume", "--checkpoint-at", "1", "--steps", "2"}}) {
    const ProgramResult result = run_forkpoint(words(verb, {"--deterministic=cublass", "--", "true"}));
    CAPTURE(result.err);
    CHECK(result.status == (verb[0] == "record" ? 125 : 2));
    CHECK(holds(result.err, "There is no knob \"cublass\""));
    CHECK(holds(result.err, "Did you mean cublas?"));
  }
}

TEST_CASE("a job that repeats only with its knob: diverged without, identical with; the knobs are told apart") {
  const TemporaryFolder folder;
  const Words trainer = {TINY_TRAINER, "4", "--repeats-with", "CUBLAS_WORKSPACE_CONFIG"};
  for (const std::string name : {"a", "b"}) {
    REQUIRE(record(folder / name, {}, trainer, with({})).status == 0);
    REQUIRE(record(folder / (name + "-knob"), {"--deterministic=cublas"}, trainer, with({})).status == 0);
  }
  CHECK(run_forkpoint({"diff", folder / "a", folder / "b"}).status == 1);
  const ProgramResult same = run_forkpoint({"diff", folder / "a-knob", folder / "b-knob"});
  CHECK_MESSAGE(same.status == 0, same.out);
  const ProgramResult other = run_forkpoint({"diff", folder / "a", folder / "a-knob"});
  CHECK(other.status == 1);
  CHECK_MESSAGE(holds(other.out, "knobs of deterministic mode: none in run A, cublas in run B"), other.out);
}

TEST_CASE("check takes the knobs, and a reference made with them is not met without") {
  const TemporaryFolder folder;
  const Words trainer = {TINY_TRAINER, "40", "--pause", "2", "--repeats-with", "CUBLAS_WORKSPACE_CONFIG"};
  const auto check = [&](const std::string& run, const Words& options) {
    return run_forkpoint(words(words({"check", "--reference", folder / "ref.json", "-o", folder / run}, options), words({"--"}, trainer)), with({}));
  };
  REQUIRE(check("made", {"--deterministic=cublas", "--steps", "4", "--update"}).status == 0);
  CHECK(check("same", {"--deterministic=cublas"}).status == 0);
  const ProgramResult without = check("without", {});
  CHECK(without.status == 2);  // what it depends on is another
  CHECK_MESSAGE(holds(without.out, "knobs"), without.out);
}

TEST_CASE("bisect runs the arms with the knobs that their runs had") {
  const TemporaryFolder folder;
  const Words trainer = {TINY_TRAINER, "40", "--pause", "2", "--repeats-with", "CUBLAS_WORKSPACE_CONFIG"};
  for (const std::string name : {"a", "b"}) {
    const Words different = name == "b" ? words(trainer, {"--different-at", "3"}) : trainer;
    REQUIRE(run_forkpoint(words({"record", "--steps", "0:6", "-o", folder / name, "--deterministic=cublas", "--"}, different), with({})).status == 0);
  }
  const ProgramResult result = run_forkpoint({"bisect", "--level", "step", "-o", folder / "bisect", folder / "a", folder / "b"}, with({}));
  INFO(result.err << result.out);
  CHECK(result.status == 1);
  CHECK(result.out.starts_with("diverged at step 3"));
  CHECK(holds(file_content(folder / "bisect/bisect.jsonl"), "\"knobs\":\"cublas\""));
}

}  // namespace forkpoint
