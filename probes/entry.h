// The way in: the table of forkpoint.h.
#pragma once

namespace forkpoint {

// Reads the environment contract, the first time. Nothing else happens before the first call through the table.
void ensure_environment_read();

}  // namespace forkpoint
