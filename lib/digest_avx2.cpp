#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "lib/digest_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2")

namespace forkpoint::digest_kernels {
namespace {

struct Simd {
  using Vector = __m256i;
  static constexpr size_t kBytes = 32;
  static Vector zero() { return _mm256_setzero_si256(); }
  static Vector load(const void* from) { return _mm256_loadu_si256(static_cast<const Vector*>(from)); }
  static void store(void* to, Vector v) { _mm256_store_si256(static_cast<Vector*>(to), v); }
  static Vector both(Vector l, Vector r) { return _mm256_and_si256(l, r); }
  static Vector add(Vector l, Vector r) { return _mm256_add_epi64(l, r); }
  static Vector multiply(Vector l, Vector r) { return _mm256_mul_epu32(l, r); }
  static Vector upper(Vector v) { return _mm256_srli_epi64(v, 32); }
  static Vector lower(Vector v) { return _mm256_blend_epi32(v, zero(), 0xAA); }
  static uint64_t sum(Vector v) {
    alignas(32) uint64_t lanes[4];
    store(lanes, v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
  static Vector repeat(uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static Vector repeat(uint16_t value) { return _mm256_set1_epi16(static_cast<short>(value)); }
  static Vector repeat(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static Vector repeat(uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
  static Vector max(Vector l, Vector r, uint8_t) { return _mm256_max_epu8(l, r); }
  static Vector max(Vector l, Vector r, uint16_t) { return _mm256_max_epu16(l, r); }
  static Vector max(Vector l, Vector r, uint32_t) { return _mm256_max_epu32(l, r); }
  static Vector max(Vector l, Vector r, uint64_t) {
    // Compared as signed numbers, hence with the top bit turned over.
    const Vector top = repeat(uint64_t{1} << 63);
    const Vector less = _mm256_cmpgt_epi64(_mm256_xor_si256(r, top), _mm256_xor_si256(l, top));
    return _mm256_blendv_epi8(l, r, less);
  }
  static Vector absolute(Vector v, uint8_t) { return _mm256_abs_epi8(v); }
  static Vector absolute(Vector v, uint16_t) { return _mm256_abs_epi16(v); }
  static Vector absolute(Vector v, uint32_t) { return _mm256_abs_epi32(v); }
  static Vector absolute(Vector v, uint64_t) {
    const Vector sign = _mm256_cmpgt_epi64(zero(), v);
    return _mm256_sub_epi64(_mm256_xor_si256(v, sign), sign);
  }
};

#include "lib/digest_vector.inc"

}  // namespace

const Kernels kAvx2 = {"avx2", sum_words, scan_magnitudes};

}  // namespace forkpoint::digest_kernels
#pragma GCC pop_options
#endif
