#include "lib/align_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "lib/evaluation.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using StepKey = std::pair<int64_t, int>;  // number in A's count, occurrence

struct StepPlaces {
  std::map<StepKey, size_t> index;
  std::set<StepKey> complete, final;  // final: what the program left behind its last step
  size_t prologue = kNoStep;
  bool prologue_complete = false;
};

StepPlaces places_of(const HashStreamReader& stream, int64_t offset, const DiffOptions& options) {
  StepPlaces places;
  std::map<int64_t, int> occurrences;
  const auto steps = stream.steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].step == kPrologueStep) {
      if (places.prologue == kNoStep) places.prologue = i, places.prologue_complete = steps[i].complete;
      continue;
    }
    const int64_t step = steps[i].step + offset;
    const StepKey key{step, occurrences[step]++};
    if ((options.first_step && step < *options.first_step) || (options.last_step && step > *options.last_step))
      continue;
    places.index[key] = i;
    if (steps[i].complete) places.complete.insert(key);
    if (is_final_part(steps, i)) places.final.insert(key);
  }
  return places;
}

// How far one side lies behind the other, over all ranks.
struct SideSteps {
  std::set<int64_t> only;          // complete on this side alone, on some rank
  std::vector<int> only_ranks;
  std::set<int64_t> final_only;    // steps behind which only this side says what the program left
  int64_t last = kPrologueStep;    // last complete step, the least over ranks
  bool any = false;
};

void add_side(const StepPlaces& mine, const StepPlaces& other, int rank, SideSteps* side) {
  bool alone = false;
  for (const StepKey& key : mine.complete) {
    if (other.complete.count(key) != 0) continue;
    if (mine.final.count(key) != 0) side->final_only.insert(key.first);
    else side->only.insert(key.first), alone = true;
  }
  if (alone) side->only_ranks.push_back(rank);
  const int64_t last = mine.complete.empty() ? kPrologueStep : mine.complete.rbegin()->first;
  side->last = side->any ? std::min(side->last, last) : last;
  side->any = true;
}

std::string ended_text(const SideSteps& side, char which) {
  if (side.last == kPrologueStep) return fmt::format("run {} has no complete step", which);
  return fmt::format("run {} ended at step {}", which, side.last);
}

// The steps that only one side has, as a sentence that says where the other ended or began.
void explain_unmatched(const SideSteps& short_side, char short_name, const SideSteps& long_side, char long_name,
                       int64_t common_last, int64_t resumed_begin, Alignment* out) {
  std::set<int64_t> after, before, between;
  for (const int64_t step : long_side.only) {
    if (step > common_last) after.insert(step);
    else if (resumed_begin >= 0 && step < resumed_begin) before.insert(step);
    else between.insert(step);
  }
  if (!after.empty()) {
    out->blockers.push_back(fmt::format("{}, run {} goes on to step {}", ended_text(short_side, short_name), long_name,
                                        *after.rbegin()));
  }
  if (!between.empty()) {
    const std::vector<int64_t> steps(between.begin(), between.end());
    out->blockers.push_back(fmt::format("step{} {} {} complete in run {} only ({})", steps.size() == 1 ? "" : "s",
                                        number_list(steps), steps.size() == 1 ? "is" : "are", long_name,
                                        rank_list(long_side.only_ranks)));
  }
}

int64_t every_of(const Run& run) {
  int64_t every = run.manifest().every;
  for (const auto& stream : run.streams()) every = std::max(every, stream->header().every);
  return every;
}

int64_t last_step_of(const Run& run, int64_t offset) {
  int64_t last = kPrologueStep;
  for (const auto& stream : run.streams()) {
    for (const StepSummary& step : stream->steps()) {
      if (step.step != kPrologueStep) last = std::max(last, step.step + offset);
    }
  }
  return last;
}

// Records, or at level launch: launches.
bool has_content(const HashStreamReader& stream, size_t step, Level level) {
  return step != kNoStep &&
         (stream.steps()[step].records > 0 || (level == Level::launch && stream.steps()[step].launches > 0));
}

size_t index_of_step(const HashStreamReader& stream, int64_t step, int64_t offset) {
  size_t found = kNoStep;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    if (stream.steps()[i].step + offset == step && stream.steps()[i].step != kPrologueStep) found = i;
  }
  return found;
}

// On any rank: something from before the first step.
bool any_load(const Run& run, Level level) {
  return std::ranges::any_of(run.streams(), [&](const auto& stream) {
    const auto steps = stream->steps();
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].step == kPrologueStep && has_content(*stream, i, level)) return true;
    }
    return false;
  });
}

void find_start(const Run& a, const Run& b, Alignment* out) {
  const int64_t begin_a = first_step_of(a);
  const int64_t begin_b = first_step_of(b) == kPrologueStep ? kPrologueStep : first_step_of(b) + out->offset_b;
  out->begin = out->begun = std::max(begin_a, begin_b);
  if (begin_a == kPrologueStep || begin_b == kPrologueStep) return;
  const int64_t begun_a = first_begun(a), begun_b = first_begun(b) + out->offset_b;
  if (begin_a == begin_b && begun_a != begun_b &&
      !(begun_b > begun_a ? any_load(b, out->level) : any_load(a, out->level))) {
    out->begun = std::min(begun_a, begun_b);  // one was attached: it went on, and did not begin here
    return;
  }
  if (begin_a != begin_b || begun_a != begun_b) {
    out->start = std::pair(begin_b, begun_b) > std::pair(begin_a, begun_a) ? Start::b_later : Start::a_later;
  }
  out->begun = out->start == Start::a_later ? begun_a : begun_b;
}

// The pair of prologues, or the load of the run that begins later.
void pair_prologues(const StepPlaces& places_a, const StepPlaces& places_b, const DiffOptions& options, RankPair* pair,
                    Alignment* out) {
  if (!options.loads || (options.first_step && *options.first_step > out->begin)) return;
  if (out->start == Start::together) {
    const bool in_a = has_content(*pair->a, places_a.prologue, out->level),
               in_b = has_content(*pair->b, places_b.prologue, out->level);
    if (in_a && in_b) {
      const bool complete = places_a.prologue_complete && places_b.prologue_complete;
      pair->steps.push_back({kPrologueStep, 0, places_a.prologue, places_b.prologue, complete});
      out->prologue_compared = true;
      if (!complete)
        out->blockers.push_back(fmt::format("the records before the first step are not whole on rank {}", pair->rank));
    } else if (in_a != in_b) {
      out->blockers.push_back(fmt::format("what was loaded before the first step was recorded in run {} only (rank {})",
                                          in_a ? 'A' : 'B', pair->rank));
    }
    return;
  }
  const bool b_later = out->start == Start::b_later;
  const HashStreamReader& later = b_later ? *pair->b : *pair->a;
  const HashStreamReader& earlier = b_later ? *pair->a : *pair->b;
  const size_t load = b_later ? places_b.prologue : places_a.prologue;
  const size_t before = index_of_step(earlier, out->begun - 1, b_later ? 0 : out->offset_b);
  // Where only every n-th step is recorded, the first recorded one need not be the first that ran.
  const bool first_ran = later.header().every == 1;
  if (first_ran && has_content(later, load, Level::step) && before != kNoStep && earlier.steps()[before].complete) {
    pair->load_step = load;
    pair->step_before = before;
    pair->prologue_other = b_later ? places_a.prologue : places_b.prologue;
  }
}

// Of runs that begin at one step too: one that was attached there has loaded nothing, and does not begin.
char which_begins(const RankPair& pair, const StepPlaces& places_a, const StepPlaces& places_b, const Alignment& alignment) {
  if (alignment.begun != alignment.begin) return '\0';  // it had begun before
  if (alignment.start != Start::together) return alignment.start == Start::a_later ? 'A' : 'B';
  const bool in_a = has_content(*pair.a, places_a.prologue, alignment.level),
             in_b = has_content(*pair.b, places_b.prologue, alignment.level);
  return in_a == in_b ? '\0' : in_a ? 'A' : 'B';
}

// A recording that was stopped behind a step cannot know it. Who names the last step asks for no more than that.
void explain_final(const SideSteps& side, char which, const DiffOptions& options, Alignment* out) {
  if (side.final_only.empty() || options.last_step) return;
  out->blockers.push_back(fmt::format("what the program left behind step {} was recorded in run {} only",
                                      *side.final_only.begin(), which));
}

}  // namespace

void align_steps(const Run& a, const Run& b, const DiffOptions& options, Alignment* out) {
  find_start(a, b, out);
  const int64_t every_a = every_of(a), every_b = every_of(b);
  if (every_a != every_b) {
    const auto steps = [](int64_t every) { return every == 1 ? "step" : fmt::format("{} steps", every); };
    out->blockers.push_back(fmt::format("run A records every {}, run B every {}: only common steps were compared",
                                        steps(every_a), steps(every_b)));
  }
  const int64_t last_ran = std::max(last_step_of(a, 0), last_step_of(b, out->offset_b));
  if (options.last_step && last_ran != kPrologueStep && *options.last_step >= last_ran + std::max(every_a, every_b)) {
    out->blockers.push_back(
        fmt::format("steps up to {} were asked for, but the runs end with step {}", *options.last_step, last_ran));
  }
  if (out->other_world) return;
  SideSteps side_a, side_b;
  int64_t common_last = kPrologueStep;
  bool any_common = false;
  for (RankPair& pair : out->ranks) {
    const StepPlaces places_a = places_of(*pair.a, 0, options);
    const StepPlaces places_b = places_of(*pair.b, out->offset_b, options);
    pair_prologues(places_a, places_b, options, &pair, out);
    for (const auto& [key, index_a] : places_a.index) {
      const auto in_b = places_b.index.find(key);
      if (in_b == places_b.index.end()) continue;
      const bool complete = places_a.complete.count(key) != 0 && places_b.complete.count(key) != 0;
      const bool early = key.first <= out->begin + 1 && key.second == 0;
      const char early_of = early ? which_begins(pair, places_a, places_b, *out) : '\0';
      const char first_of = key.first == out->begin ? early_of : '\0';
      pair.steps.push_back({key.first, key.second, index_a, in_b->second, complete, first_of, early_of});
      if (complete) common_last = std::max(common_last, key.first), any_common = true;
      if (!complete && places_a.complete.count(key) == 0 && places_b.complete.count(key) == 0) {
        out->blockers.push_back(fmt::format("step {} is complete in neither run (rank {})", key.first, pair.rank));
      }
    }
    add_side(places_a, places_b, pair.rank, &side_a);
    add_side(places_b, places_a, pair.rank, &side_b);
  }
  if (every_a == every_b && any_common) {
    const int64_t begin = out->start == Start::together ? -1 : out->begin;
    explain_unmatched(side_b, 'B', side_a, 'A', common_last, begin, out);
    explain_unmatched(side_a, 'A', side_b, 'B', common_last, begin, out);
    explain_final(side_a, 'A', options, out);
    explain_final(side_b, 'B', options, out);
  }
}

}  // namespace forkpoint
