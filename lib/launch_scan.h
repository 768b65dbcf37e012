// Compares the launches of two runs: counts what is equal, and finds for each rank what leaves a device and differs,
// and where that began. Internal to diff.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lib/diff_origin.h"
#include "lib/launch_compare.h"
#include "lib/launch_params.h"
#include "lib/launch_slice.h"

namespace forkpoint {

struct LaunchCounts {
  uint64_t launches = 0;   // work of both runs, paired
  uint64_t buffers = 0;    // digests after a launch, compared
  uint64_t differing = 0;  // launches with a buffer that differs
  uint64_t only_a = 0, only_b = 0;
  bool equal = false;    // nothing differs, and neither run has more
  bool unread = false;   // a frame of it is damaged
  bool complete = true;  // in both runs: what is missing is not there
};

// Where something began that left the device, on one rank.
struct LaunchOrigin {
  size_t pair = 0;  // in Alignment::ranks
  SliceEnd end;
  DataNode node;                      // of `end`
  std::string kernel_a, kernel_b;     // as recorded; of a gap, of its first launch in each run
  std::string reached;                // what it reaches first, in words
  size_t through = 0;                 // launches between the two that differ
  std::vector<std::string> opaque;    // kernels handed an input of it, of whose result no digest was taken
  std::set<uint32_t> pointer_places;  // of node: where its kernel is handed a buffer every time
  DataNode entry;                     // of `end`, where something that entered was seen first
};

struct RankLaunches {
  std::vector<LaunchOrigin>
      from_device;              // by way of a copy to the host or memory that another device sees; earliest first
  bool via_collective = false;  // something came from other ranks
  RankComparison::Noise noise;
  std::vector<LiveDifference> live;    // where nothing differing left the device: what still differs at the end
  std::vector<std::string> live_text;  // a sentence each
  bool finished = false;               // compared to the end, and nothing differing left the device
};

// What became of a first difference that the records show.
struct RecordSlice {
  bool on_device = false;  // else its value lay on the host
  uint32_t row = kNoRow;   // of run A's launches: where the record was taken
  std::vector<LaunchOrigin> ends;
};

struct LaunchScan {
  bool compared = false;                         // both runs are at level launch, and there are launches
  std::vector<std::vector<LaunchCounts>> steps;  // as Alignment::ranks[].steps
  std::vector<RankLaunches> ranks;               // as Alignment::ranks
  std::vector<RecordSlice> records;              // as Origins::list
  FreeWords free_words;
  std::vector<std::string> blockers, gaps;  // sentences
  std::vector<int64_t> gap_steps;
};

// wanted: false leaves the launches out.
LaunchScan scan_launches(const OriginInput& input, const Origins& origins, bool wanted);

}  // namespace forkpoint
