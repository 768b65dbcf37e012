#include "lib/align.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "lib/align_steps.h"
#include "lib/diff_match.h"
#include "lib/evaluation.h"
#include "lib/generators.h"
#include "lib/knobs.h"
#include "lib/stream_facts.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

bool wanted(int rank, const DiffOptions& options) {
  return options.ranks.empty() || std::find(options.ranks.begin(), options.ranks.end(), rank) != options.ranks.end();
}

std::vector<int> present_ranks(const Run& run, const DiffOptions& options) {
  std::vector<int> ranks;
  for (const auto& stream : run.streams()) {
    if (wanted(stream->header().rank, options)) ranks.push_back(stream->header().rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

Level level_of(const Run& run) {
  Level level = run.manifest().level;
  for (const auto& stream : run.streams()) level = std::min(level, stream->header().level);
  return level;
}

std::vector<int> only_in(const std::vector<int>& left, const std::vector<int>& right) {
  std::vector<int> only;
  std::set_difference(left.begin(), left.end(), right.begin(), right.end(), std::back_inserter(only));
  return only;
}

void align_ranks(const Run& a, const Run& b, const DiffOptions& options, Alignment* out) {
  out->ranks_a = present_ranks(a, options);
  out->ranks_b = present_ranks(b, options);
  if (a.world_size() != b.world_size()) {
    out->other_world = true;
    out->notes.push_back(
        fmt::format("run A has {}, run B {}: only tensors that can be put together from all ranks are compared",
                    counted(static_cast<uint64_t>(a.world_size()), "rank"), b.world_size()));
  } else {
    const auto only_a = only_in(out->ranks_a, out->ranks_b);
    const auto only_b = only_in(out->ranks_b, out->ranks_a);
    if (!only_a.empty()) out->blockers.push_back(fmt::format("run B has no hash stream of {}", rank_list(only_a)));
    if (!only_b.empty()) out->blockers.push_back(fmt::format("run A has no hash stream of {}", rank_list(only_b)));
    for (const int rank : out->ranks_a) {
      if (const HashStreamReader* stream_b = b.stream_of(rank); stream_b != nullptr) {
        out->ranks.push_back({rank, a.stream_of(rank), stream_b, {}, kNoStep, kNoStep});
      }
    }
  }
  std::vector<int> missing;
  for (const int rank : a.missing_ranks()) {
    const auto& in_b = b.missing_ranks();
    if (wanted(rank, options) && std::find(in_b.begin(), in_b.end(), rank) != in_b.end()) missing.push_back(rank);
  }
  if (!missing.empty()) {
    out->blockers.push_back(fmt::format("{} of {} in neither run",
                                        rank_list(missing) + (missing.size() == 1 ? " is" : " are"), a.world_size()));
  }
  for (const int rank : options.ranks) {
    const bool in_a = a.stream_of(rank) != nullptr, in_b = b.stream_of(rank) != nullptr;
    const bool is_rank = rank >= 0 && rank < std::max(a.world_size(), b.world_size());
    if (is_rank && !in_a && !in_b && std::find(missing.begin(), missing.end(), rank) == missing.end()) {
      out->blockers.push_back(fmt::format("rank {} was asked for, but neither run has recorded it", rank));
    }
    if (!is_rank) {
      out->blockers.push_back(fmt::format("rank {} was asked for, but the runs have ranks 0-{}", rank,
                                          std::max(a.world_size(), b.world_size()) - 1));
    }
  }
  if (!out->other_world && static_cast<int>(out->ranks.size()) < a.world_size()) {
    std::vector<int> compared;
    for (const RankPair& pair : out->ranks) compared.push_back(pair.rank);
    out->limits.push_back(compared.empty()
                              ? fmt::format("none of {} ranks was compared", a.world_size())
                              : fmt::format("only {} of {} were compared", rank_list(compared), a.world_size()));
  }
}

// Some steps hold records of a finer level than the stream's own: a watch had them recorded so.
bool is_deepened(const Run& run) {
  return std::any_of(run.streams().begin(), run.streams().end(), [](const auto& stream) {
    const auto sites = stream->sites();
    const auto finer = [&](const Site& site) { return !is_at_level(site, stream->header().level); };
    return std::any_of(sites.begin(), sites.end(), finer);
  });
}

void align_levels(const Run& a, const Run& b, Alignment* out) {
  const Level level_a = level_of(a), level_b = level_of(b);
  out->level = std::min(level_a, level_b);
  for (const Run* run : {&a, &b}) {
    for (const auto& stream : run->streams()) out->levels_differ |= stream->header().level != out->level;
  }
  if (level_a != level_b) {
    out->limits.push_back(fmt::format(
        "run A is at level {}, run B at level {}: compared at level {}{}", name(level_a), name(level_b),
        name(out->level), std::max(level_a, level_b) == Level::launch ? "; launches were not compared, nor what layers were handed" : ""));
  }
}

void note_left_out(Alignment* out) {
  bool collectives = false, gradients = false;
  for (const RankPair& pair : out->ranks) {
    if (pair.a == nullptr || pair.b == nullptr) continue;
    const StreamJoin join(*pair.a, *pair.b, out->level);
    collectives |= join.collectives_apart(), gradients |= join.gradients_left_out();
  }
  if (gradients)
    out->limits.push_back(
        "gradients as backward passes left them: only the finer run has these, the other one those at the optimizer's "
        "step");
  if (collectives)
    out->blockers.push_back(
        "collectives were not compared: at level step they stand in other layers than at a finer one");
}

void note_deepened(const Run& a, const Run& b, Alignment* out) {
  const bool in_a = is_deepened(a), in_b = is_deepened(b);
  if (!in_a && !in_b) return;
  out->limits.push_back(fmt::format("some steps of {} are recorded by layer as well (--on-trigger deepen): what is finer than level {} "
                                    "was not compared",
                                    in_a && in_b ? "both runs" : in_a ? "run A" : "run B", name(out->level)));
}

// False: the steps cannot be aligned.
bool align_step_base(const Run& a, const Run& b, Alignment* out) {
  if (step_base_known(a) && step_base_known(b)) return true;
  if (first_step_of(a) == kPrologueStep && first_step_of(b) == kPrologueStep) return true;  // neither has a step
  std::vector<int> ranks;
  for (const RankPair& pair : out->ranks) ranks.push_back(pair.rank);
  if (out->other_world) {
    out->blockers.push_back("the step base of a run is unknown and its world size is another, so its steps cannot be "
                            "aligned (record with --first-step)");
    return false;
  }
  const BaseByContent base = align_by_content(a, b, ranks);
  (base.found ? out->notes : out->blockers).push_back(base.sentence);
  out->offset_b = base.found ? base.offset : 0;
  return base.found;
}

std::string state_sentence(const Run& run, char which) {
  if (run.state() == RunState::recording) return fmt::format("run {} is still being recorded", which);
  const std::string& why = run.manifest().end_reason;
  if (run.manifest().exit_status == 0)
    return fmt::format("run {} is not whole, though its command {}", which, why.empty() ? "ended well" : why);
  return fmt::format("run {} did not end well{}", which, why.empty() ? "" : fmt::format(" ({})", why));
}

void collect_state(const Run& run, char which, Alignment* out) {
  if (run.state() != RunState::whole) out->blockers.push_back(state_sentence(run, which));
  for (const std::string& problem : run.problems()) out->blockers.push_back(fmt::format("run {}: {}", which, problem));
}

std::string steps_text(const Gap& gap, int64_t offset) {
  if (gap.last_step == kPrologueStep) return "step not known";
  const int64_t first = gap.first_step + offset, last = gap.last_step + offset;
  return first == last ? fmt::format("step {}", first) : fmt::format("steps {}-{}", first, last);
}

// Steps that lost records are compared as far as they go, and what one run lacks there is not a difference.
void mark_lossy(int rank, bool placed, int64_t first, int64_t last, Alignment* out) {
  for (RankPair& pair : out->ranks) {
    if (pair.rank != rank) continue;
    for (StepPair& step : pair.steps) {
      if (!placed || (step.step >= first && step.step <= last)) step.complete = false;
    }
  }
}

void collect_gaps(const Run& run, char which, int64_t offset, const DiffOptions& options, Alignment* out) {
  for (const auto& stream : run.streams()) {
    if (!wanted(stream->header().rank, options)) continue;
    for (const Gap& gap : stream->gaps()) {
      const bool placed = gap.last_step != kPrologueStep;
      if (placed && options.last_step && gap.first_step + offset > *options.last_step) continue;
      if (placed && options.first_step && gap.last_step + offset < *options.first_step) continue;
      out->gaps.push_back(
          fmt::format("run {}, rank {}, {}: {}{}", which, stream->header().rank, steps_text(gap, offset), gap.reason,
                      gap.records_lost == 0 ? "" : fmt::format(" ({} lost)", counted(gap.records_lost, "record"))));
      out->gap_steps.push_back(placed ? gap.first_step + offset : kPrologueStep);
      mark_lossy(stream->header().rank, placed, gap.first_step + offset, gap.last_step + offset, out);
    }
  }
}

void collect_coverage_limits(const Run& a, const Run& b, const DiffOptions& options, Alignment* out) {
  std::map<std::string, int> seen;  // bit 0: declared in A, bit 1: in B
  const auto collect = [&seen](const Run& run, int bit) {
    for (const auto& stream : run.streams()) {
      for (const CoverageLimit& limit : stream->coverage_limits()) {
        seen[limit.detail.empty() ? limit.what : limit.what + ": " + limit.detail] |= bit;
      }
    }
  };
  collect(a, 1);
  collect(b, 2);
  for (const auto& [text, in] : seen) {
    const std::string one_sided = fmt::format("{} (declared in run {} only)", text, in == 1 ? 'A' : 'B');
    out->limits.push_back(in == 3 ? text : one_sided);
    const bool is_behind = text.starts_with(kBehindLastStepLimit) && options.last_step.has_value();
    const bool says_nothing_unseen = text.starts_with(kEvaluationLimit) || text.starts_with(kNotDeterministic) ||
                                     text.starts_with(kDeterministicMode) || is_behind;
    if (in != 3 && text.starts_with(kUncalledLimit) && !out->other_world) {
      out->uncalled_unseen_in = in == 1 ? 'A' : 'B';
      continue;
    }
    const std::string unknown = seeding_unknown_for(text);  // of the other run: nothing is compared, as in two of this
    const bool is_generator = says_seeding_unknown(text) || (!unknown.empty() && seen.count(unknown) != 0);
    // What one run has not seen, the other has: nothing says that it is equal.
    if (in != 3 && options.limits_alike && !says_nothing_unseen && !is_generator)
      out->blockers.push_back("not seen: " + one_sided);
  }
}

}  // namespace

bool step_base_known(const Run& run) {
  return std::all_of(run.streams().begin(), run.streams().end(), [](const auto& stream) {
    return !stream->header().step_base.empty() && stream->header().step_base != "unknown";
  });
}

int64_t first_step_of(const Run& run) {
  int64_t first = kPrologueStep;
  for (const auto& stream : run.streams()) {
    for (const StepSummary& step : stream->steps()) {
      if (step.step >= 0 && (first == kPrologueStep || step.step < first)) first = step.step;
    }
  }
  return first;
}

int64_t first_begun(const Run& run) {
  int64_t first = first_step_of(run);
  for (const auto& stream : run.streams()) {
    for (const auto& [name, value] : stream->header().facts) {
      int64_t step = -1;
      const auto [rest, wrong] = std::from_chars(value.data(), value.data() + value.size(), step);
      if (name == kFirstBegunFact && wrong == std::errc() && step >= 0) first = std::min(first, step);
    }
  }
  return first;
}

Alignment align(const Run& a, const Run& b, const DiffOptions& options) {
  Alignment out;
  align_ranks(a, b, options, &out);
  align_levels(a, b, &out);
  if (out.levels_differ) {
    note_left_out(&out);
  } else {
    note_deepened(a, b, &out);
  }
  if (a.manifest().names_masked != b.manifest().names_masked) {
    out.blockers.push_back(fmt::format("the names of run {} are masked, those of the other are not",
                                       a.manifest().names_masked ? 'A' : 'B'));
  }
  if (!align_step_base(a, b, &out)) {
    out.ranks.clear();
    out.ranks_a.clear();
    out.ranks_b.clear();
  } else {
    align_steps(a, b, options, &out);
  }
  collect_state(a, 'A', &out);
  collect_state(b, 'B', &out);
  collect_gaps(a, 'A', 0, options, &out);
  collect_gaps(b, 'B', out.offset_b, options, &out);
  if (!out.gaps.empty()) {
    out.blockers.push_back(
        out.gaps.size() == 1 ? "records were lost: " + out.gaps[0]
                             : fmt::format("records were lost in {} places, first: {}", out.gaps.size(), out.gaps[0]));
  }
  collect_coverage_limits(a, b, options, &out);
  return out;
}

}  // namespace forkpoint
