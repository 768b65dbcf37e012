// The one rule of the deterministic collectives: what the result is, as a function of the ranks' inputs alone.
// Guarantee: gpu_to_gpu, because each element is computed by itself, in an order that the rule fixes, with operations
// that IEEE 754 (or integer arithmetic) defines to the last bit. Host and device compile this very file.
//
//   by rank:  acc = in[0]; acc = acc (+) in[1]; ...; acc = acc (+) in[n-1]
//   as a tree, halves of a power of two: t(a, b) = t(a, a+p) (+) t(a+p, b), p the largest power of two < b-a
//
// As a tree fewer ranks give the same bits where each holds the sum of an aligned subtree already (2^k micro-batches
// that were added pairwise, in the same type); that is all that is promised of it.
//
// (+) of floats: the operation in fp32 (fp64 for fp64), rounded to nearest even, never contracted. Native: each result
// of the 16- and 8-bit types is rounded to the type again (for a sum: the same as adding in the type). Wide: it stays
// fp32 and is rounded once, at the end. Integers wrap.
//
// scaled_sum (NCCL's PreMulSum): each input is multiplied first, the product rounded as a sum is; the factor is fp32.
//
// average: of floats scaled_sum by 1/n in fp32 (fp64 for fp64): scaled first, as NCCL does it, so that no sum overflows
// that would not there. Of integers the wrapped sum is divided, towards zero.
//
// minimum, maximum: a NaN gives way to a number, as in NCCL; -0 is less than +0; so order does not matter.
//
// A NaN that comes out has all bits set but the sign. One rank's input alone passes through the same steps.
#pragma once

#include <type_traits>

#include "kernels/collective_floats.h"
#include "lib/dtype.h"

namespace forkpoint::collective {

// Numbers as NCCL has them, for the built-in ones.
enum class Op : uint32_t { sum = 0, product = 1, maximum = 2, minimum = 3, average = 4, scaled_sum = 5 };

#ifdef __CUDA_ARCH__
FORKPOINT_HD inline float add_rounded(float a, float b) { return __fadd_rn(a, b); }
FORKPOINT_HD inline float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
FORKPOINT_HD inline double add_rounded(double a, double b) { return __dadd_rn(a, b); }
FORKPOINT_HD inline double multiply_rounded(double a, double b) { return __dmul_rn(a, b); }
#else  // REQUIRES: -ffp-contract=off
inline float add_rounded(float a, float b) { return a + b; }
inline float multiply_rounded(float a, float b) { return a * b; }
inline double add_rounded(double a, double b) { return a + b; }
inline double multiply_rounded(double a, double b) { return a * b; }
#endif

// Floats in the order of their values, -0 before +0.
FORKPOINT_HD inline int32_t order_of(float value) {
  const int32_t bits = bits_as<int32_t>(value);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
FORKPOINT_HD inline int64_t order_of(double value) {
  const int64_t bits = bits_as<int64_t>(value);
  return bits < 0 ? bits ^ 0x7fffffffffffffff : bits;
}

template <typename Float>
struct FloatValue {
  using Value = Float;
  FORKPOINT_HD static Float add(Float a, Float b) { return add_rounded(a, b); }
  FORKPOINT_HD static Float multiply(Float a, Float b) { return multiply_rounded(a, b); }
  FORKPOINT_HD static Float pick(Float a, Float b, bool smaller) {
    if (a != a) return b;
    if (b != b) return a;
    return (order_of(a) < order_of(b)) == smaller ? a : b;
  }
  FORKPOINT_HD static Float divide(Float a, uint32_t) { return a; }  // an average is a scaled sum
};

// 16- and 8-bit floats.
template <typename Format, bool kWide>
struct NarrowArithmetic : FloatValue<float> {
  using Stored = typename Format::Stored;
  FORKPOINT_HD static float load(Stored stored) { return Format::decode(stored); }
  FORKPOINT_HD static Stored store(float value) { return Format::encode(value); }
  FORKPOINT_HD static float settle(float value) { return kWide ? value : Format::decode(Format::encode(value)); }
};

template <typename Float, typename Bits>
struct WholeArithmetic : FloatValue<Float> {
  using Stored = Bits;
  FORKPOINT_HD static Float load(Bits stored) { return bits_as<Float>(stored); }
  FORKPOINT_HD static Bits store(Float value) {
    return value != value ? static_cast<Bits>(~Bits{0} >> 1) : bits_as<Bits>(value);
  }
  FORKPOINT_HD static Float settle(Float value) { return value; }
};

template <typename Integer>
struct IntegerArithmetic {
  using Stored = Integer;
  using Value = Integer;
  using Wrapping = std::conditional_t<(sizeof(Integer) < 4), uint32_t, std::make_unsigned_t<Integer>>;
  FORKPOINT_HD static Integer load(Integer stored) { return stored; }
  FORKPOINT_HD static Integer store(Integer value) { return value; }
  FORKPOINT_HD static Integer settle(Integer value) { return value; }
  FORKPOINT_HD static Integer add(Integer a, Integer b) {
    return static_cast<Integer>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  }
  FORKPOINT_HD static Integer multiply(Integer a, Integer b) {
    return static_cast<Integer>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
  }
  FORKPOINT_HD static Integer pick(Integer a, Integer b, bool smaller) { return (a < b) == smaller ? a : b; }
  FORKPOINT_HD static Integer divide(Integer a, uint32_t ranks) {
    if constexpr (std::is_signed_v<Integer>)
      return static_cast<Integer>(a / static_cast<int64_t>(ranks));
    else
      return static_cast<Integer>(a / static_cast<uint64_t>(ranks));
  }
};

template <DType kType, bool kWide>
struct ArithmeticOf;
#define FORKPOINT_ARITHMETIC(type, ...)     \
  template <bool kWide>                     \
  struct ArithmeticOf<DType::type, kWide> { \
    using Type = __VA_ARGS__;               \
  };
FORKPOINT_ARITHMETIC(f16, NarrowArithmetic<Half, kWide>)
FORKPOINT_ARITHMETIC(bf16, NarrowArithmetic<Brain16, kWide>)
FORKPOINT_ARITHMETIC(f8e4m3, NarrowArithmetic<E4m3, kWide>)
FORKPOINT_ARITHMETIC(f8e5m2, NarrowArithmetic<E5m2, kWide>)
FORKPOINT_ARITHMETIC(f32, WholeArithmetic<float, uint32_t>)
FORKPOINT_ARITHMETIC(f64, WholeArithmetic<double, uint64_t>)
FORKPOINT_ARITHMETIC(i8, IntegerArithmetic<int8_t>)
FORKPOINT_ARITHMETIC(u8, IntegerArithmetic<uint8_t>)
FORKPOINT_ARITHMETIC(i32, IntegerArithmetic<int32_t>)
FORKPOINT_ARITHMETIC(u32, IntegerArithmetic<uint32_t>)
FORKPOINT_ARITHMETIC(i64, IntegerArithmetic<int64_t>)
FORKPOINT_ARITHMETIC(u64, IntegerArithmetic<uint64_t>)
#undef FORKPOINT_ARITHMETIC
template <DType kType, bool kWide>
using Arithmetic = typename ArithmeticOf<kType, kWide>::Type;

}  // namespace forkpoint::collective
