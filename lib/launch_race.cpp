#include "lib/launch_race.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "lib/error.h"
#include "lib/launch_align.h"
#include "lib/launch_order.h"
#include "lib/launch_state.h"
#include "lib/launch_words.h"

namespace forkpoint {
namespace {

// One run's steps that are looked at: the step of the launch, and the one before where it follows without a break.
struct TracedRun {
  bool in_b = false;
  std::vector<size_t> indices;  // in HashStreamReader::steps()
  std::vector<LaunchStep> steps;
  std::vector<std::vector<Access>> accesses;  // by step
  std::optional<LaunchOrder> order;

  const BufferRow& buffer(size_t step, const Access& access) const {
    return steps[step].launches.buffers[access.buffer];
  }
};

TracedRun trace_run(const LaunchJoin& join, bool in_b, const std::vector<size_t>& indices) {
  TracedRun run;
  run.in_b = in_b;
  run.indices = indices;
  run.steps.resize(indices.size());
  run.accesses.resize(indices.size());
  StateHistory history(join, in_b);
  history.start(indices[0]);
  BufferStates states([&](uint64_t allocation) { return history.find(allocation); });
  size_t rows = 0;
  std::vector<const LaunchStep*> list;
  for (size_t k = 0; k < indices.size(); ++k) {
    LaunchStep& step = run.steps[k];
    step.read(join.stream(in_b), indices[k]);
    states.trace(
        step, indices[k], [&](size_t row) { return is_collective_output(join, in_b, step, row); }, &run.accesses[k]);
    rows += step.size();
    list.push_back(&step);
  }
  if (rows <= LaunchOrder::kMostRows) run.order.emplace(list);
  return run;
}

bool writes(const Access& access) { return access.overwritten || access.changed == Changed::yes; }

class Search {
 public:
  Search(const LaunchJoin& join, const RankPair& pair, size_t pair_step, std::optional<uint32_t> place)
      : join_(join), place_(place) {
    std::vector<size_t> in_a, in_b;
    const StepPair& at = pair.steps[pair_step];
    for (const StepPair& step : pair.steps) {  // in whatever order they stand
      if (step.a + 1 == at.a && step.b + 1 == at.b) in_a.push_back(step.a), in_b.push_back(step.b);
    }
    in_a.push_back(at.a), in_b.push_back(at.b);
    a_ = trace_run(join, false, in_a);
    b_ = trace_run(join, true, in_b);
    for (size_t k = 0; k < in_a.size(); ++k) pairs_.push_back(pair_launches(join, a_.steps[k], b_.steps[k]));
  }

  RaceEvidence run(uint32_t row_a, uint32_t row_b) {
    if (!a_.order || !b_.order) return {};
    look(a_, b_, row_a, row_b, &out_.only_a, &versions_a_);
    look(b_, a_, row_b, row_a, &out_.only_b, &versions_b_);
    keep_versions(versions_a_, versions_b_);
    keep_versions(versions_b_, versions_a_);
    return std::move(out_);
  }

 private:
  // A buffer that holds what another launch left in it at another time.
  struct Version {
    uint32_t place = 0;
    bool later = false;
    std::string sentence;
  };

  uint32_t counterpart(bool of_b, const LaunchPlace& at) const { return pairs_[at.step].counterpart(of_b, at.row); }

  // Other launches on memory that this one was handed, in one run.
  void look(const TracedRun& run, const TracedRun& other_run, uint32_t row, uint32_t counterpart_row, bool* only_here,
            std::vector<Version>* versions) {
    if (row == kNoRow) return;
    const LaunchPlace own{run.steps.size() - 1, row};
    for (const Access& access : run.accesses.back()) {
      const BufferRow& buffer = run.buffer(own.step, access);
      if (access.row != row || buffer.allocation == 0 || (place_ && buffer.place != *place_)) continue;
      for (size_t s = 0; s < run.steps.size(); ++s) {
        for (const Access& other : run.accesses[s]) {
          if (is_conflict(run, own, access, {s, other.row}, other)) {
            consider(run, other_run, own, access, {s, other.row}, counterpart_row, only_here);
          }
        }
      }
      look_for_version(run, own, access, only_reads(run, other_run, access, counterpart_row), versions);
    }
  }

  bool is_conflict(const TracedRun& run, const LaunchPlace& own, const Access& access, const LaunchPlace& at,
                   const Access& other) const {
    if (at == own || !writes(other)) return false;  // one that only reads changes nothing for this launch
    const LaunchRow &mine = run.steps[own.step].row(own.row), &theirs = run.steps[at.step].row(at.row);
    if (mine.stream == theirs.stream) return false;
    const BufferRow &left = run.buffer(own.step, access), &right = run.buffer(at.step, other);
    return left.allocation == right.allocation && left.start < right.start + right.bytes &&
           right.start < left.start + left.bytes;
  }

  void consider(const TracedRun& run, const TracedRun& other_run, const LaunchPlace& own, const Access& access,
                const LaunchPlace& at, uint32_t counterpart_row, bool* only_here) {
    if (!run.order->unordered(own, at)) return;
    const uint32_t there = counterpart(run.in_b, at);
    const LaunchPlace own_there{own.step, counterpart_row}, at_there{at.step, there};
    const bool comparable = there != kNoRow && counterpart_row != kNoRow;
    if (comparable && other_run.order->unordered(own_there, at_there)) {
      if (!run.in_b) say(run, own, access, at, "in both runs", "");
      out_.both = true;
      return;
    }
    std::string why;
    if (comparable) why = order_text(other_run, own_there, at_there);
    *only_here = true;
    say(run, own, access, at, run.in_b ? "in run B" : "in run A", why);
  }

  std::string order_text(const TracedRun& run, const LaunchPlace& own, const LaunchPlace& at) const {
    const char which = run.in_b ? 'B' : 'A';
    const bool before = run.order->ordered(at, own);
    const auto wait = run.order->wait_between(before ? at : own, before ? own : at);
    if (!wait) return fmt::format("; run {} orders them", which);
    return fmt::format("; in run {} event {}, recorded at launch {} and waited for at launch {}{}, orders them", which,
                       wait->event, wait->recorded.row, wait->waited.row,
                       wait->waited.step == own.step ? "" : " of the step before");
  }

  void say(const TracedRun& run, const LaunchPlace& own, const Access& access, const LaunchPlace& at, const char* where,
           const std::string& why) {
    constexpr size_t kMost = 3;
    if (out_.sentences.size() >= kMost) return;
    const HashStreamReader& stream = join_.stream(run.in_b);
    out_.sentences.push_back(fmt::format(
        "nothing orders {} on stream {} and {} on stream {} {}, though the first writes a buffer of the second ({}){}",
        launch_text(stream, run.indices[at.step], at.row), run.steps[at.step].row(at.row).stream,
        launch_text(stream, run.indices[own.step], own.row), run.steps[own.step].row(own.row).stream, where,
        place_name(run.buffer(own.step, access).place), why));
  }

  // The launch is handed the buffer at this place alone, and in the other run leaves what it is handed there as it is.
  static bool only_reads(const TracedRun& run, const TracedRun& other_run, const Access& access, uint32_t other_row) {
    const size_t last = run.steps.size() - 1;
    const BufferRow& buffer = run.buffer(last, access);
    const bool once = std::none_of(run.accesses[last].begin(), run.accesses[last].end(), [&](const Access& other) {
      const BufferRow& also = run.buffer(last, other);
      return other.row == access.row && also.place != buffer.place && also.allocation == buffer.allocation;
    });
    const auto& there = other_run.accesses.back();
    return once && std::any_of(there.begin(), there.end(), [&](const Access& other) {
             return other.row == other_row && other_run.buffer(last, other).place == buffer.place &&
                    other.changed == Changed::no;
           });
  }

  // A digest that is not what this buffer should hold by the order of the host, but what it held before or later. What
  // the launch itself writes may well come out as it once was: then the other run has to show that it only reads the
  // buffer.
  void look_for_version(const TracedRun& run, const LaunchPlace& own, const Access& access, bool reads_there,
                        std::vector<Version>* versions) const {
    const BufferRow& buffer = run.buffer(own.step, access);
    if (!has_digest(buffer) || !access.tracked) return;
    const bool found_other = access.unobserved,
               left_other = reads_there && access.changed == Changed::yes && !access.overwritten;
    if (!found_other && !left_other) return;
    const Digest& seen = found_other ? access.held : buffer.digest;
    for (size_t s = run.steps.size(); s-- > 0;) {
      for (size_t k = run.accesses[s].size(); k-- > 0;) {
        const Access& other = run.accesses[s][k];
        const BufferRow& there = run.buffer(s, other);
        const bool same =
            there.allocation == buffer.allocation && there.start == buffer.start && there.bytes == buffer.bytes;
        if (!same || !has_digest(there) || !(there.digest == seen) || LaunchPlace{s, other.row} == own ||
            !writes(other))
          continue;
        const bool later = own < LaunchPlace{s, other.row};
        if (later && run.steps[s].row(other.row).stream == run.steps[own.step].row(own.row).stream) continue;
        versions->push_back(
            {buffer.place, later,
             fmt::format("in run {} the {} held what {} left there, {}", run.in_b ? 'B' : 'A', place_name(buffer.place),
                         launch_text(join_.stream(run.in_b), run.indices[s], other.row),
                         later ? "a later version" : "an older version (stale)")});
        return;
      }
    }
  }

  // What a buffer does in both runs (it is set to zero again and again) is no sign of anything.
  void keep_versions(const std::vector<Version>& here, const std::vector<Version>& there) {
    for (const Version& version : here) {
      const bool usual =
          std::any_of(there.begin(), there.end(), [&](const Version& other) { return other.place == version.place; });
      if (usual) continue;
      (version.later ? out_.future : out_.stale) = true;
      out_.sentences.push_back(version.sentence);
    }
  }

  const LaunchJoin& join_;
  const std::optional<uint32_t> place_;
  TracedRun a_, b_;
  std::vector<LaunchPairs> pairs_;
  std::vector<Version> versions_a_, versions_b_;
  RaceEvidence out_;
};

}  // namespace

RaceEvidence find_races(const LaunchJoin& join, const RankPair& pair, size_t pair_step, uint32_t row_a, uint32_t row_b,
                        std::optional<uint32_t> place) {
  try {
    return Search(join, pair, pair_step, place).run(row_a, row_b);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace forkpoint
