// What is known of this machine without asking CUDA: from /proc and the C library.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace forkpoint {

std::string host_name();
// "nvidia_driver", "kernel", "libc", "cpu"; what cannot be found out is left out.
std::map<std::string, std::string> machine_versions();
// One entry a GPU of the machine, by PCI address: "NVIDIA H200". Empty without the driver.
std::vector<std::string> gpu_names();
// The variables of our environment that can change numerical results.
std::map<std::string, std::string> numeric_environment();
std::string utc_now();  // ISO 8601

}  // namespace forkpoint
