// The looks at machine and environment that lib/doctor_machine.h judges.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lib/doctor_machine.h"

namespace forkpoint {

struct MachineRequest {
  std::string run_directory;                                      // that is meant to be made
  std::chrono::milliseconds limit{30000};                         // of each look at a library or a program
  std::string python;                                             // of the job; empty: python3 of the PATH
  std::map<std::string, std::optional<std::string>> environment;  // what the job's command line sets (nothing: removes)
};

// What the looks at the machine leave for the job's.
struct MachineLooks {
  Look driver, python;
  std::string python_path;
};

// All of them. Each is bounded; nothing is changed but a folder that is made where the run is meant to be, and removed.
Findings look_at_machine(const MachineRequest& request, MachineLooks* looks);

std::map<std::string, std::string> own_environment();
// Through PATH; empty: not found. executable: false where there is a file that may not be run.
std::string find_program(const std::string& word, const std::string& path, bool* executable);
// The variables of a look: our probe, and tools that others want to be loaded, are left out.
std::map<std::string, std::optional<std::string>> quiet_environment();

}  // namespace forkpoint
