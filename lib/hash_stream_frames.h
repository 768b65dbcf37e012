// Finds and checks the frames of a file that may be cut, damaged or still growing. Not for callers outside lib.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/hash_stream_file.h"
#include "lib/hash_stream_format.h"

namespace forkpoint {

struct Frame {
  uint64_t offset = 0;
  FrameHeader header;
  uint64_t end() const { return offset + kFrameHeaderBytes + header.stored_bytes; }
};

// Not thread-safe; many of them may read one file.
class FrameSource {
 public:
  // Nothing at or past `end` is looked at. window_bytes: how much is read at once.
  FrameSource(const InputFile& file, uint64_t end, size_t window_bytes)
      : file_(file), end_(end), window_bytes_(window_bytes) {}

  // A frame whose header is right and whose payload lies within the file and within the format's bounds; else *fault is
  // a clause ("expected a frame, found bytes 00 00 00 00").
  std::optional<Frame> frame_at(uint64_t offset, std::string* fault);
  // The first such frame that begins at or after offset.
  std::optional<Frame> find_frame(uint64_t offset);

  // The payload as it lies in the file, if its checksum is right; else an empty optional and *fault. Valid until the
  // next call.
  std::optional<std::span<const uint8_t>> stored_payload(const Frame& frame, std::string* fault);
  // The same, uncompressed.
  std::optional<std::span<const uint8_t>> payload(const Frame& frame, std::string* fault);

 private:
  // size_bytes at offset, or nullptr where the file has fewer. Valid until the next call.
  const uint8_t* bytes(uint64_t offset, size_t size_bytes, size_t read_ahead = 0);
  const InputFile& file_;
  uint64_t end_;
  size_t window_bytes_;
  std::vector<uint8_t> window_, raw_;
  uint64_t window_offset_ = 0;
  size_t window_filled_ = 0;
};

}  // namespace forkpoint
