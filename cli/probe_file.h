// Where the probe lies that belongs to this program.
#pragma once

#include <string>
#include <vector>

namespace forkpoint {

// The places that are looked at, in order: FORKPOINT_PROBE alone when it is set, else next to the program, then the
// library folder beside it.
std::vector<std::string> probe_candidates();
// Absolute path. Throws Error when there is none, or when LD_PRELOAD cannot express its path (blanks and colons).
std::string find_probe();
// The probe after the entries that the user preloads already; each of them once.
std::string preload_with(const std::string& probe, const char* existing);

}  // namespace forkpoint
