#include "lib/hash_stream_planes.h"

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

// The bits in which any two values differ. A function of its own with plain arguments: this loop becomes vector code.
template <typename Value>
Value varying_bits(const Value* values, size_t count) {
  Value varying = 0;
  for (size_t i = 0; i < count; ++i) varying = static_cast<Value>(varying | (values[i] ^ values[0]));
  return varying;
}

// As varying_bits: plain arguments.
template <typename Value>
void split_plane(const Value* values, size_t count, int shift, uint8_t* plane) {
  for (size_t i = 0; i < count; ++i) plane[i] = static_cast<uint8_t>(values[i] >> shift);
}

template <typename Value>
void merge_plane(Value* values, const uint8_t* plane, size_t count, int shift) {
  for (size_t i = 0; i < count; ++i) values[i] |= static_cast<Value>(static_cast<Value>(plane[i]) << shift);
}

}  // namespace

void append_bytes(const void* data, size_t size_bytes, std::vector<uint8_t>* out) {
  const auto* first = static_cast<const uint8_t*>(data);
  out->insert(out->end(), first, first + size_bytes);
}

template <typename Value>
void PlaneEncoder::put(const Value* values, size_t count, std::vector<uint8_t>* out) {
  const Value varying = varying_bits(values, count);
  plane_.resize(count);
  for (size_t byte = 0; byte < sizeof(Value); ++byte) {
    const int shift = static_cast<int>(8 * byte);
    if (static_cast<uint8_t>(varying >> shift) == 0) {
      out->push_back(kConstant);
      out->push_back(count == 0 ? 0 : static_cast<uint8_t>(values[0] >> shift));
      continue;
    }
    split_plane(values, count, shift, plane_.data());
    put_varying(out);
  }
}

void PlaneEncoder::put_varying(std::vector<uint8_t>* out) {
  if (!context_) context_.reset(ZSTD_createCCtx());
  if (!context_) throw std::bad_alloc();
  const size_t count = plane_.size();
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
    return;
  }
  const auto size = static_cast<uint32_t>(stored);
  std::memcpy(out->data() + tag + 1, &size, sizeof(size));
  out->resize(tag + 5 + stored);
}

template <typename Value>
bool PlaneDecoder::get(size_t count, Value* values) {
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
    if (!filled) std::fill(values, values + count, Value{0});
    filled = true;
    merge_plane(values, plane, count, shift);
  }
  if (!filled) {
    std::fill(values, values + count, all_constant);
  } else if (all_constant != 0) {
    for (size_t i = 0; i < count; ++i) values[i] |= all_constant;
  }
  return true;
}

bool PlaneDecoder::get_plane(size_t count, const uint8_t** plane, uint8_t* constant) {
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
      if (!context_) context_.reset(ZSTD_createDCtx());
      if (!context_) throw std::bad_alloc();
      plane_.resize(count);
      *plane = plane_.data();
      return ZSTD_decompressDCtx(context_.get(), plane_.data(), count, bytes, stored) == count;
    }
    default:
      return false;
  }
}

bool PlaneDecoder::take(size_t size_bytes, const uint8_t** bytes) {
  if (size_bytes > left_.size()) return false;
  *bytes = left_.data();
  left_ = left_.subspan(size_bytes);
  return true;
}

template void PlaneEncoder::put(const uint8_t*, size_t, std::vector<uint8_t>*);
template void PlaneEncoder::put(const uint32_t*, size_t, std::vector<uint8_t>*);
template void PlaneEncoder::put(const uint64_t*, size_t, std::vector<uint8_t>*);
template bool PlaneDecoder::get(size_t, uint8_t*);
template bool PlaneDecoder::get(size_t, uint32_t*);
template bool PlaneDecoder::get(size_t, uint64_t*);

}  // namespace forkpoint
