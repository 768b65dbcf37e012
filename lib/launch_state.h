// What each buffer of one run held, launch after launch, as far as digests tell: what a launch found in a buffer, who
// had left it there, and whether the launch changed it. In the order in which the host issued the calls. Internal to
// diff.
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "lib/launch_step.h"

namespace forkpoint {

// A launch of one run. step: index in HashStreamReader::steps().
struct LaunchRef {
  size_t step = static_cast<size_t>(-1);
  uint32_t row = kNoRow;
  bool known() const { return row != kNoRow; }
  friend auto operator<=>(const LaunchRef&, const LaunchRef&) = default;
};

enum class Changed : uint8_t { no, yes, unknown };

// What a launch found in one buffer that it was handed, and left there.
struct Access {
  uint32_t row = 0;             // of the launch
  uint32_t buffer = 0;          // index in LaunchColumns::buffers of the digest after it
  uint32_t before = kNoBuffer;  // index of the digest right before it, where one was taken
  bool tracked = false;         // what it held is known from the last digest after
  Digest held;                  // `before` where there is one, else the tracked digest; valid with content_known()
  bool fresh = false;           // nothing was known to have been written to it since its allocation
  bool unwritten = false;       // fresh in part: some of its bytes were written by nobody since its allocation
  bool unobserved = false;      // the digest right before is not the tracked one: somebody wrote in between
  bool overwritten = false;     // the call replaces every byte of it, whatever it held
  bool reads_only = false;      // a copy's source, or what a record was taken of
  Changed changed = Changed::unknown;
  LaunchRef writer;               // that left what it held (or where this was first seen); unknown: nobody recorded
  std::vector<LaunchRef> others;  // later writers of parts of it, or of more than it
  bool content_known() const { return tracked || before != kNoBuffer; }
};

// The state of the buffers of one run. Not thread-safe.
class BufferStates {
 public:
  // Is called for an allocation that was not seen since forget(): fills in what earlier steps left in it, newest last.
  struct Part {
    uint64_t start = 0, bytes = 0;
    bool known = false;  // else a launch was handed it and no digest was taken
    Digest digest;
    LaunchRef writer;
    uint64_t age = 0;  // order of the writes
    bool found =
        false;  // as it was when a launch was first handed it; nobody is known to have written it, then or since
  };
  using Lookup = std::function<std::vector<Part>(uint64_t allocation)>;

  explicit BufferStates(Lookup lookup = {}) : lookup_(std::move(lookup)) {}
  void forget() { allocations_.clear(); }

  // Goes through one step. written_by_record(row): the row stands for a record by which memory was written (a
  // collective's output), else records read. accesses: in order of rows. It may be null.
  void trace(const LaunchStep& step, size_t step_index, const std::function<bool(size_t row)>& written_by_record,
             std::vector<Access>* accesses);
  // Allocations of the last step traced, with repetitions: that a launch was handed, and that were released.
  const std::vector<uint64_t>& touched() const { return touched_; }
  const std::vector<uint64_t>& released() const { return released_; }

  // What the buffers hold now; nullptr: not seen since forget(), or released.
  const std::vector<Part>* parts(uint64_t allocation) const;
  const auto& all() const { return allocations_; }

  struct Allocation {
    std::vector<Part> parts;
    bool written = false;     // by a recorded call, as far as is known
    bool from_birth = false;  // all uses since its allocation were seen
  };

 private:
  Allocation& allocation(uint64_t ordinal);
  Access look(const BufferRow& buffer);
  void apply(const BufferRow& buffer, const LaunchRef& at, Access* access);
  void store(const BufferRow& buffer, const LaunchRef& at, bool known, bool replaces, bool found = false);

  Lookup lookup_;
  std::unordered_map<uint64_t, Allocation> allocations_;
  std::vector<uint64_t> touched_, released_;
  uint64_t age_ = 0;
};

// Looks back, step by step and no further than asked, for what a run's buffers held before a step. Not thread-safe.
class StateHistory {
 public:
  StateHistory(const LaunchJoin& join, bool in_b) : join_(join), in_b_(in_b) {}
  // From here on what the steps before step_index left is asked for. contiguous: no step ran unrecorded right before
  // it.
  void start(size_t step_index);
  std::vector<BufferStates::Part> find(uint64_t allocation);

 private:
  bool read_one();  // one step further back; false: there is none

  const LaunchJoin& join_;
  const bool in_b_;
  size_t next_ = 0;  // step before which everything is still unread
  int64_t number_ = 0;
  LaunchStep step_;
  std::unordered_map<uint64_t, std::vector<BufferStates::Part>> found_;
};

// The rows by which a step's records say that memory was written.
bool is_collective_output(const LaunchJoin& join, bool in_b, const LaunchStep& step, size_t row);

}  // namespace forkpoint
