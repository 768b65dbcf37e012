// The run's folder as the probe meets it. Writer thread only.
#pragma once

#include <string>

#include "probes/settings.h"

namespace forkpoint {

// Makes the folder and a minimal manifest where there is none (LD_PRELOAD by hand). Of several ranks that try at once exactly
// one wins and the others carry on. Throws Error.
void prepare_run_folder(const Settings& settings, int world_size);

// The descriptor under which this process has the file open; -1: none.
int find_descriptor(const std::string& path);

}  // namespace forkpoint
