// What one rank asked of its GPUs, one row a call: kernel launches, copies, sets, and what orders them (events, waits,
// allocations). Recorded at Level::launch beside the records (lib/record.h). Plain values: thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/digest.h"

namespace forkpoint {

// The numbers are part of the hash stream format: append, never renumber.
enum class LaunchKind : uint8_t {
  kernel = 0,
  copy = 1,           // buffers: kPlaceSource, kPlaceTarget
  set = 2,            // buffers: kPlaceTarget; params: digest of the pattern and its size
  graph = 3,          // a graph launch; object: the executable graph. The rows of its nodes follow, with kLaunchInGraph
  host_function = 4,  // a call of the host's on a stream (cuLaunchHostFunc)
  allocate = 5,       // object: allocation; bytes
  release = 6,        // object: allocation
  event_record = 7,   // object: event, on stream
  event_wait = 8,     // object: event; work on stream from here on comes after it
  synchronize = 9,    // the host waited: for event `object`; object 0: for the row's stream, or all (kEveryStream)
  // A record of this step (object: its row in StepColumns) was taken of device memory here: one buffer, kPlaceSource, digest
  // as the record has it. Where its site is a collective's output, the collective has written that memory; else it was read.
  record = 10,
  retry = 11,         // one repetition of the row that retry_of names: its buffers' digests after it
};
inline constexpr int kLaunchKindCount = 12;
std::string_view name(LaunchKind kind);

// Makes or changes data on the device: what a verdict can name.
constexpr bool is_work(LaunchKind kind) { return kind <= LaunchKind::set; }

constexpr bool is_move(LaunchKind kind) { return kind == LaunchKind::copy || kind == LaunchKind::set; }

inline constexpr uint32_t kEveryStream = 0xFFFFFFFFu;

enum LaunchFlags : uint8_t {
  kLaunchInGraph = 1,        // a node of the graph row before it
  kLaunchParamsUnread = 2,   // the parameters (and the buffers in them) could not be read; a coverage limit says why
  kLaunchToHost = 4,         // a copy whose target is host memory: what leaves the device
  kLaunchFromHost = 8,       // a copy or set whose value comes from the host
  kLaunchLegacyStream = 16,  // on the default stream that waits for every blocking stream, and they for it
  kLaunchPeerMapped = 32,    // a buffer is mapped into another device or process
  kLaunchNonBlocking = 64,   // its stream does not wait for the legacy default stream, nor that for it
  kLaunchRecompute = 128,    // of a layer's second forward, under activation checkpointing
};

// Places below kPlaceSpecial are the byte offset of the pointer in the parameter block of the kernel.
inline constexpr uint32_t kPlaceSpecial = 0x80000000u;
inline constexpr uint32_t kPlaceSource = 0x80000000u;
inline constexpr uint32_t kPlaceTarget = 0x80000001u;
inline constexpr uint32_t kPlaceGlobal = 0x80000002u;  // a __device__ variable of the kernel's module

enum BufferFlags : uint8_t {
  kBufferBefore = 1,    // the digest was taken right before the launch; else right after
  kBufferWindow = 2,    // the extent is not known: a bounded window was taken, a coverage limit says so
  kBufferNoDigest = 4,  // no digest was taken (a limit or a gap says why)
  kBufferRead = 8,      // known to be read only (a copy's source)
  kBufferWritten = 16,  // known to be written (a copy's or set's target)
  kBufferAddresses = 32,  // holds device addresses: its digest means nothing between two processes
  kBufferFresh = 64,    // first use since the allocation: no recorded call was handed it before
};

// A buffer that a launch was handed. Two rows of one place, kBufferBefore first, when both digests were taken.
struct BufferRow {
  uint32_t place = 0;
  uint8_t flags = 0;
  uint64_t allocation = 0;  // ordinal in the process, from 1, never used twice; 0: host memory
  uint64_t offset = 0;      // where in the allocation the pointer points, bytes
  uint64_t address = 0;     // the pointer itself (to tell a number that looks like one: see LaunchRow::params)
  uint64_t start = 0;       // first byte of the allocation that the digest covers
  uint64_t bytes = 0;       // how many it covers
  Digest digest;            // raw bytes, position 0 at `start`
  friend bool operator==(const BufferRow&, const BufferRow&) = default;
};

// A row's index is its position in the step (LaunchColumns), in the order in which the host made the calls.
struct LaunchRow {
  LaunchKind kind = LaunchKind::kernel;
  uint8_t flags = 0;
  // id in this stream: phase, Kind::launch, Role::other, layer, op (framework op), tensor: the kernel's mangled name, or for
  // the other kinds the call ("cuMemcpyAsync", "ncclAllReduce"). Empty for what is not work.
  uint32_t site = 0;
  int32_t micro_step = 0;
  uint32_t stream = 0;      // ordinal in the process, from 1 in order of first use; 0: the default stream of device 0
  uint32_t grid[3] = {0, 0, 0};
  uint32_t block[3] = {0, 0, 0};
  uint32_t shared_bytes = 0;   // dynamic
  uint32_t param_bytes = 0;    // of the parameter block; 0: none, or not read
  // Digest of the parameter block with the words zeroed at which a pointer into an allocation was recognised (they stand in
  // the buffers, place by place). Linear (lib/digest.h), so that a word taken for a pointer in one run only can be put back.
  Digest params;
  uint64_t object = 0;      // see LaunchKind
  uint64_t bytes = 0;       // allocate: size; copy, set: bytes moved
  uint32_t retry_of = 0;    // retry: index of the row
  uint32_t buffers = 0;     // how many BufferRows follow in LaunchColumns::buffers
  friend bool operator==(const LaunchRow&, const LaunchRow&) = default;
};

// The rows of one step, in order; buffer rows of row i follow those of row i - 1.
struct LaunchColumns {
  std::vector<LaunchRow> rows;
  std::vector<BufferRow> buffers;
  void clear() { rows.clear(); buffers.clear(); }
};

// What of a row must be equal in two runs that did the same thing: everything but addresses (and the digest of a buffer
// that holds some: kBufferAddresses). Position-dependent (index), so the sum of a step's leaves is a step's digest of
// launches. site: site_key of the row's site.
Digest launch_leaf(const Digest& site, uint64_t index, const LaunchRow& row, const BufferRow* buffers);

// Human-readable kernel name ("void at::native::...<...>(...)"), or the text itself where it is not mangled.
std::string demangled(std::string_view mangled);
// The same without arguments, return type and template arguments: "vectorized_elementwise_kernel".
std::string short_kernel_name(std::string_view mangled);

}  // namespace forkpoint
