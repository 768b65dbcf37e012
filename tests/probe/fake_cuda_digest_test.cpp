// The probe's digest kernels on the fake libcuda.
#include <doctest/doctest.h>

#include <cstring>

#include "kernels/digest_flush.h"
#include "kernels/digest_pieces.h"
#include "lib/digest.h"
#include "lib/digest_raw.h"
#include "tests/probe/fake_gpu_program.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::fake_gpu;
using forkpoint::probe_test::client_path;

TEST_CASE("digest kernels give the digests of what lies there, in slots and through a ring") {
  Gpu gpu(client_path("libcuda.so.1"));
  const uint32_t fat_binary = 0xBA55ED50;
  CUmodule module = nullptr;
  GPU_OK(gpu.driver().cuModuleLoadData_(&module, &fat_binary));
  std::vector<unsigned char> bytes(100'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * i >> 7);
  unsigned char* memory = gpu.make(bytes);
  auto* slots = reinterpret_cast<DigestSlot*>(gpu.make(std::vector<uint64_t>(32 * sizeof(DigestSlot) / 8)));
  auto* scratch = reinterpret_cast<DigestScratch*>(gpu.make(std::vector<uint64_t>(32 * sizeof(DigestScratch) / 8)));
  uint64_t counters[2] = {};
  DigestRing made;
  made.slots = slots;
  made.consumed = &counters[0];
  made.dropped = &counters[1];
  made.capacity = 16;
  DigestRing* ring = gpu.make<DigestRing>({made});
  const CUstream stream = gpu.stream();
  const auto launch_all = [&](std::vector<DigestRequest> requests) {
    DigestPiecesLaunch launch;
    for (size_t done = 0; done < requests.size();) {
      done += plan_digest_pieces(&requests[done], requests.size() - done, 132, &launch);
      CUfunction function = nullptr;
      GPU_OK(gpu.driver().cuModuleGetFunction_(&function, module, launch.name()));
      void* params[] = {launch.params()};
      GPU_OK(gpu.driver().cuLaunchKernel_(function, launch.grid, 1, 1, launch.block, 1, 1, 0, stream, params, nullptr));
    }
  };
  const auto request = [&](size_t i, bool through_ring) {
    DigestTarget target;
    (through_ring ? static_cast<void>(target.ring = ring) : static_cast<void>(target.slot = slots + i));
    target.scratch = scratch + i;
    target.ticket = 40;
    target.node = static_cast<uint32_t>(i);
    return DigestRequest{memory + (i == 2 ? 3 : 16 * i), 5000 * i, target};
  };
  const auto check = [&](size_t i, const SlotResult& found) {
    CHECK(found.node == i);
    CHECK(found.raw.digest == digest_only(&bytes[i == 2 ? 3 : 16 * i], 5000 * i));
  };
  std::vector<DigestRequest> to_slots, to_ring;
  for (size_t i = 0; i < 12; ++i) {
    to_slots.push_back(request(i, false));
    if (i < 8) to_ring.push_back(request(i, true));
  }
  launch_all(to_slots);
  for (size_t i = 0; i < 12; ++i) {
    SlotResult found;
    REQUIRE(read_slot(slots[i], 40, &found));
    check(i, found);
  }
  memset(slots, 0, 16 * sizeof(DigestSlot));
  const CUgraphExec graph = gpu.capture(stream, [&] { launch_all(to_ring); });
  uint64_t next = 0;
  for (uint32_t replay = 0; replay < 5; ++replay) {
    gpu.replay(graph, stream);
    for (size_t i = 0; i < 8; ++i, ++next) {
      SlotResult found;
      REQUIRE(read_slot(slots[next % 16], ring_ticket(next, 16), &found));
      check(i, found);
      CHECK(found.ordinal == replay);
    }
    if (replay < 3) counters[0] = next;
  }
  CHECK(counters[1] == 0);
  gpu.replay(graph, stream);
  CHECK(counters[1] == 8);
}

TEST_CASE("a flush brings the digests that lie in their scratch, and none that is not complete") {
  Gpu gpu(client_path("libcuda.so.1"));
  const uint32_t fat_binary = 0xBA55ED50;
  CUmodule module = nullptr;
  GPU_OK(gpu.driver().cuModuleLoadData_(&module, &fat_binary));
  std::vector<unsigned char> bytes(10'000, 7);
  unsigned char* memory = gpu.make(bytes);
  auto* slots = reinterpret_cast<DigestSlot*>(gpu.make(std::vector<uint64_t>(16 * sizeof(DigestSlot) / 8)));
  auto* scratch = reinterpret_cast<DigestScratch*>(gpu.make(std::vector<uint64_t>(8 * sizeof(DigestScratch) / 8)));
  uint64_t counters[2] = {};
  DigestRing made;
  made.slots = slots;
  made.consumed = &counters[0];
  made.dropped = &counters[1];
  made.capacity = 16;
  DigestRing* ring = gpu.make<DigestRing>({made});
  const CUstream stream = gpu.stream();
  const auto run = [&](auto& launch) {
    CUfunction function = nullptr;
    GPU_OK(gpu.driver().cuModuleGetFunction_(&function, module, launch.name()));
    void* params[] = {launch.params()};
    GPU_OK(gpu.driver().cuLaunchKernel_(function, launch.grid, 1, 1, launch.block, 1, 1, 0, stream, params, nullptr));
  };
  const auto digest = [&](uint32_t node) {
    DigestRequest request{memory, 1000 * node, {}};
    request.target.scratch = scratch + node;
    DigestPiecesLaunch launch;
    REQUIRE(plan_digest_pieces(&request, 1, 132, &launch) == 1);
    run(launch);
  };
  const auto flush = [&] {
    const uint32_t nodes[] = {1, 0, 2};
    DigestFlushLaunch launch;
    REQUIRE(plan_digest_flush(ring, scratch, nodes, 3, &launch) == 3);
    run(launch);
  };
  uint64_t next = 0;
  const auto check = [&](uint32_t node, uint32_t ordinal) {
    SlotResult found;
    REQUIRE(read_slot(slots[next % 16], ring_ticket(next, 16), &found));
    ++next;
    CHECK(found.node == node);
    CHECK(found.ordinal == ordinal);
    CHECK(found.raw.digest == digest_only(bytes.data(), 1000 * node));
  };
  for (uint32_t replay = 0; replay < 3; ++replay) {
    digest(1), digest(2), flush();
    check(1, replay), check(2, replay);
  }
  CHECK(counters[1] == 0);
  digest(1), flush();  // the other was not there: it is not believed any more
  check(1, 3);
  CHECK(counters[1] == 1);
  digest(1), digest(2), flush();
  check(1, 4);
  CHECK(counters[1] == 2);
}
