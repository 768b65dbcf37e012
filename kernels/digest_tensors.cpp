#include "kernels/digest_tensors.h"

#include <algorithm>

#include "kernels/digest_blocks.h"
#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

uint64_t tiles_of(const DigestFlat& run) {
  if (run.size_bytes == 0) return 0;
  return (run.first_byte + run.size_bytes - 1) / kTileBytes - run.first_byte / kTileBytes + 1;
}

// The runs' rules, each once.
class Rules {
 public:
  explicit Rules(DigestTensorRule* rules) : rules_(rules) {}
  // Its place; kMostRules: there is no room for it.
  uint32_t place_of(const DigestFlat& run) {
    uint32_t place = 0;
    while (place < used_ && !is_of(rules_[place], run)) ++place;
    if (place < used_ || used_ == kMostRules) return place;
    rules_[used_++] = {run.largest_finite, run.mask, run.loop};
    return place;
  }
  void clear_rest() {
    for (uint32_t i = used_; i < kMostRules; ++i) rules_[i] = {};
  }

 private:
  static bool is_of(const DigestTensorRule& rule, const DigestFlat& run) {
    return rule.loop == run.loop && rule.mask == run.mask && rule.largest_finite == run.largest_finite;
  }
  DigestTensorRule* rules_;
  uint32_t used_ = 0;
};

DigestTensor tensor_of(const DigestFlat& run, uint32_t rule) {
  return {run.data, run.size_bytes, run.first_byte, run.target.slot, run.target.scratch, run.target.ticket, rule};
}

// Returns how many of the runs found room.
template <int kCapacity>
size_t fill(const DigestFlat* runs, size_t count, DigestTensors<kCapacity>& tensors) {
  Rules rules(tensors.rule);
  size_t taken = 0;
  for (; taken < count; ++taken) {
    const uint32_t rule = rules.place_of(runs[taken]);
    if (rule == kMostRules) break;
    tensors.tensor[taken] = tensor_of(runs[taken], rule);
  }
  rules.clear_rest();
  for (size_t i = taken; i < kCapacity; ++i) tensors.tensor[i] = {};
  return taken;
}

// Returns the number of blocks.
template <int kCapacity>
uint32_t deal_blocks(const DigestFlat* runs, size_t count, int multiprocessors, DigestTensors<kCapacity>& tensors) {
  const uint64_t rounds =
      plan::choose_rounds(count, multiprocessors, [&](size_t i) { return tiles_of(runs[i]); });
  uint32_t blocks = 0;
  for (size_t i = 0; i < tensors.kPlaces; ++i) {
    tensors.first_block[i] = i < count ? blocks : tensors.kNoBlock;
    if (i < count) blocks += static_cast<uint32_t>(plan::blocks_of(tiles_of(runs[i]), rounds));
  }
  return blocks;
}

template <int kCapacity>
size_t plan_into(const DigestFlat* runs, size_t count, int multiprocessors, DigestTensors<kCapacity>& tensors,
                 uint32_t* grid) {
  const size_t taken = fill(runs, count, tensors);
  *grid = deal_blocks(runs, taken, multiprocessors, tensors);
  return taken;
}

// As plan_digest has it.
void take_alone(const DigestFlat& run, DigestTensorsLaunch& launch) {
  launch.kernel = static_cast<int>(run.loop);
  launch.flat = run;
  launch.grid = run.parts;
}

}  // namespace

size_t plan_digest_tensors(const DigestFlat* runs, size_t count, int multiprocessors, DigestTensorsLaunch* launch) {
  if (count == 0) return 0;
  launch->block = kDigestBlockThreads;
  launch->shared_bytes = 0;
  if (count == 1) {
    take_alone(runs[0], *launch);
    return 1;
  }
  if (count <= kFewTensors) {
    launch->kernel = kDigestTensorsKernel;
    return plan_into(runs, count, multiprocessors, launch->few, &launch->grid);
  }
  launch->kernel = kDigestTensorsKernel + 1;
  return plan_into(runs, std::min<size_t>(count, kMostTensors), multiprocessors, launch->many, &launch->grid);
}

size_t DigestTensorsLaunch::param_bytes() const {
  if (kernel == kDigestTensorsKernel) return sizeof(few);
  if (kernel == kDigestTensorsKernel + 1) return sizeof(many);
  return sizeof(flat);
}

}  // namespace forkpoint
