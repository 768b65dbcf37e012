// Looks at libraries of CUDA's and at the probe, each in a child process.
#pragma once

#include <chrono>
#include <string>

#include "lib/doctor_machine.h"

namespace forkpoint {

// Keys as in lib/doctor_machine.h. limit: of each.
Look look_at_probe(const std::string& path, std::chrono::milliseconds limit);
Look look_at_driver(std::chrono::milliseconds limit);
Look look_at_devices(std::chrono::milliseconds limit);  // NVML
// major: of the driver; beside: folders in which a framework keeps its CUPTI, with colons.
Look look_at_cupti(int major, const std::string& beside, std::chrono::milliseconds limit);
Look look_at_nccl(const std::string& file, std::chrono::milliseconds limit);

}  // namespace forkpoint
