#include "probes/recorder.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "probes/cuda_digest.h"
#include "probes/exits.h"
#include "probes/launch_level.h"
#include "probes/nccl_hooks.h"
#include "probes/launch_packet.h"
#include "probes/os.h"
#include "probes/step_marks.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constexpr int64_t kExitPatienceNs = 5'000'000'000;
constexpr int64_t kStartPatienceNs = 10'000'000'000;
constexpr int32_t kMaxMembers = 1 << 20;

// Where no scope says it.
Phase default_phase(Role role) {
  switch (role) {
    case Role::batch: return Phase::data;
    case Role::gradient: return Phase::backward;
    case Role::parameter:
    case Role::optimizer_state: return Phase::optimizer;
    case Role::rng:
    case Role::sampler: return Phase::state;
    default: return Phase::forward;
  }
}

}  // namespace

constinit Recorder recorder;

void Recorder::set_up(const Settings* settings, forkpoint_api* table) {
  settings_ = settings;
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

bool Recorder::start_session(const Token& token) {
  SessionStart start;
  start.rank = own_rank();
  start.world_size = given_rank_.load() >= 0 ? given_world_.load() : std::max(settings_->world_size, 1);
  handle_forks();
  if (!settings_->wants_rank(start.rank) || !is_own_rank(start.rank)) return false;
  start.settings = settings_;
  start.facts = &facts_;
  start.losses = &losses_;
  start.limits = &limits_;
  start.on_end = [] { recorder.deactivate(); };
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

void Recorder::finish_at_exit() {
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
  life_.store(static_cast<uint32_t>(Life::idle));
  losses_.reset();
  limits_.reset();
  exit_deadline_ns_.store(0);
  any_step_.store(false);
  in_step_.store(false);
  wanted_.store(true);
  step_.store(kPrologueStep);
  micro_step_.store(0);
  forget_devices_in_child();
  next_row_.store(0);
  ended_.store(false);
  launch_level_in_child();
  forget_steps_in_child();
  forget_nccl_in_child();
  // Whatever made the parent sleep: the child may be another rank.
  __atomic_store_n(&table_->active, 1, __ATOMIC_RELEASE);
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

bool Recorder::push_step_event(const Token& token, const Event& event) {
  Session* session = session_if_running();
  if (!session) return true;
  Session::Ring::Claim claim;
  if (!session->claim(token, &claim)) return false;
  *claim.event = event;
  session->publish(token, claim);
  if (event.kind == EventKind::step_end) session->kick();
  return true;
}

void Recorder::begin_step(const Token& token, int64_t step) {
  if (step < 0) return lose(Loss::bad_step);
  handle_forks();
  Event event;
  event.kind = EventKind::step_begin;
  event.step = step;
  event.wanted = settings_->wants_step(step);
  micro_step_.store(0);
  step_.store(step);
  // What came after the end of the last step is the beginning of this one.
  if (in_step_.exchange(true) || !any_step_.exchange(true)) next_row_.store(0);
  event.step_serial = step_serial_.fetch_add(1) + 1;
  const bool placed = push_step_event(token, event);
  // A record that cannot be told which step it belongs to must not land in another.
  if (!placed) losses_.add(Loss::step_lost, step);
  wanted_.store(event.wanted && placed);
  launch_level_at_step(token, *settings_, step);
}

void Recorder::end_step(const Token& token) {
  if (!in_step_.exchange(false)) return;
  next_row_.store(0);
  Event event;
  event.kind = EventKind::step_end;
  const bool placed = push_step_event(token, event);
  micro_step_.store(0, std::memory_order_relaxed);
  if (!placed) losses_.add(Loss::step_lost, step_.load());
  // What comes before the next step begins belongs to it. Whether that one is wanted shows then: it is kept until then.
  wanted_.store(placed);
}

void Recorder::set_micro_step(const Token&, int32_t index) {
  if (index < 0) return lose(Loss::bad_step);
  micro_step_.store(index, std::memory_order_relaxed);
}

void Recorder::fact(const Token&, const char* name, const char* value) {
  if (!name || !value) return;
  const Session* session = session_.load();
  const bool late = session && session->header_written();
  if (!late && facts_.add(name, value)) return;
  if (!fact_dropped_.exchange(true)) {
    say("the fact \"%s\" came after the first record and is not kept: call forkpoint_fact before it", name);
  }
}

// ---- Scopes

const ScopeFrame& Recorder::scope(const Token& token) const {
  static constexpr ScopeFrame kNone;
  const ScopeStack* stack = ScopeStack::of_thread_if_any(token);
  return stack ? stack->top() : kNone;
}

void Recorder::push_scope(const Token& token, const ScopeFrame& frame) {
  ScopeStack* stack = ScopeStack::of_thread(token);
  if (!stack) return lose(Loss::no_memory);
  if (!stack->push(frame)) limits_.add(Limit::scope_depth);
}

void Recorder::begin_scope(const Token& token, int32_t phase, const char* layer, const char* op) {
  if (!names_.create()) return lose(Loss::no_memory);
  ScopeFrame frame = scope(token);
  if (phase >= 0 && phase < kPhaseCount) {
    frame.phase = static_cast<int8_t>(phase);
    frame.collective = false;
    frame.communicator = nullptr;
  }
  if (layer) frame.layer = names_.name(layer);
  if (op) frame.op = names_.name(op);
  if ((layer && !frame.layer) || (op && !frame.op)) lose(Loss::names_full);
  push_scope(token, frame);
}

void Recorder::begin_collective(const Token& token, const char* op, const char* communicator, const int32_t* members,
                                int32_t member_count, const char* layer) {
  if (!names_.create()) return lose(Loss::no_memory);
  ScopeFrame frame = scope(token);
  frame.phase = static_cast<int8_t>(Phase::collective);
  frame.collective = true;
  frame.communicator = nullptr;
  if (layer) frame.layer = names_.name(layer);
  if (op) frame.op = names_.name(op);
  if (member_count < 0 || member_count > kMaxMembers || (member_count > 0 && !members)) {
    lose(Loss::bad_collective);
  } else if (const Name* name = names_.name(communicator)) {
    frame.communicator = names_.communicator({name, members, member_count});
    if (!frame.communicator) lose(Loss::names_full);
  }
  if ((layer && !frame.layer) || (op && !frame.op)) lose(Loss::names_full);
  push_scope(token, frame);
}

void Recorder::end_scope(const Token& token) {
  if (ScopeStack* stack = ScopeStack::of_thread_if_any(token)) stack->pop();
}

// ---- Records

bool Recorder::skips(Role role, bool collective) const {
  return settings_->level == Level::step && !collective && (role == Role::input || role == Role::output);
}

SiteKey Recorder::site_key_of(const ScopeFrame& frame, Role role, Kind kind, const Name* name) const {
  SiteKey key = {};
  const Phase otherwise = kind == Kind::state                      ? Phase::state
                          : any_step_.load(std::memory_order_relaxed) ? default_phase(role)
                                                                      : Phase::load;
  key.phase = frame.phase >= 0 ? static_cast<Phase>(frame.phase) : otherwise;
  key.kind = kind;
  key.role = role;
  key.layer = frame.layer;
  key.op = frame.op;
  key.tensor = name;
  key.communicator = kind == Kind::collective ? frame.communicator : nullptr;
  return key;
}

void Recorder::record(const Token& token, const SiteKey& site, const LayoutKey& layout, const DigestResult& result) {
  Session* session = this->session(token);
  if (!session) return;
  const SiteEntry* site_entry = names_.site(site);
  const LayoutEntry* layout_entry = names_.layout(layout);
  if (!site_entry || !layout_entry) return lose(Loss::names_full);
  Session::Ring::Claim claim;
  if (!session->claim(token, &claim)) return lose(Loss::ring_full);
  Event& event = *claim.event;
  event.kind = EventKind::record;
  event.packet = nullptr;
  event.micro_step = micro_step_.load(std::memory_order_relaxed);
  event.site = site_entry;
  event.layout = layout_entry;
  event.digest = result.digest;
  event.stats = result.stats;
  session->publish(token, claim);
}

void Recorder::record_on_device(const Token& token, const SiteKey& site, const CheckedTensor& tensor) {
  Session* session = this->session(token);
  if (!session) return;
  const SiteEntry* site_entry = names_.site(site);
  const LayoutEntry* layout_entry = names_.layout(tensor.layout);
  if (!site_entry || !layout_entry) return lose(Loss::names_full);
  // The place first: a kernel that was enqueued without one would have a result that nobody fetches.
  Session::Ring::Claim claim;
  if (!session->claim(token, &claim)) return lose(Loss::ring_full);
  const DeviceTensor device_tensor = {tensor.data, tensor.view(), tensor.lowest_offset, tensor.end_offset, tensor.stream};
  const DeviceOutcome outcome = enqueue_device_digest(token, device_tensor, settings_->ring_slots);
  Event& event = *claim.event;
  event.kind = EventKind::none;
  event.packet = nullptr;
  if (outcome.kind == DeviceOutcome::Kind::enqueued) {
    event.kind = EventKind::device_record;
    event.micro_step = micro_step_.load(std::memory_order_relaxed);
    event.site = site_entry;
    event.layout = layout_entry;
    event.device_slot = outcome.slot;
    if (settings_->level == Level::launch) event.packet = launch_row_of_record(token, tensor.stream, tensor.data, tensor.lowest_offset, tensor.end_offset);
    if (event.packet) next_row_.fetch_add(1, std::memory_order_relaxed);
  }
  session->publish(token, claim);
  if (outcome.kind == DeviceOutcome::Kind::lost) lose(outcome.loss, outcome.error);
  if (outcome.kind == DeviceOutcome::Kind::captured) limits_.add(Limit::graph_replay);
  if (outcome.kind == DeviceOutcome::Kind::enqueued && !drain_registered_.exchange(true)) drain_before_libraries_go();
}

void Recorder::tensor(const Token& token, const forkpoint_tensor_desc* desc) { tensor_in(token, scope(token), desc); }

void Recorder::tensor_in(const Token& token, const ScopeFrame& frame, const forkpoint_tensor_desc* desc) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  CheckedTensor tensor;
  const Loss problem = check_tensor(desc, &tensor);
  if (problem != Loss::count_) return lose(problem);
  if (skips(tensor.role, frame.collective)) return;
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* name = names_.name(desc->name);
  if (!name) return lose(Loss::names_full);
  const SiteKey site = site_key_of(frame, tensor.role, frame.collective ? Kind::collective : Kind::tensor, name);
  if (tensor.on_device && tensor.elements > 0) return record_on_device(token, site, tensor);
  record(token, site, tensor.layout, tensor.digest());
}

void Recorder::scalar(const Token& token, const char* name, int32_t role, double value) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!name) return lose(Loss::bad_name);
  if (!is_role(role)) return lose(Loss::bad_role);
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  record_number(token, site_key_of(scope(token), static_cast<Role>(role), Kind::scalar, text), value);
}

void Recorder::argument_in(const Token& token, const ScopeFrame& frame, const char* name, double value) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  SiteKey site = site_key_of(frame, Role::scalar, Kind::scalar, text);
  site.communicator = frame.communicator;  // it belongs to the collective's call
  record_number(token, site, value);
}

void Recorder::record_number(const Token& token, const SiteKey& site, double value) {
  DigestResult result = digest_bytes(&value, sizeof(value), DType::f64);
  result.digest = scalar_digest(value);
  LayoutKey layout;
  layout.dtype = DType::f64;
  record(token, site, layout, result);
}

void Recorder::state(const Token& token, const char* name, int32_t role, const void* data, size_t size_bytes) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!name) return lose(Loss::bad_name);
  if (!is_role(role)) return lose(Loss::bad_role);
  if ((!data && size_bytes > 0) || size_bytes > INT64_MAX) return lose(Loss::bad_state);
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  const auto shape = static_cast<int64_t>(size_bytes);
  LayoutKey layout;
  layout.dims = 1;
  layout.shape = &shape;
  const DigestResult result = size_bytes ? digest_bytes(data, size_bytes) : DigestResult{};
  record(token, site_key_of(scope(token), static_cast<Role>(role), Kind::state, text), layout, result);
}

}  // namespace forkpoint
