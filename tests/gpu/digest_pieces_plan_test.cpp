// The planner of many runs in one launch, checked without a device: the kernel's search and enumeration are followed on
// the host, and every tile of every run must be some warp's exactly once.
#include "kernels/digest_pieces.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr uint64_t kBase = 0x7000000000;
constexpr uint64_t kWarps = kDigestBlockThreads / 32;

DigestRequest request(size_t number, uint64_t size_bytes) {
  DigestRequest made;
  made.data = reinterpret_cast<const void*>(kBase + (uint64_t{number} << 36));
  made.size_bytes = size_bytes;
  made.target.slot = reinterpret_cast<DigestSlot*>(0x1000 + 256 * number);
  made.target.scratch = reinterpret_cast<DigestScratch*>(0x900000 + 128 * number);
  made.target.ticket = static_cast<uint32_t>(7 + number);
  made.target.node = static_cast<uint32_t>(number);
  return made;
}

std::vector<DigestRequest> requests_of(const std::vector<uint64_t>& sizes) {
  std::vector<DigestRequest> requests;
  for (size_t i = 0; i < sizes.size(); ++i) requests.push_back(request(i, sizes[i]));
  return requests;
}

// As the kernel does it.
template <int kCapacity>
int piece_of(const DigestPieces<kCapacity>& pieces, uint32_t block) {
  int place = 0;
  for (int step = pieces.kPlaces / 2; step > 0; step /= 2) {
    if (pieces.first_block[place + step] <= block) place += step;
  }
  return place;
}

struct Followed {
  std::vector<uint64_t> blocks;       // of each piece
  uint64_t most_tiles_of_a_warp = 0;  // where a piece has several blocks
};

template <int kCapacity>
Followed follow(const DigestPieces<kCapacity>& pieces, uint32_t grid, const std::vector<DigestRequest>& requests,
                size_t count) {
  Followed found;
  found.blocks.resize(count);
  for (uint32_t block = 0; block < grid; ++block) {
    const auto place = static_cast<size_t>(piece_of(pieces, block));
    REQUIRE(place < count);
    CHECK(block - pieces.first_block[place] == found.blocks[place]++);
  }
  for (size_t i = 0; i < count; ++i) {
    const DigestPiece& piece = pieces.piece[i];
    const DigestRequest& asked = requests[i];
    CHECK(piece.data == asked.data);
    CHECK(piece.size_bytes == asked.size_bytes);
    CHECK(piece.slot_or_ring == asked.target.slot);
    CHECK(piece.scratch == asked.target.scratch);
    CHECK(piece.ticket == asked.target.ticket);
    CHECK(piece.node == asked.target.node);
    CHECK(piece.blocks == found.blocks[i]);
    if (piece.blocks == 1) continue;
    const uint64_t tiles = (asked.size_bytes + kTileBytes - 1) / kTileBytes, warps = piece.blocks * kWarps;
    found.most_tiles_of_a_warp = std::max(found.most_tiles_of_a_warp, (tiles + warps - 1) / warps);
  }
  return found;
}

Followed follow(const DigestPiecesLaunch& launch, const std::vector<DigestRequest>& requests, size_t count) {
  CHECK(launch.block == kDigestBlockThreads);
  if (launch.kernel == kDigestPiecesKernel) return follow(launch.few, launch.grid, requests, count);
  if (launch.kernel == kDigestPiecesKernel + 1) return follow(launch.some, launch.grid, requests, count);
  REQUIRE(launch.kernel == kDigestPiecesKernel + 2);
  return follow(launch.many, launch.grid, requests, count);
}

Followed plan_and_follow(const std::vector<uint64_t>& sizes, int multiprocessors = 132) {
  const std::vector<DigestRequest> requests = requests_of(sizes);
  DigestPiecesLaunch launch;
  REQUIRE(plan_digest_pieces(requests.data(), requests.size(), multiprocessors, &launch) == sizes.size());
  return follow(launch, requests, sizes.size());
}

}  // namespace

TEST_CASE("every block of a launch finds its piece, for every number of pieces and of multiprocessors") {
  std::mt19937_64 random(2);
  for (size_t count = 2; count <= kMostPieces; ++count) {
    for (int multiprocessors : {1, 4, 132, 160}) {
      CAPTURE(count);
      CAPTURE(multiprocessors);
      std::vector<uint64_t> sizes;
      for (size_t i = 0; i < count; ++i) sizes.push_back(random() % (uint64_t{1} << random() % 35));
      const Followed found = plan_and_follow(sizes, multiprocessors);
      uint64_t blocks = 0;
      for (const uint64_t of_piece : found.blocks) blocks += of_piece;
      CHECK(blocks <= std::max<uint64_t>(4 * static_cast<uint64_t>(multiprocessors), 2 * count));
    }
  }
}

TEST_CASE("the smallest kernel that holds the pieces is taken, and its parameters fit") {
  DigestPiecesLaunch launch;
  const std::vector<DigestRequest> requests = requests_of(std::vector<uint64_t>(200, 4096));
  const auto kernel_of = [&](size_t count) {
    CHECK(plan_digest_pieces(requests.data(), count, 132, &launch) == std::min<size_t>(count, kMostPieces));
    CHECK(launch.param_bytes() <= 4096);
    return std::string(launch.name());
  };
  CHECK(kernel_of(1) == "forkpoint_digest_flat_none");
  CHECK(kernel_of(2) == "forkpoint_digest_pieces4");
  CHECK(kernel_of(4) == "forkpoint_digest_pieces4");
  CHECK(launch.param_bytes() <= 256);
  CHECK(kernel_of(5) == "forkpoint_digest_pieces16");
  CHECK(kernel_of(16) == "forkpoint_digest_pieces16");
  CHECK(kernel_of(17) == "forkpoint_digest_pieces48");
  CHECK(kernel_of(200) == "forkpoint_digest_pieces48");
  CHECK(plan_digest_pieces(requests.data(), 0, 132, &launch) == 0);
}

TEST_CASE("a small piece is one block's, a middle one has a warp for every tile, a large one what the device holds") {
  CHECK(plan_and_follow({0, 1, 4096, 32768}).blocks == std::vector<uint64_t>{1, 1, 1, 1});
  CHECK(plan_and_follow({65536, 256 << 10, 1 << 20}).blocks == std::vector<uint64_t>{4, 16, 64});
  const Followed eight_mib = plan_and_follow({8 << 20, 4096, 4096});
  CHECK(eight_mib.blocks == std::vector<uint64_t>{512, 1, 1});
  CHECK(eight_mib.most_tiles_of_a_warp == 1);
  // 16 GiB: 8 Mi tiles, over at most 526 blocks of eight warps.
  const Followed huge = plan_and_follow({uint64_t{16} << 30, 4096});
  CHECK(huge.blocks[0] > 500);
  CHECK(huge.most_tiles_of_a_warp <= (uint64_t{8} << 20) / (500 * kWarps));
}

TEST_CASE("a piece at an odd address ends a launch before it and has the next for itself") {
  std::vector<DigestRequest> requests = requests_of({100, 200, 300, 400, 500});
  requests[2].data = static_cast<const char*>(requests[2].data) + 4;
  DigestPiecesLaunch launch;
  REQUIRE(plan_digest_pieces(requests.data(), 5, 132, &launch) == 2);
  follow(launch, requests, 2);
  REQUIRE(plan_digest_pieces(requests.data() + 2, 3, 132, &launch) == 1);
  CHECK(std::string(launch.name()) == "forkpoint_digest_units_none");
  CHECK(launch.units.common.data == requests[2].data);
  CHECK(launch.units.common.target.ticket == requests[2].target.ticket);
  CHECK(launch.grid == launch.units.common.parts);
  CHECK(launch.param_bytes() == sizeof(DigestUnits));
  CHECK(plan_digest_pieces(requests.data() + 3, 2, 132, &launch) == 2);
}

TEST_CASE("a ring is told from a slot by the ticket") {
  std::vector<DigestRequest> requests = requests_of({100, 200});
  requests[1].target = {};
  requests[1].target.ring = reinterpret_cast<DigestRing*>(0x5000);
  requests[1].target.scratch = reinterpret_cast<DigestScratch*>(0x6000);
  requests[1].target.ticket = 99;  // unused with a ring
  requests[1].target.node = 3;
  DigestPiecesLaunch launch;
  REQUIRE(plan_digest_pieces(requests.data(), 2, 132, &launch) == 2);
  CHECK(launch.few.piece[0].ticket == requests[0].target.ticket);
  CHECK(launch.few.piece[1].ticket == 0);
  CHECK(launch.few.piece[1].slot_or_ring == requests[1].target.ring);
  CHECK(launch.few.piece[1].node == 3);
}

}  // namespace forkpoint
