// How the digest kernels are launched, without any CUDA header: the planner fills a DigestLaunch, and either the CUDA
// runtime (kernels/device_digest.h) or a driver API found at run time (the probe, with kernels/digest_fatbin.h)
// launches it:
//
//   DigestLaunch launch = plan_digest(device_address, view, target, multiprocessors);
//   void* arguments[] = {launch.params()};
//   cuLaunchKernel(function[launch.kernel], launch.grid, 1, 1, launch.block, 1, 1, 0, stream, arguments, nullptr);
//
// Guarantee: gpu_to_gpu. All sums are of integers and all maxima of integers, so no grid, order or device changes a
// bit. The kernels allocate nothing, wait for nobody and read nothing of the host's but their parameters, so they may
// be captured in a CUDA graph. Planning is pure and thread-safe, allocates nothing and never fails.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/digest_slot.h"
#include "lib/digest.h"

namespace forkpoint {

// All addresses as the device sees them (with unified addressing those of mapped host memory are the same on both
// sides).
struct DigestTarget {
  DigestSlot* slot = nullptr;        // used when ring is null
  DigestRing* ring = nullptr;        // else the slot is drawn here
  DigestScratch* scratch = nullptr;  // always needed; with neither slot nor ring a flush fetches the sums from here
  uint32_t ticket = 0;               // not 0; not what the slot bears already; unused without a slot
  uint32_t node = 0;                 // handed through to SlotResult
};

inline constexpr int kDigestBlockThreads = 256;

// ---- Kernel parameters: passed by value, filled by the planner.

// A contiguous run whose 16-byte blocks in memory are 16-byte blocks of the logical tensor.
struct DigestFlat {
  DigestTarget target;
  const void* data;
  uint64_t size_bytes;
  uint64_t first_byte;      // place of data[0] in the logical tensor
  uint64_t largest_finite;  // magnitude, see MagnitudeRule; all ones: every value is finite
  uint32_t mask;            // of the magnitude, repeated over a word (of 8-byte elements: for the upper word)
  uint32_t parts;           // blocks or pieces that share the target
  uint32_t loop;            // enum DigestLoop, for pieces of a batch
  uint32_t unused;
};

// Everything else: units of up to 64 bytes, which end where 64-byte blocks of the logical tensor do, enumerated over
// the dimensions in the order of memory.
inline constexpr int kUnitDims = kMaxDims + 1;
struct DigestUnits {
  DigestFlat common;        // data: element (0, 0, ...); size_bytes: of a run
  uint64_t lowest_address;  // all bytes of the view lie in [lowest_address, end_address)
  uint64_t end_address;
  uint64_t units;            // in all
  int32_t dims;              // of the enumeration, fastest first
  int32_t unit_dim;          // the one that counts the units of a run
  int32_t element_bytes;     // 0: units of adjacent bytes; else units of 16 bytes are gathered by elements of this size
  int32_t load_bytes;        // of an element's loads, by its alignment
  int64_t run_stride_bytes;  // from element to element of a gathered run
  uint64_t extent[kUnitDims];
  int64_t stride_bytes[kUnitDims];
  uint64_t position_bytes[kUnitDims];
};

struct DigestBatch {
  const DigestFlat* pieces;  // device-readable, alive until the launch (or the last replay of its graph) is done
};

// ---- Kernels, by number: names of the extern "C" functions in the module. Load all of them eagerly.
enum DigestLoop : uint32_t {
  kLoopNone,
  kLoopMasked8,
  kLoopMasked16,
  kLoopMasked32,
  kLoopMasked64,
  kLoopAbsolute8,
  kLoopAbsolute16,
  kLoopAbsolute32,
  kLoopAbsolute64,
  kLoopCount
};
inline constexpr int kDigestBatchKernel = 2 * kLoopCount;
inline constexpr int kDigestPiecesKernel = kDigestBatchKernel + 1;  // the smallest of three, see digest_pieces.h
inline constexpr int kDigestFlushKernel = kDigestPiecesKernel + 3;  // see digest_flush.h
inline constexpr int kDigestTensorsKernel = kDigestFlushKernel + 1;  // the smaller of two, see digest_tensors.h
inline constexpr int kDigestKernelCount = kDigestTensorsKernel + 2;
inline constexpr const char* kDigestKernelNames[kDigestKernelCount] = {"forkpoint_digest_flat_none",
                                                                       "forkpoint_digest_flat_masked8",
                                                                       "forkpoint_digest_flat_masked16",
                                                                       "forkpoint_digest_flat_masked32",
                                                                       "forkpoint_digest_flat_masked64",
                                                                       "forkpoint_digest_flat_absolute8",
                                                                       "forkpoint_digest_flat_absolute16",
                                                                       "forkpoint_digest_flat_absolute32",
                                                                       "forkpoint_digest_flat_absolute64",
                                                                       "forkpoint_digest_units_none",
                                                                       "forkpoint_digest_units_masked8",
                                                                       "forkpoint_digest_units_masked16",
                                                                       "forkpoint_digest_units_masked32",
                                                                       "forkpoint_digest_units_masked64",
                                                                       "forkpoint_digest_units_absolute8",
                                                                       "forkpoint_digest_units_absolute16",
                                                                       "forkpoint_digest_units_absolute32",
                                                                       "forkpoint_digest_units_absolute64",
                                                                       "forkpoint_digest_batch",
                                                                       "forkpoint_digest_pieces4",
                                                                       "forkpoint_digest_pieces16",
                                                                       "forkpoint_digest_pieces48",
                                                                       "forkpoint_digest_flush",
                                                                       "forkpoint_digest_tensors8",
                                                                       "forkpoint_digest_tensors64"};

struct DigestLaunch {
  int kernel = 0;  // index into kDigestKernelNames
  uint32_t grid = 0;
  uint32_t block = 0;
  uint32_t shared_bytes = 0;
  union {
    DigestFlat flat;
    DigestUnits units;
    DigestBatch batch;
  };
  DigestLaunch() : units{} {}
  void* params() { return &units; }  // the kernel's only parameter
  const char* name() const { return kDigestKernelNames[kernel]; }
  bool is_flat() const { return kernel < static_cast<int>(kLoopCount); }
};

// data: device address of element (0, 0, ...); any alignment. multiprocessors: of the device. A view without elements
// is launched too (its digest is zero), so that every ticket is answered.
DigestLaunch plan_digest(const void* data, const TensorView& view, const DigestTarget& target, int multiprocessors);
// A contiguous run that starts at byte first_byte of the logical tensor, as digest_bytes. Where size or first_byte are
// no multiple of the element, magnitude and nonfinite stay 0 (the digest is right).
DigestLaunch plan_digest_bytes(const void* data, size_t size_bytes, DType dtype, uint64_t first_byte,
                               const DigestTarget& target, int multiprocessors);

// Many tensors in one launch. singles: what plan_digest made; only those that are is_flat() can be part of a batch (of
// a target each its own, with a slot or a ring). Writes the batch's pieces to `pieces` and returns how many, or 0 when
// capacity is too small (then nothing may be launched). The caller copies them to device_pieces before the launch.
size_t plan_digest_batch(const DigestLaunch* singles, size_t count, const DigestFlat* device_pieces, DigestFlat* pieces,
                         size_t capacity, int multiprocessors, DigestLaunch* launch);

}  // namespace forkpoint
