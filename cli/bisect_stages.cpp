// What differs in that step: the layer, then the op or launch, and the values that it was handed.
#include "cli/bisect_stages.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/terminal.h"
#include "lib/diff.h"
#include "lib/operand_file.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

std::string range_text(int64_t first, int64_t last) {
  return first == last ? fmt::format("step {}", first) : fmt::format("steps {} to {}", first, last);
}

// As a glob of --ops and a value of --save-operands it means itself.
bool can_be_asked_for(const std::string& layer) { return layer.find_first_of(",;*?[]\\") == std::string::npos; }

// What is handed to a layer, forward or backward, may come from what the layer around it computes by itself: that is
// where the op lies then. Of those around it the innermost that is called by itself, as containers are not. Empty: it
// is no such thing, or there is none. run: of which the layers are known.
std::string layer_around(const Divergence& first, const std::string& run) {
  const bool forward = first.phase == Phase::forward && first.tensor.starts_with("input");
  const bool backward = first.phase == Phase::backward && first.tensor.starts_with("grad_output");
  if (!forward && !backward) return "";
  const Run layers = Run::open(run);
  const auto is_called = [&](const std::string& layer) {
    return std::ranges::any_of(layers.streams(), [&](const auto& stream) {
      return std::ranges::any_of(stream->sites(),
                                 [&](const Site& site) { return site.layer == layer && site.phase == Phase::forward; });
    });
  };
  std::string layer = first.layer;
  for (size_t dot = layer.rfind('.'); dot != std::string::npos; dot = layer.rfind('.')) {
    layer.resize(dot);
    if (is_called(layer)) return layer;
  }
  return "";
}

std::string operands_of(const Divergence& first, const std::string& around) {
  if (first.kind == Kind::scalar) return "";  // its values are in the verdict
  if (!around.empty() && can_be_asked_for(around)) return fmt::format("step={};layer={}", first.step, around);
  if (!first.layer.empty())
    return can_be_asked_for(first.layer) ? fmt::format("step={};layer={}", first.step, first.layer) : "";
  return first.phase ? fmt::format("step={};phase={}", first.step, name(*first.phase)) : "";
}

int rank_of(const Verdict& verdict) {
  if (verdict.first->rank >= 0 || verdict.ranks_diverged.empty()) return std::max(0, verdict.first->rank);
  return verdict.ranks_diverged.front();
}

// Among the phases of a step; `data` and `load` come first. -1: not known.
int order_of(const Divergence& at) { return at.phase ? static_cast<int>(*at.phase) : -1; }

}  // namespace

void Bisect::end_stage(std::string name, std::string found) {
  result_.stages.push_back({std::move(name), std::move(found), jobs_.windows() - windows_before_,
                            jobs_.steps() - steps_before_, jobs_.seconds() - seconds_before_});
  print_note(fmt::format("{}: {}", result_.stages.back().name, printable(result_.stages.back().found)));
  begin_stage();
}

bool Bisect::may_have_launches() const {
  if (request_.level < Level::launch) return false;
  const Manifest manifest = read_manifest(layer_run_.run);
  const auto hidden = manifest.environment.find("CUDA_VISIBLE_DEVICES");
  const bool none = hidden != manifest.environment.end() && (hidden->second.empty() || hidden->second == "-1");
  return !manifest.gpus.empty() && !none;
}

// With the step before it, where that can be: that nothing differs there shows that the window begins early enough.
BisectWindow Bisect::window_around(const ForkRange& range) const {
  BisectWindow window;
  window.from = jobs_.common_start(std::min(range.same + 1, range.differs));
  window.first = std::max(window.from.value_or(0), range.same);
  window.last = range.differs;
  window.level = std::min(request_.level, Level::layer);
  return window;
}

// The window until it shows a fork, at most --tries times. Nothing: it did not; what it showed instead is noted.
std::optional<Verdict> Bisect::fork_again(BisectWindow window, const std::string& stage,
                                          std::pair<WindowDone, WindowDone>* runs) {
  const std::string name = window.name;
  std::string why;
  for (int64_t attempt = 1; attempt <= request_.tries; ++attempt) {
    window.name = fmt::format("{}{}-{}", name, round_ ? fmt::format("-r{}", round_) : "", attempt);
    const std::string which = attempt > 1 ? fmt::format("{}, attempt {} of {}", stage, attempt, request_.tries) : stage;
    *runs = jobs_.run_both(which, window);
    const Verdict verdict = jobs_.compare(*runs, window);
    if (verdict.outcome == Outcome::diverged && verdict.first) return verdict;
    if (verdict.outcome == Outcome::incomparable) why = verdict.reason;
  }
  if (!why.empty())
    note(fmt::format("{}: nothing differs that can be compared, and not all of it can: {}", stage, why));
  return std::nullopt;
}

// true: found, and it is the verdict. false: the verdict says why not.
bool Bisect::find_layer(ForkRange range) {
  constexpr int kMostRounds = 4;
  for (int rounds = 0; rounds < kMostRounds; ++rounds) {
    begin_stage();
    BisectWindow window = window_around(range);
    window.name = "layer";
    std::pair<WindowDone, WindowDone> runs;
    const auto verdict = fork_again(window, "which layer", &runs);
    if (!verdict) {
      const std::string where = range_text(window.first, window.last);
      end_stage("which layer",
                fmt::format("no fork in {} of {}", counted(static_cast<uint64_t>(request_.tries), "replay"), where));
      not_again(where, request_.tries);
      tell_which_repeats(runs, window);
      return false;
    }
    end_stage("which layer", headline(*verdict));
    result_.verdict = *verdict;
    compare_with_recorded(runs, window, *verdict);
    layer_run_ = runs.first;
    const bool early = !verdict->first->in_prologue && verdict->first->step <= range.same;
    if (!early) {
      const int64_t step = verdict->first->in_prologue ? window.first : verdict->first->step;
      find_op({step - 1, step});
      return true;
    }
    note(fmt::format("step {} differs already, which the search before had taken for the same: the earlier one counts",
                     verdict->first->step));
    ++round_;
    const auto earlier = record_all(window.from.value_or(0), verdict->first->step);
    if (!earlier) return false;  // said in the verdict of that
    range = *earlier;
  }
  result_.verdict = Verdict{};
  result_.verdict.reason = fmt::format(
      "each search found an earlier fork than the one before, {} times: the commands do not repeat themselves",
      kMostRounds);
  return false;
}

// What was seen once and never again: that is said, and what it suggests.
void Bisect::not_again(const std::string& where, int64_t tries) {
  Verdict verdict;
  const std::string times = counted(static_cast<uint64_t>(tries), "replay");
  if (script_step_ && !seen_) {
    verdict.reason =
        fmt::format("the script calls step {} bad, and the arms did not fork in {} of {}", *script_step_, times, where);
    verdict.notes = {"what the script sees is in both arms alike, or it comes and goes"};
    result_.verdict = verdict;
    return;
  }
  verdict.reason = fmt::format("did not fork in {} of {}", times, where);
  if (seen_ && seen_->first) {
    result_.seen = seen_->first;
    verdict.notes.push_back(fmt::format("seen before: {}", headline(*seen_)));
  }
  if (other_contents_) {
    verdict.notes.push_back(fmt::format(
        "the two arms' checkpoints of {} are not the same, so the arms have parted before; steps behind it were not "
        "looked at (without --bad-checkpoint they are)",
        counted(static_cast<uint64_t>(*other_contents_), "step")));
  }
  verdict.notes.push_back(
      "a fault that comes rarely (a race, memory that nobody wrote, a flipped bit), or one that recording makes rarer "
      "because it "
      "changes the timing; run the command again and compare: more --tries, or the same command as --good and --bad "
      "over more steps");
  if (seen_ && seen_->ranks_diverged.size() == 1) {
    verdict.notes.push_back(
        fmt::format("only rank {} differed: if it is that rank each time, suspect its GPU or its host, and test these",
                    seen_->ranks_diverged.front()));
  }
  if (!request_.good.run.empty() && !request_.bad.run.empty())
    verdict.cause.next = fmt::format("forkpoint diff {} {}", request_.good.run, request_.bad.run);
  result_.verdict = verdict;
}

// Which of the two recorded runs came out again says which of them had the fault.
void Bisect::tell_which_repeats(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window) {
  if (request_.good.run.empty() || request_.bad.run.empty()) return;
  DiffOptions options;
  options.first_step = options.last_step = window.last;
  options.loads = false;
  for (const std::string* recorded : {&request_.good.run, &request_.bad.run}) {
    const Verdict verdict = diff(Run::open(*recorded), Run::open(runs.second.run), options);
    const bool same = verdict.outcome != Outcome::diverged && verdict.coverage.records_compared > 0;
    result_.verdict.notes.push_back(
        fmt::format("step {} of {} came out {}", window.last, *recorded, same ? "again, bit by bit" : "otherwise"));
  }
}

// Commands that compute something else than when they were recorded, and another fork than the recorded one, are an
// answer to another question.
void Bisect::compare_with_recorded(const std::pair<WindowDone, WindowDone>& runs, const BisectWindow& window,
                                   const Verdict& fork) {
  if (request_.good.run.empty() || request_.bad.run.empty()) return;
  DiffOptions options;
  options.first_step = window.first, options.last_step = window.last;
  options.loads = false;
  for (const auto& [recorded, again] :
       {std::pair(request_.good.run, runs.first.run), std::pair(request_.bad.run, runs.second.run)}) {
    const Verdict verdict = diff(Run::open(recorded), Run::open(again), options);
    if (verdict.outcome == Outcome::diverged)
      note(fmt::format("its command, run again, is not {}: {}", recorded, headline(verdict)));
  }
  if (!seen_ || !seen_->first || fork.first->step < seen_->first->step) return;
  if (fork.first->step != seen_->first->step || fork.first->rank != seen_->first->rank)
    note(fmt::format("another fork than that of the recorded runs: {}", headline(*seen_)));
}

// The finer verdict, unless it is of a later place: then the earlier one stays.
void Bisect::adopt(const Verdict& finer, const char* stage) {
  const Divergence &coarse = *result_.verdict.first, &fine = *finer.first;
  const bool same_place = coarse.layer == fine.layer && coarse.phase == fine.phase;
  if (fine.step > coarse.step ||
      (fine.step == coarse.step && order_of(fine) > order_of(coarse) && order_of(coarse) >= 0)) {
    note(
        fmt::format("at {} level the arms part only {}: another fork of a command that does not repeat itself; the "
                    "earlier one counts",
                    stage, at_text(fine)));
    return;
  }
  if (!same_place) note(fmt::format("at layer level it was {}; the {} level shows it here", at_text(coarse), stage));
  result_.verdict = finer;
}

// At launch level where the job launches anything, else with the ops of the layer. `window` becomes the one that was
// run.
std::optional<Verdict> Bisect::fork_finer(const Divergence& first, BisectWindow* window,
                                          std::pair<WindowDone, WindowDone>* runs) {
  const auto said = [](const std::optional<Verdict>& verdict) {
    return verdict ? headline(*verdict) : "no fork in these replays";
  };
  if (may_have_launches()) {
    BisectWindow fine = *window;
    fine.name = "launch", fine.level = Level::launch, fine.inputs = true;
    if (first.rank >= 0 && first.phase != Phase::collective) fine.ranks = {first.rank};
    const auto verdict = fork_again(fine, "which launch", runs);
    const bool launches = runs->first.launches > 0;
    end_stage("which launch", launches ? said(verdict) : "the job launches nothing on a GPU");
    if (launches && verdict) {
      *window = fine;
      return verdict;
    }
    if (launches) note("at launch level the arms did not part: recording launches changes the timing most");
  }
  const auto verdict = fork_again(*window, "which op", runs);
  end_stage("which op", said(verdict));
  return verdict;
}

void Bisect::find_op(const ForkRange& around) {
  const Divergence first = *result_.verdict.first;
  if (first.in_prologue) return note("it stands in what was loaded, before any op");
  if (request_.level == Level::step) return;
  begin_stage();
  BisectWindow window = window_around(around);
  window.name = "op";
  const std::string outer = layer_around(first, layer_run_.run);
  if (!first.layer.empty() && can_be_asked_for(first.layer)) {
    window.ops = first.layer;
    if (!outer.empty() && can_be_asked_for(outer)) window.ops = outer + "," + window.ops;
  }
  window.save_good = window.save_bad = operands_of(first, outer);
  std::pair<WindowDone, WindowDone> runs;
  const auto verdict = fork_finer(first, &window, &runs);
  if (!verdict) {
    return note(
        fmt::format("at the finer level the arms did not part in {}: the layer is what was seen, and its op was not",
                    counted(static_cast<uint64_t>(request_.tries), "replay")));
  }
  const bool launches = window.level == Level::launch;
  adopt(*verdict, launches ? "launch" : "op");
  if (!window.save_good.empty()) {
    const Divergence& found = *result_.verdict.first;
    result_.operands = operand_sentences(runs.first.run, runs.second.run, found, rank_of(result_.verdict));
    for (const WindowDone* done : {&runs.first, &runs.second}) result_.kept.push_back(done->run + "/" + kOperandFolder);
  }
  if (launches) save_launch(window, runs);
}

// The launch's own buffers of both arms, and the launch again.
void Bisect::save_launch(const BisectWindow& as, const std::pair<WindowDone, WindowDone>& fork) {
  const Divergence first = *result_.verdict.first;
  if (first.kind != Kind::launch) return;
  const int rank = rank_of(result_.verdict);
  const LaunchPlace place = find_launch(fork, first, rank);
  if (!place.good || !place.bad) {
    return note(
        "the launch was not run again, nor its operands saved: it cannot be told from others of its kernel, or only "
        "one arm made it");
  }
  BisectWindow window = as;
  window.name = "operands";
  window.save_good = fmt::format("step={};launch={}", first.step, *place.good);
  window.save_bad = fmt::format("step={};launch={}", first.step, *place.bad);
  window.launch_good = fmt::format("{}:{}", first.step, *place.good);
  window.launch_bad = fmt::format("{}:{}", first.step, *place.bad);
  std::pair<WindowDone, WindowDone> runs;
  const auto again = fork_again(window, "its operands", &runs);
  const bool same_launch = again && again->first->kernel == first.kernel && again->first->step == first.step &&
                           find_launch(runs, *again->first, rank) == place;
  end_stage("its operands", !again ? "no fork in these replays" : same_launch ? "the same launch" : headline(*again));
  if (same_launch) result_.verdict = *again;  // what its repetitions gave is evidence for the cause
  if (!same_launch) note("the launch's operands are of a replay in which it was not that launch that differed first");
  for (const WindowDone* done : {&runs.first, &runs.second}) {
    for (const std::string& text : done->retry) {
      result_.retry.push_back(fmt::format("{}: {}", done == &runs.first ? "good" : "bad", text));
    }
    result_.kept.push_back(done->run + "/" + kOperandFolder);
  }
  for (std::string& text : operand_sentences(runs.first.run, runs.second.run, first, rank))
    result_.operands.push_back(std::move(text));
}

BisectResult Bisect::run() {
  begin_stage();
  std::optional<ForkRange> range = !request_.script.empty()                                  ? from_script()
                                   : !request_.good.run.empty() && !request_.bad.run.empty() ? from_runs()
                                                                                             : from_commands();
  if (range) range = narrowed(*range);
  if (range) find_layer(*range);
  if (script_step_ && result_.verdict.outcome == Outcome::diverged && result_.verdict.first &&
      result_.verdict.first->step < *script_step_) {
    note(fmt::format("the script's first bad step is {}: the arms part before it", *script_step_));
  }
  if (result_.verdict.outcome == Outcome::identical && request_.good.command == request_.bad.command) {
    note(
        "both arms are one command, and what it computed twice is the same: a fault that comes and goes need not have "
        "come");
  }
  result_.verdict.notes.insert(result_.verdict.notes.end(), notes_.begin(), notes_.end());
  result_.windows = jobs_.windows(), result_.steps = jobs_.steps(), result_.seconds = jobs_.seconds();
  return result_;
}

BisectResult run_bisect(const BisectRequest& request, BisectLog* log) { return Bisect(request, log).run(); }

}  // namespace forkpoint
