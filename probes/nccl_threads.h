// Threads that NCCL starts for itself: what they launch and copy is NCCL's as much as what it does within a caller's call.
// A non-blocking communicator, for one, is made on such a thread.
#pragma once

namespace forkpoint {

// Was this thread started by a library named libnccl..., with nobody else's code on its stack? Found out once a thread, from
// all frames of its stack, in some ten microseconds; then a read. false where they cannot be read: what is launched is taken for
// the program's then. Any thread; takes no lock of ours.
bool on_thread_of_nccl();

}  // namespace forkpoint
