// One row of the launch level in the making: a packet is taken, described, given its buffers and their digests, and handed to
// the writer or into the graph that is being captured. Internal to launch_recorder.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "probes/allocations.h"
#include "probes/cuda_driver.h"
#include "probes/launch_packet.h"
#include "probes/launch_recorder.h"

namespace forkpoint {

struct Capture {
  bool capturing = false;
  bool unusable = false;  // the stream cannot be asked or used now
  cuuint64_t id = 0;
};
Capture capture_of(const CudaDriver& driver, CUstream stream);

// A packet of which there will be no row; nullptr: none. Digests that are on their way to it still need somebody to take them.
void drop_packet(const Token& token, LaunchPacket* packet);

// Between the two callbacks of one call of this thread.
void begin_packet(LaunchPacket* packet, const CallPlace& place);
// What was begun before this very call; anything else never came to its end. nullptr: nothing.
LaunchPacket* take_begun_packet(const Token& token, const CallPlace& place);
void drop_begun_packet(const Token& token);
void forget_begun_packet_in_child();

class RowBuilder {
 public:
  RowBuilder(const Token& token, const CudaDriver& driver, const CallPlace& place)
      : token_(token), driver_(driver), place_(place) {}
  ~RowBuilder() { drop_packet(token_, packet_); }
  RowBuilder(const RowBuilder&) = delete;
  RowBuilder& operator=(const RowBuilder&) = delete;

  // false: there is none (counted). may_wait: until one comes back, bounded.
  bool take(uint32_t buffers, bool may_wait = true);
  // Goes on with what was begun before the call: its buffers were digested at another time.
  void adopt(LaunchPacket* packet) { packet_ = packet, first_sharing_ = packet->row.buffers; }
  LaunchPacket* give();
  LaunchPacket& packet() { return *packet_; }  // REQUIRES: taken or adopted

  void describe(LaunchKind kind, const Name* name);
  // A buffer of the row; its extent is decided here. whole: all of its allocation, else [address, address + bytes).
  // nullptr: the packet holds no more (counted).
  PacketBuffer* add_buffer(uint32_t where, uint64_t address, const Allocation& allocation, bool whole, uint64_t bytes);
  void take_digests(uint32_t first, const Capture& capture);
  // Digests of the buffers from `first` on, then the row goes to the writer (or into the graph that is being captured).
  // await_digests: the host has waited for what was done, and may have it changed as soon as we return.
  void finish(uint32_t first, bool await_digests = false);

 private:
  void no_digests(uint32_t first);
  void await(uint32_t first);
  bool is_out_of_reach(const Allocation& allocation);
  void share_digest(uint32_t index);

  const Token& token_;
  const CudaDriver& driver_;
  const CallPlace& place_;
  LaunchPacket* packet_ = nullptr;
  int device_ = Allocation::kAnyDevice;  // of the current context, once asked
  uint32_t first_sharing_ = 0;
};

}  // namespace forkpoint
