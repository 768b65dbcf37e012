#include "lib/diff.h"

#include <fmt/format.h>

#include "lib/diff_map.h"
#include "lib/diff_verdict.h"
#include "lib/error.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

void add_blockers(const Findings& findings, const Coverage& coverage, std::vector<std::string>* blockers) {
  const Alignment& alignment = findings.input.alignment;
  *blockers = alignment.blockers;
  const auto& unread = findings.input.scan.gaps;
  if (!unread.empty()) {
    blockers->push_back(unread.size() == 1
                            ? unread[0]
                            : fmt::format("{} steps could not be read, first: {}", unread.size(), unread[0]));
  }
  // --steps from there on asks for these steps alone.
  if (!(findings.options.first_step && *findings.options.first_step >= alignment.begin)) {
    blockers->insert(blockers->end(), findings.loads.unmatched.begin(), findings.loads.unmatched.end());
  }
  if (findings.resharding.not_comparable > 0) {
    blockers->push_back(fmt::format("{} sharded in another way could not be put together ({})",
                                    counted(findings.resharding.not_comparable, "tensor"), findings.resharding.why));
  }
  if (coverage.steps_compared == 0 && alignment.blockers.empty())
    blockers->push_back("the runs have no complete step in common");
  if (coverage.records_compared == 0) blockers->push_back("the runs have no record in common");
}

bool something_differs(const Findings& findings) {
  const Origins& origins = findings.origins;
  return !origins.list.empty() || origins.evaluation || origins.permutation || findings.structure.first != nullptr;
}

void add_common_notes(const Findings& findings, Verdict* verdict) {
  const auto append = [&](const std::vector<std::string>& texts) {
    verdict->notes.insert(verdict->notes.end(), texts.begin(), texts.end());
  };
  const Alignment& alignment = findings.input.alignment;
  append(alignment.notes);
  if (findings.loads.resumed) {
    const bool b_later = alignment.start == Start::b_later;
    verdict->notes.push_back(
        fmt::format("run {} begins at step {}: compared from there on, and what it loaded with run {}'s state at "
                    "the end of step {}",
                    b_later ? 'B' : 'A', alignment.begin, b_later ? 'A' : 'B', alignment.begin - 1));
  }
  append(findings.structure.sentences);
  append(findings.structure.evaluation);
  if (findings.resharding.compared > 0) {
    verdict->notes.push_back(fmt::format("{} cut into other shards in run B; put together, they were compared",
                                         findings.resharding.compared == 1
                                             ? "one tensor is"
                                             : counted(findings.resharding.compared, "tensor") + " are"));
  }
  for (const std::string& text : environment_differences(findings.input.run_a, findings.input.run_b)) {
    verdict->notes.push_back("environment: " + text);
  }
  append(manifest_notes(findings.input.run_a, findings.input.run_b));
}

// Identical, unless the files turn out to be damaged.
void say_identical(const Findings& findings, Verdict* verdict) {
  const OriginInput& input = findings.input;
  if (findings.options.verify_checksums) {
    const auto damage = verify_runs(input.run_a, input.run_b, findings.options, &verdict->coverage.frames_verified);
    if (!damage.empty()) {
      verdict->gaps.insert(verdict->gaps.end(), damage.begin(), damage.end());
      verdict->reason =
          incomparable_reason(damage, verdict->coverage.steps_compared, verdict->coverage.records_compared);
      return;
    }
  } else {
    verdict->coverage.limits.push_back("the checksums of the files were not verified");
  }
  verdict->outcome = Outcome::identical;
  verdict->reason = fmt::format("{} agrees ({}){}",
                                input.alignment.levels_differ ? "every record that both runs have" : "every record of both runs",
                                counted(verdict->coverage.records_compared, "record"),
                                findings.options.verify_checksums ? "" : "; the files were not verified");
}

}  // namespace

Verdict diff(const Run& a, const Run& b, const DiffOptions& options) {
  const Alignment alignment = align(a, b, options);
  if (alignment.other_world) return diff_other_world(a, b, alignment, options);
  Joins joins(alignment.ranks, alignment.level);
  MapBuilder map;
  const Scan scan = scan_runs(alignment, options, &joins, options.want_map ? &map : nullptr);
  const Loads loads = compare_loads(alignment, &joins);
  const Resharding resharding = assemble_resharded(alignment, scan, &joins, options.threads);
  const OriginInput input{a, b, alignment, scan, joins, loads.differences, resharding.differing, options.threads,
                          loaded_before(alignment, loads)};
  const Origins origins = find_origins(input);
  const StructureNotes structure = structure_notes(scan, alignment, &joins);
  const Findings findings{input, options, origins, structure, loads, resharding};

  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.coverage = coverage_of(findings);
  verdict.gaps = alignment.gaps;
  verdict.gaps.insert(verdict.gaps.end(), scan.gaps.begin(), scan.gaps.end());
  std::vector<std::string> blockers;
  add_blockers(findings, verdict.coverage, &blockers);
  if (something_differs(findings) && verdict.coverage.records_compared > 0) {
    write_divergence(findings, &verdict);
    verdict.notes.insert(verdict.notes.end(), blockers.begin(), blockers.end());
  } else if (!blockers.empty()) {
    verdict.reason = incomparable_reason(blockers, verdict.coverage.steps_compared, verdict.coverage.records_compared);
    if (blockers.size() > 2) verdict.notes.insert(verdict.notes.end(), blockers.begin(), blockers.end());
  } else {
    say_identical(findings, &verdict);
  }
  add_common_notes(findings, &verdict);
  if (options.want_map) map.finish(&verdict);
  return verdict;
}

}  // namespace forkpoint
