// Launches as a transformer's training makes them: the same ones every step, much alike from layer to layer, with new
// values in new allocations. For measuring what they cost.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

struct LaunchGeneratorOptions {
  int layers = 8;
  int launches_per_step = 2750;     // kernels; on average each is handed 1.35 buffers
  bool allocation_rows = false;     // also a row for each allocation and each release
  bool unchanged_inputs = false;    // what a kernel only reads has the digest it had before; else every digest is new
};

class LaunchGenerator {
 public:
  explicit LaunchGenerator(const LaunchGeneratorOptions& options) : options_(options) {}
  // The next step's launches; their sites are made known to the writer.
  LaunchColumns next_step(HashStreamWriter* writer);

 private:
  struct Tensor {
    uint64_t allocation = 0, address = 0, bytes = 0;
    Digest digest;
  };
  Tensor& allocate(uint64_t bytes, LaunchColumns* launches);
  void release_oldest(LaunchColumns* launches);
  void add_buffer(Tensor* tensor, uint32_t place, bool is_new_value, LaunchColumns* launches);
  uint64_t draw() { return random_ = random_ * 6364136223846793005ull + 1442695040888963407ull; }

  LaunchGeneratorOptions options_;
  uint64_t random_ = 1;
  uint64_t last_allocation_ = 0;
  uint64_t next_address_ = 0x7F0000000000ull;
  std::vector<Tensor> weights_, live_;
  std::vector<Tensor> free_;  // memory to use again
};

}  // namespace forkpoint
