#include "lib/doctor_job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "lib/run_steps.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr auto kRepeating = FindingAbout::repeating;
constexpr auto kRecording = FindingAbout::recording;
constexpr char kNotPreloaded[] = "the probe is loaded by LD_PRELOAD, which such a program does not take";

// A limit of the probe's, by the beginning of its text, and what it means to a job.
struct KnownLimit {
  std::string_view begins, id;
  FindingKind kind;
  std::string_view fix;
};
constexpr KnownLimit kKnownLimits[] = {
    {"the state of Python's generator, which was not seen to be seeded", "python-generator-unseeded", FindingKind::note,
     "random.seed(0)   # before the first use of Python's random"},
    {"torch older than 2.4", "torch", FindingKind::fix, "pip install 'torch>=2.4'"},
    {"the torch bridge could not be installed", "torch-bridge", FindingKind::fix,
     "python3 -m pip install --upgrade torch"},
    {"no optimizer of torch.optim", "no-steps", FindingKind::fix,
     "forkpoint record --level launch --step-on '^step$' -- CMD"},
    {"kernel launches were not recorded", "launches-unseen", FindingKind::fix, "unset CUDA_INJECTION64_PATH"},
    {"NCCL calls that did not come through the probe", "nccl-unseen", FindingKind::fix,
     "pip install nvidia-nccl-cu12   # linked dynamically"},
    {"NVTX ranges are not seen", "nvtx-injection", FindingKind::fix, "unset NVTX_INJECTION64_PATH"},
    {"tensors that have no bytes of their own to read", "unread-tensors", FindingKind::note, ""},
    {"process groups that torch.distributed does not list", "unnamed-communicators", FindingKind::note, ""},
};

std::string text_of(const CoverageLimit& limit) {
  return limit.detail.empty() ? limit.what : limit.what + ": " + limit.detail;
}

Finding judge_limit(const CoverageLimit& limit) {
  for (const KnownLimit& known : kKnownLimits) {
    if (!limit.what.starts_with(known.begins)) continue;
    return {std::string(known.id), known.kind, kRecording, text_of(limit), "what is not seen is not compared",
            std::string(known.fix)};
  }
  return {"not-seen", FindingKind::note, kRecording, text_of(limit), "what is not seen is not compared", ""};
}

std::string fact(const JobSeen& seen, const char* name) {
  const auto found = seen.facts.find(name);
  if (found == seen.facts.end()) return {};
  return fmt::format("{}", fmt::join(found->second, " | "));
}

// One setting of PyTorch's, as it was when the first step began.
void judge_setting(const JobSeen& seen, const char* name, const char* id, std::string_view good, FindingKind otherwise,
                   std::string why, std::string fix, Findings* findings) {
  const std::string value = fact(seen, name);
  if (value.empty()) return;
  const bool is_good = value == good;
  findings->push_back({id, is_good ? FindingKind::ok : otherwise, kRepeating, fmt::format("{} = {}", name, value),
                       is_good ? "" : std::move(why), is_good ? "" : std::move(fix)});
}

void judge_settings(const JobSeen& seen, bool repeats, Findings* findings) {
  if (fact(seen, "torch").empty()) return;
  const std::string so_far = repeats ? " (it did not show in the steps that were run)" : "";
  judge_setting(seen, "torch.deterministic", "torch-deterministic", "True", FindingKind::note,
                "ops with an atomic implementation keep it" + so_far,
                "torch.use_deterministic_algorithms(True, warn_only=True)", findings);
  if (!seen.on_gpu) return;
  judge_setting(seen, "torch.cudnn.benchmark", "cudnn-benchmark", "False", FindingKind::fix,
                "cuDNN keeps whichever algorithm was fastest on that day" + so_far,
                "torch.backends.cudnn.benchmark = False", findings);
  if (fact(seen, "torch.deterministic") != "True") {
    judge_setting(seen, "torch.cudnn.deterministic", "cudnn-deterministic", "True", FindingKind::note,
                  "some of cuDNN's backward convolutions add atomically" + so_far,
                  "torch.backends.cudnn.deterministic = True", findings);
  }
  judge_setting(seen, "torch.float32_matmul", "float32-matmul", "highest", FindingKind::note,
                "it repeats on one kind of GPU, and gives other bits on another",
                "torch.set_float32_matmul_precision('highest')", findings);
}

}  // namespace

namespace {

Finding about_program(const char* id, FindingKind kind, std::string found, std::string why, std::string fix) {
  return {id, kind, kRecording, std::move(found), std::move(why), std::move(fix)};
}

std::string links_of(const ElfFile& elf) {
  std::string links;
  for (const std::string& soname : elf.needed) {
    for (const char* known : {"libcuda.so", "libcudart.so", "libnccl.so", "libtorch"}) {
      if (soname.starts_with(known)) links += fmt::format("{}{}", links.empty() ? ", links " : " ", soname);
    }
  }
  return links;
}

void judge_nccl_within(const ProgramLook& look, Findings* findings) {
  if (look.nccl != SymbolPlace::inside && !look.has_nccl_texts) return;
  const std::string found =
      look.nccl == SymbolPlace::inside
          ? fmt::format("{} has NCCL linked into it", look.path)
          : fmt::format("{} holds NCCL's own texts and names no function of it: NCCL seems to be linked into it",
                        look.path);
  findings->push_back(
      about_program("nccl-static", FindingKind::fix, found,
                    "its collectives do not come through the probe: they are not seen at level step and "
                    "layer",
                    "cc ... -lnccl   # not -lnccl_static"));
}

void judge_elf(const ProgramLook& look, const ElfFile& elf, Findings* findings) {
  if (elf.bits == 32) {
    findings->push_back(
        about_program("program-32-bit", FindingKind::fix,
                      fmt::format("{} is a 32-bit program ({})", look.path, elf_machine_name(elf.machine)),
                      "the probe is of 64 bits, and cannot be loaded into it", "cc -m64 ...   # build it for 64 bits"));
    return;
  }
  if (elf.machine != own_elf_machine()) {
    findings->push_back(about_program("program-other-machine", FindingKind::fix,
                                      fmt::format("{} is for {}, the probe for {}", look.path,
                                                  elf_machine_name(elf.machine), elf_machine_name(own_elf_machine())),
                                      kNotPreloaded, ""));
  }
  if (elf.is_static_program()) {
    findings->push_back(about_program("program-static", FindingKind::fix,
                                      fmt::format("{} is statically linked", look.path), kNotPreloaded,
                                      "cc ...   # link it without -static"));
  }
  judge_nccl_within(look, findings);
}

}  // namespace

Findings judge_program(const ProgramLook& look) {
  if (look.path.empty()) {
    return {about_program("program-missing", FindingKind::fix, fmt::format("`{}` was not found", look.word),
                          "the command cannot be run", fmt::format("command -v {}", look.word))};
  }
  if (!look.executable) {
    return {about_program("program-not-executable", FindingKind::fix,
                          fmt::format("{} is not marked executable", look.path), "the command cannot be run",
                          fmt::format("chmod +x {}", look.path))};
  }
  if (!look.trouble.empty()) {
    return {about_program("program", FindingKind::unknown, look.trouble,
                          "whether the probe can be loaded into it is not known", "")};
  }
  Findings findings;
  if (!look.changes_user.empty()) {
    findings.push_back(
        about_program("program-set-id", FindingKind::fix, fmt::format("{} {}", look.path, look.changes_user),
                      "the loader drops LD_PRELOAD for it, and for all that it starts",
                      fmt::format("cp {} . && ./{}", look.path, look.path.substr(look.path.rfind('/') + 1))));
  }
  if (look.elf) judge_elf(look, *look.elf, &findings);
  if (!findings.empty()) return findings;
  const std::string found = look.elf ? fmt::format("{} takes the probe{}{}", look.path,
                                                   look.reports ? ", reports to forkpoint.h" : "", links_of(*look.elf))
                                     : fmt::format("{} is a script; its interpreter is looked at by itself", look.path);
  return {about_program("program", FindingKind::ok, found, "", "")};
}

Findings judge_torch_links(const std::string& path, SymbolPlace nccl) {
  if (path.empty()) return {};
  switch (nccl) {
    case SymbolPlace::elsewhere:
      return {{"torch-nccl", FindingKind::ok, kRecording, fmt::format("{} takes NCCL from a library", path), "", ""}};
    case SymbolPlace::exported:
      return {{"torch-nccl", FindingKind::note, kRecording,
               fmt::format("{} has NCCL linked into it, and exports it", path),
               "its calls come through the probe unless they were bound when it was linked; the run shows it", ""}};
    case SymbolPlace::inside:
      return {{"nccl-static", FindingKind::fix, kRecording, fmt::format("{} has NCCL linked into it", path),
               "its collectives do not come through the probe: they are not seen at level step and layer",
               "pip install --force-reinstall torch   # the wheels link NCCL dynamically"}};
    case SymbolPlace::absent:
      break;
  }
  return {{"torch-nccl", FindingKind::note, kRecording, fmt::format("{} names no NCCL", path),
           "collectives of torch's gloo are seen; NCCL's, if another library has it, where it is called by name", ""}};
}

Findings judge_job_line(const JobLineLook& look) {
  Findings findings;
  if (!look.drops_preload.empty()) {
    findings.push_back(
        {"preload-lost", FindingKind::fix, kRecording, fmt::format("`{}` {}", look.drops_preload, look.how),
         "the probe does not get to what it starts",
         fmt::format("{} ... forkpoint record -- CMD   # forkpoint within, not around", look.drops_preload)});
  }
  if (look.ignores_python_variables) {
    findings.push_back({"python-variables-ignored", FindingKind::fix, kRepeating,
                        "python is run with -E or -I, which ignores PYTHONHASHSEED",
                        "the order of sets of strings changes from process to process",
                        "PYTHONHASHSEED=0 python ...   # without -E and -I"});
  }
  return findings;
}

JobSeen look_at_run(const Run& run) {
  JobSeen seen;
  seen.ranks = static_cast<int>(run.streams().size());
  seen.world_size = run.world_size();
  seen.missing_ranks = run.missing_ranks();
  seen.gaps = lost_in(run, {});
  if (!seen.missing_ranks.empty() && !seen.gaps.empty()) seen.gaps.erase(seen.gaps.begin());  // said of them, and first
  for (const auto& stream : run.streams()) {
    const StreamHeader& header = stream->header();
    if (seen.step_base.empty()) seen.step_base = header.step_base;
    seen.on_gpu |= !header.device.empty() && header.device != "cpu";
    for (const auto& [key, value] : header.facts) seen.facts[key].insert(value);
    for (const CoverageLimit& limit : stream->coverage_limits()) {
      if (std::find(seen.limits.begin(), seen.limits.end(), limit) == seen.limits.end()) seen.limits.push_back(limit);
    }
    for (const Site& site : stream->sites()) {
      if (site.role == Role::batch) ++seen.batches;
      // As the torch bridge calls what it finds in an optimizer and in no module.
      const size_t group = site.tensor.find("group");
      if (!site.layer.empty() || group == std::string::npos || site.tensor.find(".param", group) == std::string::npos)
        continue;
      ++seen.unnamed;
      if (seen.unnamed_example.empty()) seen.unnamed_example = site.tensor;
    }
  }
  return seen;
}

Findings judge_seen(const JobSeen& seen, bool repeats) {
  Findings findings;
  const auto add = [&](const char* id, FindingKind kind, FindingAbout about, std::string found, std::string why,
                       std::string fix) {
    findings.push_back({id, kind, about, std::move(found), std::move(why), std::move(fix)});
  };
  for (const std::string& gap : seen.gaps)
    add("gap", FindingKind::fix, kRecording, gap, "something expected was lost: two such runs are incomparable", "");
  if (!seen.missing_ranks.empty()) {
    add("missing-ranks", FindingKind::fix, kRecording,
        fmt::format("{} of {} left no stream", rank_list(seen.missing_ranks), seen.world_size),
        "ranks on other machines write to folders of their own", "forkpoint merge -o RUN NODE_0/RUN NODE_1/RUN");
  }
  if (seen.step_base == "unknown")
    add("step-base", FindingKind::note, kRecording, "nothing says which step the job begins with",
        "after a resume the steps of two runs would not line up", "forkpoint record --first-step N -- CMD");
  if (seen.unnamed > 0) {
    add("unnamed-parameters", FindingKind::note, kRecording,
        fmt::format("{} of an optimizer belong to no module, as {}", counted(seen.unnamed, "record site"),
                    seen.unnamed_example),
        "a verdict names them by their place in the optimizer", "");
  }
  for (const CoverageLimit& limit : seen.limits) findings.push_back(judge_limit(limit));
  if (seen.batches == 0)
    add("data", FindingKind::note, kRepeating, "no batch was recorded: what the data loader gives was not looked at",
        "data that differ show at the first loss or gradient only", "");
  else if (repeats)
    add("data", FindingKind::ok, kRepeating, "both runs got the same batches, whoever loaded them", "", "");
  judge_settings(seen, repeats, &findings);
  return findings;
}

namespace {

bool is_torch(const JobSeen& seen) { return !fact(seen, "torch").empty(); }

std::string cause_of(const Verdict& verdict) {
  const Cause& cause = verdict.cause;
  std::string text = cause.cls.empty() || cause.cls == "unknown"
                         ? fmt::format("{}", fmt::join(cause.class_candidates, " or "))
                         : cause.cls;
  if (text.empty()) text = "cause unknown";
  if (!cause.evidence.empty()) text += ": " + cause.evidence.front();
  return text;
}

bool may_be(const Verdict& verdict, std::initializer_list<std::string_view> classes) {
  return std::any_of(classes.begin(), classes.end(), [&](std::string_view cls) { return verdict.cause.cls == cls; });
}

std::string fix_of(const PairLook& pair, const JobSeen& seen) {
  const Verdict& verdict = *pair.verdict;
  const bool from_the_start = verdict.first && verdict.first->in_prologue;
  if (is_torch(seen) && (may_be(verdict, {"initial_state", "rng_state"}) || from_the_start))
    return "torch.manual_seed(0); random.seed(0); numpy.random.seed(0)   # before the model is made";
  if (from_the_start) return "CMD --seed 1   # one seed in each run, however the command is told it";
  if (is_torch(seen) && may_be(verdict, {"data_order"}))
    return "DataLoader(..., generator=torch.Generator().manual_seed(0))";
  return fmt::format("forkpoint bisect {} {}", pair.run_a, pair.run_b);
}

bool has_cured(const PairLook& deterministic) {
  return deterministic.trouble.empty() && deterministic.verdict && deterministic.verdict->outcome == Outcome::identical &&
         deterministic.without && deterministic.without->outcome == Outcome::diverged;
}

Finding judge_deterministic(const PairLook& pair, const std::string& how) {
  Finding finding{"deterministic", FindingKind::note, kRepeating, "", "", how};
  if (!pair.trouble.empty() || !pair.verdict) {
    finding.kind = FindingKind::unknown;
    finding.found = fmt::format("in deterministic mode: {}", pair.trouble);
  } else if (pair.verdict->outcome == Outcome::identical &&
             (!pair.without || pair.without->outcome == Outcome::incomparable)) {
    finding.kind = FindingKind::unknown;
    finding.found = fmt::format("in deterministic mode two runs of {} are {}, and whether the job still differs without it could "
                                "not be looked at: {}", pair.steps, headline(*pair.verdict),
                                pair.without ? headline(*pair.without) : "a third run of it was not recorded to its end");
  } else if (pair.verdict->outcome == Outcome::identical && !has_cured(pair)) {
    finding.found = fmt::format("in deterministic mode two runs of {} are {}, and a third one without it is what the second was: "
                                "what differed did not come again", pair.steps, headline(*pair.verdict));
    finding.why = "a fault that comes rarely, or once: whether the mode keeps it away is not known";
    finding.fix = "";
  } else if (pair.verdict->outcome == Outcome::identical) {
    finding.found = fmt::format("in deterministic mode two runs of {} are {}", pair.steps, headline(*pair.verdict));
  } else if (pair.verdict->outcome == Outcome::diverged) {
    finding.found = fmt::format("deterministic mode does not cure it: {}", headline(*pair.verdict));
    finding.why = cause_of(*pair.verdict);
    finding.fix = fmt::format("forkpoint bisect {} {}", pair.run_a, pair.run_b);
  } else {
    finding.kind = FindingKind::unknown;
    finding.found = fmt::format("in deterministic mode: {}", headline(*pair.verdict));
  }
  return finding;
}

}  // namespace

Findings judge_pair(const PairLook& pair, const JobSeen& seen, const std::optional<PairLook>& deterministic,
                    const std::string& how) {
  constexpr char kWhy[] = "a divergence can be bisected only in a job that repeats";
  if (!pair.verdict) return {{"repeats", FindingKind::unknown, kRepeating, pair.trouble, kWhy, ""}};
  const Verdict& verdict = *pair.verdict;
  Findings findings;
  if (verdict.outcome == Outcome::diverged) {
    const bool cured = deterministic && has_cured(*deterministic);
    findings.push_back({"repeats", FindingKind::fix, kRepeating,
                        fmt::format("two runs of {}: {}", pair.steps, headline(verdict)), cause_of(verdict),
                        cured ? how : fix_of(pair, seen)});
  } else if (verdict.outcome == Outcome::incomparable || !pair.trouble.empty()) {
    // Equal as far as they went is no answer for the steps that were asked for.
    const std::string what = pair.trouble.empty() ? headline(verdict) : pair.trouble;
    findings.push_back(
        {"repeats", FindingKind::unknown, kRepeating, fmt::format("two runs of {}: {}", pair.steps, what), kWhy, ""});
  } else {
    findings.push_back(
        {"repeats", FindingKind::ok, kRepeating,
         fmt::format("two runs of {} are identical within coverage ({} on {}, level {})", pair.steps,
                     counted(verdict.coverage.records_compared, "record"),
                     counted(static_cast<uint64_t>(std::max(0, verdict.coverage.ranks_compared)), "rank"),
                     verdict.coverage.level),
         "", ""});
  }
  if (deterministic) findings.push_back(judge_deterministic(*deterministic, how));
  return findings;
}

}  // namespace forkpoint
