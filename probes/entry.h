// The way in: the table of forkpoint.h.
#pragma once

namespace forkpoint {

// Reads the environment contract, the first time. Nothing else happens before the first call through the table.
void ensure_environment_read();
// At load: asks the libraries that call others by environment variable to call this one (own_path), and an interpreter to
// take the bridge in.
void offer_to_libraries(const char* own_path);

}  // namespace forkpoint
