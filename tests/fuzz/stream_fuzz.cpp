// libFuzzer target: any bytes as a hash stream. Run by hand:
//   build/tests/fuzz/stream_fuzz -max_len=16384 /tmp/corpus tests/fuzz/corpus
// The mutator knows frames: half of its changes are made inside a payload or a header whose checksums are made to fit
// again, so that the parsers behind the checksums are reached too.
#include <zstd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "lib/hash_stream_format.h"
#include "tests/support/stream_exercise.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using namespace forkpoint;

struct Piece {
  FrameHeader header;
  std::vector<uint8_t> payload;
};

// The frames at the beginning of the file, as far as they are whole.
std::vector<Piece> split(const uint8_t* data, size_t size) {
  std::vector<Piece> pieces;
  for (size_t at = kPrefixBytes; at + kFrameHeaderBytes <= size;) {
    const auto header = decode_frame_header(data + at);
    if (!header || header->stored_bytes > size - at - kFrameHeaderBytes) break;
    const uint8_t* payload = data + at + kFrameHeaderBytes;
    pieces.push_back({*header, std::vector<uint8_t>(payload, payload + header->stored_bytes)});
    at += kFrameHeaderBytes + header->stored_bytes;
  }
  return pieces;
}

void uncompress(Piece* piece) {
  if (!(piece->header.flags & kFrameZstd) || piece->header.raw_bytes > 1u << 16) return;
  std::vector<uint8_t> raw(piece->header.raw_bytes);
  if (ZSTD_decompress(raw.data(), raw.size(), piece->payload.data(), piece->payload.size()) != raw.size()) return;
  piece->payload = raw;
  piece->header.flags &= static_cast<uint8_t>(~kFrameZstd);
}

void mutate_payload(Piece* piece) {
  uncompress(piece);
  const size_t before = piece->payload.size();
  piece->payload.resize(before + 64);
  piece->payload.resize(LLVMFuzzerMutate(piece->payload.data(), before, piece->payload.size()));
  piece->header.raw_bytes += static_cast<uint32_t>(piece->payload.size() - before);
}

void mutate_header(Piece* piece, std::minstd_rand* random) {
  uint8_t bytes[kFrameHeaderBytes];
  encode(piece->header, bytes);
  LLVMFuzzerMutate(bytes + 4, 36, 36);  // type to sequence
  bytes[4] = static_cast<uint8_t>((*random)() % 4 == 0 ? bytes[4] : bytes[4] % 12);
  FrameHeader& header = piece->header;
  header.type = static_cast<FrameType>(bytes[4]);
  header.flags = bytes[5];
  std::memcpy(&header.raw_bytes, bytes + 12, 4);
  std::memcpy(&header.step, bytes + 16, 8);
  std::memcpy(&header.step_ordinal, bytes + 24, 4);
  std::memcpy(&header.records, bytes + 28, 4);
}

size_t join(const std::vector<Piece>& pieces, uint8_t* data, size_t max_size) {
  size_t at = kPrefixBytes;
  uint64_t sequence = 0;
  for (const Piece& piece : pieces) {
    const size_t need = kFrameHeaderBytes + piece.payload.size();
    if (at + need > max_size) break;
    std::vector<uint8_t> payload = piece.payload;
    if (piece.header.type == FrameType::end && payload.size() >= kEndTrailerBytes) {
      const uint64_t offset = at;
      std::memcpy(payload.data() + payload.size() - kEndTrailerBytes, &offset, sizeof(offset));
    }
    FrameHeader header = piece.header;
    header.sequence = sequence++;
    header.stored_bytes = static_cast<uint32_t>(payload.size());
    header.checksum = digest_only(payload.data(), payload.size());
    encode(header, data + at);
    if (!payload.empty()) std::memcpy(data + at + kFrameHeaderBytes, payload.data(), payload.size());
    at += need;
  }
  return at;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  std::minstd_rand random(seed);
  std::vector<Piece> pieces;
  if (random() % 2 == 0 && size > kPrefixBytes) pieces = split(data, size);
  if (pieces.empty()) return LLVMFuzzerMutate(data, size, max_size);
  const size_t at = random() % pieces.size();
  switch (random() % 8) {
    case 0:
      mutate_header(&pieces[at], &random);
      break;
    case 1:
      pieces.erase(pieces.begin() + static_cast<long>(at));
      break;
    case 2:
      pieces.insert(pieces.begin() + static_cast<long>(at), pieces[random() % pieces.size()]);
      break;
    case 3:
      std::swap(pieces[at], pieces[random() % pieces.size()]);
      break;
    default:
      mutate_payload(&pieces[at]);
  }
  return join(pieces, data, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryFile file(std::span(data, size));
  exercise_stream(file.path(), true);
  return 0;
}
