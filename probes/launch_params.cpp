#include "probes/launch_params.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "probes/recorder.h"

namespace forkpoint {
namespace {

constexpr uint64_t kLowestAddress = 1u << 16;
constexpr uint64_t kAddressEnd = 1ull << 47;  // of user space
constexpr uint32_t kRefusals = 4096;          // a power of two

// An answer of the driver's or the system's, and for how long it is believed: the host may unmap memory, and what an unseen
// call allocates may come to lie there. So all is asked again in each step, and after some thousand launches.
uint64_t dated(uint64_t number, int bits) {
  const uint64_t period = static_cast<uint64_t>(recorder.current_step() + 2) << 10 ^ recorder.next_row() >> 12;
  return number | mix64(period) << bits;
}

// Numbers that look like addresses and are none: asking the driver costs more than the rest of a launch.
constinit std::atomic<uint64_t> refused[kRefusals] = {};
constexpr int kAddressBits = 47;

bool ask_driver(const CudaDriver& driver, uint64_t address, Allocation* allocation) {
  std::atomic<uint64_t>& cell = refused[mix64(address) & (kRefusals - 1)];
  if (cell.load(std::memory_order_relaxed) == dated(address, kAddressBits)) return false;
  unsigned int type = 0;
  CUdeviceptr start = 0;
  size_t size = 0;
  int device = Allocation::kAnyDevice;
  unsigned int managed = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                      CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void* values[] = {&type, &start, &size, &device, &managed};
  const bool known = driver.cuPointerGetAttributes_(5, attributes, values, address) == CUDA_SUCCESS && type != 0 && size > 0;
  // Pinned host memory is not followed: the host writes it as it likes.
  if (!known || type == CU_MEMORYTYPE_HOST || address - start >= size) {
    cell.store(dated(address, kAddressBits), std::memory_order_relaxed);
    return false;
  }
  memory.allocations.add(start, size, MemoryKind::found, managed || device < 0 ? Allocation::kAnyDevice : device);
  return memory.find(address, allocation);
}

// Pages that hold nothing that CUDA knows, and are mapped: kernels whose parameters are partly filled in hold dozens of old
// addresses of the host's, and to ask the driver and the system of each costs more than all the rest of a launch.
constexpr uint32_t kOwnPages = 8192;  // a power of two
constexpr int kPageBits = 12;         // the smallest page: a part of a larger one is as good
constinit std::atomic<uint64_t> own_pages[kOwnPages] = {};

std::atomic<uint64_t>& own_page_cell(uint64_t word) { return own_pages[mix64(word >> kPageBits) & (kOwnPages - 1)]; }

uint64_t own_page_mark(uint64_t word) { return dated(word >> kPageBits, kAddressBits - kPageBits); }

bool is_known_own_page(uint64_t word) { return own_page_cell(word).load(std::memory_order_relaxed) == own_page_mark(word); }

// Stack, heap or code of the host, as padding between parameters often holds: it differs from run to run and means nothing.
// REQUIRES: the word points into no allocation.
bool is_own_address(uint64_t word) {
  const bool may_be = (word >= 0x550000000000 && word < 0x570000000000) || (word >= 0x7e0000000000 && word < kAddressEnd);
  if (!may_be) return false;
  static const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 0;
  if (mincore(reinterpret_cast<void*>(word & ~(page - 1)), 1, &resident) != 0) return false;
  own_page_cell(word).store(own_page_mark(word), std::memory_order_relaxed);
  return true;
}

}  // namespace

bool find_allocation(const CudaDriver& driver, uint64_t address, Allocation* allocation) {
  if (address < kLowestAddress || address >= kAddressEnd) return false;
  return memory.find(address, allocation) || ask_driver(driver, address, allocation);
}

ParamBlock::ParamBlock(const CudaDriver& driver, const KernelFacts& facts, const KernelCall& call)
    : driver_(driver), facts_(facts) {
  if (call.extra && !call.params) read_extra(call.extra);
  else if (facts.params_known) read_params(facts, call.params);
}

ParamBlock::~ParamBlock() {
  if (bytes_ != small_) free(bytes_);
  if (found_ != small_found_) free(found_);
}

bool ParamBlock::reserve(uint32_t bytes) {
  size_bytes_ = bytes;
  const uint32_t rounded = (bytes + 7) & ~7u;
  bytes_ = rounded <= kSmallBytes ? small_ : static_cast<unsigned char*>(malloc(rounded));
  if (!bytes_) return false;
  memset(bytes_, 0, rounded);
  return true;
}

void ParamBlock::read_params(const KernelFacts& facts, void** params) {
  if (facts.param_count > 0 && !params) return;
  if (!reserve(facts.param_bytes)) return;
  for (uint32_t i = 0; i < facts.param_count; ++i) {
    if (!params[i]) return;
    memcpy(bytes_ + facts.params[i].offset, params[i], facts.params[i].size_bytes);
  }
  readable_ = true;
}

void ParamBlock::read_extra(void** extra) {
  const void* buffer = nullptr;
  size_t size = 0;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
    else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<const size_t*>(extra[1]);
    else return;
  }
  if (size > kMostParamBytes || (size > 0 && !buffer)) return;
  if (!reserve(static_cast<uint32_t>(size))) return;
  if (size > 0) memcpy(bytes_, buffer, size);
  contiguous_ = true;
  readable_ = true;
}

bool ParamBlock::add(uint32_t place, uint64_t address, const Allocation& allocation) {
  if (found_count_ == found_capacity_) {
    if (found_ != small_found_) return false;
    auto* more = static_cast<FoundPointer*>(malloc((kMostParamBytes / 8 + 1) * sizeof(FoundPointer)));
    if (!more) return false;
    memcpy(static_cast<void*>(more), static_cast<const void*>(found_), found_count_ * sizeof(FoundPointer));
    found_ = more;
    found_capacity_ = kMostParamBytes / 8 + 1;
  }
  new (&found_[found_count_++]) FoundPointer{place, address, allocation};
  return true;
}

// Pointers lie at multiples of 8 bytes within a parameter, and parameters that can hold one begin at such a multiple.
void ParamBlock::search(uint32_t from, uint32_t to) {
  for (uint32_t at = (from + 7) & ~7u; at + 8 <= to; at += 8) {
    uint64_t word = 0;
    memcpy(&word, bytes_ + at, sizeof(word));
    if (word < kLowestAddress || word >= kAddressEnd) continue;
    Allocation allocation;
    const bool known = memory.find(word, &allocation);
    const bool own = !known && is_known_own_page(word);
    const bool points = known || (!own && ask_driver(driver_, word, &allocation));
    if (points && !add(at, word, allocation)) continue;
    if (points || own || is_own_address(word)) memset(bytes_ + at, 0, 8);
  }
}

uint32_t ParamBlock::find_pointers() {
  if (contiguous_) {
    search(0, size_bytes_);
    return found_count_;
  }
  for (uint32_t i = 0; i < facts_.param_count; ++i) {
    const KernelParam& param = facts_.params[i];
    if (param.size_bytes >= 8) search(param.offset, param.offset + param.size_bytes);
  }
  return found_count_;
}

Digest ParamBlock::digest() const { return size_bytes_ ? digest_only(bytes_, size_bytes_) : Digest{}; }

}  // namespace forkpoint
