// Puts together what the records and what the launches say about where two runs part. Internal to diff.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/launch_scan.h"

namespace forkpoint {

// A first divergence: of a record, of a launch, or of a launch that a record led to.
struct First {
  const Origin* record = nullptr;      // lives as long as the Origins
  std::optional<LaunchOrigin> launch;  // then it is what the verdict names
  bool on_host = false;                // the record's value lay on the host, or came from there
  std::vector<int> ranks;              // ascending
  bool everyone = false;               // all ranks alike
  size_t pair = 0;                     // of ranks[0]
  std::vector<std::string> evidence;   // what the launches add to a record
};

// In the order in which they are to be named. The record of a value of the host stays first where no launch of an
// earlier step differs; a record of device memory gives way to the launches that put the difference there.
std::vector<First> join_firsts(const OriginInput& input, const Origins& origins, const LaunchScan& launches);

// True when something that differs has left a device.
bool launches_diverge(const LaunchScan& launches);

// Sentences: buffers that differ and are still there at the end; what forbids to call the runs identical.
// Launches that line up with none of the other run, in whole steps.
uint64_t launches_in_one_run(const LaunchScan& launches);
std::vector<std::string> launch_blockers(const LaunchScan& launches);
// What differed and reached nothing; launches in one run only.
std::vector<std::string> launch_notes(const OriginInput& input, const LaunchScan& launches);

// ", first rank 0: gemm (launch 7 of step 3)"
std::string first_of_them(const OriginInput& input, const LaunchScan& launches, bool in_b);

// Launches that differ in the steps from this one on.
uint64_t differing_launches(const OriginInput& input, const LaunchScan& launches, int64_t first_step, bool in_prologue);

// NCCL's kernels of one step, where their names differ between the runs; empty: they do not.
std::string collective_kernels(const OriginInput& input, const Origin& origin);

}  // namespace forkpoint
