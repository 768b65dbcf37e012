#include "lib/replicas.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "lib/cause_facts.h"
#include "lib/diff_parallel.h"
#include "lib/replica_judge.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

struct Judgements {
  std::vector<std::pair<const Disagreement*, Judgement>> desyncs;  // by step
  std::vector<std::string> unknown, not_meant;
};

// Tensors loaded apart that the first step finds alike were sent around in between (DDP does that when it is made).
bool settled_after_load(const Disagreement& found, const ReplicaScan& scan, const ReplicaSites& sites) {
  const ReplicaSites::Entry& entry = sites.entries[found.entry];
  if (entry.site->phase != Phase::load) return false;
  const bool apart_later =
      std::any_of(scan.disagreements.begin(), scan.disagreements.end(), [&](const Disagreement& other) {
        return other.step > found.step &&
               (sites.entries[other.entry].name == entry.name || sites.entries[other.entry].parameter == entry.name);
      });
  return !apart_later && scan.whole_steps > 1;
}

Judgements judge_all(const ReplicaScan& scan, const ReplicaGroups& groups, const ReplicaSites& sites) {
  Judgements out;
  uint64_t settled = 0;
  for (const Disagreement& found : scan.disagreements) {
    if (settled_after_load(found, scan, sites)) {
      ++settled;
      continue;
    }
    Judgement judgement = judge(found, scan, groups, sites);
    if (judgement.judged == Judged::desync)
      out.desyncs.emplace_back(&found, std::move(judgement));
    else
      (judgement.judged == Judged::unknown ? out.unknown : out.not_meant).push_back(std::move(judgement.why));
  }
  if (settled > 0) {
    out.not_meant.push_back(fmt::format("{} not alike when loaded and are from the first step on",
                                        settled == 1 ? "one tensor was" : counted(settled, "tensor") + " were"));
  }
  return out;
}

void add_few(const std::vector<std::string>& from, std::string_view noun, std::vector<std::string>* to) {
  constexpr size_t kMost = 4;
  for (size_t i = 0; i < from.size() && i < kMost; ++i) to->push_back(from[i]);
  if (from.size() > kMost) to->push_back(fmt::format("and {} such", counted(from.size() - kMost, noun)));
}

void write_desync(const Run& run, const Judgements& judgements, const ReplicaScan& scan, const ReplicaSites& sites,
                  Verdict* verdict) {
  const auto& [first, judgement] = judgements.desyncs.front();
  verdict->outcome = Outcome::diverged;
  verdict->first = replica_divergence(run, *first, scan, sites);
  verdict->cause = replica_cause(run, *first, judgement, scan, sites);
  verdict->reason = place_text(*verdict->first) + ": replicas that must be equal are not";
  std::set<int> ranks;
  uint64_t records = 0;
  for (const auto& [found, why] : judgements.desyncs) {
    ranks.insert(found->outliers.begin(), found->outliers.end());
    records += found->records;
    // Another collective of the step is no consequence: what goes in there is of each rank anyway.
    const bool independent = found != first && found->step == first->step && found->how == Compared::collective &&
                             first->how == Compared::collective && verdict->also_first.size() < 8;
    if (independent) verdict->also_first.push_back(replica_divergence(run, *found, scan, sites));
  }
  verdict->ranks_diverged.assign(ranks.begin(), ranks.end());
  verdict->propagated = records - 1 - std::min<uint64_t>(records - 1, verdict->also_first.size());
}

void write_recompute(const Run& run, const std::vector<RecomputeMismatch>& mismatches, Verdict* verdict) {
  const RecomputeMismatch& first = mismatches.front();
  verdict->outcome = Outcome::diverged;
  verdict->finding = "recompute mismatch";
  verdict->first = first.at;
  verdict->cause = recompute_cause(first, run.directory());
  verdict->reason = place_text(first.at) + ": recomputed, it is another value than in the first forward";
  std::set<int> ranks;
  for (const RecomputeMismatch& mismatch : mismatches) {
    ranks.insert(mismatch.at.rank);
    verdict->propagated += mismatch.differing;
    const bool elsewhere = &mismatch != &first && mismatch.at.step == first.at.step && verdict->also_first.size() < 8;
    if (elsewhere) verdict->also_first.push_back(mismatch.at);
  }
  verdict->propagated -= 1 + verdict->also_first.size();
  verdict->ranks_diverged.assign(ranks.begin(), ranks.end());
}

// The earlier of the two is the verdict, the other one stands beside it: neither follows from the other.
void write_findings(const Run& run, const Judgements& judgements, const ReplicaScan& scan, const ReplicaSites& sites,
                    Verdict* verdict) {
  std::vector<RecomputeMismatch> mismatches = scan.recompute.mismatches;
  std::sort(mismatches.begin(), mismatches.end(), [](const RecomputeMismatch& left, const RecomputeMismatch& right) {
    return std::tuple(left.at.step, left.at.rank) < std::tuple(right.at.step, right.at.rank);
  });
  if (mismatches.empty()) return write_desync(run, judgements, scan, sites, verdict);
  const bool desync_first = !judgements.desyncs.empty() &&
                            scan.steps[judgements.desyncs.front().first->step].step < mismatches.front().at.step;
  if (desync_first) {
    write_desync(run, judgements, scan, sites, verdict);
    verdict->also_first.push_back(mismatches.front().at);
    verdict->notes.push_back(recompute_headline(mismatches.front()));
    return;
  }
  write_recompute(run, mismatches, verdict);
  if (judgements.desyncs.empty()) return;
  const Divergence desync = replica_divergence(run, *judgements.desyncs.front().first, scan, sites);
  verdict->also_first.push_back(desync);
  verdict->notes.push_back("replicas also came apart, at " + place_text(desync));
}

std::vector<std::string> blockers_of(const Run& run, const ReplicaScan& scan, const Judgements& judgements,
                                     const StepWindow& window) {
  std::vector<std::string> blockers = lost_in(run, window);
  blockers.insert(blockers.end(), scan.damage.begin(), scan.damage.end());
  std::vector<int64_t> uneven;
  size_t wanted = 0;
  for (const auto& stream : run.streams()) wanted += window.wants_rank(stream->header().rank) ? 1 : 0;
  for (const RunStep& step : scan.steps) {
    if (step.streams.size() < wanted) uneven.push_back(step.step);
  }
  if (!uneven.empty()) {
    blockers.push_back(uneven.size() == 1 ? fmt::format("{} is not on every rank", step_text(uneven[0]))
                                          : fmt::format("{} are not on every rank, the first is {}",
                                                        counted(uneven.size(), "step"), step_text(uneven[0])));
  }
  add_few(judgements.unknown, "tensor", &blockers);
  if (scan.compared == 0 && blockers.empty()) {
    blockers.push_back(wanted < 2
                           ? "there is one rank, which has no replica"
                           : "no two ranks hold a parameter, optimizer state or reduced gradient that must be equal");
  }
  return blockers;
}

std::vector<std::string> damaged_files(const Run& run, const StepWindow& window, const DiffOptions& options,
                                       uint64_t* frames) {
  std::vector<std::string> damage(run.streams().size());
  std::vector<uint64_t> checked(run.streams().size(), 0);
  parallel_for(thread_count(options.threads), run.streams().size(), [&](size_t i, int) {
    const HashStreamReader& stream = *run.streams()[i];
    if (!window.wants_rank(stream.header().rank)) return;
    damage[i] = stream.verify(&checked[i]);
    if (!damage[i].empty()) damage[i] = fmt::format("rank {}: {}", stream.header().rank, damage[i]);
  });
  for (const uint64_t count : checked) *frames += count;
  damage.erase(std::remove(damage.begin(), damage.end(), std::string()), damage.end());
  return damage;
}

void fill_coverage(const Run& run, const ReplicaScan& scan, const ReplicaGroups& groups, const Judgements& judgements,
                   const StepWindow& window, Coverage* coverage) {
  coverage->records_compared = scan.compared + scan.recompute.compared;
  coverage->bytes_hashed = scan.bytes;
  coverage->steps_compared = scan.whole_steps;
  for (const RunStep& step : scan.steps)
    coverage->steps_compared -= step.step == kPrologueStep && step.whole && scan.whole_steps > 0 ? 1 : 0;
  for (const auto& stream : run.streams()) coverage->ranks_compared += window.wants_rank(stream->header().rank) ? 1 : 0;
  coverage->level = name(run.manifest().level);
  for (const std::string& text : left_out_of(run)) {
    if (!text.starts_with("no layer's")) coverage->limits.push_back(text);  // layers' values are no replicas
  }
  if (run.manifest().names_masked) {
    coverage->limits.push_back(
        "names are masked: which buffers and which collectives' outputs are replicas is not known, "
        "and they were not compared");
  }
  const auto rests = [](const Site& site) { return site.role == Role::parameter && site.layer.starts_with("kept."); };
  if (std::any_of(run.streams().begin(), run.streams().end(), [&](const auto& stream) {
        return std::any_of(stream->sites().begin(), stream->sites().end(), rests);
      })) {
    coverage->limits.push_back(
        "averages of the weights and other modules that no step trains: not compared between ranks");
  }
  if (!groups.stage_note().empty()) coverage->limits.push_back(groups.stage_note());
  add_few(judgements.not_meant, "tensor", &coverage->limits);
  if (scan.recompute.unmatched > 0) {
    coverage->limits.push_back(fmt::format("{} without a first forward in the step: not checked",
                                           counted(scan.recompute.unmatched, "recomputed record")));
  }
}

std::string reason_of(const std::vector<std::string>& blockers, const ReplicaScan& scan) {
  std::string reason = blockers[0];
  if (blockers.size() > 1) reason += "; " + blockers[1];
  if (blockers.size() > 2) reason += fmt::format("; and {} more, see the notes", blockers.size() - 2);
  if (scan.compared == 0) return reason;
  return reason + fmt::format("; what could be compared is equal ({})", counted(scan.compared, "record"));
}

}  // namespace

Verdict diff_replicas(const Run& run, const DiffOptions& options) {
  const StepWindow window{options.first_step, options.last_step, options.ranks};
  const ReplicaGroups groups(run);
  const ReplicaSites sites = replica_sites(run);
  const ReplicaScan scan = scan_replicas(run, groups, sites, window, options);
  const Judgements judgements = judge_all(scan, groups, sites);
  std::vector<std::string> blockers = blockers_of(run, scan, judgements, window);

  Verdict verdict;
  verdict.cause.cls.clear();
  verdict.one_run = true;
  fill_coverage(run, scan, groups, judgements, window, &verdict.coverage);
  if (!judgements.desyncs.empty() || !scan.recompute.mismatches.empty()) {
    write_findings(run, judgements, scan, sites, &verdict);
    verdict.notes.insert(verdict.notes.end(), blockers.begin(), blockers.end());
    return verdict;
  }
  if (blockers.empty() && options.verify_checksums) {
    blockers = damaged_files(run, window, options, &verdict.coverage.frames_verified);
    verdict.gaps = blockers;
  } else if (blockers.empty()) {
    verdict.coverage.limits.push_back("the checksums of the files were not verified");
  }
  if (!blockers.empty()) {
    verdict.reason = reason_of(blockers, scan);
    if (blockers.size() > 2) verdict.notes.insert(verdict.notes.end(), blockers.begin(), blockers.end());
    return verdict;
  }
  verdict.outcome = Outcome::identical;
  verdict.until = "between replicas";
  verdict.reason = fmt::format(
      "what must be equal between ranks is, in every step ({}){}", counted(scan.compared, "record"),
      scan.recompute.compared == 0
          ? ""
          : fmt::format(", and so is what was recomputed ({})", counted(scan.recompute.compared, "record")));
  return verdict;
}

}  // namespace forkpoint
