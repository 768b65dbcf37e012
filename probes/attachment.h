// What `forkpoint attach` has asked of this process, and how far it is. The agent's thread asks; the threads of the
// host carry it out where steps begin and end, so that a recording begins exactly with a step. No lock: each change of
// state is made by whoever wins it.
//
//   dormant -> listening    awake, so that hooks count steps; nothing is recorded
//   listening -> armed      a window [first, last] is known, and the host has not passed a step's begin since
//   armed -> waking -> ready  it has, before `first`: the recorder has the window's settings (nobody else acts while it
//   wakes) ready -> recording      `first` has begun, and go() was called before
//   -> finishing -> done    asleep again; the writer thread ends the stream; then there is an outcome, until release()
//
// A rank that has passed `first`, or that was not told to go before the end of the step in front of it, records
// nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "probes/guard.h"
#include "probes/settings.h"

namespace forkpoint {

enum class AttachState : uint32_t { dormant, listening, armed, waking, ready, recording, finishing, done };
const char* name(AttachState state);

class Attachment {
 public:
  // ---- The agent's thread. base: of the process as it was loaded.
  bool listen(const Settings& base, Level level);  // false: not dormant
  // REQUIRES: listening. window: run_directory, level, mask_names and the wanted steps are set. Takes it.
  void arm(Settings* window);
  void go() { go_.store(true); }
  void end_at(int64_t step);  // the window ends with this step, if not before; a step before its first one calls it off
  // Ends at once what has not begun, and at the next border of a step what has.
  void call_off();
  // As call_off, and ends a recording in the middle of its step (a Gap says so).
  void abort();
  // From listening or done back to dormant. false: not there yet.
  bool release();
  // Is there something to be seen to without being asked? Then tick() is to be called every few milliseconds.
  bool is_busy() const { return state() > AttachState::listening && state() != AttachState::done; }
  void tick();

  AttachState state() const { return static_cast<AttachState>(state_.load()); }
  int64_t first_step() const { return first_.load(); }
  int64_t last_step() const { return until_.load(); }
  // REQUIRES: done. recorded: the window was, to its end (or to where it was told to end).
  bool recorded() const { return recorded_.load(); }
  std::string outcome() const;  // a phrase, empty when all went as asked

  // ---- Threads of the host. Before and after the recorder takes note of a step's begin, and after that of its end.
  void before_step(const Token& token, int64_t step);
  void step_begun(const Token& token, int64_t step);
  void step_ended(const Token& token, int64_t step);
  // Are records behind the end of this step to be kept for the next one?
  bool wants_between(int64_t step) const;
  bool wants_step(int64_t step) const { return step <= until_.load(std::memory_order_relaxed); }

  void forget_in_child();

 private:
  bool change(AttachState from, AttachState to);
  void finish(const Token& token, AttachState from, bool recorded, const char* why);
  void settle(bool cut);
  void note_failure();

  std::atomic<uint32_t> state_{0};
  std::atomic<bool> go_{false};
  std::atomic<bool> called_off_{false};
  std::atomic<bool> recorded_{false};
  std::atomic<int64_t> first_{INT64_MAX};
  std::atomic<int64_t> until_{INT64_MAX};
  std::atomic<const char*> why_{""};  // of finish(); constant
  std::atomic<const Settings*> window_{nullptr};
  static constexpr int kKept = 4;  // settings of the last recordings: threads that only looked may still read them
  const Settings* kept_[kKept] = {};
  int next_kept_ = 0;
  char failure_[400] = "";  // of the session; agent's thread
};

extern Attachment attachment;

}  // namespace forkpoint
