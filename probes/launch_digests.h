// Digests of raw memory for the launch level: many in one kernel, on the stream of the launch that they belong to.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "probes/cuda_context.h"
#include "probes/launch_packet.h"
#include "probes/losses.h"

namespace forkpoint {

struct DigestPlace {
  const CudaDriver& driver;
  CudaContext& context;  // current
  CUstream stream;
  bool capturing;        // the digests become nodes of the graph and arrive at each replay
  bool flushed = false;  // of these: once flush_captured_digests, captured behind them, has run
};

// Enqueues the digests of those of packet's buffers from `first` on that have an address to read (row.bytes > 0 and neither
// kBufferNoDigest nor same_as), and fills in slot or node. Loss::count_: all well; otherwise the buffers that got none are
// marked kBufferNoDigest. error: CUresult behind the loss.
Loss enqueue_launch_digests(const Token& token, const DigestPlace& place, LaunchPacket& packet, uint32_t first, int* error);

// Has the results of the nodes (0: none, for the graph to keep its form) sent to the host, by kernels on place.stream.
CUresult flush_captured_digests(const DigestPlace& place, const uint32_t* nodes, size_t count);

}  // namespace forkpoint
