// PyTorch's caching allocator cuts large allocations up into blocks and tells nobody but its profiler: through this function
// of libc10, which libc10_cuda calls by name for every block that it hands out (positive size) and takes back (negative).
// Ours is found first, notes the block, and calls the real one. (c10/core/Allocator.h of PyTorch 1.8 to 2.11.)
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "probes/allocations.h"
#include "probes/cupti_hooks.h"
#include "probes/launch_recorder.h"
#include "probes/recorder.h"

namespace c10 {

struct Device {  // passed in one register, as the real one
  int8_t type;
  int8_t index;
};

__attribute__((visibility("default"))) void reportMemoryUsageToProfiler(void* address, int64_t size, size_t allocated,
                                                                        size_t reserved, Device device);

}  // namespace c10

namespace forkpoint {
namespace {

constexpr int8_t kCuda = 1;  // c10::DeviceType
constexpr char kSymbol[] = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
using Report = void (*)(void*, int64_t, size_t, size_t, c10::Device);

Report real_report() {
  static constinit std::atomic<Report> found{nullptr};
  Report report = found.load(std::memory_order_acquire);
  if (report) return report;
  // Python loads it with RTLD_LOCAL, so RTLD_NEXT does not see it.
  void* library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library) report = reinterpret_cast<Report>(dlsym(library, kSymbol));
  if (!report) report = reinterpret_cast<Report>(dlsym(RTLD_NEXT, kSymbol));
  if (report == &c10::reportMemoryUsageToProfiler) report = nullptr;
  found.store(report, std::memory_order_release);
  return report;
}

void note_block(const Token& token, uint64_t address, int64_t size) {
  if (size > 0) {
    Allocation within;
    if (memory.allocations.find(address, &within) && (within.flags & kAllocationArena) == 0) {
      memory.allocations.mark(within.start, kAllocationArena);
    }
    const uint64_t ordinal = memory.blocks.add(address, static_cast<uint64_t>(size), MemoryKind::block);
    if (ordinal != 0 && recorder.wants_launches() && is_watching()) {
      launch_recorder.note_everywhere(token, LaunchKind::allocate, ordinal, static_cast<uint64_t>(size));
    }
    return;
  }
  const uint64_t ordinal = memory.blocks.remove(address);
  if (ordinal != 0 && recorder.wants_launches() && is_watching()) {
    launch_recorder.note_everywhere(token, LaunchKind::release, ordinal);
  }
}

}  // namespace

void note_torch_block(void* address, int64_t size) {
  const Guard guard;
  if (!guard.entered() || !recorder.records_launches() || !memory.create()) return;
  note_block(guard.token(), reinterpret_cast<uint64_t>(address), size);
}

}  // namespace forkpoint

void c10::reportMemoryUsageToProfiler(void* address, int64_t size, size_t allocated, size_t reserved, Device device) {
  if (device.type == forkpoint::kCuda) forkpoint::note_torch_block(address, size);
  if (const forkpoint::Report real = forkpoint::real_report()) real(address, size, allocated, reserved, device);
}
