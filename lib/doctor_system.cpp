// Python, the place for a run, the operating system, and the environment.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "lib/doctor_machine.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr auto kRepeating = FindingAbout::repeating;
constexpr auto kRecording = FindingAbout::recording;
constexpr uint64_t kGiB = 1ull << 30;
constexpr uint64_t kLittleRoomBytes = kGiB, kLittleSharedBytes = kGiB;  // a container's /dev/shm has 64 MiB unless told
constexpr uint64_t kFewFiles = 1000, kFewOpenFiles = 1024;

std::string gibibytes(uint64_t bytes) { return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / kGiB); }

bool is_older(std::string_view version, const std::vector<int>& least) { return version_numbers(version) < least; }

Finding torch_finding(const std::string& torch) {
  constexpr char kWhy[] = "layers, gradients and optimizers are seen through hooks that need torch 2.4";
  if (torch.empty())
    return {"torch",
            FindingKind::note,
            kRecording,
            "no PyTorch in this python",
            "its jobs are seen where they call forkpoint.h, or at level launch",
            ""};
  if (version_numbers(torch).size() < 2)
    return {"torch",    FindingKind::unknown,
            kRecording, fmt::format("PyTorch of a version that is no number: {}", torch),
            kWhy,       ""};
  if (is_older(torch, {2, 4}))
    return {"torch", FindingKind::fix, kRecording, fmt::format("PyTorch {}", torch), kWhy, "pip install 'torch>=2.4'"};
  return {"torch", FindingKind::ok, kRecording, fmt::format("PyTorch {}", torch), "", ""};
}

}  // namespace

Findings judge_python(const Look& look, const std::string& name, const std::string& path, bool is_the_jobs) {
  constexpr char kWhy[] = "the hooks need CPython 3.9 or newer";
  if (path.empty())
    return {{"python", FindingKind::note, kRecording, fmt::format("no {} on the PATH", name),
             "jobs of Python would bring their own", ""}};
  const auto version = look.value("version"), implementation = look.value("implementation");
  if (!version || !implementation) {
    Look bad = look;
    if (bad.trouble.empty()) bad.trouble = "said nothing";
    return {not_looked("python", kRecording, fmt::format("asking {}", path), bad, kWhy)};
  }
  const std::string what = fmt::format("{} {} ({})", *implementation == "cpython" ? "CPython" : *implementation,
                                       *version, look.value("executable").value_or(path));
  Findings findings;
  if (*implementation != "cpython" || is_older(*version, {3, 9})) {
    findings.push_back(
        {"python", FindingKind::fix, kRecording, what, kWhy, "python3.11 -m venv .venv && . .venv/bin/activate"});
  } else if (look.value("gil") == "0") {
    findings.push_back({"python", FindingKind::fix, kRecording, what + ", without a global interpreter lock",
                        "the hooks were made for the usual build", "python3.11 -m venv .venv && . .venv/bin/activate"});
  } else {
    findings.push_back({"python", FindingKind::ok, kRecording, what, "", ""});
  }
  if (!look.whole || !look.value("torch")) {
    Look bad = look;
    if (bad.trouble.empty()) bad.trouble = look.value("error").value_or("said nothing of it");
    findings.push_back(not_looked("torch", kRecording, fmt::format("asking {} for PyTorch", path), bad, kWhy));
  } else {
    findings.push_back(torch_finding(*look.value("torch")));
  }
  if (!is_the_jobs) {
    // Which python a job will use is not known yet.
    for (Finding& finding : findings) finding.found += fmt::format(", as {} on the PATH", name);
  }
  return findings;
}

Findings judge_run_folder(const FolderLook& look) {
  if (!look.trouble.empty()) {
    return {{"run-folder", FindingKind::fix, kRecording, fmt::format("{}: {}", look.path, look.trouble),
             "a run is written there", "forkpoint doctor -o \"$(mktemp -d)/run\""}};
  }
  Findings findings{{"run-folder", FindingKind::ok, kRecording,
                     fmt::format("{} can be made, written and locked", look.path), "", ""}};
  if (!look.known_size) {
    findings.push_back({"disk-room", FindingKind::unknown, kRecording,
                        fmt::format("{}: how much room there is cannot be asked", look.nearest),
                        "a full disk cuts the recording", ""});
  } else if (look.free_bytes < kLittleRoomBytes || (look.free_files != 0 && look.free_files < kFewFiles)) {
    findings.push_back({"disk-room", FindingKind::fix, kRecording,
                        look.free_bytes < kLittleRoomBytes
                            ? fmt::format("{}: {} are free", look.nearest, gibibytes(look.free_bytes))
                            : fmt::format("{}: room for {} more files", look.nearest, look.free_files),
                        "a full disk cuts the recording (the job goes on)", fmt::format("du -sh {}/*", look.nearest)});
  } else {
    findings.push_back({"disk-room", FindingKind::ok, kRecording,
                        fmt::format("{}: {} are free", look.nearest, gibibytes(look.free_bytes)), "", ""});
  }
  return findings;
}

namespace {

Finding shared_memory(const SystemLook& look) {
  constexpr char kWhy[] = "NCCL and data loaders' workers pass their data through it and die when it is full";
  if (!look.shared_memory_bytes)
    return {"shared-memory",
            FindingKind::fix,
            kRecording,
            fmt::format("/dev/shm: {}", look.shared_memory_trouble),
            kWhy,
            "sudo mount -t tmpfs -o rw,nosuid,nodev,size=50% tmpfs /dev/shm"};
  if (*look.shared_memory_bytes < kLittleSharedBytes)
    return {"shared-memory",
            FindingKind::note,
            kRecording,
            fmt::format("/dev/shm holds {}", gibibytes(*look.shared_memory_bytes)),
            kWhy,
            "docker run --shm-size=8g ..."};
  return {"shared-memory",
          FindingKind::ok,
          kRecording,
          fmt::format("/dev/shm holds {}", gibibytes(*look.shared_memory_bytes)),
          "",
          ""};
}

}  // namespace

Findings judge_system(const SystemLook& look) {
  Findings findings{shared_memory(look)};
  const auto add = [&](const char* id, FindingKind kind, FindingAbout about, std::string found, const char* why,
                       std::string fix) {
    findings.push_back({id, kind, about, std::move(found), why, std::move(fix)});
  };
  if (!look.sockets_trouble.empty())
    add("sockets", FindingKind::fix, kRecording, look.sockets_trouble,
        "a job that runs already cannot be reached by `forkpoint attach`", look.sockets_hint);
  else
    add("sockets", FindingKind::ok, kRecording, fmt::format("{} can be used for `forkpoint attach`", look.sockets), "",
        "");
  if (look.fixed_addresses)
    add("addresses", FindingKind::ok, kRepeating, "a command can be run without address randomisation", "", "");
  else
    add("addresses", FindingKind::note, kRepeating, "address randomisation cannot be switched off here",
        "at level launch padding of kernels' parameters may hold other addresses in each run",
        "docker run --security-opt seccomp=unconfined ...");
  if (look.file_size_limit_bytes) {
    add("file-size-limit", FindingKind::fix, kRecording,
        fmt::format("files may not grow beyond {} bytes (ulimit -f)", grouped(*look.file_size_limit_bytes)),
        "a rank's stream is cut there", "ulimit -f unlimited");
  }
  if (look.address_space_limit_bytes) {
    add("address-space-limit", FindingKind::note, kRecording,
        fmt::format("{} of address space (ulimit -v)", gibibytes(*look.address_space_limit_bytes)),
        "CUDA reserves more than the memory of all GPUs", "ulimit -v unlimited");
  }
  if (look.open_files_limit < kFewOpenFiles) {
    add("open-files-limit", FindingKind::note, kRecording,
        fmt::format("{} open files a process (ulimit -n)", look.open_files_limit), "ranks and data loaders open many",
        "ulimit -n 65536");
  }
  return findings;
}

namespace {

// One variable by itself: is it what is in conflict?
bool conflicts(const KnobVariable& variable, const std::map<std::string, std::string>& users) {
  Knob one;
  one.variables = {variable};
  return resolve({&one}, users).outcomes.front().state == KnobState::conflict;
}

// The user's flags, the one that is in conflict exchanged.
std::string with_flag(std::string_view users, std::string_view flag) {
  const std::string_view flag_name = flag.substr(0, flag.find('='));
  std::string text;
  while (!users.empty()) {
    const size_t end = std::min(users.find(' '), users.size());
    const std::string_view word = users.substr(0, end);
    users.remove_prefix(std::min(end + 1, users.size()));
    if (!word.empty() && word.substr(0, word.find('=')) != flag_name) text += std::string(word) + " ";
  }
  return text + std::string(flag);
}

std::string fix_of(const KnobOutcome& outcome, const std::map<std::string, std::string>& users) {
  std::map<std::string, std::string> values;
  for (const KnobVariable& variable : outcome.knob->variables) {
    // A value may also stand in a file of NCCL's, which a variable overrides.
    const bool in_a_file = !users.contains(std::string(variable.name)) &&
                           outcome.problem.find(std::string(variable.name) + "=") != std::string::npos;
    if (!in_a_file && !conflicts(variable, users)) continue;
    const std::string key(variable.name);
    const auto planned = values.find(key);
    values[key] = variable.is_flag
                      ? with_flag(planned == values.end() ? users.at(key) : planned->second, variable.value)
                      : std::string(variable.value);
  }
  std::string text;
  for (const auto& [name, value] : values) {
    const bool quote = value.find_first_of(" ^;:*$") != std::string::npos;
    text += fmt::format("{}{}={}", text.empty() ? "export " : " ", name, quote ? "'" + value + "'" : value);
  }
  return text;
}

std::string id_of(const Knob& knob) { return "knob-" + std::string(knob.name); }

}  // namespace

Findings judge_knobs(const KnobPlan& plan, const std::map<std::string, std::string>& users) {
  Findings findings;
  std::string unset, changes;
  size_t count = 0;
  for (const KnobOutcome& outcome : plan.outcomes) {
    const Knob& knob = *outcome.knob;
    if (outcome.state == KnobState::conflict) {
      findings.push_back({id_of(knob), knob.by_default ? FindingKind::fix : FindingKind::note, kRepeating,
                          fmt::format("{} is set", outcome.value), std::string(knob.why), fix_of(outcome, users)});
    } else if (outcome.state == KnobState::kept && !knob.in_process) {
      findings.push_back({id_of(knob), FindingKind::ok, kRepeating, fmt::format("{} is set", outcome.value), "", ""});
    } else if (knob.by_default) {
      ++count;
      unset += fmt::format("{}{}", unset.empty() ? "" : ", ", knob.name);
      const std::string variables = outcome.value.substr(0, outcome.value.find("; in process"));
      if (!variables.empty() && variables != "in process")
        changes += fmt::format("{}{}", changes.empty() ? "" : ", ", variables);
    }
  }
  if (count > 0) {
    findings.push_back({"knobs-unset", FindingKind::note, kRepeating,
                        fmt::format("{} of deterministic mode are not set: {}", counted(count, "knob"), unset),
                        fmt::format("a job may need some of them; --deterministic would set {}", changes), ""});
  }
  return findings;
}

Findings judge_other_variables(const std::map<std::string, std::string>& numeric_environment) {
  std::string text;
  for (const auto& [name, value] : numeric_environment) {
    const bool is_knob = std::any_of(knob_table().begin(), knob_table().end(), [&](const Knob& knob) {
      return std::any_of(knob.variables.begin(), knob.variables.end(),
                         [&](const KnobVariable& variable) { return variable.name == name; });
    });
    if (!is_knob && name != "LD_PRELOAD") text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  if (text.empty()) return {};
  return {{"environment", FindingKind::note, kRepeating, text,
           "results can depend on these: they are kept in each run's manifest", ""}};
}

}  // namespace forkpoint
