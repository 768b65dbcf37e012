#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace minigpt {

// Where a sampler stands: all that decides what it draws next.
struct SamplerState {
  uint64_t seed = 0;
  uint64_t epoch = 0;
  uint64_t cursor = 0;  // batches of all ranks drawn in this epoch
  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

struct Batch {
  std::vector<int32_t> tokens, targets;  // [batch, seq]
};

// Draws windows of a text without repetition within an epoch, in an order that follows from the seed; the ranks share
// out each draw.
class Sampler {
 public:
  // Throws Error when the text has fewer windows than one draw takes. The text must outlive the sampler.
  Sampler(std::string_view text, int seq, int batch, int rank, int ranks, uint64_t seed);

  const SamplerState& state() const { return state_; }
  void restore(const SamplerState& state);
  // What this rank draws next, or after so many further draws.
  Batch peek(int ahead = 0);
  void advance() { state_ = following(state_); }

 private:
  SamplerState following(SamplerState state) const;
  void shuffle(const SamplerState& state);

  std::string_view text_;
  int seq_, batch_, rank_, ranks_;
  SamplerState state_;
  SamplerState shuffled_for_;
  std::vector<uint32_t> windows_;
};

}  // namespace minigpt
