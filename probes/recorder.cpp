#include "probes/recorder.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "probes/agent.h"
#include "probes/attachment.h"
#include "probes/cuda_digest.h"
#include "probes/launch_level.h"
#include "probes/nccl_hooks.h"
#include "probes/operands.h"
#include "probes/os.h"
#include "probes/step_marks.h"
#include "probes/torch_bridge.h"
#include "probes/watch_control.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constexpr int64_t kExitPatienceNs = 4'000'000'000;  // for the device; a second more to write what there is
constexpr int64_t kStopPatienceNs = 300'000'000'000;  // the host goes on meanwhile
constexpr int64_t kAbortPatienceNs = 1'000'000'000;
constexpr int64_t kStartPatienceNs = 10'000'000'000;

}  // namespace

constinit Recorder recorder;

void Recorder::set_up(const Settings* settings, forkpoint_api* table) {
  settings_ = settings;
  base_ = settings;
  table_ = table;
}

void Recorder::deactivate() {
  ended_.store(true, std::memory_order_relaxed);
  __atomic_store_n(&table_->active, 0, __ATOMIC_RELEASE);
}

// Between two steps a record belongs to the one that begins next, whose number nobody knows yet.
int64_t Recorder::place() const { return in_step_.load(std::memory_order_relaxed) ? step_.load() : kPrologueStep; }

void Recorder::lose(Loss loss, int error) { losses_.add(loss, place(), 1, error); }

void Recorder::refuse_reentrant() { lose(Loss::reentrant); }

void Recorder::refuse_broken(const char* what) {
  if (!broken_said_.exchange(true)) say("an error inside the probe: %s", what);
  lose(Loss::internal);
}

// ---- The session's life

Session* Recorder::session_if_running() {
  // Sequentially consistent against start(): either it sees the step that this thread has set, or we see that it starts.
  uint32_t life = life_.load();
  const int64_t give_up_ns = life == static_cast<uint32_t>(Life::starting) ? now_ns() + kStartPatienceNs : 0;
  while (life == static_cast<uint32_t>(Life::starting) && now_ns() < give_up_ns) {
    futex_wait(life_, life, 1'000'000);
    life = life_.load();
  }
  return life == static_cast<uint32_t>(Life::running) ? session_.load(std::memory_order_acquire) : nullptr;
}

Session* Recorder::session(const Token& token) {
  if (life_.load(std::memory_order_acquire) == static_cast<uint32_t>(Life::idle)) return start(token);
  return session_if_running();
}

Session* Recorder::start(const Token& token) {
  auto idle = static_cast<uint32_t>(Life::idle);
  if (!life_.compare_exchange_strong(idle, static_cast<uint32_t>(Life::starting))) return session_if_running();
  const bool started = start_session(token);
  if (!started) deactivate();
  life_.store(static_cast<uint32_t>(started ? Life::running : Life::ended));
  futex_wake(life_);
  return started ? session_.load(std::memory_order_acquire) : nullptr;
}

int Recorder::own_rank() const { return given_rank_.load() >= 0 ? given_rank_.load() : std::max(settings_->rank, 0); }

bool Recorder::is_own_rank(int rank) const {
  for (int i = 0; i < ancestors_; ++i) {
    if (ancestor_ranks_[i] == rank) return false;
  }
  return ancestors_ < kMaxAncestors;
}

// With the first record, and not when the library is loaded: a shell under the same preload must stay silent.
void Recorder::say_rank_problem(int rank, int world_size) const {
  if (!settings_->rank_problem[0] || given_rank_.load() >= 0) return;  // the program knows better
  say("%s; this process is recorded as rank %d of %s%d", settings_->rank_problem, rank,
      settings_->rank >= 0 && !settings_->world_size_known ? "at least " : "", world_size);
}

bool Recorder::start_session(const Token& token) {
  SessionStart start;
  start.rank = own_rank();
  start.world_size = given_rank_.load() >= 0 ? given_world_.load() : std::max(settings_->world_size, 1);
  handle_forks();
  say_rank_problem(start.rank, start.world_size);
  if (!settings_->wants_rank(start.rank) || !is_own_rank(start.rank)) return false;
  say_bridge_problem();
  start.settings = settings_;
  start.facts = &facts_;
  start.losses = &losses_;
  start.limits = &limits_;
  start.notes = &notes_;
  start.on_end = [](bool whole) { recorder.note_session_end(whole); };
  start.any_step = any_step_.load();
  start.in_step = in_step_.load();
  start.step = step_.load();
  start.step_serial = step_serial_.load();
  start.step_wanted = settings_->wants_step(start.step);
  if (settings_->level == Level::launch) declare_launch_limits(limits_);
  describe_device(token, start.device, sizeof(start.device), start.driver, sizeof(start.driver));
  Session* session = Session::start(token, start);
  session_.store(session, std::memory_order_release);
  return session != nullptr;
}

void Recorder::handle_forks() {
  if (!fork_handler_.exchange(true)) pthread_atfork(nullptr, nullptr, [] { recorder.after_fork_in_child(); });
}

int64_t Recorder::exit_deadline_ns() {
  int64_t deadline = 0;
  const int64_t wanted = now_ns() + kExitPatienceNs;
  return exit_deadline_ns_.compare_exchange_strong(deadline, wanted) ? wanted : deadline;
}

void Recorder::drain_at_exit() {
  Session* session = session_.load();
  if (session && session->owned_by_this_process()) session->drain(exit_deadline_ns());
}

void Recorder::save_before_death() {
  const Guard::Use use;
  Session* session = session_.load();
  if (session && session->owned_by_this_process()) session->save(now_ns() + kAbortPatienceNs);
}

void Recorder::finish_at_exit() {
  leave_agent();
  const Guard::Use use;
  Session* session = session_.load();
  if (!session || !session->owned_by_this_process()) return;
  deactivate();
  session->finish(exit_deadline_ns());
}

void Recorder::after_fork_in_child() {
  Guard::reset_after_fork();
  Session* session = session_.exchange(nullptr);
  // A parent that has begun a step, or said its rank, will record under it even if it has not yet.
  const bool starting = life_.load() == static_cast<uint32_t>(Life::starting);
  if (session || starting || any_step_.load() || given_rank_.load() >= 0) {
    if (ancestors_ < kMaxAncestors) ancestor_ranks_[ancestors_++] = session ? session->rank() : own_rank();
  }
  if (session) session->abandon_in_child();
  attachment.forget_in_child();
  agent_in_child();
  settings_ = base_;
  retired_ = nullptr;
  life_.store(static_cast<uint32_t>(Life::idle));
  losses_.reset();
  limits_.reset();
  notes_.limits.forget();
  notes_.gaps.forget();
  exit_deadline_ns_.store(0);
  any_step_.store(false);
  in_step_.store(false);
  wanted_.store(true);
  step_.store(kPrologueStep);
  micro_step_.store(0);
  step_lock_.reset();
  forget_devices_in_child();
  save_nothing_in_child();
  next_row_.store(0);
  ended_.store(false);
  stop_.forget_in_child();
  forget_control_in_child();
  __atomic_store_n(&table_->level, static_cast<int32_t>(settings_->level), __ATOMIC_RELAXED);
  launch_level_in_child();
  forget_steps_in_child();
  forget_nccl_in_child();
  // Whatever made the parent sleep: the child may be another rank.
  __atomic_store_n(&table_->active, sleeps_by_itself() ? 0 : 1, __ATOMIC_RELEASE);
}

// ---- Who and when

void Recorder::set_rank(const Token&, int32_t rank, int32_t world_size) {
  if (rank < 0 || world_size < 1 || rank >= world_size) {
    return say("forkpoint_rank(%d, %d) makes no sense and is ignored: expected 0 <= rank < world_size", rank, world_size);
  }
  if (const Session* session = session_.load()) {
    if (session->rank() != rank) {
      say("forkpoint_rank(%d, %d) came after the first record, which was made as rank %d; it is ignored", rank, world_size,
          session->rank());
    }
    return;
  }
  handle_forks();
  given_world_.store(world_size);
  given_rank_.store(rank);
  if (!settings_->wants_rank(rank)) deactivate();
  if (sleeps_by_itself()) be_reachable();
}

int Recorder::known_rank(int* world_size) const {
  if (const Session* session = session_.load()) return *world_size = session->world_size(), session->rank();
  const bool given = given_rank_.load() >= 0;
  const int rank = given ? given_rank_.load() : settings_->rank;
  if (rank >= 0) *world_size = given ? given_world_.load() : settings_->world_size;
  return rank;
}

void Recorder::suggest_rank(const Token& token, int rank, int world_size) {
  if (session_.load() || given_rank_.load() >= 0) return;
  if (settings_->rank >= 0 && (settings_->world_size_known || settings_->rank != rank)) return;
  set_rank(token, rank, world_size);
}

bool Recorder::push_step_event(const Token& token, const Event& event, bool ends_step) {
  Session* session = session_if_running();
  if (!session) return true;
  Session::Ring::Claim claim;
  if (!session->claim(token, &claim)) return false;
  *claim.event = event;
  session->publish(token, claim);
  if (ends_step) session->step_has_ended();
  return true;
}

void Recorder::begin_step(const Token& token, StepBegin begin) {
  if (begin.step < 0) return lose(Loss::bad_step);
  handle_forks();
  if (settings_->stop_after >= 0 && is_past_stop(token, begin.step)) return;
  const bool sleeper = sleeps_by_itself();
  if (sleeper) {
    be_reachable();
    attachment.before_step(token, begin.step);
  }
  {
    const SpinGuard guard(step_lock_);
    if (begin.begun) begin.step = first_step() + begin.begun->fetch_add(1);
    if (!tell_step(token, begin, sleeper)) return;
  }
  launch_level_at_step(token, *settings_, begin.step);
  if (sleeper) attachment.step_begun(token, begin.step);
}

// With step_lock_ held. false: nobody is told anything now.
bool Recorder::tell_step(const Token& token, const StepBegin& begin, bool sleeper) {
  const int64_t step = begin.step;
  Event event;
  event.kind = EventKind::step_begin;
  event.step = step;
  event.wanted = is_awake() && settings_->wants_step(step) && (!sleeper || attachment.wants_step(step));
  event.flags = begin.computed ? kStepComputed : 0;
  micro_step_.store(0);
  step_.store(step);
  step_is_known_.store(true);
  // What came after the end of the last step is the beginning of this one.
  const bool ends_step = in_step_.exchange(true);
  if (ends_step || !any_step_.exchange(true)) next_row_.store(0);
  event.step_serial = step_serial_.fetch_add(1) + 1;
  if (!is_awake()) return false;
  const auto level = static_cast<int32_t>(begin_step_level(*settings_, step));
  if (table_->level != level) __atomic_store_n(&table_->level, level, __ATOMIC_RELAXED);
  const bool placed = push_step_event(token, event, ends_step);
  // A record that cannot be told which step it belongs to must not land in another.
  if (!placed) losses_.add(Loss::step_lost, step);
  wanted_.store(event.wanted && placed);
  return true;
}

bool Recorder::begin_final(const Token& token) {
  const int64_t step = step_.load();
  // A window of an attach ends where it was asked to.
  if (!is_awake() || sleeps_by_itself() || stop_.is_stopping()) return false;
  const SpinGuard guard(step_lock_);
  if (!any_step_.load() || in_step_.load() || !settings_->wants_step(step)) return false;
  Event event;
  event.kind = EventKind::step_begin;
  event.step = step;
  event.wanted = true;
  event.flags = kStepFinal;
  event.step_serial = step_serial_.fetch_add(1) + 1;
  micro_step_.store(0);
  in_step_.store(true);
  const bool placed = push_step_event(token, event, false);
  if (!placed) losses_.add(Loss::step_lost, step);
  wanted_.store(placed);
  return placed;
}

void Recorder::end_step(const Token& token) {
  const bool sleeper = sleeps_by_itself();
  bool placed = false;
  {
    const SpinGuard guard(step_lock_);
    if (!in_step_.exchange(false)) return;
    next_row_.store(0);
    if (!is_awake()) return;
    Event event;
    event.kind = EventKind::step_end;
    placed = push_step_event(token, event, true);
    micro_step_.store(0, std::memory_order_relaxed);
    if (!placed) losses_.add(Loss::step_lost, step_.load());
    // What comes before the next step begins belongs to it. Whether that one is wanted shows then: it is kept until then.
    wanted_.store(placed && !sleeper);
  }
  if (sleeper) {
    attachment.step_ended(token, step_.load());
    if (attachment.wants_between(step_.load())) wanted_.store(placed);
  }
  if (stop_.ends_with(step_.load())) stop_recording(token);
}

// ---- FORKPOINT_STOP_AFTER

// A rank that another one waits for must not stand still for longer; then it goes on, unrecorded.
bool Recorder::is_past_stop(const Token& token, int64_t step) {
  const int rank = own_rank();
  int world = 0;
  if (known_rank(&world) < 0) world = 1;
  if (settings_->wants_rank(rank) && is_own_rank(rank)) stop_.begin_step(*settings_, rank, std::max(world, 1), step);
  if (!stop_.is_past(step)) return false;
  // Steps that the program does not end by itself end here.
  if (in_step_.load()) end_step(token);
  if (!stop_.is_stopping()) stop_recording(token);
  launch_level_at_step(token, *settings_, step);
  stop_.hold();
  deactivate();
  return true;
}

void Recorder::stop_recording(const Token&) {
  if (!stop_.begin_stopping()) return;
  wanted_.store(false);
  Session* session = session_if_running();
  if (!session) return stop_.note_end(true);  // nothing was recorded: nothing is to be written
  stop_.set_rank(session->rank(), session->world_size());
  session->end_soon(now_ns() + kStopPatienceNs, false);
}

// The next step must still find the recorder awake, so that this rank waits there.
void Recorder::note_session_end(bool whole) {
  stop_.note_end(whole);
  if (!stop_.is_stopping()) deactivate();
}

void Recorder::set_micro_step(const Token&, int32_t index) {
  if (index < 0) return lose(Loss::bad_step);
  micro_step_.store(index, std::memory_order_relaxed);
}

void Recorder::fact(const Token&, const char* name, const char* value) {
  if (!name || !value || facts_.add(name, value) || facts_full_.exchange(true)) return;
  say("more facts than are kept (%u): \"%s\" and later ones are not in the run", FactList::kMost, name);
}

void Recorder::set_step_base(const Token&, const char* base) {
  if (!names_.create()) return lose(Loss::no_memory);
  if (const Name* name = names_.name(base)) set_program_step_base(name->text);
}

void Recorder::note_limit(const char* what, const char* detail) {
  if (!notes_.limits.add(what, detail)) limits_.add(Limit::notes_full);
}

void Recorder::note_gap(const char* reason) {
  if (Note* note = notes_.gaps.add(reason, nullptr)) note->when.add(place());
  else lose(Loss::notes_full);
}

}  // namespace forkpoint
