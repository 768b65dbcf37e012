#include "cli/attaching.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "lib/error.h"
#include "lib/probe_contract.h"

namespace forkpoint {
using control::Message;

namespace {

constexpr int kAnswerMs = 5000;  // the agent answers whatever the job does, unless the process is stopped
constexpr int kPauseMs = 10;
constexpr int kMostAttempts = 5;
constexpr double kMargin_s = 0.2;     // from the choice of the first step to the last rank's confirmation
constexpr int kEndingMs = 10'000;     // for ranks that are left when one has gone, or after Ctrl-C

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMs)); }

Error does_not_answer(const Job& job) {
  return Error(job.is_gone() ? fmt::format("{} has ended.", job.who()) : fmt::format("{} does not answer: is it stopped?", job.who()),
               "Nothing is recorded; the other ranks were called off.");
}

}  // namespace

int64_t reachable_step(const std::vector<std::unique_ptr<Job>>& jobs, double margin_s, double* steps_a_second) {
  constexpr int kLookMs = 60;
  std::vector<std::pair<int64_t, int64_t>> before;
  int64_t furthest = 0;
  for (const auto& job : jobs) {
    if (!job->refresh(kAnswerMs)) throw does_not_answer(*job);
    before.emplace_back(job->step().value_or(0), now_ms());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!jobs[i]->refresh(kAnswerMs)) throw does_not_answer(*jobs[i]);
    const int64_t step = jobs[i]->step().value_or(0);
    const double elapsed_s = static_cast<double>(std::max<int64_t>(now_ms() - before[i].second, 1)) / 1000;
    *steps_a_second = std::max(*steps_a_second, static_cast<double>(step - before[i].first) / elapsed_s);
    furthest = std::max(furthest, step);
  }
  // The settings are taken over where the next step begins, and the one after it is the first that can be recorded.
  return furthest + 3 + static_cast<int64_t>(std::ceil(*steps_a_second * margin_s));
}

Attaching::Attaching(std::vector<std::unique_ptr<Job>> jobs, AttachRequest request, std::function<int()> interruptions)
    : jobs_(std::move(jobs)), request_(std::move(request)), interruptions_(std::move(interruptions)) {
  std::sort(jobs_.begin(), jobs_.end(), [](const auto& a, const auto& b) { return a->rank() < b->rank(); });
  check_ranks();
  settled_.resize(jobs_.size());
}

void Attaching::check_ranks() {
  for (size_t i = 1; i < jobs_.size(); ++i) {
    const Job &job = *jobs_[i], &before = *jobs_[i - 1];
    if (job.rank() < 0 || before.rank() < 0 || job.rank() == before.rank()) {
      throw Error(fmt::format("processes {} and {} are {}: these are not the ranks of one job.", before.pid(), job.pid(),
                              job.rank() < 0 || before.rank() < 0 ? "not told apart by a rank" : fmt::format("both rank {}", job.rank())),
                  "Name the processes of one job, or its name with --job.");
    }
    if (job.status().number("world") != before.status().number("world")) {
      throw Error(fmt::format("{} is of {} ranks and {} of {}: these are not the ranks of one job.", job.who(), job.status().text("world"),
                              before.who(), before.status().text("world")),
                  "Name the processes of one job, or its name with --job.");
    }
  }
}

Message Attaching::told(size_t i, const Message& request) {
  const auto reply = jobs_[i]->ask(request, kAnswerMs);
  if (!reply) throw does_not_answer(*jobs_[i]);
  if (reply->word != "refused") return *reply;
  throw Error(fmt::format("{}: {}.", jobs_[i]->who(), reply->text("why")), "Nothing is recorded.");
}

void Attaching::check_interrupted() const {
  if (interruptions_() > 0) throw Error("interrupted before the first step.", "Nothing is recorded.");
}

void Attaching::listen() {
  for (size_t i = 0; i < jobs_.size(); ++i) told(i, Message("listen").set("level", std::string(name(request_.level))));
}

std::string Attaching::unfit(const Job& job) const {
  if (job.status().text("bridge") == "failed") return "its PyTorch cannot be watched (its stderr says why)";
  if (job.status().text("bridge") == "waiting") return "it has not imported torch yet";
  if (jobs_.size() > 1 && job.status().text("base") == "unknown") {
    return "nothing in it says how many steps it has made (its optimizer keeps no count), so no step common to all ranks can be named";
  }
  return "";
}

void Attaching::await_steps() {
  const int64_t deadline = now_ms() + request_.timeout_s * 1000;
  for (const auto& job : jobs_) {
    while (!job->step()) {
      check_interrupted();
      if (const std::string why = unfit(*job); !why.empty()) throw Error(fmt::format("{}: {}.", job->who(), why));
      if (now_ms() > deadline) {
        throw Error(fmt::format("{} has begun no step within {} s.", job->who(), request_.timeout_s),
                    "Its steps come from forkpoint.h or torch.optim; --timeout gives it longer.");
      }
      pause();
      if (!job->refresh(kAnswerMs)) throw does_not_answer(*job);
    }
    if (const std::string why = unfit(*job); !why.empty()) throw Error(fmt::format("{}: {}.", job->who(), why));
  }
}

int64_t Attaching::next_common_step(int attempt) {
  const int64_t reachable = reachable_step(jobs_, kMargin_s * (1 << attempt), &steps_a_second_);
  if (!request_.first) return reachable;
  for (const auto& job : jobs_) {
    if (job->step().value_or(0) + 1 < *request_.first) continue;
    throw Error(fmt::format("{} is at step {}, so recording cannot begin with step {}.", job->who(), job->step().value_or(0), *request_.first),
                "Name a later one with --from, or leave it out.");
  }
  return *request_.first;
}

bool Attaching::arm_all(int64_t first, std::string* why) {
  first_ = first;
  last_ = first + request_.steps - 1;
  Message request("arm");
  request.set("first", first_).set("last", last_).set("run", request_.run_directory).set("mask", request_.mask_names ? 1 : 0);
  if (request_.max_size_bytes) request.set("max_size", static_cast<int64_t>(*request_.max_size_bytes));
  for (size_t i = 0; i < jobs_.size(); ++i) told(i, request);
  return await_ready(why);
}

// Every rank has taken the window over, before its first step. false: one was too far already.
bool Attaching::await_ready(std::string* why) {
  const int64_t deadline = now_ms() + request_.timeout_s * 1000;
  for (const auto& job : jobs_) {
    // One that gave up says why when it is done with it.
    while (job->state() == "armed" || job->state() == "finishing") {
      check_interrupted();
      if (now_ms() > deadline) {
        throw Error(fmt::format("{} came to no new step within {} s.", job->who(), request_.timeout_s),
                    "Nothing is recorded; --timeout gives it longer.");
      }
      pause();
      if (!job->refresh(kAnswerMs)) throw does_not_answer(*job);
    }
    if (job->state() == "ready") continue;
    *why = fmt::format("{}: {}", job->who(), job->status().text("why"));
    called_off_ = job->status().text("why") == contract::kWhyCalledOff;
    return false;
  }
  // Up to here no rank has been told to go; each that came to the first step meanwhile has given up by itself.
  for (const auto& job : jobs_) job->ask(Message("go"), kAnswerMs);
  // From here on ranks may have recorded: what is wrong with one shows in wait().
  return true;
}

// Back to listening or, where that fails, as far as it goes.
void Attaching::call_off(const char* request) {
  for (const auto& job : jobs_) job->ask(Message(request), kAnswerMs);
  const int64_t deadline = now_ms() + kAnswerMs;
  for (const auto& job : jobs_) {
    while (!job->is_gone() && now_ms() < deadline) {
      const auto reply = job->ask(Message("release"), kAnswerMs);
      if (!reply || reply->word != "refused") break;
      pause();
    }
  }
}

void Attaching::begin() {
  try {
    std::string why;
    for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
      listen();
      await_steps();
      if (arm_all(next_common_step(attempt), &why)) return;
      call_off("abort");
      if (called_off_)
        throw Error(why + " before its first step.", "Nothing is recorded: `forkpoint detach` has ended the window.");
      if (request_.first) break;
    }
    throw Error(why + ".", "Nothing is recorded. Its steps are fast, or --from names one that is too near.");
  } catch (const Error&) {
    call_off("abort");
    throw;
  }
}

// No rank comes to its first step before it can be told.
bool Attaching::window_is_ahead() const {
  int64_t furthest = 0;
  for (const auto& job : jobs_) furthest = std::max(furthest, job->step().value_or(0));
  return furthest + 2 + static_cast<int64_t>(std::ceil(steps_a_second_ * kMargin_s)) < first_;
}

void Attaching::look_for_interruptions() {
  const int now = interruptions_();
  if (now == seen_interruptions_) return;
  seen_interruptions_ = now;
  interrupted_ = true;
  if (window_is_ahead()) {
    for (const auto& job : jobs_) job->ask(Message("call_off"), kAnswerMs);
    give_up_ms_ = now_ms() + (now > 1 ? 0 : kEndingMs);
    return;
  }
  int64_t furthest = 0;
  for (size_t i = 0; i < jobs_.size(); ++i) furthest = std::max(furthest, settled_[i] ? 0 : jobs_[i]->step().value_or(0));
  const int64_t end = std::max(first_, furthest + 1 + static_cast<int64_t>(std::ceil(steps_a_second_ * kMargin_s)));
  last_ = std::min(last_, end);
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (!settled_[i]) jobs_[i]->ask(Message("end_at").set("step", last_), kAnswerMs);
  }
  give_up_ms_ = now_ms() + (now > 1 ? 0 : kEndingMs);  // who asks twice wants it now
}

// A rank has gone: the others may wait for it for ever. They get as long as they move.
void Attaching::end_the_rest(size_t lost) {
  give_up_ms_ = now_ms() + kEndingMs;
  outcomes_[lost].ended = outcomes_[lost].settled = jobs_[lost]->is_gone();
  outcomes_[lost].why = outcomes_[lost].ended ? "its process ended" : "it does not answer (is it stopped?)";
  settled_[lost] = true;
}

bool Attaching::settled(size_t i) {
  if (settled_[i]) return true;
  Job& job = *jobs_[i];
  const auto step = job.step();
  if (!job.refresh(kAnswerMs)) return end_the_rest(i), true;
  if (job.step() != step && give_up_ms_ && !interrupted_) give_up_ms_ = now_ms() + kEndingMs;
  AttachOutcome& outcome = outcomes_[i];
  if (job.state() != "done") return false;
  outcome.recorded = job.status().text("recorded") == "1";
  outcome.why = job.status().text("why");
  outcome.settled = true;
  outcome.last_step = job.status().number("last").value_or(last_);
  job.ask(Message("release"), kAnswerMs);
  return settled_[i] = true;
}

// Whoever ends one rank's window (`forkpoint detach` on its machine) does not reach the others.
void Attaching::compare_ends() {
  int64_t furthest = -1;
  for (const AttachOutcome& outcome : outcomes_)
    furthest = std::max(furthest, outcome.recorded ? outcome.last_step : -1);
  if (furthest >= 0) last_ = std::min(last_, furthest);
  for (AttachOutcome& outcome : outcomes_) {
    if (!outcome.recorded || outcome.last_step >= furthest) continue;
    outcome.recorded = false;
    outcome.why =
        fmt::format("it was told to end with step {}, and others went on to step {}", outcome.last_step, furthest);
  }
}

std::vector<AttachOutcome> Attaching::wait() {
  for (const auto& job : jobs_) outcomes_.push_back({.rank = std::max(job->rank(), 0), .who = job->who()});
  bool aborted = false;
  for (bool all = false; !all;) {
    look_for_interruptions();
    all = true;
    for (size_t i = 0; i < jobs_.size(); ++i) all = settled(i) && all;
    if (all) break;
    if (give_up_ms_ && now_ms() > *give_up_ms_) {
      if (aborted) break;
      aborted = true;
      for (size_t i = 0; i < jobs_.size(); ++i) {
        if (!settled_[i]) jobs_[i]->ask(Message("abort"), kAnswerMs);
      }
      give_up_ms_ = now_ms() + kEndingMs;
    }
    pause();
  }
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (!settled_[i]) outcomes_[i].why = "its stream could not be ended";
  }
  compare_ends();
  return outcomes_;
}

}  // namespace forkpoint
