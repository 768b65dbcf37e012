// record --certify: the same command once more with nothing hashed, and the comparison.
#pragma once

#include <string>

#include "cli/recording.h"

namespace forkpoint {

// Runs the command of `request` with only its calls noted and the frameworks' own allocators left alone; its stdout and stderr
// go to files in the folder. Returns the folder, beside the run. REQUIRES: no signal is blocked yet. Throws Error when the
// command
// fails, or when what stands ready on its stdin can be read only once (a pipe): both runs must be given the same.
std::string record_plain(const RecordingRequest& request, const std::string& probe);
// Compares; says the outcome on stderr and writes certificate.json into the run. true: granted.
bool certify(const std::string& run_directory, const std::string& plain_directory);

}  // namespace forkpoint
