// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011). Counter-based: a
// number depends on its key and counter alone, so that it needs no state, no order and is the same on every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MINIGPT_HD __host__ __device__
#else
#define MINIGPT_HD
#endif

namespace minigpt {

struct PhiloxWords {
  uint32_t word[4];
};

MINIGPT_HD inline PhiloxWords philox(PhiloxWords counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// What a number is for goes into its counter, so that no two uses ever share one.
enum class RandomUse : uint32_t { dropout = 1u << 24, weights = 2u << 24, sampler = 3u << 24 };

// Everything that a dropout mask depends on. site: which dropout of the model.
struct DropoutKey {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t rank = 0;
  uint32_t site = 0;
  float probability = 0;
};

// Random words of elements 4 * group to 4 * group + 3.
MINIGPT_HD inline PhiloxWords dropout_words(const DropoutKey& key, uint32_t group) {
  return philox({{group, static_cast<uint32_t>(RandomUse::dropout) | key.site, key.step, key.rank}}, key.seed);
}
// An element is kept when its word is not below this. REQUIRES: 0 <= probability < 1.
MINIGPT_HD inline uint32_t dropout_threshold(const DropoutKey& key) {
  return static_cast<uint32_t>(static_cast<double>(key.probability) * 4294967296.0);
}
MINIGPT_HD inline float dropout_scale(const DropoutKey& key) { return 1.0f / (1.0f - key.probability); }

}  // namespace minigpt
