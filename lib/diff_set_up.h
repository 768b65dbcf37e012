// What a run called to set itself up before its first step, and what of it another run that began earlier does not have
// there. Internal to diff.
#pragma once

#include <string>

#include "lib/align.h"
#include "lib/diff_match.h"

namespace forkpoint {

// Reads a step of both runs. Throws Error as HashStreamReader::read_step; *which: the run that it was at ('A' or 'B').
//
// What is called before a step begins belongs to that step (a batch may be sent around before its forward), and so do the
// broadcasts with which a job sets its ranks up before its first one. A run that was resumed there does this again in the
// middle of the other's training, and has not done there what the other did behind the step before (a metric). So where
// only one run begins, calls ahead of the step (kRecordAhead) are matched from the last one, as the batch is sent last;
// the first ones that only one run has get the flag kRecordSetUp, by which match_step leaves them out, and the others of
// their site are counted from there.
void read_pair(const StreamJoin& join, const RankPair& ranks, const StepPair& step, StepBuffers* buffers,
               char* which = nullptr);
uint64_t set_up_records(const StepBuffers& buffers);  // how many have the flag

}  // namespace forkpoint
