#if defined(__x86_64__)
// g++ 12's own intrinsics trip this warning (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#include "lib/digest_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")

namespace forkpoint::digest_kernels {
namespace {

struct Simd {
  using Vector = __m512i;
  static constexpr size_t kBytes = 64;
  static Vector zero() { return _mm512_setzero_si512(); }
  static Vector load(const void* from) { return _mm512_loadu_si512(from); }
  static void store(void* to, Vector v) { _mm512_store_si512(to, v); }
  static Vector both(Vector l, Vector r) { return _mm512_and_si512(l, r); }
  static Vector add(Vector l, Vector r) { return _mm512_add_epi64(l, r); }
  static Vector multiply(Vector l, Vector r) { return _mm512_mul_epu32(l, r); }
  static Vector upper(Vector v) { return _mm512_srli_epi64(v, 32); }
  static Vector lower(Vector v) { return _mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF)); }
  static uint64_t sum(Vector v) {
    alignas(64) uint64_t lanes[8];
    store(lanes, v);
    uint64_t total = 0;
    for (const uint64_t lane : lanes) total += lane;
    return total;
  }
  static Vector repeat(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static Vector repeat(uint16_t value) { return _mm512_set1_epi16(static_cast<short>(value)); }
  static Vector repeat(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Vector repeat(uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
  static Vector max(Vector l, Vector r, uint8_t) { return _mm512_max_epu8(l, r); }
  static Vector max(Vector l, Vector r, uint16_t) { return _mm512_max_epu16(l, r); }
  static Vector max(Vector l, Vector r, uint32_t) { return _mm512_max_epu32(l, r); }
  static Vector max(Vector l, Vector r, uint64_t) { return _mm512_max_epu64(l, r); }
  static Vector absolute(Vector v, uint8_t) { return _mm512_abs_epi8(v); }
  static Vector absolute(Vector v, uint16_t) { return _mm512_abs_epi16(v); }
  static Vector absolute(Vector v, uint32_t) { return _mm512_abs_epi32(v); }
  static Vector absolute(Vector v, uint64_t) { return _mm512_abs_epi64(v); }
};

#include "lib/digest_vector.inc"

}  // namespace

const Kernels kAvx512 = {"avx512", sum_words, scan_magnitudes};

}  // namespace forkpoint::digest_kernels
#pragma GCC pop_options
#endif
