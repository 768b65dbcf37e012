// The floating-point formats of 16 and 8 bits, to and from fp32, with the same bits on host and device. To fp32 is
// exact. From fp32 rounds to the nearest, ties to even; every NaN becomes the one NaN of the format (sign clear, all
// other bits set), so that no hardware's choice of a payload shows. fp16 and bf16 overflow to infinity; the 8-bit
// formats saturate at their largest value, as NCCL's do (infinity too).
#pragma once

#include <cstdint>
#include <cstring>

#include "lib/digest_mix.h"

#ifdef __CUDA_ARCH__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace forkpoint::collective {

template <typename To, typename From>
FORKPOINT_HD inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Sign, exponent, `kFraction` bits of fraction; `kLargest` is the code of the largest value, `kOverflow` what a larger
// one becomes.
template <typename Code, int kFraction, int kBias, uint32_t kLargest, uint32_t kOverflow>
struct NarrowFloat {
  using Stored = Code;
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Code) - 1);
  static constexpr uint32_t kNan = kSign - 1;
  static constexpr int kLowestExponent = 1 - kBias;

  FORKPOINT_HD static bool is_nan(uint32_t magnitude) {
    return kOverflow > kLargest ? magnitude > kOverflow : magnitude == kNan;
  }

  // REQUIRES: the unit below is a normal number in fp32 (not so for bf16).
  FORKPOINT_HD static float decode(Code code) {
    const uint32_t magnitude = code & (kSign - 1), sign = code & kSign ? 1u << 31 : 0;
    if (is_nan(magnitude)) return bits_as<float>(0x7fffffffu);
    if (kOverflow > kLargest && magnitude == kOverflow) return bits_as<float>(sign | 0x7f800000u);
    const uint32_t exponent = magnitude >> kFraction, fraction = magnitude & ((1u << kFraction) - 1);
    if (exponent != 0) {
      return bits_as<float>(sign | (exponent - kBias + 127) << 23 | fraction << (23 - kFraction));
    }
    // A small integer times a power of two: exact.
    const float unit = bits_as<float>(static_cast<uint32_t>(kLowestExponent - kFraction + 127) << 23);
    const float value = static_cast<float>(fraction) * unit;
    return sign ? -value : value;
  }

  FORKPOINT_HD static Code encode(float value) {
    const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<Code>(kNan);
    const uint32_t sign = bits >> 31 ? kSign : 0, field = magnitude >> 23;
    const int exponent = static_cast<int>(field == 0 ? 1 : field) - 127;
    const uint32_t significand = (magnitude & 0x7fffffu) | (field == 0 ? 0 : 0x800000u);
    int dropped = 23 - kFraction;
    if (exponent < kLowestExponent) dropped += kLowestExponent - exponent;
    if (dropped > 30) dropped = 30;  // nothing is left of 24 bits, nor half of anything
    uint32_t code = significand >> dropped;
    const uint32_t rest = significand & ((1u << dropped) - 1), half = 1u << (dropped - 1);
    if (rest > half || (rest == half && (code & 1))) ++code;
    if (exponent > kLowestExponent) code += static_cast<uint32_t>(exponent - kLowestExponent) << kFraction;
    return static_cast<Code>(sign | (code > kLargest ? kOverflow : code));
  }
};

using HalfBits = NarrowFloat<uint16_t, 10, 15, 0x7bff, 0x7c00>;
using E4m3Bits = NarrowFloat<uint8_t, 3, 7, 0x7e, 0x7e>;
using E5m2Bits = NarrowFloat<uint8_t, 2, 15, 0x7b, 0x7b>;
using Brain16Bits = NarrowFloat<uint16_t, 7, 127, 0x7f7f, 0x7f80>;

// What the device has instructions for; the same values.
struct Half : HalfBits {
#ifdef __CUDA_ARCH__
  __device__ static float decode(uint16_t code) { return __half2float(__ushort_as_half(code)); }
  __device__ static uint16_t encode(float value) { return __half_as_ushort(__float2half_rn(value)); }
#endif
};
struct Brain16 : Brain16Bits {
  FORKPOINT_HD static float decode(uint16_t code) { return bits_as<float>(static_cast<uint32_t>(code) << 16); }
#ifdef __CUDA_ARCH__
  __device__ static uint16_t encode(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
#endif
};
struct E4m3 : E4m3Bits {
#ifdef __CUDA_ARCH__
  __device__ static float decode(uint8_t code) { return Half::decode(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3).x); }
  __device__ static uint8_t encode(float value) {
    return value != value ? kNan : __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  }
#endif
};
// Infinity and the NaNs are codes that can come in, though none of them but kNan goes out.
struct E5m2 : E5m2Bits {
  FORKPOINT_HD static float decode(uint8_t code) { return Half::decode(static_cast<uint16_t>(code << 8)); }
#ifdef __CUDA_ARCH__
  __device__ static uint8_t encode(float value) {
    return value != value ? kNan : __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
  }
#endif
};

}  // namespace forkpoint::collective
