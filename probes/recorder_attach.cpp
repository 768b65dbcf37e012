// Recordings that begin and end while the process runs, as often as they are asked for (attachment.h).
#include "probes/agent.h"
#include "probes/attachment.h"
#include "probes/launch_level.h"
#include "probes/os.h"
#include "probes/recorder.h"
#include "probes/torch_bridge.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constexpr int64_t kFinishPatienceNs = 30'000'000'000;  // for the device, once a window has ended

}  // namespace

void Recorder::be_reachable() {
  if (!is_own_rank(own_rank())) return;  // a worker of a rank
  handle_forks();
  start_agent(*base_);
}

void Recorder::listen(const Settings* settings) {
  wanted_.store(false);
  step_is_known_.store(false);
  settings_ = settings;
  ended_.store(false);
}

int64_t Recorder::last_step() const {
  // Steps of forkpoint.h are told to a sleeper, too; PyTorch's hooks rest with it.
  const bool known = any_step_.load() && (step_is_known_.load() || torch_bridge_state() == BridgeState::none);
  return known ? step_.load() : -1;
}

void Recorder::stop_listening() {
  step_is_known_.store(false);
  ended_.store(true);
  wanted_.store(false);
  settings_ = base_;
}

void Recorder::wake(const Settings* settings) {
  wanted_.store(false);
  next_row_.store(0);
  ScopeStack::forget_all();  // a scope that was open when the last recording ended is not open now
  losses_.reset();
  limits_.reset();
  notes_.forget_when();
  life_.store(static_cast<uint32_t>(Life::idle));
  settings_ = settings;
  __atomic_store_n(&table_->level, static_cast<int32_t>(settings->level), __ATOMIC_RELAXED);
  __atomic_store_n(&table_->active, 1, __ATOMIC_RELEASE);
}

void Recorder::end_watching(const Token& token) {
  if (settings_->level == Level::launch) launch_level_at_step(token, *settings_, INT64_MAX);
}

void Recorder::fall_asleep(bool cut) {
  deactivate();
  wanted_.store(false);
  // Without a record there is no session yet, and none is to begin now.
  auto idle = static_cast<uint32_t>(Life::idle);
  if (life_.compare_exchange_strong(idle, static_cast<uint32_t>(Life::ended))) return;
  if (Session* session = session_if_running()) session->end_soon(now_ns() + kFinishPatienceNs, cut);
}

bool Recorder::session_has_ended() {
  if (life_.load() == static_cast<uint32_t>(Life::idle)) return false;  // none has begun
  if (life_.load() == static_cast<uint32_t>(Life::starting)) return false;
  const Session* session = session_.load();
  return !session || session->is_done();
}

void Recorder::copy_session_failure(char* text, size_t text_bytes) {
  const Session* session = session_.load();
  if (session) session->copy_failure(text, text_bytes);
}

bool Recorder::reclaim_session() {
  life_.store(static_cast<uint32_t>(Life::ended));
  Session* session = session_.exchange(nullptr);
  if (session) retired_ = session;
  if (!retired_) return true;
  // Whoever is inside may have looked before; whoever comes later finds none.
  if (Guard::has_users()) return false;
  delete retired_;
  retired_ = nullptr;
  return true;
}

}  // namespace forkpoint
