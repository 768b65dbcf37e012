// A loop over threads, for work that is independent per item.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace forkpoint {

inline int thread_count(int wanted) {
  return wanted > 0 ? wanted : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Calls work(item, worker) for every item in 0 .. count-1, worker in 0 .. threads-1; at most one call a worker at a
// time. Rethrows the first exception after all threads have ended.
template <typename Work>
void parallel_for(int threads, size_t count, Work&& work) {
  threads = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), count));
  std::atomic<size_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&](int worker) {
    try {
      for (size_t item; (item = next.fetch_add(1)) < count;) work(item, worker);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> pool;
  try {
    for (int worker = 1; worker < threads; ++worker) pool.emplace_back(run, worker);
  } catch (const std::system_error&) {  // no more threads to be had: those that run do the work
  }
  if (threads > 0) run(0);
  for (std::thread& thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

// Counts finished items and passes them on, one call at a time, about 200 times in all.
class Progress {
 public:
  Progress(const std::function<void(uint64_t, uint64_t)>& report, uint64_t total)
      : report_(report), total_(total), stride_(std::max<uint64_t>(1, total / 200)) {}
  void add(uint64_t items) {
    if (!report_) return;
    const std::lock_guard lock(mutex_);
    done_ += items;
    if (done_ < reported_ + stride_ && done_ != total_) return;
    reported_ = done_;
    report_(done_, total_);
  }

 private:
  const std::function<void(uint64_t, uint64_t)>& report_;
  uint64_t total_, stride_, done_ = 0, reported_ = 0;
  std::mutex mutex_;
};

}  // namespace forkpoint
