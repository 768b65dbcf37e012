#include "kernels/digest_flush.h"

#include <algorithm>

namespace forkpoint {

size_t plan_digest_flush(DigestRing* ring, DigestScratch* scratch, const uint32_t* nodes, size_t count,
                         DigestFlushLaunch* launch) {
  const size_t taken = std::min<size_t>(count, kMostFlushed);
  launch->flush.ring = ring;
  launch->flush.scratch = scratch;
  launch->flush.count = static_cast<uint32_t>(taken);
  std::copy_n(nodes, taken, launch->flush.node);
  launch->grid = static_cast<uint32_t>((taken + kFlushedByBlock - 1) / kFlushedByBlock);
  return taken;
}

}  // namespace forkpoint
