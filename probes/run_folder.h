// The run's folder as the probe meets it. Writer thread only.
#pragma once

#include <string>

#include "probes/settings.h"

namespace forkpoint {

// Makes the folder and a minimal manifest where there is none (LD_PRELOAD by hand). Of several ranks that try at once exactly
// one wins and the others carry on. Throws Error.
void prepare_run_folder(const Settings& settings, int world_size);

// Leaves a note in the run's folder that this process recorded nothing, for want of a stream of its own: a reader must not take
// the run for whole. Best effort.
void note_refusal(const Settings& settings, int rank, const char* why) noexcept;

// The descriptor under which this process has the file open; -1: none.
int find_descriptor(const std::string& path);

}  // namespace forkpoint
