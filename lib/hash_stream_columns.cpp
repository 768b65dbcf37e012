#include "lib/hash_stream_columns.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace forkpoint {
namespace {

enum PlaneCoding : uint8_t { kConstant = 0, kRaw = 1, kZstd = 2 };

// Level 1: planes either are close to constant or do not compress at all, and the writer shares a core with a training.
constexpr int kPlaneLevel = 1;
// Smaller planes never win back what a zstd frame costs.
constexpr size_t kSmallestZstdPlane = 32;

void append_bytes(const void* data, size_t size_bytes, std::vector<uint8_t>* out) {
  const auto* first = static_cast<const uint8_t*>(data);
  out->insert(out->end(), first, first + size_bytes);
}

uint32_t zigzag(uint32_t value) { return value << 1 ^ (0u - (value >> 31)); }
uint32_t unzigzag(uint32_t value) { return value >> 1 ^ (0u - (value & 1)); }

template <typename Value>
void fill(Value* values, size_t count, Value value) {
  std::fill(values, values + count, value);
}

// A function of its own with plain arguments: this loop becomes vector code.
template <typename Value>
void merge_plane(Value* values, const uint8_t* plane, size_t count, int shift) {
  for (size_t i = 0; i < count; ++i) values[i] |= static_cast<Value>(static_cast<Value>(plane[i]) << shift);
}

}  // namespace

void resize(StepColumns* columns, size_t count) {
  columns->site.resize(count);
  columns->layout.resize(count);
  columns->micro_step.resize(count);
  columns->call.resize(count);
  columns->digest.resize(count);
  columns->absmax.resize(count);
  columns->nonfinite.resize(count);
  columns->word_sum.resize(count);
  columns->flags.resize(count);
}

void append(const Record& record, StepColumns* columns) {
  columns->site.push_back(record.site);
  columns->layout.push_back(record.layout);
  columns->micro_step.push_back(record.micro_step);
  columns->call.push_back(record.call);
  columns->digest.push_back(record.digest);
  columns->absmax.push_back(record.stats.absmax);
  columns->nonfinite.push_back(record.stats.nonfinite);
  columns->word_sum.push_back(record.stats.word_sum);
  columns->flags.push_back(record.flags);
}

Record StepColumns::row(size_t i) const {
  Record record;
  record.site = site[i];
  record.layout = layout[i];
  record.micro_step = micro_step[i];
  record.call = call[i];
  record.digest = digest[i];
  record.stats = {absmax[i], nonfinite[i], word_sum[i]};
  record.flags = flags[i];
  return record;
}

void ColumnEncoder::encode(const StepColumns& columns, std::vector<uint8_t>* out) {
  const size_t count = columns.size();
  if (!context_) context_.reset(ZSTD_createCCtx());
  if (!context_) throw std::bad_alloc();
  append_bytes(columns.digest.data(), count * sizeof(Digest), out);
  append_bytes(columns.word_sum.data(), count * sizeof(uint32_t), out);
  // Steps repeat and ids count up in order of first use, so the difference to "the next id" is mostly zero.
  steps_.resize(count);
  uint32_t expected = 0;
  for (size_t i = 0; i < count; ++i) {
    steps_[i] = zigzag(columns.site[i] - expected);
    expected = columns.site[i] + 1;
  }
  const auto planes_of = [&](const auto* values) {
    put_planes(reinterpret_cast<const uint8_t*>(values), sizeof(*values), count, out);
  };
  planes_of(steps_.data());
  planes_of(columns.layout.data());
  planes_of(columns.micro_step.data());
  planes_of(columns.call.data());
  planes_of(columns.nonfinite.data());
  planes_of(columns.flags.data());
  planes_of(columns.absmax.data());
}

void ColumnEncoder::put_planes(const uint8_t* values, size_t size_bytes, size_t count, std::vector<uint8_t>* out) {
  plane_.resize(count);
  for (size_t plane = 0; plane < size_bytes; ++plane) {
    for (size_t i = 0; i < count; ++i) plane_[i] = values[i * size_bytes + plane];
    if (std::all_of(plane_.begin(), plane_.end(), [&](uint8_t byte) { return byte == plane_[0]; })) {
      out->push_back(kConstant);
      out->push_back(count == 0 ? 0 : plane_[0]);
      continue;
    }
    const size_t tag = out->size();
    out->push_back(kZstd);
    out->resize(tag + 5 + (count < kSmallestZstdPlane ? 0 : ZSTD_compressBound(count)));
    const size_t room = out->size() - tag - 5;
    const size_t stored = count < kSmallestZstdPlane ? count
                                                     : ZSTD_compressCCtx(context_.get(), out->data() + tag + 5, room,
                                                                         plane_.data(), count, kPlaneLevel);
    if (ZSTD_isError(stored) || stored + stored / 16 + 4 >= count) {
      (*out)[tag] = kRaw;
      out->resize(tag + 1);
      append_bytes(plane_.data(), count, out);
      continue;
    }
    const auto size = static_cast<uint32_t>(stored);
    std::memcpy(out->data() + tag + 1, &size, sizeof(size));
    out->resize(tag + 5 + stored);
  }
}

bool ColumnDecoder::decode(std::span<const uint8_t> payload, size_t first, size_t count, StepColumns* columns) {
  left_ = payload;
  if (!context_) context_.reset(ZSTD_createDCtx());
  if (!context_) throw std::bad_alloc();
  const uint8_t* bytes = nullptr;
  if (!take(count * sizeof(Digest), &bytes)) return false;
  if (count != 0) std::memcpy(columns->digest.data() + first, bytes, count * sizeof(Digest));
  if (!take(count * sizeof(uint32_t), &bytes)) return false;
  if (count != 0) std::memcpy(columns->word_sum.data() + first, bytes, count * sizeof(uint32_t));
  uint32_t* site = columns->site.data() + first;
  auto* micro_step = reinterpret_cast<uint32_t*>(columns->micro_step.data() + first);
  absmax_.resize(count);
  if (!get_planes(count, site) || !get_planes(count, columns->layout.data() + first) ||
      !get_planes(count, micro_step) || !get_planes(count, columns->call.data() + first) ||
      !get_planes(count, columns->nonfinite.data() + first) || !get_planes(count, columns->flags.data() + first) ||
      !get_planes(count, absmax_.data()) || !left_.empty()) {
    return false;
  }
  static_assert(sizeof(float) == sizeof(uint32_t));
  if (count != 0) std::memcpy(columns->absmax.data() + first, absmax_.data(), count * sizeof(float));
  uint32_t expected = 0;
  for (size_t i = 0; i < count; ++i) {
    site[i] = expected + unzigzag(site[i]);
    expected = site[i] + 1;
  }
  return true;
}

template <typename Value>
bool ColumnDecoder::get_planes(size_t count, Value* values) {
  Value all_constant = 0;
  bool filled = false;
  for (size_t byte = 0; byte < sizeof(Value); ++byte) {
    const uint8_t* plane = nullptr;
    uint8_t constant = 0;
    if (!get_plane(count, &plane, &constant)) return false;
    const int shift = static_cast<int>(8 * byte);
    if (plane == nullptr) {
      all_constant = static_cast<Value>(all_constant | static_cast<Value>(static_cast<Value>(constant) << shift));
      continue;
    }
    if (!filled) fill(values, count, Value{0});
    filled = true;
    merge_plane(values, plane, count, shift);
  }
  if (!filled) {
    fill(values, count, all_constant);
  } else if (all_constant != 0) {
    for (size_t i = 0; i < count; ++i) values[i] |= all_constant;
  }
  return true;
}

bool ColumnDecoder::get_plane(size_t count, const uint8_t** plane, uint8_t* constant) {
  const uint8_t* bytes = nullptr;
  if (!take(1, &bytes)) return false;
  switch (*bytes) {
    case kConstant:
      *plane = nullptr;
      if (!take(1, &bytes)) return false;
      *constant = *bytes;
      return true;
    case kRaw:
      return take(count, plane);
    case kZstd: {
      if (!take(4, &bytes)) return false;
      uint32_t stored = 0;
      std::memcpy(&stored, bytes, sizeof(stored));
      if (!take(stored, &bytes)) return false;
      plane_.resize(count);
      *plane = plane_.data();
      return ZSTD_decompressDCtx(context_.get(), plane_.data(), count, bytes, stored) == count;
    }
    default:
      return false;
  }
}

bool ColumnDecoder::take(size_t size_bytes, const uint8_t** bytes) {
  if (size_bytes > left_.size()) return false;
  *bytes = left_.data();
  left_ = left_.subspan(size_bytes);
  return true;
}

}  // namespace forkpoint
