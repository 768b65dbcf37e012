#include "samples/minigpt/parallel.h"

namespace minigpt {

Parallel::Parallel(int threads) : pieces_(threads) {
  for (int piece = 1; piece < pieces_; ++piece) threads_.emplace_back([this, piece] { work(piece); });
}

Parallel::~Parallel() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Parallel::ranges(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (pieces_ == 1 || count < pieces_) return body(0, count);
  {
    const std::lock_guard lock(mutex_);
    count_ = count;
    body_ = &body;
    busy_ = pieces_ - 1;
    ++round_;
  }
  changed_.notify_all();
  run_piece(0);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return busy_ == 0; });
}

void Parallel::work(int piece) {
  uint64_t seen = 0;
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || round_ != seen; });
    if (stopping_) return;
    seen = round_;
    lock.unlock();
    run_piece(piece);
    lock.lock();
    if (--busy_ == 0) changed_.notify_all();
  }
}

void Parallel::run_piece(int piece) const {
  const int64_t begin = count_ * piece / pieces_, end = count_ * (piece + 1) / pieces_;
  (*body_)(begin, end);
}

}  // namespace minigpt
