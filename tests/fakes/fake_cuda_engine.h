// What the streams of the fake libcuda were given to do, and in which order it is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace forkpoint::fake {

using Work = std::function<void()>;
class Queue;

// The first `count` operations of a queue.
struct Point {
  std::shared_ptr<Queue> queue;
  uint64_t count = 0;
};

struct Operation {
  uint64_t number;  // of all operations, in the order of the calls
  std::vector<Point> after;
  Work work;
};

// Of one stream. Its members are the engine's.
class Queue {
 public:
  explicit Queue(bool is_blocking) : blocking(is_blocking) {}
  const bool blocking;  // waits for the legacy default stream, and that for it

 private:
  friend class Engine;
  std::deque<Operation> operations;
  uint64_t submitted = 0;
  uint64_t done = 0;
  bool retired = false;
};

// Any thread. Work must not call the engine.
class Engine {
 public:
  static Engine& get();

  std::shared_ptr<Queue> make_queue(bool blocking);
  const std::shared_ptr<Queue>& legacy() const { return legacy_; }
  // Gets no more work; what it has is still done.
  void retire(const std::shared_ptr<Queue>& queue);

  void enqueue(const std::shared_ptr<Queue>& queue, Work work, std::vector<Point> after = {});
  Point end_of(const std::shared_ptr<Queue>& queue);
  bool is_done(const Point& point);
  void wait_for(const Point& point);
  void wait_for_all();
  unsigned run_next(const std::shared_ptr<Queue>& queue, unsigned count);
  unsigned pending(const std::shared_ptr<Queue>& queue);
  // Deferred work is done, and from now on all is done at once.
  void finish();
  // What was enqueued is never done.
  void forget_all();

  void set_mode(int mode);
  void set_order(int order) { order_ = order; }
  void set_stuck(bool stuck) { stuck_ = stuck; }

 private:
  Engine();
  bool is_done_locked(const Point& point) const { return point.queue->done >= point.count; }
  std::vector<Point> implied(const Queue& queue) const;
  Queue* first_submitted() const;
  Queue* needed_for(const Point& point) const;
  void run_one(Queue* queue);
  void run_until(const Point& point);
  void run_everything();
  void work_slowly();

  std::shared_ptr<Queue> legacy_;
  std::mutex run_lock_;  // held while anything is done; before lock_
  std::mutex lock_;      // of all below, and of the queues
  std::vector<std::shared_ptr<Queue>> queues_;
  uint64_t last_number_ = 0;
  std::atomic<int> mode_{0};
  std::atomic<int> order_{0};
  std::atomic<bool> stuck_{false};
  bool has_thread_ = false;
};

}  // namespace forkpoint::fake
