// This rank's side of FORKPOINT_STOP_AFTER (StopBoard in lib/probe_contract.h): tells the program which step the rank
// is in and when its stream is whole behind the last one, and holds the rank there. Any thread; never throws. Without
// the variable nothing is done. A board that cannot be made is said on stderr: the rank then goes on unrecorded behind
// the last step, and the program waits for its end.
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/probe_contract.h"

namespace forkpoint {

struct Settings;

class Stop {
 public:
  // Before a step is recorded. Makes the board when it is the first.
  void begin_step(const Settings& settings, int rank, int world_size, int64_t step);
  bool is_past(int64_t step) const { return is_on() && step > stop_after(); }
  bool ends_with(int64_t step) const { return is_on() && step >= stop_after(); }
  // false: it was begun already.
  bool begin_stopping();
  bool is_stopping() const { return stopping_.load(); }
  void set_rank(int rank, int world_size);
  // Of the stream. The first one counts.
  void note_end(bool whole);
  // Waits to be ended: for a while, and not beyond a signal that this thread handles.
  void hold() const;
  // The board is the parent's.
  void forget_in_child();

 private:
  bool is_on() const { return last_.load(std::memory_order_relaxed) >= 0; }
  int64_t stop_after() const;
  contract::StopBoard* make(const Settings& settings, int rank, int world_size, int64_t step) const;

  std::atomic<int64_t> last_{-1};  // as the environment says; -1: no step has begun
  std::atomic<contract::StopBoard*> board_{nullptr};
  std::atomic<bool> tried_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace forkpoint
