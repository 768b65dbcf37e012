// The self-test of one suspect launch (FORKPOINT_RETRY, FORKPOINT_LAUNCH): its buffers are saved before it, it is run again N
// times from them, and the buffers are then left as its first run left them. Any thread; one launch a process. A launch that
// writes what could not be saved (behind a table of addresses, or past a window) is not repeated: Limit::retry_failed.
#pragma once

#include "probes/launch_packet.h"
#include "probes/launch_recorder.h"

namespace forkpoint {

// Before the launch: saves the contents of packet's buffers, if it is the one that was asked for.
void retry_save(const Token& token, const CudaDriver& driver, const CallPlace& place, const LaunchPacket& packet);
// After it, and after its own row: runs it again, a row of LaunchKind::retry each time. Does nothing unless retry_save saved.
void retry_run(const Token& token, const CudaDriver& driver, const CallPlace& place, const KernelCall& call,
               const Name* kernel);

}  // namespace forkpoint
