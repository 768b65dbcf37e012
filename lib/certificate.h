// Did the observer change what it observed? Compares a run in which nothing was hashed (only which kernels were launched,
// and what left the device) with the full recording of the same command.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/run.h"

namespace forkpoint {

struct Certificate {
  bool granted = false;
  // What was looked at, alike in both runs when granted.
  uint64_t kernels = 0;      // launches: name, grid, block, shared memory, stream
  uint64_t transfers = 0;    // copies and sets: kind and size
  uint64_t to_host = 0;      // copies to the host: also their digest
  uint64_t records = 0;      // at step level: weights, optimizer state, loss, ...
  std::vector<std::string> differences;  // sentences; at most a few
};

// Neither run is changed. Throws what reading throws.
Certificate certify_observer(const Run& plain, const Run& full);
// "recording changed nothing: 2,750 kernels ..."; or what differs.
std::string to_string(const Certificate& certificate);

}  // namespace forkpoint
