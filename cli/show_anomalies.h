// forkpoint show --anomalies: spikes and NaN of one run.
#pragma once

#include "cli/show.h"

namespace forkpoint {

// Prints the answer; returns the exit status: 0 nothing, 1 found, 2 nothing found, but a part of the run is lost.
int show_anomalies(const Run& run, const RecordFilter& filter, bool json);

}  // namespace forkpoint
