#include "probes/session.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>

#include "lib/error.h"
#include "lib/run.h"
#include "probes/cuda_digest.h"
#include "probes/os.h"
#include "probes/run_folder.h"
#include "probes/session_launches.h"
#include "probes/step_marks.h"
#include "probes/watch_control.h"

namespace forkpoint {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kFlushPeriod = 200 * kMillisecond;  // what a killed rank may lose of an open step ...
constexpr int64_t kShortestFlushPeriod = 5 * kMillisecond;  // ... and of one that has just begun to record
constexpr int64_t kWatchedFlushPeriod = 50 * kMillisecond;  // somebody reads what is written
constexpr uint32_t kYoungSteps = 16;
constexpr int64_t kYoungPatience = 300 * kMillisecond;
constexpr int64_t kLongestIdle = 10 * kMillisecond;
constexpr int64_t kUnpublishedWait = 200 * kMillisecond;  // at exit, for threads between claim and publish
constexpr size_t kThreadStackBytes = 2u << 20;

std::atomic<uint32_t> session_count{0};

}  // namespace

Session* Session::start(const Token&, const SessionStart& start) {
  auto* session = new (std::nothrow) Session(start);
  if (!session || !session->ring_.create(start.settings->ring_slots)) {
    say("no memory for a ring of %u records; nothing is recorded in process %d", start.settings->ring_slots, getpid());
    return nullptr;
  }
  session->owner_pid_ = getpid();
  session->begun_ns_ = now_ns();
  session->young_patience_ns_.store(kYoungPatience);
  session->number_ = ++session_count;
  if (session->start_thread()) return session;
  say("no thread could be started to write with; nothing is recorded in process %d", getpid());
  return nullptr;
}

bool Session::start_thread() {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kThreadStackBytes);
  const AllSignalsBlocked blocked;
  pthread_t thread;
  const auto body = [](void* session) -> void* {
    static_cast<Session*>(session)->run();
    return nullptr;
  };
  const bool started = pthread_create(&thread, &attributes, body, this) == 0;
  pthread_attr_destroy(&attributes);
  return started;
}

bool Session::owned_by_this_process() const { return owner_pid_ == getpid(); }

bool Session::claim(const Token&, Ring::Claim* claim) {
  if (ring_.try_claim(claim)) return true;
  if (is_stalled() || !owned_by_this_process()) return false;
  const int64_t deadline_ns = now_ns() + start_.settings->ring_wait_ms * kMillisecond;
  bool claimed = false;
  waiters_.fetch_add(1);
  while (!ended_.load(std::memory_order_acquire)) {
    const uint32_t moved = moved_.load();
    claimed = ring_.try_claim(claim);
    const int64_t left_ns = deadline_ns - now_ns();
    if (claimed || left_ns <= 0) break;
    kick();
    futex_wait(moved_, moved, std::min(left_ns, 10 * kMillisecond));
  }
  waiters_.fetch_sub(1);
  if (!claimed) note_stall();
  return claimed;
}

bool Session::await_progress(const Token&) {
  const uint64_t popped = ring_.popped();
  if (stalled_at_.load(std::memory_order_relaxed) == popped || !owned_by_this_process()) return false;
  const int64_t deadline_ns = now_ns() + start_.settings->ring_wait_ms * kMillisecond;
  waiters_.fetch_add(1);
  while (!ended_.load(std::memory_order_acquire) && ring_.popped() == popped) {
    const uint32_t moved = moved_.load();
    const int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) break;
    kick();
    futex_wait(moved_, moved, std::min(left_ns, kMillisecond));
  }
  waiters_.fetch_sub(1);
  if (ring_.popped() != popped) return true;
  stalled_at_.store(popped, std::memory_order_relaxed);
  return false;
}

void Session::kick() {
  wake_.fetch_add(1);
  futex_wake(wake_);
}

void Session::drain(int64_t deadline_ns) {
  const uint64_t goal = ring_.claimed();
  waiters_.fetch_add(1);
  for (;;) {
    const uint32_t moved = moved_.load();
    const int64_t left_ns = deadline_ns - now_ns();
    if (ring_.popped() >= goal || done_.load() || left_ns <= 0) break;
    kick();
    futex_wait(moved_, moved, std::min(left_ns, kLongestIdle));
  }
  waiters_.fetch_sub(1);
}

void Session::step_has_ended() {
  kick();
  const int64_t patience_ns = young_patience_ns_.load(std::memory_order_relaxed);
  if (patience_ns <= 0 || steps_ended_.fetch_add(1, std::memory_order_relaxed) >= kYoungSteps) return;
  const int64_t now = now_ns();
  drain(now + patience_ns);
  young_patience_ns_.fetch_sub(now_ns() - now, std::memory_order_relaxed);
}

void Session::save(int64_t deadline_ns) {
  drain(deadline_ns);
  const uint32_t ticket = save_asked_.fetch_add(1) + 1;
  waiters_.fetch_add(1);
  for (;;) {
    const uint32_t moved = moved_.load();
    const int64_t left_ns = deadline_ns - now_ns();
    if (static_cast<int32_t>(saved_.load() - ticket) >= 0 || done_.load() || left_ns <= 0) break;
    kick();
    futex_wait(moved_, moved, std::min(left_ns, kLongestIdle));
  }
  waiters_.fetch_sub(1);
}

void Session::finish(int64_t deadline_ns) {
  stop_deadline_ns_.store(deadline_ns);
  stop_.store(1);
  // A little longer than the writer waits for the device, so that it can still write what it has.
  const int64_t patience_ns = deadline_ns + 1000 * kMillisecond;
  while (!done_.load(std::memory_order_acquire)) {
    const int64_t left_ns = patience_ns - now_ns();
    if (left_ns <= 0) return;
    kick();
    futex_wait(done_, 0, std::min(left_ns, kLongestIdle));
  }
}

void Session::end_soon(int64_t deadline_ns, bool cut) {
  cut_.store(cut);
  stop_deadline_ns_.store(deadline_ns);
  stop_.store(1);
  kick();
}

void Session::copy_failure(char* text, size_t text_bytes) const {
  if (is_done()) snprintf(text, text_bytes, "%s", failure_);
}

void Session::note_failure(const char* text) { snprintf(failure_, sizeof(failure_), "%s", text); }

void Session::abandon_in_child() {
  ring_.destroy();
  if (descriptor_is_ours()) close(descriptor_.load());  // the parent's lock on the stream lives in it
}

void Session::run() noexcept {
  const Guard guard(Guard::OwnThread::yes);
  prctl(PR_SET_NAME, "forkpoint");
  bool whole = false;
  // Not where the host has pinned the thread that made the first record: the two would share a core.
  const Settings& settings = *start_.settings;
  if (settings.cpus_bytes > 0) syscall(SYS_sched_setaffinity, 0, settings.cpus_bytes, settings.cpus);
  try {
    open_stream();
    consume();
    check_descriptor();
    const int64_t step = appender_->step();
    const bool cut = cut_.load() && step != kPrologueStep;
    add_to_header();
    if (cut) writer_->add_gap({step, step, 0, "the recording was ended within this step"});
    appender_->finish(full_ || cut);
    whole = !full_ && !cut;
  } catch (const Error& error) {
    fail(error.what(), error.hint());
  } catch (const std::exception& error) {
    fail(error.what(), {});
  } catch (...) {
    fail("an error without a name.", {});
  }
  ended_.store(true, std::memory_order_release);
  start_.on_end(whole);
  done_.store(1, std::memory_order_release);
  for (auto* word : {&done_, &moved_}) futex_wake(*word);
}

void Session::fail(const char* what, const std::string& hint) noexcept {
  ended_.store(true, std::memory_order_release);
  note_failure(what);
  start_.on_end(false);
  say("recording of rank %d ended, the job goes on: %s%s%s", start_.rank, what, hint.empty() ? "" : " ", hint.c_str());
  if (!appender_) return note_refusal(*start_.settings, start_.rank, what);
  if (!descriptor_is_ours()) return;
  try {
    writer_->add_gap({appender_->step(), appender_->step(), 0, std::string("recording ended: ") + what});
  } catch (const std::exception&) {  // the stream reads as "died" then, which is as good as a gap
  }
}

void Session::consume() {
  for (uint32_t handled = 0; !full_;) {
    Event* event = ring_.front();
    if (!event) {
      if (stopping() && (ring_.claimed() == ring_.popped() || drop_unpublished())) return;
      maintain();
      idle();
      continue;
    }
    handle(*event);
    ring_.pop();
    idle_ns_ = 0;
    if (waiters_.load() != 0) {
      moved_.fetch_add(1);
      futex_wake(moved_);
    }
    if (++handled % 256 == 0) {
      check_descriptor();
      maintain();
    }
    full_ = full_ || appender_->is_full();
  }
  end_at_size_limit();
}

void Session::handle(Event& event) {
  switch (event.kind) {
    case EventKind::none: break;
    case EventKind::step_begin:
      note_first_step(event);
      add_to_header();
      appender_->begin_step(event.step, event.wanted, event.step_serial, event.flags);
      break;
    case EventKind::step_end:
      check_descriptor();
      appender_->end_step();
      break;
    case EventKind::device_record:
      if (await_device(event)) appender_->add(event);
      if (event.packet) return_launch_packet(event.packet);
      break;
    case EventKind::launch: handle_launch(*event.packet); break;
    case EventKind::record: appender_->add(event); break;
  }
}

void Session::wait_a_little(int64_t* pause_ns) {
  maintain();
  drain_graph_digests();  // else a graph's replays would find their ring full
  futex_wait(wake_, wake_.load(), *pause_ns);
  *pause_ns = std::min(*pause_ns * 2, kMillisecond);
}

// The writer makes no CUDA call: it looks at the slot, in mapped memory, until the device has filled it in.
DevicePoll Session::await_slot(DeviceSlot& slot, DigestResult* result) {
  int64_t pause_ns = 5'000;
  DevicePoll poll = poll_device_slot(slot, result);
  while (poll == DevicePoll::pending && !(stopping() && now_ns() > stop_deadline_ns_.load())) {
    wait_a_little(&pause_ns);
    poll = poll_device_slot(slot, result);
  }
  release_device_slot(slot, poll == DevicePoll::ready);
  return poll;
}

bool Session::await_device(Event& event) {
  DigestResult result;
  const DevicePoll poll = await_slot(*event.device_slot, &result);
  if (poll != DevicePoll::ready) {
    start_.losses->add(poll == DevicePoll::gone ? Loss::device_gone : Loss::device_late, appender_->step());
    return false;
  }
  event.digest = result.digest;
  event.stats = result.stats;
  return true;
}

// At exit: a thread that was stopped, or interrupted by the signal whose handler ends the process, in the middle of a call.
bool Session::drop_unpublished() {
  const int64_t give_up_ns = now_ns() + kUnpublishedWait;
  while (!ring_.front() && ring_.claimed() != ring_.popped()) {
    if (now_ns() > give_up_ns) {
      start_.losses->add(Loss::unfinished, appender_->step(), ring_.claimed() - ring_.popped());
      return true;
    }
    futex_wait(wake_, wake_.load(), kMillisecond);
  }
  return false;
}

void Session::maintain() {
  const int64_t now = now_ns();
  const uint32_t asked = save_asked_.load();
  // Growing with the session's age: a job that dies young leaves something, and a long one is not cut into small frames.
  const int64_t longest = is_watched(*start_.settings) ? kWatchedFlushPeriod : kFlushPeriod;
  const int64_t period = std::clamp((now - begun_ns_) / 4, kShortestFlushPeriod, longest);
  look_at_control(*start_.settings, now);
  if (now - last_flush_ns_ < period && asked == saved_.load()) return;
  check_descriptor();
  appender_->flush();
  last_flush_ns_ = now;
  saved_.store(asked);
  if (waiters_.load() == 0) return;
  moved_.fetch_add(1);
  futex_wake(moved_);
}

void Session::idle() {
  idle_ns_ = std::clamp<int64_t>(idle_ns_ * 2, kMillisecond / 10, kLongestIdle);
  const uint32_t wake = wake_.load();
  if (!ring_.front() && !stopping()) futex_wait(wake_, wake, idle_ns_);
}

void Session::end_at_size_limit() {
  ended_.store(true, std::memory_order_release);
  start_.on_end(false);
  const int64_t step = appender_->step();
  const std::string reached = fmt::format("the stream has reached its limit of {} bytes (--max-size, FORKPOINT_MAX_SIZE_BYTES)",
                                          start_.settings->max_size_bytes);
  const std::string where = step == kPrologueStep ? "before the first step" : fmt::format("at step {}", step);
  say("recording of rank %d ended %s, the job goes on: %s", start_.rank, where.c_str(), reached.c_str());
  note_failure(reached.c_str());
  writer_->add_gap({step, step, 0, reached + "; nothing later is recorded"});
}

}  // namespace forkpoint
