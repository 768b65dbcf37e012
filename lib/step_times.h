// The whole file of a StopBoard (probe_contract.h): behind the board, when steps began. Probe and program of one build only.
#pragma once

#include "lib/probe_contract.h"

namespace forkpoint::contract {

struct TimedStopBoard {
  // Of the last kTimes steps: step n at [n % kTimes], on the machine's monotonic clock; 0: none has begun.
  static constexpr int64_t kTimes = 1024;
  StopBoard board;
  int64_t begun_ns[kTimes];
};

}  // namespace forkpoint::contract
