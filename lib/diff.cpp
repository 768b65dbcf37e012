#include "lib/diff.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/diff_map.h"
#include "lib/diff_verdict.h"
#include "lib/error.h"
#include "lib/evaluation.h"
#include "lib/launch_sinks.h"
#include "lib/recompute.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

// A program that knows no steps: all its launches stand before the first one, on every rank, and are whole.
bool whole_program_before_steps(const Findings& findings) {
  const Alignment& alignment = findings.input.alignment;
  if (!findings.launches.compared || alignment.begin != kPrologueStep) return false;
  return std::all_of(alignment.ranks.begin(), alignment.ranks.end(),
                     [](const RankPair& pair) { return pair.steps.size() == 1 && pair.steps[0].complete; });
}

bool something_differs(const Findings& findings) {
  const Origins& origins = findings.origins;
  return !origins.list.empty() || origins.evaluation || origins.permutation || findings.structure.first != nullptr ||
         launches_diverge(findings.launches);
}

// Asked for, and not to be had (no CUPTI, or another tool has it): alike in both runs, and still nobody has looked.
void add_unseen_launches(const Findings& findings, std::vector<std::string>* blockers) {
  constexpr std::string_view kUnseen = "kernel launches were not recorded";
  if (findings.input.alignment.level != Level::launch) return;
  for (const RankPair& pair : findings.input.alignment.ranks) {
    for (const auto& [stream, run] : {std::pair(pair.a, 'A'), std::pair(pair.b, 'B')}) {
      for (const CoverageLimit& limit : stream->coverage_limits()) {
        if (!limit.what.starts_with(kUnseen)) continue;
        return blockers->push_back(fmt::format("run {}, rank {}: {}", run, pair.rank, limit.what));
      }
    }
  }
}

// Has the run that sees modules which rest recorded any that the other has not, or anything else besides?
bool rest_unseen(const Findings& findings) {
  const Alignment& alignment = findings.input.alignment;
  const bool in_a = alignment.uncalled_unseen_in == 'A';
  if (alignment.uncalled_unseen_in == 0 || !findings.options.limits_alike) return false;
  for (const OneSided& entry : findings.input.scan.one_sided) {
    if (entry.side == (in_a ? OneSided::only_b : OneSided::only_a)) return true;
  }
  for (const RankPair& pair : alignment.ranks) {
    for (const StepPair& step : pair.steps) {
      const StepSummary &a = pair.a->steps()[step.a], &b = pair.b->steps()[step.b];
      const StepSummary &unseen = in_a ? a : b, &seen = in_a ? b : a;
      if (unseen.eval_records == 0 && seen.eval_records > 0) return true;
    }
  }
  return false;
}

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
  if (rest_unseen(findings)) {
    blockers->push_back(fmt::format("not seen: {}, as long as nobody calls them, in run {}; the other recorded more",
                                    kUncalledLimit, alignment.uncalled_unseen_in));
  }
  blockers->insert(blockers->end(), findings.set_up.unsure.begin(), findings.set_up.unsure.end());
  blockers->insert(blockers->end(), findings.relaid.not_shown.begin(), findings.relaid.not_shown.end());
  if (findings.resharding.not_comparable > 0) {
    blockers->push_back(fmt::format("{} sharded in another way could not be put together ({})",
                                    counted(findings.resharding.not_comparable, "tensor"), findings.resharding.why));
  }
  if (coverage.steps_compared == 0 && alignment.blockers.empty() && !whole_program_before_steps(findings))
    blockers->push_back("the runs have no complete step in common");
  if (coverage.records_compared == 0 && coverage.launches_compared == 0)
    blockers->push_back("the runs have no record in common");
  const auto launches = launch_blockers(findings.launches);
  blockers->insert(blockers->end(), launches.begin(), launches.end());
  add_unseen_launches(findings, blockers);
  if (!findings.launches.compared || something_differs(findings)) return;
  const auto unseen = sink_blockers(findings.input, coverage.records_compared, launches_in_one_run(findings.launches));
  blockers->insert(blockers->end(), unseen.begin(), unseen.end());
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
        fmt::format("run {} begins at step {}: compared from {} on, and what it loaded with run {}'s state at "
                    "the end of step {}",
                    b_later ? 'B' : 'A', alignment.begun,
                    alignment.begun == alignment.begin ? "there" : fmt::format("step {}", alignment.begin),
                    b_later ? 'A' : 'B', alignment.begun - 1));
  }
  append(findings.set_up.sentences);
  append(findings.structure.sentences);
  append(findings.relaid.sentences);
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
  append(launch_notes(findings.input, findings.launches));
  // Looked for in one step: where they part, else the first. A job that does not recompute what it computed never does.
  const int64_t step = verdict->first && !verdict->first->in_prologue ? verdict->first->step : alignment.begin;
  append(recompute_notes(findings.input.run_a, "run A", step));
  append(recompute_notes(findings.input.run_b, "run B", step - alignment.offset_b));
}

// Of the steps that were found equal unread, only the rows of all kinds are known before the files are checked.
void count_launches(const Findings& findings, const Verified& verified, Coverage* coverage) {
  if (!findings.launches.compared) return;
  coverage->launches_compared = coverage->buffers_compared = 0;
  for (size_t p = 0; p < findings.launches.steps.size(); ++p) {
    const RankPair& pair = findings.input.alignment.ranks[p];
    const auto counts = verified.launches.find(pair.rank);
    for (size_t s = 0; s < pair.steps.size(); ++s) {
      const LaunchCounts& known = findings.launches.steps[p][s];
      const bool unread = known.equal && known.buffers == 0 && counts != verified.launches.end();
      coverage->launches_compared += unread ? counts->second[pair.steps[s].a].work : known.launches;
      coverage->buffers_compared += unread ? counts->second[pair.steps[s].a].buffers : known.buffers;
    }
  }
}

// Identical, unless the files turn out to be damaged.
void say_identical(const Findings& findings, Verdict* verdict) {
  const OriginInput& input = findings.input;
  if (findings.options.verify_checksums) {
    const Verified verified = verify_runs(input.run_a, input.run_b, findings.options);
    verdict->coverage.frames_verified = verified.frames;
    count_launches(findings, verified, &verdict->coverage);
    if (!verified.damage.empty()) {
      verdict->gaps.insert(verdict->gaps.end(), verified.damage.begin(), verified.damage.end());
      verdict->reason =
          incomparable_reason(verified.damage, verdict->coverage.steps_compared, verdict->coverage.records_compared);
      return;
    }
  } else {
    verdict->coverage.limits.push_back("the checksums of the files were not verified");
  }
  verdict->outcome = Outcome::identical;
  const uint64_t launches = verdict->coverage.launches_compared;
  verdict->until = until_failure(input.run_a, input.run_b);
  const bool compares_all =
      !input.alignment.levels_differ && findings.set_up.sentences.empty() && findings.relaid.limit.empty();
  verdict->reason =
      fmt::format("{} agrees ({}{}){}{}",
                  compares_all ? "every record of both runs" : "every record that both runs have",
                  counted(verdict->coverage.records_compared, "record"),
                  launches == 0 ? "" : fmt::format(", and what left the devices in {}", counted(launches, "launch")),
                  verdict->until.empty() ? "" : fmt::format(" {}", verdict->until),
                  findings.options.verify_checksums ? "" : "; the files were not verified");
}

// Nothing of the two has a name in common: whatever was compared would be an accident.
Verdict masked_in_one(char run) {
  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.reason = fmt::format("the names of run {} are masked (--mask-names) and those of the other are not, so no record of one "
                               "can be found in the other: record both alike",
                               run);
  return verdict;
}

bool began_anew(const Run& run) {
  const auto& notes = run.manifest().notes;
  return std::find(notes.begin(), notes.end(), kUnopenedCheckpoint) != notes.end();
}

Verdict not_resumed(char run) {
  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.reason =
      fmt::format("run {} is a replay, and {}: it began anew, so its steps are not those that they are numbered as",
                  run, kUnopenedCheckpoint);
  return verdict;
}

}  // namespace

Verdict diff(const Run& a, const Run& b, const DiffOptions& options) {
  for (const Run* run : {&a, &b}) {
    if (began_anew(*run) && !options.is_resume) return not_resumed(run == &a ? 'A' : 'B');
  }
  if (a.manifest().names_masked != b.manifest().names_masked) return masked_in_one(a.manifest().names_masked ? 'A' : 'B');
  const Alignment alignment = align(a, b, options);
  if (alignment.other_world) return diff_other_world(a, b, alignment, options);
  Joins joins(alignment.ranks, alignment.level);
  MapBuilder map;
  const Scan scan = scan_runs(alignment, options, &joins, options.want_map ? &map : nullptr);
  const Loads loads = compare_loads(alignment, options.is_resume, &joins);
  const Resharding resharding = assemble_resharded(alignment, scan, &joins, options.threads);
  const OriginInput input{a, b, alignment, scan, joins, loads.differences, resharding.differing, options.threads,
                          loaded_before(alignment, loads)};
  const Origins origins = find_origins(input);
  const LaunchScan launches = scan_launches(input, origins, options.launches);
  const StructureNotes structure = structure_notes(scan, alignment, &joins);
  const SetUpNotes set_up = set_up_notes(scan, alignment, &joins);
  const RelaidNotes relaid = relaid_notes(scan, alignment, &joins);
  const Findings findings{input, options, origins, structure, set_up, relaid, loads, resharding, launches};

  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.coverage = coverage_of(findings);
  verdict.gaps = alignment.gaps;
  verdict.gaps.insert(verdict.gaps.end(), scan.gaps.begin(), scan.gaps.end());
  verdict.gaps.insert(verdict.gaps.end(), launches.gaps.begin(), launches.gaps.end());
  std::vector<std::string> blockers;
  add_blockers(findings, verdict.coverage, &blockers);
  const bool compared = verdict.coverage.records_compared > 0 || launches.compared;
  if (something_differs(findings) && compared) {
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
