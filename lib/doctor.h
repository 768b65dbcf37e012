// What keeps a job from repeating itself bit by bit, and what keeps forkpoint from seeing it: findings, each with what
// was found, why it matters and what to do. Judgements are pure functions (doctor_machine.h, doctor_job.h); who looks
// is cli/.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

// unknown: could not be looked at, or nothing follows from what was seen. Never counted as ok.
enum class FindingKind : uint8_t { fix, unknown, note, ok };
std::string_view name(FindingKind kind);  // "fix"
// What it is about: does the job repeat itself, can forkpoint record it.
enum class FindingAbout : uint8_t { repeating, recording };
std::string_view name(FindingAbout about);  // "repeating"

struct Finding {
  std::string id;  // kebab-case, stable, for scripts; several findings may have one
  FindingKind kind = FindingKind::unknown;
  FindingAbout about = FindingAbout::recording;
  std::string found;  // a sentence without its full stop
  std::string why;    // why it matters; of `ok` it may be empty
  std::string fix;    // one line that can be copied; empty where there is none
};
using Findings = std::vector<Finding>;

// What was looked at besides the machine.
enum class DoctorScope : uint8_t { machine, job_not_run, job_run };

// One sentence: "3 things keep this job from repeating, 1 keeps forkpoint from seeing it".
std::string doctor_headline(const Findings& findings, DoctorScope scope);
// 0 nothing to fix, 1 something to fix, 2 nothing to fix but something could not be looked at.
int doctor_exit_status(const Findings& findings);
// {"verdict": "ok|fix|unknown", "summary", "job_was_run": true|false|null, "findings": [{"id", "kind":
// "fix|unknown|note|ok",
//  "about": "repeating|recording", "found", "why", "fix"}], "runs": [folders of the recorded runs]}. Empty text is
//  null.
nlohmann::ordered_json to_json(const Findings& findings, DoctorScope scope, const std::vector<std::string>& runs);
// fix before unknown before note before ok; within a kind in the order of coming.
void sort_findings(Findings* findings);

}  // namespace forkpoint
