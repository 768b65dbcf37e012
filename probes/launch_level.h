// The launch level's life in the process: when the CUDA calls of the host are watched, and when no more. Any thread.
#pragma once

#include <cstdint>

#include "probes/guard.h"
#include "probes/losses.h"
#include "probes/settings.h"

namespace forkpoint {

struct LaunchPacket;

// When the probe is loaded, with FORKPOINT_LEVEL=launch: asks libcuda and NVTX, through their own variables, to call us when
// they are initialised. own_path: of this library.
void offer_injection(const Settings& settings, const char* own_path);
// libcuda is initialised (InitializeInjection): watches from now on, unless only later steps are wanted.
void cuda_initialised(const Token& token, const Settings& settings);
// A step begins: watching begins at the first wanted step, and ends behind the last.
void launch_level_at_step(const Token& token, const Settings& settings, int64_t step);
// Where the bytes of a record of device memory lie; nullptr: launches are not watched.
LaunchPacket* launch_row_of_record(const Token& token, void* stream, const void* data, int64_t lowest_offset, int64_t end_offset);
void declare_launch_limits(LimitSet& limits);
// At calls of the host that do not come from within a CUDA call, and when the process ends: gives CUPTI back, if that is due.
void launch_level_outside_callbacks(const Token& token);
// In the child of a fork.
void launch_level_in_child();

}  // namespace forkpoint
