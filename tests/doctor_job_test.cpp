// What the doctor makes of a job: its programs, its recorded runs, the verdict on them.
#include "lib/doctor_job.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace forkpoint {
namespace {

const Finding* find(const Findings& findings, const std::string& id) {
  const auto found =
      std::find_if(findings.begin(), findings.end(), [&](const Finding& finding) { return finding.id == id; });
  return found == findings.end() ? nullptr : &*found;
}

FindingKind kind_of(const Findings& findings, const std::string& id) {
  const Finding* finding = find(findings, id);
  REQUIRE_MESSAGE(finding != nullptr, id);
  return finding->kind;
}

ProgramLook program() {
  ProgramLook look;
  look.word = "train";
  look.path = "/x/train";
  look.elf = ElfFile{};
  look.elf->machine = own_elf_machine();
  look.elf->is_program = true;
  look.elf->interpreter = "/lib64/ld-linux-x86-64.so.2";
  return look;
}

Verdict diverged(const std::string& cls, bool in_prologue = false) {
  Verdict verdict;
  verdict.outcome = Outcome::diverged;
  verdict.first = Divergence{};
  verdict.first->step = 1;
  verdict.first->rank = 2;
  verdict.first->phase = Phase::backward;
  verdict.first->layer = "blocks.1.mlp.fc1";
  verdict.first->tensor = "weight.grad";
  verdict.first->in_prologue = in_prologue;
  verdict.cause.cls = cls;
  return verdict;
}

Verdict of(Outcome outcome) {
  Verdict verdict;
  verdict.outcome = outcome;
  verdict.reason = "a reason";
  return verdict;
}

PairLook pair(std::optional<Verdict> verdict, const std::string& trouble = "") {
  return {"steps 0 to 1", "runs/a", "runs/b", trouble, std::move(verdict)};
}

JobSeen torch_run() {
  JobSeen seen;
  seen.ranks = seen.world_size = 1;
  seen.batches = 3;
  seen.facts = {{"torch", {"2.11.0"}},
                {"torch.deterministic", {"False"}},
                {"torch.cudnn.benchmark", {"True"}},
                {"torch.cudnn.deterministic", {"False"}},
                {"torch.float32_matmul", {"high"}}};
  return seen;
}

}  // namespace

TEST_CASE("a program that takes a preloaded library is ok, and its links are named") {
  ProgramLook look = program();
  look.elf->needed = {"libnccl.so.2", "libc.so.6"};
  look.reports = true;
  const Findings findings = judge_program(look);
  CHECK(kind_of(findings, "program") == FindingKind::ok);
  CHECK(findings.front().found == "/x/train takes the probe, reports to forkpoint.h, links libnccl.so.2");
}

TEST_CASE("programs that cannot be found, run or read") {
  ProgramLook look = program();
  look.trouble = "/x/train: damaged";
  CHECK(kind_of(judge_program(look), "program") == FindingKind::unknown);
  look.executable = false;
  CHECK(kind_of(judge_program(look), "program-not-executable") == FindingKind::fix);
  look.path = "";
  CHECK(kind_of(judge_program(look), "program-missing") == FindingKind::fix);
}

TEST_CASE("static, 32-bit, foreign and set-uid programs take no probe, and are never ok") {
  ProgramLook fixed = program(), small = program(), foreign = program(), other_user = program();
  fixed.elf->interpreter = "";
  small.elf->bits = 32;
  foreign.elf->machine = 243;
  other_user.changes_user = "is set-uid";
  for (const auto& [look, id] : std::vector<std::pair<ProgramLook, std::string>>{{fixed, "program-static"},
                                                                                 {small, "program-32-bit"},
                                                                                 {foreign, "program-other-machine"},
                                                                                 {other_user, "program-set-id"}}) {
    const Findings findings = judge_program(look);
    CHECK(kind_of(findings, id) == FindingKind::fix);
    CHECK(find(findings, "program") == nullptr);
  }
}

TEST_CASE("NCCL that is linked into a program is not seen; where symbols were stripped, its texts tell") {
  ProgramLook look = program();
  look.nccl = SymbolPlace::inside;
  CHECK(kind_of(judge_program(look), "nccl-static") == FindingKind::fix);
  look.nccl = SymbolPlace::elsewhere;
  CHECK(kind_of(judge_program(look), "program") == FindingKind::ok);
  look.nccl = SymbolPlace::absent;
  look.has_nccl_texts = true;
  CHECK(kind_of(judge_program(look), "nccl-static") == FindingKind::fix);
}

TEST_CASE("PyTorch's NCCL: from a library, within and exported, within and hidden, none") {
  CHECK(kind_of(judge_torch_links("/t.so", SymbolPlace::elsewhere), "torch-nccl") == FindingKind::ok);
  CHECK(kind_of(judge_torch_links("/t.so", SymbolPlace::exported), "torch-nccl") == FindingKind::note);
  CHECK(kind_of(judge_torch_links("/t.so", SymbolPlace::inside), "nccl-static") == FindingKind::fix);
  CHECK(kind_of(judge_torch_links("/t.so", SymbolPlace::absent), "torch-nccl") == FindingKind::note);
  CHECK(judge_torch_links("", SymbolPlace::absent).empty());
}

TEST_CASE("two runs that agree are ok, with how much was compared; nothing else is") {
  Verdict same = of(Outcome::identical);
  same.coverage.records_compared = 120;
  same.coverage.ranks_compared = 4;
  same.coverage.level = "step";
  const Findings ok = judge_pair(pair(same), {}, std::nullopt, "");
  CHECK(kind_of(ok, "repeats") == FindingKind::ok);
  CHECK(ok.front().found ==
        "two runs of steps 0 to 1 are identical within coverage (120 records on 4 ranks, level step)");
  CHECK(kind_of(judge_pair(pair(of(Outcome::incomparable)), {}, std::nullopt, ""), "repeats") == FindingKind::unknown);
  CHECK(kind_of(judge_pair(pair(std::nullopt, "it hung"), {}, std::nullopt, ""), "repeats") == FindingKind::unknown);
  // Equal up to where the job failed is no answer for the steps that were asked for.
  const Findings cut = judge_pair(pair(same, "the command exited with status 1"), {}, std::nullopt, "");
  CHECK(kind_of(cut, "repeats") == FindingKind::unknown);
  CHECK(cut.front().found.find("exited with status 1") != std::string::npos);
}

TEST_CASE("two runs that differ are to be fixed, with the place of the fork, even where the job then failed") {
  for (const char* trouble : {"", "the command exited with status 1"}) {
    const Findings findings = judge_pair(pair(diverged("nondeterministic_op"), trouble), {}, std::nullopt, "");
    CHECK(kind_of(findings, "repeats") == FindingKind::fix);
    CHECK(findings.front().about == FindingAbout::repeating);
    CHECK(findings.front().found ==
          "two runs of steps 0 to 1: diverged at step 1, rank 2, backward, blocks.1.mlp.fc1: weight.grad");
    CHECK(findings.front().why == "nondeterministic_op");
    CHECK(findings.front().fix == "forkpoint bisect runs/a runs/b");
  }
}

TEST_CASE("a PyTorch job that starts from other weights, or draws other numbers, is to be seeded") {
  CHECK(judge_pair(pair(diverged("initial_state", true)), torch_run(), std::nullopt, "")
            .front()
            .fix.find("torch.manual_seed(0)") == 0);
  CHECK(judge_pair(pair(diverged("initial_state", true)), {}, std::nullopt, "").front().fix.find("CMD --seed 1") == 0);
  CHECK(judge_pair(pair(diverged("data_order")), torch_run(), std::nullopt, "").front().fix.find("generator=") !=
        std::string::npos);
  CHECK(judge_pair(pair(diverged("unordered_accumulation")), torch_run(), std::nullopt, "").front().fix ==
        "forkpoint bisect runs/a runs/b");
}

TEST_CASE("deterministic mode: said to cure only where two runs in it were identical") {
  const std::string how = "forkpoint record --deterministic -- ./train";
  PairLook twin = pair(of(Outcome::identical));
  twin.without = diverged("nondeterministic_op");
  const Findings cured = judge_pair(pair(diverged("nondeterministic_op")), {}, twin, how);
  CHECK(cured.front().fix == how);
  CHECK(kind_of(cured, "deterministic") == FindingKind::note);
  const Findings not_cured = judge_pair(pair(diverged("nondeterministic_op")), {}, pair(diverged("data_order")), how);
  CHECK(not_cured.front().fix == "forkpoint bisect runs/a runs/b");
  CHECK(find(not_cured, "deterministic")->found.find("does not cure it") != std::string::npos);
  CHECK(kind_of(judge_pair(pair(diverged("x")), {}, pair(of(Outcome::incomparable)), how), "deterministic") ==
        FindingKind::unknown);
  // A third run without it is what the second was: what differed came once, and nothing is known of the mode.
  twin.without = of(Outcome::identical);
  const Findings once = judge_pair(pair(diverged("nondeterministic_op")), {}, twin, how);
  CHECK(once.front().fix == "forkpoint bisect runs/a runs/b");
  CHECK(find(once, "deterministic")->found.find("did not come again") != std::string::npos);
  CHECK(find(once, "deterministic")->fix.empty());
  // And where there is no such run, nothing is said of it.
  for (const auto& without : {std::optional(of(Outcome::incomparable)), std::optional<Verdict>()}) {
    twin.without = without;
    const Findings open = judge_pair(pair(diverged("nondeterministic_op")), {}, twin, how);
    CHECK(open.front().fix == "forkpoint bisect runs/a runs/b");
    CHECK(kind_of(open, "deterministic") == FindingKind::unknown);
    CHECK(find(open, "deterministic")->found.find("did not come again") == std::string::npos);
  }
  // Identical as far as it went, and then it failed.
  const Findings cut = judge_pair(pair(diverged("x")), {}, pair(of(Outcome::identical), "it failed"), how);
  CHECK(kind_of(cut, "deterministic") == FindingKind::unknown);
  CHECK(cut.front().fix == "forkpoint bisect runs/a runs/b");
}

TEST_CASE("what was lost is to be fixed, what is declared as not seen is noted by name") {
  JobSeen seen;
  seen.batches = 1;
  seen.gaps = {"rank 0, step 1: ring full"};
  seen.missing_ranks = {2, 3};
  seen.world_size = 4;
  seen.limits = {{"the state of Python's generator, which was not seen to be seeded before the first step", ""},
                 {"NCCL calls that did not come through the probe (resolved by dlsym, or statically linked)", "x"},
                 {"something new", "a detail"}};
  seen.unnamed = 2;
  seen.unnamed_example = "group0.param1.grad";
  seen.step_base = "unknown";
  const Findings findings = judge_seen(seen, true);
  CHECK(kind_of(findings, "gap") == FindingKind::fix);
  CHECK(kind_of(findings, "missing-ranks") == FindingKind::fix);
  CHECK(find(findings, "missing-ranks")->found == "ranks 2, 3 of 4 left no stream");
  CHECK(kind_of(findings, "python-generator-unseeded") == FindingKind::note);
  CHECK(kind_of(findings, "nccl-unseen") == FindingKind::fix);
  CHECK(kind_of(findings, "not-seen") == FindingKind::note);
  CHECK(find(findings, "not-seen")->found == "something new: a detail");
  CHECK(kind_of(findings, "unnamed-parameters") == FindingKind::note);
  CHECK(kind_of(findings, "step-base") == FindingKind::note);
}

TEST_CASE("batches are ok only where some were recorded and both runs agree") {
  JobSeen seen;
  CHECK(kind_of(judge_seen(seen, true), "data") == FindingKind::note);
  seen.batches = 2;
  CHECK(kind_of(judge_seen(seen, true), "data") == FindingKind::ok);
  CHECK(find(judge_seen(seen, false), "data") == nullptr);
}

TEST_CASE("PyTorch's settings are judged where they are in force: those of cuDNN on a GPU alone") {
  JobSeen seen = torch_run();
  const Findings on_cpu = judge_seen(seen, true);
  CHECK(kind_of(on_cpu, "torch-deterministic") == FindingKind::note);
  CHECK(find(on_cpu, "cudnn-benchmark") == nullptr);
  seen.on_gpu = true;
  const Findings on_gpu = judge_seen(seen, true);
  CHECK(kind_of(on_gpu, "cudnn-benchmark") == FindingKind::fix);
  CHECK(kind_of(on_gpu, "cudnn-deterministic") == FindingKind::note);
  CHECK(kind_of(on_gpu, "float32-matmul") == FindingKind::note);
  seen.facts["torch.deterministic"] = {"True"};
  seen.facts["torch.cudnn.benchmark"] = {"False"};
  const Findings good = judge_seen(seen, true);
  CHECK(kind_of(good, "torch-deterministic") == FindingKind::ok);
  CHECK(kind_of(good, "cudnn-benchmark") == FindingKind::ok);
  // Ranks that do not agree are no ok.
  seen.facts["torch.deterministic"] = {"True", "False"};
  CHECK(kind_of(judge_seen(seen, true), "torch-deterministic") == FindingKind::note);
  CHECK(find(judge_seen(JobSeen{}, true), "torch-deterministic") == nullptr);
}

TEST_CASE("a command line that loses the preload or python's variables says so") {
  JobLineLook look;
  CHECK(judge_job_line(look).empty());
  look.drops_preload = "sudo";
  look.how = "removes LD_PRELOAD from the environment";
  look.ignores_python_variables = true;
  const Findings findings = judge_job_line(look);
  CHECK(kind_of(findings, "preload-lost") == FindingKind::fix);
  CHECK(find(findings, "preload-lost")->about == FindingAbout::recording);
  CHECK(kind_of(findings, "python-variables-ignored") == FindingKind::fix);
  CHECK(find(findings, "python-variables-ignored")->about == FindingAbout::repeating);
}

}  // namespace forkpoint
