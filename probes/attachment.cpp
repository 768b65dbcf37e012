#include "probes/attachment.h"

#include <cstdio>
#include <new>

#include "lib/probe_contract.h"
#include "probes/recorder.h"

namespace forkpoint {

namespace {}

constinit Attachment attachment;

const char* name(AttachState state) {
  static constexpr const char* kNames[] = {"dormant", "listening", "armed",     "armed",
                                           "ready",   "recording", "finishing", "done"};
  return kNames[static_cast<uint32_t>(state)];
}

bool Attachment::change(AttachState from, AttachState to) {
  auto known = static_cast<uint32_t>(from);
  return state_.compare_exchange_strong(known, static_cast<uint32_t>(to));
}

// ---- The agent's thread

bool Attachment::listen(const Settings& base, Level level) {
  if (state() != AttachState::dormant) return false;
  auto* listener = new (std::nothrow) Settings(base);
  if (!listener) return false;
  listener->state = Settings::State::ready;
  listener->level = level;
  listener->first_wanted_step = INT64_MAX;
  go_.store(false);
  called_off_.store(false);
  recorded_.store(false);
  why_.store("");
  failure_[0] = '\0';
  first_.store(INT64_MAX);
  until_.store(INT64_MAX);
  window_.store(listener);
  recorder.listen(listener);
  state_.store(static_cast<uint32_t>(AttachState::listening));
  return true;
}

void Attachment::arm(Settings* window) {
  first_.store(window->first_wanted_step);
  until_.store(window->last_wanted_step);
  // The listener's settings are in use until the host takes over these.
  delete kept_[next_kept_];
  kept_[next_kept_] = window_.exchange(window);
  next_kept_ = (next_kept_ + 1) % kKept;
  change(AttachState::listening, AttachState::armed);
}

void Attachment::end_at(int64_t step) {
  if (step < first_.load()) call_off();  // a window that has begun ends with the step that it is in
  int64_t known = until_.load();
  while (step < known && !until_.compare_exchange_weak(known, step)) {
  }
}

void Attachment::call_off() {
  called_off_.store(true);
  for (const AttachState waiting : {AttachState::armed, AttachState::ready}) {
    if (!change(waiting, AttachState::finishing)) continue;
    why_.store(contract::kWhyCalledOff);
    settle(false);
  }
}

void Attachment::abort() {
  call_off();
  if (!change(AttachState::recording, AttachState::finishing)) return;
  why_.store("it was ended in the middle of a step");
  settle(true);
}

// The recorder sleeps from here on; tick() does the rest.
void Attachment::settle(bool cut) { recorder.fall_asleep(cut); }

bool Attachment::release() {
  const AttachState from = state();
  if (from == AttachState::dormant) return true;
  if (from != AttachState::listening && from != AttachState::done) return false;
  recorder.stop_listening();
  delete kept_[next_kept_];
  kept_[next_kept_] = window_.exchange(nullptr);
  next_kept_ = (next_kept_ + 1) % kKept;
  first_.store(INT64_MAX);
  until_.store(INT64_MAX);
  state_.store(static_cast<uint32_t>(AttachState::dormant));
  return true;
}

void Attachment::note_failure() { recorder.copy_session_failure(failure_, sizeof(failure_)); }

void Attachment::tick() {
  if (state() == AttachState::recording && recorder.session_has_ended() && change(AttachState::recording, AttachState::finishing)) {
    recorded_.store(false);
    settle(false);
  }
  if (state() != AttachState::finishing || !recorder.session_has_ended()) return;
  note_failure();
  if (!recorder.reclaim_session()) return;
  if (failure_[0]) recorded_.store(false);
  change(AttachState::finishing, AttachState::done);
}

std::string Attachment::outcome() const { return failure_[0] ? failure_ : why_.load(); }

// ---- Threads of the host

void Attachment::finish(const Token& token, AttachState from, bool recorded, const char* why) {
  // The outcome first: behind the change the agent may tell of it.
  if (state() != from) return;
  recorded_.store(recorded);
  why_.store(why);
  recorder.end_watching(token);
  if (change(from, AttachState::finishing)) settle(false);
}

void Attachment::before_step(const Token& token, int64_t step) {
  if (state() == AttachState::armed) {
    if (step >= first_.load()) return finish(token, AttachState::armed, false, "it had passed the first step when it was told");
    if (!change(AttachState::armed, AttachState::waking)) return;
    recorder.wake(window_.load());
    change(AttachState::waking, AttachState::ready);
    return;
  }
  if (state() != AttachState::ready || step < first_.load()) {
    if (state() == AttachState::ready && called_off_.load())
      finish(token, AttachState::ready, false, contract::kWhyCalledOff);
    return;
  }
  if (called_off_.load()) return finish(token, AttachState::ready, false, contract::kWhyCalledOff);
  if (step != first_.load()) return finish(token, AttachState::ready, false, "its steps jumped past the first one");
  if (!go_.load()) return finish(token, AttachState::ready, false, "it began the first step before all ranks were ready");
  change(AttachState::ready, AttachState::recording);
}

void Attachment::step_begun(const Token& token, int64_t step) {
  if (state() != AttachState::recording) return;
  // A program that ends no step: the last one is over, the stream has heard of it.
  if (step > until_.load()) return finish(token, AttachState::recording, true, "");
  if (called_off_.load()) finish(token, AttachState::recording, false, contract::kWhyCalledOff);
}

void Attachment::step_ended(const Token& token, int64_t step) {
  if (state() == AttachState::recording) {
    if (step >= until_.load()) return finish(token, AttachState::recording, true, "");
    if (called_off_.load()) finish(token, AttachState::recording, false, contract::kWhyCalledOff);
    return;
  }
  if (state() != AttachState::ready) return;
  if (called_off_.load()) return finish(token, AttachState::ready, false, contract::kWhyCalledOff);
  // What follows belongs to the first step: whether it is recorded is settled here.
  if (step + 1 >= first_.load() && !go_.load()) {
    finish(token, AttachState::ready, false, "it came to the first step before all ranks were ready");
  }
}

bool Attachment::wants_between(int64_t step) const {
  const AttachState now = state();
  if (now == AttachState::ready) return step + 1 >= first_.load();
  return now == AttachState::recording && step < until_.load();
}

void Attachment::forget_in_child() {
  state_.store(static_cast<uint32_t>(AttachState::dormant));
  first_.store(INT64_MAX);
  until_.store(INT64_MAX);
}

}  // namespace forkpoint
