// Looks at a run while it is being recorded: what is written is read once, a little later, and forgotten again. The
// memory that it takes does not grow with the run.
//
// nan: a value is found when it is not finite and either the training lives on it (loss, gradient, parameter, optimizer
// state, collective, anything of the backward pass) or the same site and call was finite before in this run and is no
// mask. So what was never finite (a mask of -infinity) is not found, nor are evaluations. Gradients, and what is
// computed of them, wait for the end of their step: in one that a gradient scaler skipped (scalar "skipped" or
// "found_inf") they are expected, and a half precision loss with them, unless the scaler skips 24 steps in a row.
// replicas: lib/replicas.h, in each step as soon as every rank has ended it.
//
// Only the first finding of its kind is said: what follows from it (the ranks that a reduction carried it to, later
// steps) is counted. A rank whose values were finite through a whole step again may be found again.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lib/watch_nonfinite.h"
#include "lib/watch_replicas.h"

namespace forkpoint {

struct WatchOptions {
  bool nan = false;
  bool replicas = false;
  bool deepens = false;  // some steps may be recorded finer than the run: which ones, on which ranks?
};

struct WatchFinding {
  bool replicas = false;         // else: not finite
  Divergence at;                 // rank -1: there is no majority among the ranks
  std::vector<int> ranks;        // that it is about
  std::string what;              // "1 of 1 elements is not finite", "differs from ranks 0, 1 and 3"
  std::string sentence() const;  // "step 7, rank 2, forward, loss: loss: 1 of 1 elements is not finite"
};

// Not thread-safe.
class Watch {
 public:
  Watch(std::string run_directory, Manifest manifest, WatchOptions options);

  // Reads what has come. New findings, in causal order. Throws Error when the folder cannot be listed.
  std::vector<WatchFinding> look();
  // The last one: nothing is waited for any more.
  std::vector<WatchFinding> finish();
  // Sentences that came up since the last call: a stream that can no longer be watched, and why.
  std::vector<std::string> take_problems();

  bool anything_there() const { return !ranks_.empty(); }
  std::vector<const StreamHeader*> headers() const;  // of the ranks that are there
  std::optional<int64_t> newest_step() const;        // that any rank has begun, as far as it is on disk
  std::optional<int64_t> oldest_step() const;        // that a rank whose stream goes on is in
  double step_seconds() const;                       // how long a step takes, lately; 0: not known yet
  // What was looked at, and what of it was not: sentences for the end.
  std::vector<std::string> summary() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    StreamTail* tail = nullptr;  // of run_
    int rank = 0;
    NonfiniteWatch nonfinite;
    bool bad = false;                   // found, or a consequence, and not clean since
    int64_t ended = kPrologueStep - 1;  // last step that it ended
    bool reported = false;              // its damage was
    std::vector<int64_t> deep;          // steps that hold layers' inputs and outputs
  };
  struct Candidate {
    WatchFinding finding;
    bool received = false;
    uint32_t row = 0;
    int order = 0;
    Clock::time_point since;
  };

  void find_streams();
  void advance(Rank* rank);
  void take_hits(Rank* rank, const std::vector<NonfiniteHit>& hits);
  bool is_said(const Candidate& candidate) const;
  void release(bool all, std::vector<WatchFinding>* out);
  bool all_there() const;
  void compare_replicas(std::vector<WatchFinding>* out);
  void note_pace();
  std::string uneven_steps() const;  // a sentence; empty: the same steps were recorded by layer on every rank
  std::vector<WatchFinding> look_once(bool last);

  WatchOptions options_;
  Run run_;
  Manifest manifest_;
  std::vector<Rank> ranks_;  // ascending, as the run's streams
  std::set<std::string> refused_files_;
  Clock::time_point listed_{};
  ReplicaWatch replicas_;
  size_t dictionary_ = 0;
  std::vector<Candidate> candidates_;
  std::optional<int64_t> first_bad_step_;  // of the finding that others follow from
  std::set<std::string> said_places_;      // of that step
  std::set<int> followed_, desynced_;
  uint64_t following_records_ = 0, desync_records_ = 0;
  std::vector<std::string> problems_;
  std::optional<int64_t> pace_step_;
  Clock::time_point pace_since_{};
  double step_seconds_ = 0;
  bool said_left_out_ = false;
};

}  // namespace forkpoint
