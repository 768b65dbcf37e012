// Allocations, copies and sets of the fake libcuda.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/fakes/fake_cuda_memory.h"
#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

constexpr size_t kPageBytes = 4096;

CUresult allocate(CUdeviceptr* address, size_t size_bytes, MemoryKind kind) {
  if (size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  if (const CUresult error = forced_failure(); error != CUDA_SUCCESS) return error;
  const bool no_records = size_bytes == 33280 && is_for_this_rank("FAKE_CUDA_NO_RECORDS");
  if (no_records || fails_here("cuMemAlloc", size_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = Memory::get().allocate(size_bytes, kind);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult release(CUdeviceptr address) {
  if (address == 0) return CUDA_SUCCESS;
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  // The driver waits for what uses the memory.
  Engine::get().wait_for_all();
  return Memory::get().remove(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult allocate_in_order(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = forced_failure(); error != CUDA_SUCCESS) return error;
  *address = Memory::get().allocate(size_bytes, MemoryKind::device);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult release_in_order(CUdeviceptr address, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  // A captured release happens at the replays: the memory stays.
  if (is_captured(stream)) return submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE, [] {});
  if (!Memory::get().mark_released(address)) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, CU_GRAPH_NODE_TYPE_MEM_FREE, [address] { Memory::get().remove(address); });
}

CUresult allocate_on_host(void** memory, size_t size_bytes) {
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  *memory = aligned_alloc(kPageBytes, (size_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (!*memory) return CUDA_ERROR_OUT_OF_MEMORY;
  Memory::get().add(*memory, size_bytes, MemoryKind::pinned);
  return CUDA_SUCCESS;
}

CUresult release_on_host(void* memory) {
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  Engine::get().wait_for_all();
  if (!Memory::get().remove(reinterpret_cast<uint64_t>(memory))) return CUDA_ERROR_INVALID_VALUE;
  free(memory);
  return CUDA_SUCCESS;
}

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }
void* memory_at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Memory of the process that CUDA has not been told of.
bool is_pageable(CUdeviceptr address) {
  Block block;
  return !Memory::get().find(address, &block);
}

CUresult copy_in_order(CUdeviceptr target, CUdeviceptr source, size_t size_bytes, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  for (const CUdeviceptr address : {target, source}) {
    if (!is_pageable(address) && !Memory::get().is_there(address, size_bytes)) return CUDA_ERROR_INVALID_VALUE;
  }
  if (is_pageable(source) && !is_captured(stream)) {
    // Staged by the call: the program may change it afterwards.
    const auto* bytes = static_cast<const char*>(memory_at(source));
    std::vector<char> staged(bytes, bytes + size_bytes);
    return submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY,
                  [target, staged] { memcpy(memory_at(target), staged.data(), staged.size()); });
  }
  const CUresult result =
      submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=] { memmove(memory_at(target), memory_at(source), size_bytes); });
  // Into such memory the call itself copies.
  return result == CUDA_SUCCESS && is_pageable(target) && !is_captured(stream) ? wait_for_stream(stream) : result;
}

CUresult copy_now(CUdeviceptr target, CUdeviceptr source, size_t size_bytes, CUstream stream) {
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  const CUresult result = copy_in_order(target, source, size_bytes, stream);
  return result == CUDA_SUCCESS ? wait_for_stream(stream) : result;
}

CUresult check_device(CUdeviceptr address, size_t size_bytes) {
  return !is_pageable(address) && Memory::get().is_there(address, size_bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUdeviceptr row_of(CUmemorytype type, CUdeviceptr device, const void* host, size_t x, size_t y, size_t pitch) {
  return (type == CU_MEMORYTYPE_HOST ? address_of(host) : device) + y * pitch + x;
}

CUresult copy_rows(const CUDA_MEMCPY2D* copy, CUstream stream, bool wait) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const CUdeviceptr target =
      row_of(copy->dstMemoryType, copy->dstDevice, copy->dstHost, copy->dstXInBytes, copy->dstY, copy->dstPitch);
  const CUdeviceptr source =
      row_of(copy->srcMemoryType, copy->srcDevice, copy->srcHost, copy->srcXInBytes, copy->srcY, copy->srcPitch);
  const CUDA_MEMCPY2D made = *copy;
  const CUresult result = submit(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=] {
    for (size_t row = 0; row < made.Height; ++row) {
      memmove(memory_at(target + row * made.dstPitch), memory_at(source + row * made.srcPitch), made.WidthInBytes);
    }
  });
  return result == CUDA_SUCCESS && wait ? wait_for_stream(stream) : result;
}

// Nobody waits for sets of device memory, on the default stream either.
template <typename Word>
CUresult set_in_order(CUdeviceptr address, Word value, size_t count, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (count > 0 && check_device(address, count * sizeof(Word)) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, CU_GRAPH_NODE_TYPE_MEMSET, [=] {
    for (size_t i = 0; i < count; ++i) memcpy(memory_at(address + i * sizeof(Word)), &value, sizeof(Word));
  });
}

CUresult attribute_of(CUdeviceptr address, bool known, const Block& block, CUpointer_attribute attribute, void* value) {
  const bool on_host = block.kind == MemoryKind::pinned;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return *static_cast<unsigned int*>(value) = !known    ? 0
                                                  : on_host ? CU_MEMORYTYPE_HOST
                                                            : CU_MEMORYTYPE_DEVICE,
                                   CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return *static_cast<int*>(value) = known ? 0 : -2, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return *static_cast<unsigned int*>(value) = known && block.kind == MemoryKind::managed, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return *static_cast<CUdeviceptr*>(value) = known ? address : 0, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return *static_cast<void**>(value) = known && block.kind != MemoryKind::device ? memory_at(address) : nullptr,
             CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return *static_cast<CUcontext*>(value) = known ? primary_context() : nullptr, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return *static_cast<unsigned long long*>(value) = block.id, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return *static_cast<CUdeviceptr*>(value) = block.start, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return *static_cast<size_t*>(value) = block.size_bytes, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return *static_cast<int*>(value) = known, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return *static_cast<void**>(value) = nullptr, CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace
}  // namespace forkpoint::fake

using namespace forkpoint::fake;

FAKE cuMemAlloc_v2(CUdeviceptr* address, size_t size_bytes) {
  FAKE_TRACE(cuMemAlloc_v2, address, size_bytes);
  return traced.end(allocate(address, size_bytes, MemoryKind::device));
}
FAKE cuMemAllocManaged(CUdeviceptr* address, size_t size_bytes, unsigned int flags) {
  FAKE_TRACE(cuMemAllocManaged, address, size_bytes, flags);
  return traced.end(allocate(address, size_bytes, MemoryKind::managed));
}
FAKE cuMemFree_v2(CUdeviceptr address) {
  FAKE_TRACE(cuMemFree_v2, address);
  return traced.end(release(address));
}
FAKE_TWINS(cuMemAllocAsync, _ptsz, allocate_in_order(address, size_bytes, find_stream(stream, per_thread)),
           (CUdeviceptr * address, size_t size_bytes, CUstream stream), address, size_bytes, stream)
FAKE_TWINS(cuMemFreeAsync, _ptsz, release_in_order(address, find_stream(stream, per_thread)),
           (CUdeviceptr address, CUstream stream), address, stream)
FAKE cuMemHostAlloc(void** memory, size_t size_bytes, unsigned int flags) {
  FAKE_TRACE(cuMemHostAlloc, memory, size_bytes, flags);
  return traced.end(allocate_on_host(memory, size_bytes));
}
FAKE cuMemAllocHost_v2(void** memory, size_t size_bytes) {
  FAKE_TRACE(cuMemAllocHost_v2, memory, size_bytes);
  return traced.end(allocate_on_host(memory, size_bytes));
}
FAKE cuMemFreeHost(void* memory) {
  FAKE_TRACE(cuMemFreeHost, memory);
  return traced.end(release_on_host(memory));
}
FAKE cuMemHostRegister_v2(void* memory, size_t size_bytes, unsigned int flags) {
  FAKE_TRACE(cuMemHostRegister_v2, memory, size_bytes, flags);
  if (fails_here("cuMemHostRegister", size_bytes)) return traced.end(CUDA_ERROR_OUT_OF_MEMORY);
  Memory::get().add(memory, size_bytes, MemoryKind::pinned);
  return traced.end(CUDA_SUCCESS);
}
FAKE cuMemHostUnregister(void* memory) {
  FAKE_TRACE(cuMemHostUnregister, memory);
  Engine::get().wait_for_all();
  return traced.end(Memory::get().remove(address_of(memory)) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}
FAKE cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* memory, unsigned int) {
  return *address = address_of(memory), CUDA_SUCCESS;
}
FAKE cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return *free_bytes = Memory::get().free_bytes(), *total_bytes = size_t{16} << 30, CUDA_SUCCESS;
}
FAKE cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size_bytes, CUdeviceptr address) {
  Block block;
  if (!Memory::get().find(address, &block)) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = block.start;
  if (size_bytes) *size_bytes = block.size_bytes;
  return CUDA_SUCCESS;
}
FAKE cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  FAKE_TRACE(cuPointerGetAttributes, count, attributes, values, address);
  Block block;
  const bool known = Memory::get().find(address, &block);
  CUresult result = CUDA_SUCCESS;
  for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; ++i) {
    result = attribute_of(address, known, block, attributes[i], values[i]);
  }
  return traced.end(result);
}
FAKE cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  FAKE_TRACE(cuPointerGetAttribute, value, attribute, address);
  Block block;
  if (!Memory::get().find(address, &block)) return traced.end(CUDA_ERROR_INVALID_VALUE);
  return traced.end(attribute_of(address, true, block, attribute, value));
}

FAKE_TWINS(cuMemcpy, _ptds, copy_now(target, source, size_bytes, find_stream(nullptr, per_thread)),
           (CUdeviceptr target, CUdeviceptr source, size_t size_bytes), target, source, size_bytes)
FAKE_TWINS(cuMemcpyHtoD_v2, _ptds, copy_now(target, address_of(source), size_bytes, find_stream(nullptr, per_thread)),
           (CUdeviceptr target, const void* source, size_t size_bytes), target, source, size_bytes)
FAKE_TWINS(cuMemcpyDtoH_v2, _ptds, copy_now(address_of(target), source, size_bytes, find_stream(nullptr, per_thread)),
           (void* target, CUdeviceptr source, size_t size_bytes), target, source, size_bytes)
// Between device memory nobody waits.
FAKE_TWINS(cuMemcpyDtoD_v2, _ptds, copy_in_order(target, source, size_bytes, find_stream(nullptr, per_thread)),
           (CUdeviceptr target, CUdeviceptr source, size_t size_bytes), target, source, size_bytes)
FAKE_TWINS(cuMemcpyAsync, _ptsz, copy_in_order(target, source, size_bytes, find_stream(stream, per_thread)),
           (CUdeviceptr target, CUdeviceptr source, size_t size_bytes, CUstream stream), target, source, size_bytes,
           stream)
FAKE_TWINS(cuMemcpyHtoDAsync_v2, _ptsz,
           fails_here("cuMemcpyHtoDAsync", size_bytes) ? CUDA_ERROR_INVALID_VALUE :
           copy_in_order(target, address_of(source), size_bytes, find_stream(stream, per_thread)),
           (CUdeviceptr target, const void* source, size_t size_bytes, CUstream stream), target, source, size_bytes,
           stream)
FAKE_TWINS(cuMemcpyDtoHAsync_v2, _ptsz,
           fails_here("cuMemcpyDtoHAsync", size_bytes) ? CUDA_ERROR_INVALID_VALUE :
           copy_in_order(address_of(target), source, size_bytes, find_stream(stream, per_thread)),
           (void* target, CUdeviceptr source, size_t size_bytes, CUstream stream), target, source, size_bytes, stream)
FAKE_TWINS(cuMemcpyDtoDAsync_v2, _ptsz, copy_in_order(target, source, size_bytes, find_stream(stream, per_thread)),
           (CUdeviceptr target, CUdeviceptr source, size_t size_bytes, CUstream stream), target, source, size_bytes,
           stream)
FAKE_TWINS(cuMemcpy2D_v2, _ptds, copy_rows(copy, find_stream(nullptr, per_thread), true), (const CUDA_MEMCPY2D* copy),
           copy)
FAKE_TWINS(cuMemcpy2DAsync_v2, _ptsz, copy_rows(copy, find_stream(stream, per_thread), false),
           (const CUDA_MEMCPY2D* copy, CUstream stream), copy, stream)

FAKE_TWINS(cuMemsetD8_v2, _ptds, set_in_order(address, value, count, find_stream(nullptr, per_thread)),
           (CUdeviceptr address, unsigned char value, size_t count), address, value, count)
FAKE_TWINS(cuMemsetD16_v2, _ptds, set_in_order(address, value, count, find_stream(nullptr, per_thread)),
           (CUdeviceptr address, unsigned short value, size_t count), address, value, count)
FAKE_TWINS(cuMemsetD32_v2, _ptds, set_in_order(address, value, count, find_stream(nullptr, per_thread)),
           (CUdeviceptr address, unsigned int value, size_t count), address, value, count)
FAKE_TWINS(cuMemsetD8Async, _ptsz, set_in_order(address, value, count, find_stream(stream, per_thread)),
           (CUdeviceptr address, unsigned char value, size_t count, CUstream stream), address, value, count, stream)
FAKE_TWINS(cuMemsetD16Async, _ptsz, set_in_order(address, value, count, find_stream(stream, per_thread)),
           (CUdeviceptr address, unsigned short value, size_t count, CUstream stream), address, value, count, stream)
FAKE_TWINS(cuMemsetD32Async, _ptsz, set_in_order(address, value, count, find_stream(stream, per_thread)),
           (CUdeviceptr address, unsigned int value, size_t count, CUstream stream), address, value, count, stream)
