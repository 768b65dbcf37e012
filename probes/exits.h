// The ends of a process.
#pragma once

namespace forkpoint {

// Registers a wait for what is recorded that runs before the exit handlers of everything loaded by now (of the CUDA driver
// above all): afterwards no kernel finishes any more.
void drain_before_libraries_go();

}  // namespace forkpoint
