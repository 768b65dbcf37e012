#include "tests/fakes/fake_cuda_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/fakes/fake_cuda.h"

namespace forkpoint::fake {
namespace {

constexpr useconds_t kSlowUs = 2000;
constexpr useconds_t kPollUs = 100;

bool says(const char* variable, const char* value) {
  const char* set = getenv(variable);
  return set && strcmp(set, value) == 0;
}

}  // namespace

Engine& Engine::get() {
  static Engine* one = new Engine;  // the "device" works until the process is gone
  return *one;
}

Engine::Engine() {
  legacy_ = make_queue(true);
  if (says("FAKE_CUDA_MODE", "deferred")) set_mode(kFakeDeferred);
  if (says("FAKE_CUDA_MODE", "slow")) set_mode(kFakeSlow);
  if (says("FAKE_CUDA_ORDER", "submission")) set_order(kFakeSubmission);
}

std::shared_ptr<Queue> Engine::make_queue(bool blocking) {
  auto queue = std::make_shared<Queue>(blocking);
  const std::lock_guard lock(lock_);
  std::erase_if(queues_, [](const auto& old) { return old->retired && old->operations.empty(); });
  queues_.push_back(queue);
  return queue;
}

void Engine::retire(const std::shared_ptr<Queue>& queue) {
  const std::lock_guard lock(lock_);
  queue->retired = true;
}

// The legacy default stream and those that wait for each other with it.
std::vector<Point> Engine::implied(const Queue& queue) const {
  std::vector<Point> after;
  if (&queue != legacy_.get()) {
    if (queue.blocking) after.push_back({legacy_, legacy_->submitted});
    return after;
  }
  for (const auto& other : queues_) {
    if (other->blocking && other != legacy_) after.push_back({other, other->submitted});
  }
  return after;
}

void Engine::enqueue(const std::shared_ptr<Queue>& queue, Work work, std::vector<Point> after) {
  Point end;
  {
    const std::lock_guard lock(lock_);
    const std::vector<Point> more = implied(*queue);
    after.insert(after.end(), more.begin(), more.end());
    queue->operations.push_back({++last_number_, std::move(after), std::move(work)});
    end = {queue, ++queue->submitted};
  }
  if (mode_ == kFakeAtOnce && !stuck_) run_until(end);
}

Point Engine::end_of(const std::shared_ptr<Queue>& queue) {
  const std::lock_guard lock(lock_);
  return {queue, queue->submitted};
}

bool Engine::is_done(const Point& point) {
  const std::lock_guard lock(lock_);
  return is_done_locked(point);
}

Queue* Engine::first_submitted() const {
  Queue* first = nullptr;
  for (const auto& queue : queues_) {
    if (queue->operations.empty()) continue;
    if (!first || queue->operations.front().number < first->operations.front().number) first = queue.get();
  }
  return first;
}

// The queue whose next operation must be done before the point is reached and can be done now.
Queue* Engine::needed_for(const Point& point) const {
  for (const Point& before : point.queue->operations.front().after) {
    if (!is_done_locked(before)) return needed_for(before);
  }
  return point.queue.get();
}

void Engine::run_one(Queue* queue) {
  Work work;
  {
    const std::lock_guard lock(lock_);
    work = std::move(queue->operations.front().work);
    queue->operations.pop_front();
  }
  work();
  const std::lock_guard lock(lock_);
  ++queue->done;
}

void Engine::run_until(const Point& point) {
  const std::lock_guard running(run_lock_);
  for (;;) {
    Queue* next = nullptr;
    {
      const std::lock_guard lock(lock_);
      if (is_done_locked(point)) return;
      next = order_ == kFakeSubmission ? first_submitted() : needed_for(point);
    }
    run_one(next);
  }
}

void Engine::run_everything() {
  std::vector<Point> ends;
  {
    const std::lock_guard lock(lock_);
    for (const auto& queue : queues_) ends.push_back({queue, queue->submitted});
  }
  // The youngest stream first: as far from the order of the calls as the waits allow.
  std::reverse(ends.begin(), ends.end());
  for (const Point& end : ends) run_until(end);
}

void Engine::wait_for(const Point& point) {
  while (stuck_ || mode_ == kFakeSlow) {
    if (is_done(point)) return;
    usleep(kPollUs);
  }
  run_until(point);
}

void Engine::wait_for_all() {
  std::vector<Point> ends;
  {
    const std::lock_guard lock(lock_);
    for (const auto& queue : queues_) ends.push_back({queue, queue->submitted});
  }
  if (!stuck_ && mode_ != kFakeSlow) run_everything();
  for (const Point& end : ends) wait_for(end);
}

unsigned Engine::run_next(const std::shared_ptr<Queue>& queue, unsigned count) {
  Point goal;
  unsigned found = 0;
  {
    const std::lock_guard lock(lock_);
    found = static_cast<unsigned>(std::min<uint64_t>(count, queue->submitted - queue->done));
    goal = {queue, queue->done + found};
  }
  const int order = order_.exchange(kFakeNeeded);
  run_until(goal);
  order_ = order;
  return found;
}

unsigned Engine::pending(const std::shared_ptr<Queue>& queue) {
  const std::lock_guard lock(lock_);
  return static_cast<unsigned>(queue->submitted - queue->done);
}

void Engine::finish() {
  int deferred = kFakeDeferred;
  if (mode_.compare_exchange_strong(deferred, kFakeAtOnce)) wait_for_all();
}

void Engine::forget_all() {
  const std::lock_guard running(run_lock_);
  const std::lock_guard lock(lock_);
  for (const auto& queue : queues_) {
    queue->operations.clear();
    queue->done = queue->submitted;
  }
}

void Engine::set_mode(int mode) {
  mode_ = mode;
  if (mode != kFakeSlow || has_thread_) return;
  has_thread_ = true;
  std::thread([this] { work_slowly(); }).detach();
}

void Engine::work_slowly() {
  for (;;) {
    usleep(kSlowUs);
    while (mode_ == kFakeSlow && !stuck_) {
      const std::lock_guard running(run_lock_);
      Queue* next = nullptr;
      {
        const std::lock_guard lock(lock_);
        next = first_submitted();
      }
      if (!next) break;
      run_one(next);
    }
  }
}

}  // namespace forkpoint::fake
