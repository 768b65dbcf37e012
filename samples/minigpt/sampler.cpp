#include "samples/minigpt/sampler.h"

#include <fmt/format.h>

#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include "samples/minigpt/error.h"
#include "samples/minigpt/philox.h"
#include "samples/minigpt/text.h"

namespace minigpt {

std::string load_text(const std::string& path) {
  if (path.empty()) return std::string(embedded_text());
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) throw Error(fmt::format("{}: cannot be read, or is empty", path));
  return std::move(text).str();
}

Sampler::Sampler(std::string_view text, int seq, int batch, int rank, int ranks, uint64_t seed)
    : text_(text), seq_(seq), batch_(batch), rank_(rank), ranks_(ranks), state_{seed, 0, 0} {
  const int64_t windows = static_cast<int64_t>(text.size()) - seq;
  if (windows < static_cast<int64_t>(batch) * ranks)
    throw Error(fmt::format("the text has {} bytes: too few for {} ranks x {} different windows of {} bytes",
                            text.size(), ranks, batch, seq + 1));
  if (text.size() > UINT32_MAX)
    throw Error(fmt::format("the text has {} bytes, at most {} are possible", text.size(), UINT32_MAX));
  windows_.resize(static_cast<size_t>(windows));
  shuffle(state_);
}

void Sampler::restore(const SamplerState& state) {
  state_ = state;
  shuffle(state_);
}

// Fisher and Yates; the slight bias of the remainder does not matter here.
void Sampler::shuffle(const SamplerState& state) {
  std::iota(windows_.begin(), windows_.end(), 0u);
  for (uint32_t i = static_cast<uint32_t>(windows_.size()) - 1; i > 0; --i) {
    const PhiloxWords words =
        philox({{i, static_cast<uint32_t>(RandomUse::sampler), static_cast<uint32_t>(state.epoch), 0}}, state.seed);
    std::swap(windows_[i], windows_[words.word[0] % (i + 1)]);
  }
  shuffled_for_ = state;
}

SamplerState Sampler::following(SamplerState state) const {
  if ((++state.cursor + 1) * batch_ * ranks_ <= windows_.size()) return state;
  return {state.seed, state.epoch + 1, 0};
}

Batch Sampler::peek(int ahead) {
  SamplerState state = state_;
  for (int i = 0; i < ahead; ++i) state = following(state);
  if (state.epoch != shuffled_for_.epoch || state.seed != shuffled_for_.seed) shuffle(state);
  Batch drawn;
  for (int i = 0; i < batch_; ++i) {
    const uint32_t start = windows_[(state.cursor * ranks_ + rank_) * batch_ + i];
    for (int t = 0; t < seq_; ++t) {
      drawn.tokens.push_back(static_cast<unsigned char>(text_[start + t]));
      drawn.targets.push_back(static_cast<unsigned char>(text_[start + t + 1]));
    }
  }
  return drawn;
}

}  // namespace minigpt
