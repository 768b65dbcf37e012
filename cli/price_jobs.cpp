// The jobs of forkpoint price.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "cli/job.h"
#include "cli/knob_options.h"
#include "cli/price.h"
#include "cli/terminal.h"
#include "lib/diff.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

class Pricing {
 public:
  explicit Pricing(const PriceRequest& request) : request_(request) {}

  PriceResult run() {
    choose_knobs();
    make_arms();
    for (int64_t round = 0; round < request_.rounds; ++round) {
      for (PriceArm& arm : result_.arms) run_arm(&arm);
    }
    if (!result_.fast().repeats()) result_.full().repeats() ? search() : take_lone();
    result_.not_deterministic.assign(not_deterministic_.begin(), not_deterministic_.end());
    return std::move(result_);
  }

 private:
  // What the user's own settings keep out of force costs nothing and mends nothing.
  void choose_knobs() {
    RecordingRequest as_asked;
    as_asked.knobs = request_.knobs;
    const auto plan = knob_plan(as_asked);
    for (const KnobOutcome& outcome : plan ? plan->outcomes : std::vector<KnobOutcome>{}) {
      if (outcome.in_force()) knobs_.push_back(outcome.knob);
      else result_.not_in_force.push_back(outcome.problem);
    }
    if (knobs_.empty()) throw Error("price: no knob is left to be priced.", "See --deterministic, and what was said of conflicts.");
  }

  void make_arms() {
    PriceArm fast, full;
    fast.name = "fast";
    full.kind = PriceArm::Kind::full;
    full.name = "all";
    full.knobs = knobs_;
    result_.arms = {fast, full};
    if (!request_.alone || knobs_.size() < 2) return;
    for (const Knob* knob : knobs_) {
      PriceArm arm;
      arm.kind = PriceArm::Kind::alone;
      arm.name = std::string(knob->name);
      arm.knobs = parse_knobs(knob->name);  // with what it needs
      result_.arms.push_back(arm);
    }
  }

  JobRequest job_of(const PriceArm& arm) const {
    JobRequest job;
    RecordingRequest& recording = job.recording;
    recording.run_directory = fmt::format("{}/{}-{}", request_.folder, arm.name, arm.runs.size() + 1);
    recording.command = request_.command;
    recording.level = Level::step;
    recording.step_on = request_.step_on;
    recording.steps = StepRange{request_.last, request_.last};
    if (!arm.knobs.empty()) recording.knobs = arm.knobs;
    job.stop_after = request_.last;
    job.begins_with = begins_with_;  // one that goes on from what the run before has saved cannot be compared
    job.patience = request_.patience;
    job.show_output = request_.show_output;
    return job;
  }

  std::vector<double> times_of(const JobResult& result) const {
    std::vector<StepBegins> ranks;
    for (const StepTimes& times : result.times) ranks.push_back(times.begun_ns);
    return step_times_ms(ranks, request_.first, request_.last);
  }

  // An arm that failed once, or was seen not to repeat as a candidate, is not run again.
  void run_arm(PriceArm* arm) {
    if (!arm->failure.empty()) return;
    const JobRequest job = job_of(*arm);
    print_note(fmt::format("{}, run {}: {}", arm->name, arm->runs.size() + 1,
                           arm->knobs.empty() ? "no knob" : knob_names(arm->knobs)));
    const JobResult result = run_job(job);
    ++result_.jobs;
    result_.seconds += result.seconds;
    if (result.end == JobEnd::interrupted) {
      print_note(fmt::format("interrupted; {} holds what was recorded until then", request_.folder));
      exit_interrupted(result);
    }
    const std::vector<double> times = times_of(result);
    if (result.end == JobEnd::short_of || result.recorded.ranks == 0 || times.empty()) return fail(job, result, arm);
    not_deterministic_.insert(result.recorded.not_deterministic.begin(), result.recorded.not_deterministic.end());
    begins_with_ = result.first_step;
    arm->runs.push_back(job.recording.run_directory);
    arm->run_medians_ms.push_back(median(times));
    if (arm->runs.size() > 1 && arm->difference.empty()) compare_runs(arm);
  }

  void fail(const JobRequest& job, const JobResult& result, PriceArm* arm) {
    arm->failure = !result.trouble.empty()          ? result.trouble
                   : result.recorded.ranks == 0     ? "it recorded nothing"
                                                    : fmt::format("no step from {} to {} was timed", request_.first, request_.last);
    report_job(job, result);
    if (arm->kind == PriceArm::Kind::fast) {
      throw Error(fmt::format("price: without any knob the job did not do steps {} to {}: {}.", request_.first, request_.last,
                              arm->failure),
                  fmt::format("See {}/job.log, and --steps.", job.recording.run_directory));
    }
    print_warning(fmt::format("{}: {}", arm->name, arm->failure));
  }

  void compare_runs(PriceArm* arm) const {
    const Run a = Run::open(arm->runs.front()), b = Run::open(arm->runs.back());
    DiffOptions options;
    options.first_step = options.last_step = request_.last;
    const Verdict verdict = diff(a, b, options);
    arm->incomparable = verdict.outcome == Outcome::incomparable;
    if (verdict.outcome != Outcome::identical) arm->difference = headline(verdict);
  }

  std::optional<ArmTime> time_alone(const Knob* knob) const {
    for (const PriceArm& arm : result_.arms) {
      if (arm.kind == PriceArm::Kind::alone && arm.name == knob->name) return arm.time();
    }
    return std::nullopt;
  }

  // Cheap ones first: by what was measured, else by what is known.
  Knobs by_cost() const {
    Knobs sorted = knobs_;
    const auto cost = [&](const Knob* knob) {
      const auto time = time_alone(knob);
      return time ? time->median_ms : knob->costly ? 1e9 : 0;
    };
    std::stable_sort(sorted.begin(), sorted.end(), [&](const Knob* a, const Knob* b) { return cost(a) < cost(b); });
    return sorted;
  }

  static Knobs with_needed(const Knobs& knobs) { return parse_knobs(knobs.empty() ? "none" : knob_names(knobs)); }

  // A set that was an arm already has its runs.
  const PriceArm* known(const Knobs& knobs) const {
    for (const auto* list : {&result_.arms, &result_.candidates}) {
      for (const PriceArm& arm : *list) {
        if (arm.knobs == knobs) return &arm;
      }
    }
    return nullptr;
  }

  // Twice, and a third time nowhere: once unequal is out.
  const PriceArm& tried(const Knobs& knobs) {
    if (const PriceArm* arm = known(knobs)) return *arm;
    PriceArm arm;
    arm.kind = PriceArm::Kind::candidate;
    arm.name = fmt::format("set{}", result_.candidates.size() + 1);
    arm.knobs = knobs;
    for (int i = 0; i < 2; ++i) run_arm(&arm);
    result_.candidates.push_back(std::move(arm));
    return result_.candidates.back();
  }

  void search() {
    Knobs sorted = by_cost();
    while (!sorted.empty()) {
      const auto needed = minimal_knobs(sorted.size(), [&](const std::vector<size_t>& kept) {
        Knobs knobs;
        for (size_t at : kept) knobs.push_back(sorted[at]);
        return tried(with_needed(knobs)).repeats();
      });
      Knobs knobs;
      for (size_t at : needed) knobs.push_back(sorted[at]);
      if (confirm(with_needed(knobs))) return;
      // It repeated twice and then did not. All of them did, and one that was left out may be why.
      if (knobs.size() == sorted.size()) return;
      print_warning(fmt::format("{} repeated twice and not a third time; the search begins anew", knob_names(knobs)));
    }
  }

  // All knobs together do not repeat, or do not run, and yet one of them alone may: what another sets can undo it.
  void take_lone() {
    for (const PriceArm& arm : result_.arms) {
      if (arm.kind != PriceArm::Kind::alone || !arm.repeats()) continue;
      if (result_.cheapest && result_.cheapest->time()->median_ms <= arm.time()->median_ms) continue;
      result_.cheapest = arm;
      result_.cheapest->kind = PriceArm::Kind::cheapest;
    }
  }

  // Runs it in turns with the fast arm: the runs of the search were not, and their times do not count.
  bool confirm(const Knobs& knobs) {
    PriceArm arm = tried(knobs);
    PriceArm& fast = result_.arms[0];
    const bool is_new = arm.kind == PriceArm::Kind::candidate;
    if (is_new) arm.run_medians_ms.clear();
    for (int64_t round = 0; is_new && arm.repeats() && round < request_.rounds; ++round) {
      run_arm(&fast);
      run_arm(&arm);
    }
    for (PriceArm& candidate : result_.candidates) {
      if (candidate.knobs == knobs) candidate = arm;
    }
    if (!arm.repeats()) return false;
    arm.kind = PriceArm::Kind::cheapest;
    result_.cheapest = arm;
    return true;
  }

  const PriceRequest& request_;
  PriceResult result_;
  Knobs knobs_;
  std::optional<int64_t> begins_with_;
  std::set<std::string> not_deterministic_;
};

}  // namespace

PriceResult run_price(const PriceRequest& request) { return Pricing(request).run(); }

}  // namespace forkpoint
