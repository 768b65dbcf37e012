// Which launches of one run are ordered: by their stream, by events, by the default stream, or because the host waited
// in between. Vector clocks, one entry a stream (Mattern: Virtual Time and Global States of Distributed Systems, 1989).
// Where the host has several threads, its waits order what all of them ask for afterwards, so that an order may be seen
// where there is none, never the reverse. Immutable once made. Internal to diff.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lib/launch_step.h"

namespace forkpoint {

// step: place in the list that LaunchOrder was made of.
struct LaunchPlace {
  size_t step = 0;
  uint32_t row = 0;
  friend auto operator<=>(const LaunchPlace&, const LaunchPlace&) = default;
};

class LaunchOrder {
 public:
  static constexpr size_t kMostRows = 400'000;
  // Steps that follow each other, oldest first, at most kMostRows rows in all; what was waited for before them orders
  // nothing in them.
  explicit LaunchOrder(const std::vector<const LaunchStep*>& steps);

  // The later one begins after the earlier one has ended. REQUIRES: both ran on a stream (work, records).
  bool ordered(const LaunchPlace& earlier, const LaunchPlace& later) const;
  bool unordered(const LaunchPlace& one, const LaunchPlace& other) const {
    return !ordered(one, other) && !ordered(other, one);
  }

  // The wait by which `later` comes after `earlier`; empty: not by an event.
  struct Wait {
    uint64_t event = 0;
    LaunchPlace recorded, waited;
  };
  std::optional<Wait> wait_between(const LaunchPlace& earlier, const LaunchPlace& later) const;

 private:
  using Clock = std::vector<uint32_t>;
  struct Stamp {
    uint32_t stream = 0;  // index
    Clock clock;          // of the stream once the launch has ended
  };
  struct Gain {  // what a wait added to a stream's past
    size_t stream = 0;
    Clock before, after;
    Wait wait;
  };
  struct Event {
    Clock clock;
    LaunchPlace recorded;
  };
  void add(const LaunchRow& row, const LaunchPlace& at);
  uint32_t stream_of(const LaunchRow& row);
  void begin(const LaunchRow& row, uint32_t stream);
  void wait(const LaunchRow& row, uint32_t stream, const LaunchPlace& at);
  void synchronize(const LaunchRow& row, uint32_t stream);
  static void join(Clock* clock, const Clock& other);

  std::map<uint32_t, uint32_t> streams_;
  std::vector<Clock> now_;  // by stream
  std::vector<char> free_;  // by stream: does not wait for the default stream, nor that for it
  Clock host_, legacy_;
  std::map<uint64_t, Event> events_;
  std::map<LaunchPlace, Stamp> stamps_;
  std::vector<Gain> gains_;
};

}  // namespace forkpoint
