// Digests inside a captured graph, fetched all at once at its end. Each leaves its sums in device memory and has
// nothing to wait for: no slot to draw, no store over PCIe, no last block. One more kernel behind all of them then
// draws slots of a ring for many digests in one go, and sends them to the host.
//
//   target.scratch = scratch + node;   // neither slot nor ring; node: from 1 on
//   ... plan_digest_pieces, launched into the capture ...
//   for (size_t done = 0; done < count; ) {
//     DigestFlushLaunch launch;
//     done += plan_digest_flush(ring, scratch, nodes + done, count - done, &launch);
//     cuLaunchKernel(function[launch.kernel], launch.grid, ...);   // on a stream ordered behind all the digests
//   }
//
// Guarantee: a result that arrives is the sum of all blocks of one run of its node's digest. Each word counts the
// blocks that have added to it, so a flush that is not ordered behind the digest after all, as in a graph that was
// changed by hand, sees that and sends nothing: it counts the result as dropped, and all later
// ones of that node.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/digest_launch.h"

namespace forkpoint {

inline constexpr uint32_t kMostFlushed = 1016;
// Few blocks, since each draws its slots for itself; enough for the loads of a launch to be under way at once.
inline constexpr uint32_t kFlushThreads = 4;  // a digest
inline constexpr uint32_t kFlushedByBlock = kDigestBlockThreads / kFlushThreads;

// Kernel parameter.
struct DigestFlush {
  DigestRing* ring;
  DigestScratch* scratch;
  uint32_t count;
  uint32_t node[kMostFlushed];  // the digest's place in scratch, and its SlotResult::node; 0: none
};
static_assert(sizeof(DigestFlush) <= 4096, "of what every driver takes as parameters");

struct DigestFlushLaunch {
  int kernel = kDigestFlushKernel;
  uint32_t grid = 0;
  uint32_t block = kDigestBlockThreads;
  uint32_t shared_bytes = 0;
  DigestFlush flush;
  DigestFlushLaunch() {}  // no more is written than is needed, by the planner
  void* params() { return &flush; }
  const char* name() const { return kDigestKernelNames[kernel]; }
};

// How many of the nodes *launch covers: 0 for none, else at least 1. Grid and kernel depend on nothing but the count.
size_t plan_digest_flush(DigestRing* ring, DigestScratch* scratch, const uint32_t* nodes, size_t count,
                         DigestFlushLaunch* launch);

}  // namespace forkpoint
