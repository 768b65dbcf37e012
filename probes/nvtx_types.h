// The binary interface between NVTX (version 3) and the library that it loads, as far as the probe needs it. Checked
// against NVTX's headers in tests/probe/probe_nccl_types_test.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forkpoint {

using NvtxFunction = void (*)();
// Where NVTX keeps what its functions call: table[id] is the place of the pointer, or nullptr. Ids count from 1.
using NvtxFunctionTable = NvtxFunction**;
using NvtxGetExportTable = const void* (*)(uint32_t id);
inline constexpr uint32_t kNvtxCallbacks = 1;  // export tables
inline constexpr uint32_t kNvtxVersionInfo = 3;

struct NvtxCallbacks {
  size_t struct_size;
  int (*get_table)(int module, NvtxFunctionTable* table, unsigned int* size);
};
struct NvtxVersionInfo {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;
  void (*set_injection_version)(uint32_t version);
};

enum NvtxModule : int { kNvtxCore = 1, kNvtxDomains = 5 };
enum NvtxCoreId : unsigned {
  kNvtxMarkEx = 1, kNvtxMarkA = 2, kNvtxMarkW = 3, kNvtxRangeStartEx = 4, kNvtxRangeStartA = 5, kNvtxRangeStartW = 6,
  kNvtxRangePushEx = 8, kNvtxRangePushA = 9, kNvtxRangePushW = 10, kNvtxRangePop = 11,
};
enum NvtxDomainId : unsigned {
  kNvtxDomainMarkEx = 1, kNvtxDomainRangeStartEx = 2, kNvtxDomainRangePushEx = 4, kNvtxDomainRangePop = 5,
  kNvtxDomainRegisterStringA = 10, kNvtxDomainRegisterStringW = 11, kNvtxDomainCreateA = 12, kNvtxDomainCreateW = 13,
};

enum NvtxMessageType : int32_t { kNvtxAscii = 1, kNvtxWide = 2, kNvtxRegistered = 3 };
struct NvtxEvent {
  uint16_t version;
  uint16_t size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type;
  int32_t reserved;
  uint64_t payload;
  int32_t message_type;
  const void* message;
};

// What push and pop return without a tool: the host's results stay as they are.
inline constexpr int kNvtxNoTracking = -2;

}  // namespace forkpoint
