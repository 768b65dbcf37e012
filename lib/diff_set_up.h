// What a run called to set itself up before its first step, and what of it another run that began earlier does not have
// there. Internal to diff.
#pragma once

#include <string>

#include "lib/align.h"
#include "lib/diff_match.h"

namespace forkpoint {

// Reads a step of both runs. Throws Error as HashStreamReader::read_step; *which: the run that it was at ('A' or 'B').
//
// What is called before a step begins belongs to that step (a batch may be sent around before its forward), and so do
// the broadcasts with which a job sets its ranks up before its first one. A run that was resumed there does this again
// in the middle of the other's training, and has not done there what the other did behind the step before (a metric).
// So where only one run begins, calls ahead of the step (kRecordAhead) are matched from the last one, as the batch is
// sent last, as long as they are the same; those before get the flag kRecordSetUp, by which match_step leaves them out,
// and the others of their site are counted from there. Where both runs have such calls left, they may be others, or the
// same with other values: that cannot be told, and forbids the word "identical" (SetUpRecords::unsure).
//
// The same is done with the map of used parameters that DistributedDataParallel reduces in the first step of a static
// graph: an all-reduce of int32, 0 or 1 on each rank, of which the run that goes on has none, ahead of one of
// floating-point numbers.
void read_pair(const StreamJoin& join, const RankPair& ranks, const StepPair& step, StepBuffers* buffers,
               char* which = nullptr);

struct SetUpRecords {        // how many have the flag
  uint64_t ahead = 0;        // of the step
  uint64_t used_map = 0;     // in it
  uint64_t unsure = 0;       // of those ahead, in both runs
  uint32_t unsure_site = 0;  // one of them: joint id
  bool none() const { return ahead == 0 && used_map == 0; }
};
SetUpRecords set_up_records(const StepBuffers& buffers);

}  // namespace forkpoint
