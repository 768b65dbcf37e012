#include "kernels/deterministic_scatter.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/scatter_sort.cuh"

namespace forkpoint::device {

using namespace scatter;

constexpr int kBlockThreads = 128;
constexpr int kUnroll = 4;

template <typename T>
struct Sum {
  using Type = float;
};
template <>
struct Sum<double> {
  using Type = double;
};

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void narrow(float value, float* to) { *to = value; }
__device__ inline void narrow(double value, double* to) { *to = value; }
__device__ inline void narrow(float value, __half* to) { *to = __float2half_rn(value); }
__device__ inline void narrow(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }
__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline float add_product(float sum, float a, float b) { return __fmaf_rn(a, b, sum); }
__device__ inline double add_product(double sum, double a, double b) { return __fma_rn(a, b, sum); }

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount >= 16 ? 16 : sizeof(T) * kCount) Elements {
  T values[kCount];
};

// -0 changes no sum, not even one that is -0.
template <typename S>
__device__ S nothing(uint32_t flags) {
  return flags & kScatterProduct ? S(1) : S(-0.0);
}

template <typename S>
__device__ S joined(S left, S right, uint32_t flags) {
  return flags & kScatterProduct ? multiply(left, right) : add(left, right);
}

// What goes into an element of out, before it is rounded to its type.
template <typename S>
__device__ S finished(const ScatterWork& work, S before, S sum, int64_t places) {
  const bool adds = work.flags & kScatterAdd;
  const S alpha = static_cast<S>(work.alpha);
  if (work.flags & kScatterProduct) return adds ? multiply(before, sum) : sum;
  S result = adds ? add_product(before, alpha, sum) : multiply(alpha, sum);
  if (work.flags & kScatterMean) result = result / static_cast<S>(places + (adds ? 1 : 0));
  return result;
}

template <typename T, int kCount>
__device__ Elements<T, kCount>* out_at(const ScatterWork& work, int64_t row, int64_t column) {
  return reinterpret_cast<Elements<T, kCount>*>(static_cast<T*>(work.out) + row * work.out_stride + column);
}

template <typename T, int kCount>
__device__ Elements<T, kCount> read_out(const ScatterWork& work, int64_t row, int64_t column) {
  if (work.flags & kScatterAdd) return *out_at<T, kCount>(work, row, column);
  return {};
}

// elements: what read_out() gave.
template <typename T, int kCount>
__device__ void write_out(const ScatterWork& work, int64_t row, int64_t column, Elements<T, kCount> elements,
                          const typename Sum<T>::Type* sums, int64_t places) {
  for (int i = 0; i < kCount; ++i) {
    narrow(finished<typename Sum<T>::Type>(work, widen(elements.values[i]), sums[i], places), &elements.values[i]);
  }
  *out_at<T, kCount>(work, row, column) = elements;
}

__device__ inline int64_t row_at(const ScatterWork& work, int64_t place) {
  if (!work.rows) return place;
  return work.narrow_rows ? static_cast<const uint32_t*>(work.rows)[place]
                          : static_cast<const int64_t*>(work.rows)[place];
}

// kUnroll rows' loads are issued before the first is used; what is added is added in the order of the places.
template <typename T, int kCount>
__device__ void add_places(const ScatterWork& work, int64_t place, int count, int64_t column,
                           typename Sum<T>::Type* sums) {
  using S = typename Sum<T>::Type;
  const T* src = static_cast<const T*>(work.src) + column;
  Elements<T, kCount> loaded[kUnroll];
  S weights[kUnroll];
  for (int i = 0; i < kUnroll; ++i) {
    if (i >= count) break;
    loaded[i] = *reinterpret_cast<const Elements<T, kCount>*>(src + row_at(work, place + i) * work.src_stride);
    weights[i] = work.weights ? static_cast<const S*>(work.weights)[place + i] : S(1);
  }
  for (int i = 0; i < kUnroll; ++i) {
    if (i >= count) break;
    for (int c = 0; c < kCount; ++c) {
      const S value = widen(loaded[i].values[c]);
      if (work.flags & kScatterProduct)
        sums[c] = multiply(sums[c], value);
      else
        sums[c] = work.weights ? add_product(sums[c], weights[i], value) : add(sums[c], value);
    }
  }
}

// A piece, by the threads of one group; lane: of this thread among them.
template <typename T, int kCount>
__device__ void sum_piece(const ScatterWork& work, int64_t place, int lane) {
  using S = typename Sum<T>::Type;
  // What is known of the piece is read all at once, and out together with src: it is latency that costs here.
  const int64_t end = end_of_piece(work.starts, work.keys.count, place);
  const bool last = end == work.keys.count;
  const int64_t key = work.keys.at(place), before = work.keys.at(place == 0 ? 0 : place - 1);
  const int64_t behind = work.keys.at(last ? place : end);
  if (key < 0 || key >= work.out_rows) return;
  const bool first = place == 0 || before != key;
  const bool whole = first && (last || behind != key);
  S* partial = static_cast<S*>(work.partials) + (whole ? 0 : slot_of_piece(place, first) * work.partial_stride);
  const int64_t stride = int64_t{work.piece_threads} * kCount * gridDim.y;
  for (int64_t column = (int64_t{blockIdx.y} * work.piece_threads + lane) * kCount; column < work.columns;
       column += stride) {
    S sums[kCount];
    for (int c = 0; c < kCount; ++c) sums[c] = nothing<S>(work.flags);
    Elements<T, kCount> elements{};
    if (whole) elements = read_out<T, kCount>(work, key, column);
    int64_t at = place;
    for (; at + kUnroll <= end; at += kUnroll) add_places<T, kCount>(work, at, kUnroll, column, sums);
    if (at < end) add_places<T, kCount>(work, at, static_cast<int>(end - at), column, sums);
    if (whole) {
      write_out<T, kCount>(work, key, column, elements, sums, end - place);
    } else {
      for (int c = 0; c < kCount; ++c) partial[column + c] = sums[c];
    }
  }
}

__device__ inline uint32_t without_lowest(uint32_t bits, int count) {
  for (int i = 0; i < count && bits != 0; ++i) bits &= bits - 1;
  return bits;
}

template <typename T, int kCount>
__device__ void sum_pieces(const ScatterWork& work) {
  const int threads = work.piece_threads;
  const int unit_threads = threads > 32 ? threads : 32;  // of a unit: a warp, shared by groups, or several warps
  const int groups = unit_threads / threads;
  const int lane = static_cast<int>(threadIdx.x) % threads;
  const int group = static_cast<int>(threadIdx.x) % unit_threads / threads;
  const int64_t units = int64_t{gridDim.x} * (kBlockThreads / unit_threads);
  int64_t unit = int64_t{blockIdx.x} * (kBlockThreads / unit_threads) + threadIdx.x / unit_threads;
  const uint32_t all = work.places == 32 ? ~0u : (1u << work.places) - 1;
  for (; unit * work.places < work.keys.count; unit += units) {
    const int64_t first = unit * work.places;
    // Each group takes every groups-th piece, and all of them at once: in turns they would wait for each other.
    uint32_t starts = without_lowest(work.starts[first / 32] >> (first % 32) & all, group);
    for (; starts != 0; starts = without_lowest(starts, groups)) {
      sum_piece<T, kCount>(work, first + __ffs(static_cast<int>(starts)) - 1, lane);
    }
  }
}

// The sums of a long segment's pieces: 8 threads of 4 columns each, times kPieceGroups.
template <typename T>
__device__ void combine_segment(const ScatterWork& work, int64_t start, int64_t first_column,
                                typename Sum<T>::Type (*shared)[36]) {
  using S = typename Sum<T>::Type;
  const int64_t key = work.keys.at(start);
  const int64_t places = end_of(work.keys, start + kPieceRows) - start;
  const int64_t pieces = (places + kPieceRows - 1) / kPieceRows;
  const int group = static_cast<int>(threadIdx.x) / 8, column = static_cast<int>(threadIdx.x) % 8 * 4;
  int64_t begin, end;
  pieces_of_group(pieces, group, &begin, &end);
  S sums[4];
  for (int c = 0; c < 4; ++c) sums[c] = nothing<S>(work.flags);
  if (first_column + column >= work.columns) end = begin;
  const S* partials = static_cast<const S*>(work.partials) + first_column + column;
#pragma unroll 8
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t slot = slot_of_piece(start + piece * kPieceRows, piece == 0);
    const auto partial = *reinterpret_cast<const Elements<S, 4>*>(partials + slot * work.partial_stride);
    for (int c = 0; c < 4; ++c) sums[c] = joined(sums[c], partial.values[c], work.flags);
  }
  for (int c = 0; c < 4; ++c) shared[group][column + c] = sums[c];
  __syncthreads();
  if (threadIdx.x < 32 && first_column + threadIdx.x < work.columns) {
    S sum = shared[0][threadIdx.x];
    for (int g = 1; g < kPieceGroups; ++g) {
      pieces_of_group(pieces, g, &begin, &end);
      if (begin == end) break;
      sum = joined(sum, shared[g][threadIdx.x], work.flags);
    }
    const auto element = read_out<T, 1>(work, key, first_column + threadIdx.x);
    write_out<T, 1>(work, key, first_column + threadIdx.x, element, &sum, places);
  }
  __syncthreads();
}

template <typename T>
__device__ void combine(const ScatterWork& work) {
  __shared__ typename Sum<T>::Type shared[kPieceGroups][36];
  const int64_t marks = (work.keys.count + kPieceRows - 1) / kPieceRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t tile = blockIdx.x; tile * 32 < marks; tile += gridDim.x) {
    const int64_t mine = tile * 32 + lane;
    int64_t start = 0;
    const bool marked = mine < marks && is_mark(work.keys, mine * kPieceRows, &start);
    uint32_t found = __ballot_sync(~0u, marked);  // the same in every warp of the block
    while (found != 0) {
      const int bit = __ffs(static_cast<int>(found)) - 1;
      found &= found - 1;
      const int64_t segment = __shfl_sync(~0u, start, bit);
      const int64_t key = work.keys.at(segment);
      if (key < 0 || key >= work.out_rows) continue;
      for (int64_t column = int64_t{blockIdx.y} * 32; column < work.columns; column += int64_t{gridDim.y} * 32) {
        combine_segment<T>(work, segment, column, shared);
      }
    }
  }
}

extern "C" __global__ void forkpoint_scatter_starts(const __grid_constant__ ScatterWork work) {
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool starts = place < work.keys.count && starts_piece(work.keys, place);
  const uint32_t word = __ballot_sync(~0u, starts);
  if (threadIdx.x % 32 == 0 && place < work.keys.count) work.starts[place / 32] = word;
}

#define FORKPOINT_SCATTER_KERNELS(name, type)                                      \
  extern "C" __global__ void __launch_bounds__(kBlockThreads)                      \
      forkpoint_scatter_pieces_##name(const __grid_constant__ ScatterWork work) {  \
    sum_pieces<type, 1>(work);                                                     \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kBlockThreads)                      \
      forkpoint_scatter_vectors_##name(const __grid_constant__ ScatterWork work) { \
    sum_pieces<type, 16 / sizeof(type)>(work);                                     \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(256)                                \
      forkpoint_scatter_combine_##name(const __grid_constant__ ScatterWork work) { \
    combine<type>(work);                                                           \
  }

FORKPOINT_SCATTER_KERNELS(float32, float)
FORKPOINT_SCATTER_KERNELS(float16, __half)
FORKPOINT_SCATTER_KERNELS(bfloat16, __nv_bfloat16)
FORKPOINT_SCATTER_KERNELS(float64, double)

}  // namespace forkpoint::device

namespace forkpoint {
namespace {

#define FORKPOINT_OF_TYPES(kind)                                                                                    \
  (const void*)device::forkpoint_scatter_##kind##_float32, (const void*)device::forkpoint_scatter_##kind##_float16, \
      (const void*)device::forkpoint_scatter_##kind##_bfloat16,                                                     \
      (const void*)device::forkpoint_scatter_##kind##_float64

const void* const kKernels[kScatterKernelCount] = {(const void*)device::forkpoint_scatter_starts,
                                                   FORKPOINT_OF_TYPES(pieces), FORKPOINT_OF_TYPES(vectors),
                                                   FORKPOINT_OF_TYPES(combine),
                                                   (const void*)device::forkpoint_sort_count,
                                                   (const void*)device::forkpoint_sort_move};

}  // namespace

cudaError_t sort_on_device(const SortWork& work, cudaStream_t stream) {
  SortPlan plan = plan_sort(work);
  for (int digit = 0; digit < plan.digit_count; ++digit) {
    void* arguments[] = {&plan.digits[digit]};
    for (const int kernel : {kSortCount, kSortMove}) {
      if (kernel == kSortCount && plan.digits[digit].alone) continue;
      const cudaError_t error = cudaLaunchKernel(kKernels[kernel], dim3(plan.blocks), dim3(scatter::kSortThreads),
                                                 arguments, 0, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t scatter_on_device(ScatterType type, const ScatterWork& work, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  ScatterPlan plan = plan_scatter(type, work, multiprocessors);
  void* arguments[] = {&plan.work};
  for (const ScatterLaunch& launch : plan.launches) {
    if (launch.grid_x == 0) continue;
    error = cudaLaunchKernel(kKernels[launch.kernel], dim3(launch.grid_x, launch.grid_y), dim3(launch.block), arguments,
                             0, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace forkpoint
