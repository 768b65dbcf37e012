#include "lib/doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace forkpoint {
namespace {

size_t count_of(const Findings& findings, FindingKind kind) {
  return static_cast<size_t>(
      std::count_if(findings.begin(), findings.end(), [&](const Finding& finding) { return finding.kind == kind; }));
}

size_t fixes_of(const Findings& findings, FindingAbout about) {
  return static_cast<size_t>(std::count_if(findings.begin(), findings.end(), [&](const Finding& finding) {
    return finding.kind == FindingKind::fix && finding.about == about;
  }));
}

std::string keeps(size_t count, bool with_noun, std::string_view what) {
  if (with_noun) return fmt::format("{} {} {}", count, count == 1 ? "thing keeps" : "things keep", what);
  return fmt::format("{} {} {}", count, count == 1 ? "keeps" : "keep", what);
}

std::string nothing_found(const Findings& findings, DoctorScope scope, size_t unknown) {
  if (unknown > 0) return "nothing to fix in what could be looked at";
  if (scope == DoctorScope::machine) return "nothing to fix was found on this machine and in its environment";
  if (scope == DoctorScope::job_not_run) return "nothing to fix was found; the job was not run";
  const auto repeats =
      std::find_if(findings.begin(), findings.end(), [](const Finding& f) { return f.id == "repeats"; });
  if (repeats == findings.end() || repeats->kind != FindingKind::ok) return "nothing to fix was found";
  return "nothing to fix: " + repeats->found;
}

nlohmann::ordered_json text_or_null(const std::string& text) {
  return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
}

}  // namespace

std::string_view name(FindingKind kind) {
  switch (kind) {
    case FindingKind::fix:
      return "fix";
    case FindingKind::unknown:
      return "unknown";
    case FindingKind::note:
      return "note";
    case FindingKind::ok:
      return "ok";
  }
  return "unknown";
}

std::string_view name(FindingAbout about) { return about == FindingAbout::repeating ? "repeating" : "recording"; }

std::string doctor_headline(const Findings& findings, DoctorScope scope) {
  const size_t repeating = fixes_of(findings, FindingAbout::repeating);
  const size_t recording = fixes_of(findings, FindingAbout::recording);
  const size_t unknown = count_of(findings, FindingKind::unknown);
  const bool job = scope != DoctorScope::machine;
  std::string text;
  if (repeating > 0) text = keeps(repeating, true, job ? "this job from repeating" : "jobs from repeating here");
  if (recording > 0) {
    const std::string_view what = job ? (repeating ? "forkpoint from seeing it" : "forkpoint from seeing this job")
                                      : (repeating ? "forkpoint from seeing them" : "forkpoint from seeing jobs here");
    text += (text.empty() ? "" : ", ") + keeps(recording, text.empty(), what);
  }
  if (text.empty()) text = nothing_found(findings, scope, unknown);
  if (unknown > 0) text += fmt::format(", {} could not be looked at", unknown);
  return text;
}

int doctor_exit_status(const Findings& findings) {
  if (count_of(findings, FindingKind::fix) > 0) return 1;
  return count_of(findings, FindingKind::unknown) > 0 ? 2 : 0;
}

nlohmann::ordered_json to_json(const Findings& findings, DoctorScope scope, const std::vector<std::string>& runs) {
  static constexpr const char* kVerdicts[] = {"ok", "fix", "unknown"};
  nlohmann::ordered_json object;
  object["verdict"] = kVerdicts[doctor_exit_status(findings)];
  object["summary"] = doctor_headline(findings, scope);
  object["job_was_run"] = scope == DoctorScope::machine ? nlohmann::ordered_json(nullptr)
                                                        : nlohmann::ordered_json(scope == DoctorScope::job_run);
  object["findings"] = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    object["findings"].push_back({{"id", finding.id},
                                  {"kind", name(finding.kind)},
                                  {"about", name(finding.about)},
                                  {"found", text_or_null(finding.found)},
                                  {"why", text_or_null(finding.why)},
                                  {"fix", text_or_null(finding.fix)}});
  }
  object["runs"] = runs;
  return object;
}

void sort_findings(Findings* findings) {
  std::stable_sort(findings->begin(), findings->end(),
                   [](const Finding& left, const Finding& right) { return left.kind < right.kind; });
}

}  // namespace forkpoint
