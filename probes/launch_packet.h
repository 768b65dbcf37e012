// One row of the launch level on its way to the writer thread: lib/launch.h's rows, with places for what is still to come
// from the device. Packets lie in blocks of fixed memory, one size for few buffers, one for many.
#pragma once

#include <cstdint>

#include "lib/launch.h"
#include "probes/guard.h"
#include "probes/names.h"

namespace forkpoint {

class CudaContext;
class DeviceSlot;
struct GraphTemplate;  // graphs.h

struct PacketBuffer {
  BufferRow row;
  DeviceSlot* slot = nullptr;  // where the digest arrives
  uint32_t node = 0;           // in a captured graph: the number under which it arrives at each replay
  // Of a copy of rows with gaps between them: what is digested is the rows alone. 0: all of the bytes.
  uint64_t row_bytes = 0, pitch = 0;
  int32_t same_as = -1;        // index of the buffer of this packet whose digest it shares
};

struct LaunchPacket {
  LaunchRow row;                    // site, buffers: filled in by the writer
  const SiteEntry* site = nullptr;
  GraphTemplate* graph = nullptr;   // of a graph's launch whose nodes are known: they follow as rows of their own
  uint32_t replay = 0;              // the n-th launch of that graph, from 0
  bool discard = false;             // no row: what its digests give is thrown away
  uint32_t rows = 1;                // that the writer will append for it
  uint32_t capacity = 0;            // of buffers
  uint32_t pool = 0;
  uint32_t next_free = 0;           // of the pool
  PacketBuffer buffers[1];          // capacity of them; row.buffers are used

  PacketBuffer* add() { return row.buffers < capacity ? &(buffers[row.buffers++] = {}) : nullptr; }
};

inline constexpr uint32_t kMostBuffers = 2048;  // of one launch: a parameter block of 32 KiB and as many digests before

// may_wait: when too many are on their way, waits for the writer thread to give one back, at most FORKPOINT_RING_WAIT_MS, and
// not at all while none has come back since the last wait that was in vain. REQUIRES then: the caller holds no place in the
// ring and no lock. Any thread. nullptr: there is no memory, or none came back.
LaunchPacket* take_packet(const Token& token, uint32_t buffers, bool may_wait = true);
void return_packet(LaunchPacket* packet);
// In the child of a fork: what the parent has on its way is not ours.
void forget_packets_in_child();

}  // namespace forkpoint
