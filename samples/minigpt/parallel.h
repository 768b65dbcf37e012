#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace minigpt {

// A fixed set of threads that share out index ranges. What a range computes must not depend on where it is cut.
class Parallel {
 public:
  explicit Parallel(int threads);
  ~Parallel();
  // body(begin, end) over all of [0, count), in at most `threads` pieces; returns when all are done.
  void ranges(int64_t count, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  void work(int piece);
  void run_piece(int piece) const;

  int pieces_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
  int64_t count_ = 0;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace minigpt
