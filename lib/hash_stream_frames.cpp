#include "lib/hash_stream_frames.h"

#include <fmt/format.h>
#include <zstd.h>

#include <algorithm>

namespace forkpoint {
namespace {

constexpr size_t kSearchBytes = 1u << 20;

std::string bounds_fault(const FrameHeader& header) {
  if (header.stored_bytes > kMaxPayloadBytes || header.raw_bytes > kMaxPayloadBytes) {
    return fmt::format("expected at most {} bytes in a frame, found one of {} ({} uncompressed)", kMaxPayloadBytes,
                       header.stored_bytes, header.raw_bytes);
  }
  const bool compressed = (header.flags & kFrameZstd) != 0;
  const bool is_records = header.type == FrameType::records;
  if (is_records || (compressed ? header.raw_bytes / kMaxExpansion <= header.stored_bytes
                                : header.raw_bytes == header.stored_bytes)) {
    return {};
  }
  return fmt::format("found a frame of {} bytes that claims to hold {}", header.stored_bytes, header.raw_bytes);
}

}  // namespace

const uint8_t* FrameSource::bytes(uint64_t offset, size_t size_bytes, size_t read_ahead) {
  if (offset >= window_offset_ && offset + size_bytes <= window_offset_ + window_filled_) {
    return window_.data() + (offset - window_offset_);
  }
  if (offset > end_ || size_bytes > end_ - offset) return nullptr;
  const size_t wanted = std::max({size_bytes, read_ahead, window_bytes_});
  const size_t there = std::min<uint64_t>(wanted, end_ - offset);
  if (window_.size() < there) window_.resize(there);
  window_offset_ = offset;
  window_filled_ = file_.read_at(offset, window_.data(), there);
  return window_filled_ >= size_bytes ? window_.data() : nullptr;
}

std::optional<Frame> FrameSource::frame_at(uint64_t offset, std::string* fault) {
  const uint8_t* at = bytes(offset, kFrameHeaderBytes);
  if (at == nullptr) {
    *fault = fmt::format("the file ends at byte {} within a frame header", end_);
    return std::nullopt;
  }
  const auto header = decode_frame_header(at);
  if (!header) {
    *fault = std::memcmp(at, kFrameMark, sizeof(kFrameMark)) == 0
                 ? std::string("a frame header does not have its checksum")
                 : fmt::format("expected a frame, found bytes {:02x} {:02x} {:02x} {:02x}", at[0], at[1], at[2], at[3]);
    return std::nullopt;
  }
  *fault = bounds_fault(*header);
  if (!fault->empty()) return std::nullopt;
  const Frame frame{offset, *header};
  if (frame.end() > end_) {
    *fault = fmt::format("the file ends at byte {} within a {} frame of {} bytes", end_, name(header->type),
                         frame.end() - offset);
    return std::nullopt;
  }
  return frame;
}

// Each byte is read about once, however many false marks the file holds.
std::optional<Frame> FrameSource::find_frame(uint64_t offset) {
  std::string fault;
  while (offset <= end_ && end_ - offset >= kFrameHeaderBytes) {
    const uint8_t* begin = bytes(offset, kFrameHeaderBytes, kSearchBytes);
    if (begin == nullptr) return std::nullopt;
    const size_t size = window_offset_ + window_filled_ - offset;
    const std::string_view text(reinterpret_cast<const char*>(begin), size);
    const size_t found = text.find(std::string_view(kFrameMark, sizeof(kFrameMark)));
    if (found == std::string_view::npos) {
      offset += size - (sizeof(kFrameMark) - 1);
    } else if (found != 0) {
      offset += found;
    } else if (auto frame = frame_at(offset, &fault)) {
      return frame;
    } else {
      ++offset;
    }
  }
  return std::nullopt;
}

std::optional<std::span<const uint8_t>> FrameSource::stored_payload(const Frame& frame, std::string* fault) {
  const size_t size = frame.header.stored_bytes;
  const uint8_t* at = bytes(frame.offset + kFrameHeaderBytes, size);
  if (at == nullptr) {
    *fault = fmt::format("a {} frame of {} bytes could not be read to its end: the file was cut or failed",
                         name(frame.header.type), size);
    return std::nullopt;
  }
  if (digest_only(at, size) != frame.header.checksum) {
    *fault = fmt::format("a {} frame of {} bytes does not have its checksum", name(frame.header.type), size);
    return std::nullopt;
  }
  return std::span(at, size);
}

std::optional<std::span<const uint8_t>> FrameSource::payload(const Frame& frame, std::string* fault) {
  const auto stored = stored_payload(frame, fault);
  if (!stored || !(frame.header.flags & kFrameZstd)) return stored;
  if (raw_.size() < frame.header.raw_bytes) raw_.resize(frame.header.raw_bytes);
  if (ZSTD_decompress(raw_.data(), frame.header.raw_bytes, stored->data(), stored->size()) != frame.header.raw_bytes) {
    *fault = fmt::format("a {} frame of {} bytes cannot be decompressed to {}", name(frame.header.type), stored->size(),
                         frame.header.raw_bytes);
    return std::nullopt;
  }
  return std::span<const uint8_t>(raw_.data(), frame.header.raw_bytes);
}

}  // namespace forkpoint
