// The parameter block of a kernel launch: copied out of the caller's arrays, searched for pointers into allocations, and
// digested without them. No CUDA call but the ones that ask about an address nobody has told us of.
#pragma once

#include <cstdint>

#include "lib/digest.h"
#include "probes/allocations.h"
#include "probes/cuda_driver.h"
#include "probes/launch_functions.h"
#include "probes/launch_recorder.h"

namespace forkpoint {

struct FoundPointer {
  uint32_t place = 0;      // byte offset in the block
  uint64_t address = 0;
  Allocation allocation;
};

class ParamBlock {
 public:
  // Reads the parameters of `call`; false: they cannot be read (is_readable() then says no).
  ParamBlock(const CudaDriver& driver, const KernelFacts& facts, const KernelCall& call);
  ~ParamBlock();
  ParamBlock(const ParamBlock&) = delete;
  ParamBlock& operator=(const ParamBlock&) = delete;

  bool is_readable() const { return readable_; }
  uint32_t size_bytes() const { return size_bytes_; }
  // Words that point into an allocation, ascending; they are zero in the block from then on, as are words that hold addresses
  // of the process's own memory.
  uint32_t find_pointers();
  const FoundPointer& pointer(uint32_t i) const { return found_[i]; }
  // REQUIRES: find_pointers() was called.
  Digest digest() const;

 private:
  static constexpr uint32_t kSmallBytes = 2048;
  static constexpr uint32_t kSmallPointers = 64;

  void read_params(const KernelFacts& facts, void** params);
  void read_extra(void** extra);
  void search(uint32_t from, uint32_t to);
  bool add(uint32_t place, uint64_t address, const Allocation& allocation);
  bool reserve(uint32_t bytes);

  const CudaDriver& driver_;
  const KernelFacts& facts_;
  bool readable_ = false;
  bool contiguous_ = false;  // one buffer (extra): no single parameters
  uint32_t size_bytes_ = 0;
  unsigned char* bytes_ = nullptr;
  uint32_t found_count_ = 0;
  uint32_t found_capacity_ = kSmallPointers;
  FoundPointer* found_ = small_found_;
  alignas(16) unsigned char small_[kSmallBytes];
  union {  // no more than is found is written
    FoundPointer small_found_[kSmallPointers];
  };
};

// The allocation that `address` lies in; asks the driver where the tables do not know it. false: in none.
bool find_allocation(const CudaDriver& driver, uint64_t address, Allocation* allocation);

}  // namespace forkpoint
