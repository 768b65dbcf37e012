#include "lib/doctor_machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

namespace forkpoint {
namespace {

constexpr auto kRecording = FindingAbout::recording;
constexpr char kLookLonger[] = "forkpoint doctor --look-timeout 300";

std::string variable(const std::map<std::string, std::string>& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

}  // namespace

Finding not_looked(std::string id, FindingAbout about, const std::string& what, const Look& look, std::string why) {
  const std::string step = look.where().empty() ? "" : fmt::format(" (at: {})", look.where());
  return {std::move(id),  FindingKind::unknown,
          about,          fmt::format("{} {}{}", what, look.trouble, step),
          std::move(why), look.trouble.starts_with("did not end") ? kLookLonger : ""};
}

std::optional<std::string> Look::value(std::string_view key) const {
  for (const auto& [name, text] : lines) {
    if (name == key) return text;
  }
  return std::nullopt;
}

std::optional<int64_t> Look::number(std::string_view key) const {
  const auto text = value(key);
  int64_t result = 0;
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), result);
  return error == std::errc() && end == text->data() + text->size() ? std::optional(result) : std::nullopt;
}

std::vector<std::string> Look::values(std::string_view key) const {
  std::vector<std::string> found;
  for (const auto& [name, text] : lines) {
    if (name == key) found.push_back(text);
  }
  return found;
}

std::string Look::where() const {
  const auto steps = values("at");
  return steps.empty() ? "" : steps.back();
}

Look parse_look(std::string_view text) {
  Look look;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    const size_t equals = line.find('=');
    // A line without its end was cut where the child died.
    if (equals != line.npos && end < text.size())
      look.lines.emplace_back(line.substr(0, equals), line.substr(equals + 1));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return look;
}

std::vector<int> version_numbers(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty() && std::isdigit(static_cast<unsigned char>(text.front()))) {
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc()) break;
    numbers.push_back(number);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (text.empty() || text.front() != '.') break;
    text.remove_prefix(1);
  }
  return numbers;
}

Findings judge_probe(const std::string& path, const std::string& trouble, const std::string& hint, const Look& look,
                     int abi) {
  const std::string why = "without it nothing of a job is recorded";
  if (path.empty()) return {{"probe", FindingKind::fix, kRecording, trouble, why, hint}};
  if (!look.whole) return {not_looked("probe", kRecording, fmt::format("loading {}", path), look, why)};
  if (const auto error = look.value("error")) {
    return {{"probe", FindingKind::fix, kRecording, fmt::format("{} cannot be loaded: {}", path, *error), why,
             "cmake --build build --target forkpoint_probe"}};
  }
  const auto found = look.number("abi");
  if (found != abi) {
    return {{"probe-version", FindingKind::fix, kRecording,
             fmt::format("{} speaks version {} of the contract, this program version {}", path,
                         found ? std::to_string(*found) : "(it does not say)", abi),
             "what this program asks for would not reach it", "cmake --build build --target forkpoint_probe"}};
  }
  return {{"probe", FindingKind::ok, kRecording, fmt::format("{}, contract version {}", path, abi), "", ""}};
}

Findings judge_preload(const std::vector<PreloadEntry>& entries, bool secure_execution, const std::string& probe) {
  Findings findings;
  if (secure_execution) {
    findings.push_back({"secure-execution", FindingKind::fix, kRecording,
                        "this program runs set-uid, set-gid or with capabilities",
                        "the loader then drops LD_PRELOAD, here and in all that is started",
                        "chmod u-s,g-s \"$(command -v forkpoint)\""});
  }
  for (const PreloadEntry& entry : entries) {
    if (entry.path == probe) continue;
    if (!entry.trouble.empty()) {
      findings.push_back(
          {"preload", FindingKind::fix, kRecording, fmt::format("LD_PRELOAD names {}: {}", entry.path, entry.trouble),
           "the loader complains about it in each process of a job, and goes on without it", "unset LD_PRELOAD"});
    } else if (entry.other_probe) {
      findings.push_back({"preload-second-probe", FindingKind::fix, kRecording,
                          fmt::format("LD_PRELOAD names another probe, {}, before {}", entry.path, probe),
                          "the first one that is loaded gets the calls, and may be of another version",
                          "unset LD_PRELOAD"});
    } else if (entry.is_tool) {
      findings.push_back({"preload-tool", FindingKind::fix, kRecording,
                          fmt::format("LD_PRELOAD names a profiler's library, {}", entry.path),
                          "one tool of a process can hold CUPTI: kernel launches may not be recorded beside it",
                          "unset LD_PRELOAD"});
    } else {
      findings.push_back(
          {"preload", FindingKind::note, kRecording,
           fmt::format("LD_PRELOAD names {}{}", entry.path, entry.has_nccl ? ", which has functions of NCCL" : ""),
           entry.has_nccl ? "it comes before the probe: calls that it does not pass on are not seen"
                          : "it is loaded before the probe; the two are not known to disturb each other",
           ""});
    }
  }
  const bool clean =
      std::none_of(findings.begin(), findings.end(), [](const Finding& f) { return f.kind == FindingKind::fix; });
  if (clean)
    findings.push_back({"preload", FindingKind::ok, kRecording,
                        entries.empty() ? "LD_PRELOAD is not set" : "LD_PRELOAD can be added to", "", ""});
  return findings;
}

Findings judge_tools(const std::map<std::string, std::string>& environment, const std::string& probe) {
  Findings findings;
  const auto add = [&](const char* id, FindingKind kind, std::string found, const char* why, std::string fix) {
    findings.push_back({id, kind, kRecording, std::move(found), why, std::move(fix)});
  };
  const std::string cuda = variable(environment, "CUDA_INJECTION64_PATH"),
                    nvtx = variable(environment, "NVTX_INJECTION64_PATH");
  if (!cuda.empty() && cuda != probe) {
    add("cuda-injection", FindingKind::fix, fmt::format("CUDA_INJECTION64_PATH names another tool, {}", cuda),
        "the driver loads one tool: kernel launches are not recorded", "unset CUDA_INJECTION64_PATH");
  }
  if (!nvtx.empty() && nvtx != probe) {
    add("nvtx-injection", FindingKind::fix, fmt::format("NVTX_INJECTION64_PATH names another tool, {}", nvtx),
        "NVTX loads one tool: layers and steps from ranges are not seen", "unset NVTX_INJECTION64_PATH");
  }
  if (!variable(environment, "KINETO_USE_DAEMON").empty()) {
    add("kineto-daemon", FindingKind::note, "KINETO_USE_DAEMON is set",
        "PyTorch's profiler may be told to take CUPTI while a job is recorded; launches would then be missing",
        "unset KINETO_USE_DAEMON");
  }
  if (variable(environment, "FORKPOINT_TORCH") == "0") {
    add("torch-left-alone", FindingKind::fix, "FORKPOINT_TORCH=0 is set",
        "PyTorch's layers, gradients and optimizers are not seen", "unset FORKPOINT_TORCH");
  }
  if (findings.empty()) add("tools", FindingKind::ok, "no other tool is asked for by the environment", "", "");
  return findings;
}

}  // namespace forkpoint
