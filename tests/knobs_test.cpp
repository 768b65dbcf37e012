#include "lib/knobs.h"

#include <doctest/doctest.h>

#include <set>

#include "lib/error.h"

namespace forkpoint {
namespace {

using Environment = std::map<std::string, std::string>;

KnobOutcome outcome_of(const KnobPlan& plan, std::string_view name) {
  for (const KnobOutcome& outcome : plan.outcomes) {
    if (outcome.knob->name == name) return outcome;
  }
  FAIL("no outcome of " << name);
  return {};
}

Error refusal(std::string_view list) {
  try {
    parse_knobs(list);
  } catch (const Error& error) {
    return error;
  }
  FAIL("accepted: " << list);
  return Error("");
}

}  // namespace

TEST_CASE("every knob has a name of its own, a reason, and a way to be set") {
  std::set<std::string_view> names;
  for (const Knob& knob : knob_table()) {
    CAPTURE(knob.name);
    CHECK(names.insert(knob.name).second);
    CHECK(knob.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string_view::npos);
    CHECK_FALSE(knob.area.empty());
    CHECK_FALSE(knob.does.empty());
    CHECK(knob.why.ends_with('.'));
    CHECK((knob.in_process || !knob.variables.empty()));
    CHECK((knob.needs.empty() || find_knob(knob.needs) != nullptr));
    for (const KnobVariable& variable : knob.variables) {
      if (variable.is_as_good && !variable.is_flag) CHECK(variable.is_as_good(variable.value));
    }
  }
}

TEST_CASE("no two knobs set the same variable, but for lists of flags") {
  std::map<std::string_view, std::string_view> owner;
  for (const Knob& knob : knob_table()) {
    for (const KnobVariable& variable : knob.variables) {
      const auto [at, is_new] = owner.emplace(variable.name, knob.name);
      CAPTURE(variable.name);
      CHECK((is_new || variable.is_flag));
    }
  }
}

TEST_CASE("a list names the default set, some, all but some, or none") {
  CHECK(knob_names(parse_knobs("")) == knob_names(default_knobs()));
  CHECK(knob_names(parse_knobs("default")) == knob_names(default_knobs()));
  CHECK(parse_knobs("none").empty());
  CHECK(parse_knobs("all").size() == knob_table().size());
  CHECK(knob_names(parse_knobs("nvte,cublas")) == "cublas,nvte");  // the table's order
  CHECK(knob_names(parse_knobs("cublas,cublas,")) == "cublas");
  CHECK(parse_knobs("-nccl").size() == default_knobs().size() - 1);
  CHECK(knob_names(parse_knobs("-nccl")).find("nccl") == std::string::npos);
  CHECK(parse_knobs("+tf32").size() == default_knobs().size() + 1);
  CHECK(knob_names(parse_knobs("cublas,nvte,-cublas")) == "nvte");
  CHECK(parse_knobs("all,-tf32,-xla").size() == knob_table().size() - 2);
}

TEST_CASE("what a knob needs comes with it, and cannot be left out under it") {
  CHECK(knob_names(parse_knobs("torch-fill")) == "torch-algorithms,torch-fill");
  CHECK(std::string(refusal("+torch-fill,-torch-algorithms").what()).find("does nothing without torch-algorithms") != std::string::npos);
  CHECK(knob_names(parse_knobs("-torch-algorithms")).find("torch-algorithms") == std::string::npos);
}

TEST_CASE("a name that is no knob is refused with the nearest") {
  const Error error = refusal("cublass");
  CHECK(std::string(error.what()) == "There is no knob \"cublass\".");
  CHECK(error.hint().starts_with("Did you mean cublas? "));
  CHECK(error.hint().find("python-hash") != std::string::npos);
  CHECK(refusal("-ncll").hint().starts_with("Did you mean nccl? "));
  CHECK(refusal("xylophone").hint().starts_with("The knobs: "));
  refusal("-");
  refusal("Cublas");
}

TEST_CASE("by default filling, TF32, NCCL's layout and NCCL's reductions are left alone") {
  const std::string names = "," + knob_names(default_knobs()) + ",";
  for (const std::string off : {",torch-fill,", ",tf32,", ",nccl-layout,", ",collectives,", ",collectives-wide,", ",collectives-tree,"}) {
    CHECK(names.find(off) == std::string::npos);
  }
  for (const std::string on : {",cublas,", ",nccl,", ",torch-algorithms,", ",torch-kernels,", ",seeds,"}) {
    CHECK(names.find(on) != std::string::npos);
  }
}

TEST_CASE("in an empty environment every knob is set") {
  const KnobPlan plan = resolve(parse_knobs("all"), {});
  for (const KnobOutcome& outcome : plan.outcomes) CHECK(outcome.state == KnobState::set);
  CHECK(plan.in_force() == knob_names(parse_knobs("all")));
  CHECK(plan.changes.at("CUBLAS_WORKSPACE_CONFIG") == ":4096:8");
  CHECK(plan.changes.at("NCCL_ALGO") == "Ring");
  CHECK(plan.changes.at("NCCL_NVLS_ENABLE") == "0");
  CHECK(plan.changes.at("PYTHONHASHSEED") == "0");
  CHECK(plan.changes.at("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0");
  CHECK(plan.changes.at("XLA_FLAGS") == "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0");
  CHECK(outcome_of(plan, "cublas").value == "CUBLAS_WORKSPACE_CONFIG=:4096:8");
  CHECK(outcome_of(plan, "cudnn").value == "in process");
  CHECK(outcome_of(plan, "flash-attention").value == "FLASH_ATTENTION_DETERMINISTIC=1; in process");
  CHECK(outcome_of(plan, "xla").value == "XLA_FLAGS=--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0");
}

TEST_CASE("a value of the user's own that is as good is kept as it is") {
  const Environment users = {{"CUBLAS_WORKSPACE_CONFIG", ":16:8"}, {"NCCL_ALGO", "Tree"}, {"NCCL_NVLS_ENABLE", "0"}, {"PYTHONHASHSEED", "1234"}};
  const KnobPlan plan = resolve(parse_knobs("cublas,nccl,python-hash"), users);
  CHECK(plan.changes.empty());
  for (const KnobOutcome& outcome : plan.outcomes) CHECK(outcome.state == KnobState::kept);
  CHECK(plan.in_force() == "cublas,nccl,python-hash");
  CHECK(outcome_of(plan, "cublas").value == "CUBLAS_WORKSPACE_CONFIG=:16:8");
}

TEST_CASE("what the user did not set of a knob is set beside what he did") {
  const KnobPlan plan = resolve(parse_knobs("nccl"), {{"NCCL_ALGO", "^NVLS"}});
  CHECK(plan.changes == Environment{{"NCCL_NVLS_ENABLE", "0"}});
  CHECK(outcome_of(plan, "nccl").state == KnobState::set);
  CHECK(outcome_of(plan, "nccl").value == "NCCL_ALGO=^NVLS NCCL_NVLS_ENABLE=0");
}

TEST_CASE("a value of the user's own that is not as good stays, and the knob is not in force") {
  const KnobPlan plan = resolve(parse_knobs("cublas,nccl,nvte"), {{"CUBLAS_WORKSPACE_CONFIG", ":0:0"}, {"NCCL_ALGO", "NVLS"}});
  CHECK(plan.changes == Environment{{"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"}});  // nothing of nccl, not even NCCL_NVLS_ENABLE
  CHECK(plan.in_force() == "nvte");
  const KnobOutcome cublas = outcome_of(plan, "cublas");
  CHECK(cublas.state == KnobState::conflict);
  CHECK(cublas.value == "CUBLAS_WORKSPACE_CONFIG=:0:0");
  CHECK(cublas.problem == "The knob cublas is not in force: CUBLAS_WORKSPACE_CONFIG=:0:0 is set; :4096:8 or :16:8 would be needed.");
  CHECK(outcome_of(plan, "nccl").value == "NCCL_ALGO=NVLS");
}

TEST_CASE("an empty value is a value") {
  const KnobPlan plan = resolve(parse_knobs("python-hash,cublas"), {{"PYTHONHASHSEED", ""}, {"CUBLAS_WORKSPACE_CONFIG", ""}});
  CHECK(plan.changes.empty());
  CHECK(plan.in_force().empty());
}

TEST_CASE("which algorithms of NCCL are as good as Ring") {
  const auto state = [](const std::string& algorithm) {
    return outcome_of(resolve(parse_knobs("nccl"), {{"NCCL_ALGO", algorithm}}), "nccl").state;
  };
  for (const std::string good : {"Ring", "ring", "RING", "Tree", "^NVLS", "^nvls,nvlstree"}) {
    CAPTURE(good);
    CHECK(state(good) != KnobState::conflict);
  }
  for (const std::string bad : {"NVLS", "NVLSTree", "Ring,NVLS", "Ring,Tree", "^Tree", "^NVLSTree", "CollnetDirect", "allreduce:ring;allgather:^nvls", "x"}) {
    CAPTURE(bad);
    CHECK(state(bad) == KnobState::conflict);
  }
}

TEST_CASE("flags are added to the user's, never put in their place") {
  const auto plan_with = [](const std::string& flags) { return resolve(parse_knobs("xla"), {{"XLA_FLAGS", flags}}); };
  CHECK(plan_with("--xla_dump_to=/tmp/x").changes.at("XLA_FLAGS") ==
        "--xla_dump_to=/tmp/x --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0");
  const KnobPlan half = plan_with("--xla_gpu_deterministic_ops");
  CHECK(half.changes.at("XLA_FLAGS") == "--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0");
  CHECK(outcome_of(half, "xla").state == KnobState::set);
  const KnobPlan whole = plan_with("--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true");
  CHECK(whole.changes.empty());
  CHECK(outcome_of(whole, "xla").state == KnobState::kept);
  const KnobPlan against = plan_with("--xla_gpu_autotune_level=0 --xla_gpu_autotune_level=4");  // the last one counts
  CHECK(against.changes.empty());
  CHECK(outcome_of(against, "xla").problem.find("XLA_FLAGS says --xla_gpu_autotune_level=4") != std::string::npos);
}

}  // namespace forkpoint
