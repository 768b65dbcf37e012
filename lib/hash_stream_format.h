// The bytes of a hash stream: what writer and reader share (its index: hash_stream_index.h). FORMAT.md explains them.
// Not for callers outside lib.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/hash_stream.h"

namespace forkpoint {

inline constexpr char kStreamMagic[8] = {'\x93', 'f', 'k', 'p', '\r', '\n', '\x1a', '\n'};
inline constexpr char kEndMagic[8] = {'f', 'k', 'p', '-', 'e', 'n', 'd', '\n'};
inline constexpr char kFrameMark[4] = {'F', 'K', '\xf7', 'm'};
inline constexpr size_t kPrefixBytes = 16;       // magic, version, zero
inline constexpr size_t kFrameHeaderBytes = 64;
inline constexpr size_t kEndTrailerBytes = 16;   // offset of the end frame, kEndMagic

// Bounds that a writer keeps and a reader enforces before it allocates anything.
inline constexpr uint32_t kMaxPayloadBytes = 64u << 20;
inline constexpr uint32_t kMaxExpansion = 1024;  // of a compressed payload
inline constexpr size_t kRecordsPerFrame = 16384;
inline constexpr size_t kLaunchesPerFrame = 16384;
inline constexpr size_t kBuffersPerFrame = 65536;  // of all its launches; far more than one launch can be handed
inline constexpr size_t kStepsPerIndex = 4096;

enum class FrameType : uint8_t {
  header = 1, dictionary = 2, records = 3, step = 4, gap = 5, coverage_limit = 6, index = 7, end = 8,
  launches = 9, launch_index = 10, header_addition = 11,
};
std::string_view name(FrameType type);

enum FrameFlags : uint8_t {
  kFrameZstd = 1,       // the payload is one zstd frame of raw_bytes
  kFrameSkippable = 2,  // a reader that does not know the type may go on without it
};

struct FrameHeader {
  FrameType type = FrameType::header;
  uint8_t flags = 0;
  uint32_t stored_bytes = 0;  // payload as it lies in the file
  uint32_t raw_bytes = 0;     // payload uncompressed
  int64_t step = 0;           // records, launches and step frames
  uint32_t step_ordinal = 0;  // n-th begin_step of the stream; tells two steps of one number apart
  uint32_t records = 0;       // rows of records and launches frames
  uint64_t sequence = 0;      // n-th frame of the file
  Digest checksum;            // of the stored payload
};
void encode(const FrameHeader& header, uint8_t bytes[kFrameHeaderBytes]);
// Empty unless mark and checksum of the header are right.
std::optional<FrameHeader> decode_frame_header(const uint8_t bytes[kFrameHeaderBytes]);

// Little-endian; unsigned numbers of any size as LEB128, signed ones zigzag first, strings with their length.
class ByteWriter {
 public:
  void u8(uint8_t value) { bytes_.push_back(value); }
  void u32(uint32_t value) { raw(&value, sizeof(value)); }
  void u64(uint64_t value) { raw(&value, sizeof(value)); }
  void number(uint64_t value);
  void signed_number(int64_t value) { number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63)); }
  void text(std::string_view value) { number(value.size()); raw(value.data(), value.size()); }
  void digest(const Digest& value) { u64(value.a); u64(value.b); }
  void raw(const void* data, size_t size_bytes) {
    const auto* first = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), first, first + size_bytes);
  }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// Reading past the end (or a number of more than 64 bits) gives zeros and clears ok().
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size() - at_; }
  uint8_t u8() { uint8_t value = 0; raw(&value, sizeof(value)); return value; }
  uint32_t u32() { uint32_t value = 0; raw(&value, sizeof(value)); return value; }
  uint64_t u64() { uint64_t value = 0; raw(&value, sizeof(value)); return value; }
  uint64_t number();
  int64_t signed_number() { const uint64_t v = number(); return static_cast<int64_t>(v >> 1 ^ (~(v & 1) + 1)); }
  std::string_view text();
  Digest digest() { Digest value; value.a = u64(); value.b = u64(); return value; }
  // How many items follow. An item takes at least one byte, so a larger number is damage, whatever it is used for.
  size_t count();
  void fail() { ok_ = false; at_ = bytes_.size(); }

 private:
  void raw(void* data, size_t size_bytes);
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

struct DictionaryPart {
  uint32_t first_site = 0, first_layout = 0, first_communicator = 0;
  std::vector<Site> sites;
  std::vector<Layout> layouts;
  std::vector<Communicator> communicators;
  bool empty() const { return sites.empty() && layouts.empty() && communicators.empty(); }
};

// What a step frame holds: the sums of the tree. The root is the sum of the phases.
struct StepSums {
  uint64_t eval_records = 0;
  uint64_t bytes_hashed = 0;
  uint64_t frames = 0;  // records frames of the step
  Digest phase[kPhaseCount];
  uint64_t records[kPhaseCount] = {};
  uint64_t launches = 0;
  uint64_t launch_frames = 0;
  Digest launch_sum;
  void add(Phase at, const Digest& leaf) { phase[static_cast<int>(at)] += leaf; ++records[static_cast<int>(at)]; }
  Digest root() const;
  uint64_t total_records() const;
};
StepSummary summarize(int64_t step, const StepSums& sums, bool complete);

void encode(const StreamHeader& header, ByteWriter* out);
void encode(const DictionaryPart& part, ByteWriter* out);
void encode(const StepSums& sums, ByteWriter* out);
void encode(const Gap& gap, ByteWriter* out);
void encode(const CoverageLimit& limit, ByteWriter* out);
void encode(const HeaderAddition& addition, ByteWriter* out);

// False when the bytes do not say what they should; *out is then unspecified. Trailing bytes are allowed (later
// fields).
bool decode(ByteReader in, StreamHeader* out);
bool decode(ByteReader in, DictionaryPart* out);
bool decode(ByteReader in, StepSums* out);
bool decode(ByteReader in, Gap* out);
bool decode(ByteReader in, CoverageLimit* out);
bool decode(ByteReader in, HeaderAddition* out);

}  // namespace forkpoint
