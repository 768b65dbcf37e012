// Files of /proc about a process that may end at any moment.
#pragma once

#include <string>

namespace forkpoint {

// What is in it; empty when the process is gone, also when it goes while it is read (a stream would throw then).
std::string read_proc_file(const std::string& path);

}  // namespace forkpoint
