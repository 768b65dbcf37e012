// The launches of two runs whose results are not equal, and what each of them found in its buffers: what a slice walks
// along. Plain values. Internal to diff.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "lib/launch_state.h"

namespace forkpoint {

inline constexpr uint32_t kNoNode = 0xFFFFFFFFu;

// One buffer of a launch on one side.
struct PlaceSide {
  bool there = false;
  BufferRow buffer;    // with the digest after
  bool known = false;  // what it held before is known:
  Digest held;
  bool hashed = false;  // by a digest right before
  bool fresh = false, unobserved = false;
  bool unwritten = false;  // fresh in part: some of its bytes were written by nobody since its allocation
  Changed changed = Changed::unknown;
  LaunchRef writer;
  std::vector<LaunchRef> others;
};

// One buffer of a launch in both runs.
struct PlaceFact {
  PlaceSide a, b;
  bool reads_only = false, overwritten = false;
  bool mismatched = false;  // these are not one buffer: the one's counterpart is known, and it is not the other
  const PlaceSide& side(bool in_b) const { return in_b ? b : a; }
  uint32_t place() const { return a.there ? a.buffer.place : b.buffer.place; }
  bool before_known() const { return a.known && b.known; }
  bool before_differs() const { return before_known() && !(a.held == b.held); }
  bool fresh() const { return a.fresh || b.fresh; }
  bool unobserved() const { return a.unobserved || b.unobserved; }
  bool after_known() const { return a.there && b.there && !mismatched && has_digest(a.buffer) && has_digest(b.buffer); }
  bool after_differs() const { return after_known() && !(a.buffer.digest == b.buffer.digest); }
  // Left untouched by the launch in both runs, as far as digests tell.
  bool untouched() const { return a.changed == Changed::no && b.changed == Changed::no; }
  bool modified() const { return a.changed == Changed::yes && b.changed == Changed::yes; }
  // It was handed the buffer and may have written it, but no digest was taken.
  bool opaque() const;
  // Something else stands in it afterwards, and the launch may have put it there.
  bool differing_output() const { return after_differs() && !untouched(); }
};

enum class NodeForm : uint8_t {
  launch,      // a launch of both runs
  gap,         // what only one run has, or has in another way, between two launches of both
  record,      // a record that differs: read from memory
  collective,  // a collective's output that differs: written to memory
};

struct DataNode {
  NodeForm form = NodeForm::launch;
  size_t pair_step = 0;                     // index in RankPair::steps
  uint64_t order = 0;                       // in time: steps as they were compared, then rows of run A
  uint32_t row_a = kNoRow, row_b = kNoRow;  // of a gap: the first work in it
  uint32_t kernel = 0;                      // LaunchNames
  uint64_t manner = 0;                   // of kernel, grid and parameters: by them a kernel may overwrite or accumulate
  uint8_t flags = 0;                     // LaunchFlags of both
  bool sink = false;                     // leaves the device, or is seen by another one
  bool resized = false;                  // a copy or set of another number of bytes in each run: their digests do not compare
  std::vector<PlaceFact> places;         // of a gap: each on one side only
  std::vector<uint32_t> rows_a, rows_b;  // of a gap: all its rows
  std::vector<uint32_t> inputs;          // of a collective: the nodes of its own inputs that differ
  std::vector<std::pair<bool, uint32_t>> place_rows;  // of a gap: run and row that each place belongs to
};

// Whether a buffer that differed before a launch made a difference to what else the launch wrote.
struct Sensitivity {
  // Launches in which it made none: by DataNode::manner, place of the buffer and where in its memory, place of the
  // result.
  std::map<std::tuple<uint64_t, uint32_t, uint64_t, uint32_t>, uint32_t> equal;
  struct Buffer {
    uint32_t scratch = 0;  // launches that wrote it in both runs, and everything else came out equal though it differed
    uint32_t matters = 0;  // launches that only read it, and nothing else explains what they wrote
  };
  std::map<std::pair<bool, uint64_t>, Buffer> buffers;  // by run and allocation
  uint32_t count(uint64_t manner, const PlaceFact& in, const PlaceFact& out) const {
    const auto at = equal.find({manner, in.place(), in.a.buffer.offset, out.place()});
    return at == equal.end() ? 0 : at->second;
  }
  Buffer of(bool in_b, uint64_t allocation) const {
    const auto at = buffers.find({in_b, allocation});
    return at == buffers.end() ? Buffer{} : at->second;
  }
};

// At which places of its parameters a kernel is handed buffers. A word that its host left in the padding may look like
// a pointer now and then; a pointer is there every time.
class Places {
 public:
  void add(uint32_t kernel, std::span<const BufferRow> buffers) {
    if (kernels_.size() <= kernel) kernels_.resize(kernel + 1);
    ++kernels_[kernel].launches;
    for (const BufferRow& buffer : buffers) {
      if (!is_before(buffer)) ++kernels_[kernel].places[buffer.place];
    }
  }
  bool always(uint32_t kernel, uint32_t place) const {
    if (kernel >= kernels_.size()) return true;
    const auto at = kernels_[kernel].places.find(place);
    return at != kernels_[kernel].places.end() && at->second >= kernels_[kernel].launches;
  }

 private:
  struct Kernel {
    uint32_t launches = 0;
    std::unordered_map<uint32_t, uint32_t> places;
  };
  std::vector<Kernel> kernels_;
};

// All nodes of one rank.
class NodeTable {
 public:
  uint32_t add(DataNode node) {
    nodes_.push_back(std::move(node));
    return static_cast<uint32_t>(nodes_.size() - 1);
  }
  void name(bool in_b, const LaunchRef& ref, uint32_t node) { by_ref_[key(in_b, ref)] = node; }
  uint32_t find(bool in_b, const LaunchRef& ref) const {
    const auto at = by_ref_.find(key(in_b, ref));
    return at == by_ref_.end() ? kNoNode : at->second;
  }
  DataNode& operator[](uint32_t node) { return nodes_[node]; }
  const DataNode& operator[](uint32_t node) const { return nodes_[node]; }
  size_t size() const { return nodes_.size(); }

 private:
  static uint64_t key(bool in_b, const LaunchRef& ref) {
    return static_cast<uint64_t>(ref.step) << 33 | static_cast<uint64_t>(ref.row) << 1 | (in_b ? 1 : 0);
  }
  std::vector<DataNode> nodes_;
  std::unordered_map<uint64_t, uint32_t> by_ref_;
};

inline bool PlaceFact::opaque() const {
  const auto one = [this](const PlaceSide& at) {
    return at.there && (at.buffer.flags & kBufferNoDigest) != 0 && at.buffer.allocation != 0 && !reads_only;
  };
  return one(a) || one(b);
}

}  // namespace forkpoint
