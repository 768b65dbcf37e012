// Kernel launches, memory and streams in every plain way that the CUDA runtime has.
// Usage: launch_plain [PART...] (default: all)
#include "launch_plain.h"

#include <cooperative_groups.h>
#include <cuda.h>  // types only: the program is not linked with libcuda

// Begins the step that is recorded.
__global__ void mark_step() {}

ADDING_KERNEL(plain_add)
ADDING_KERNEL(clustered_add)
ADDING_KERNEL(pool_add)
ADDING_KERNEL(managed_add)
ADDING_KERNEL(produce)

__global__ void consume(const float* from, float* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = 2 * from[i] + to[i];
}

__global__ void pitched_add(float* x, size_t pitch_bytes, int width) {
  float* row = reinterpret_cast<float*>(reinterpret_cast<char*>(x) + blockIdx.x * pitch_bytes);
  for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] += static_cast<float>(blockIdx.x);
}

__global__ void cooperative_sum(float* x, float* partial, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] *= 2;
  cooperative_groups::this_grid().sync();
  if (i == 0) {
    for (int j = 0; j < count; ++j) partial[0] += x[j];
  }
}

struct Pair {
  float factor;
  const float* from;
  int count;
  float* to;
};
__global__ void scale_by_struct(Pair pair) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pair.count) pair.to[i] = pair.factor * pair.from[i];
}

struct Large {
  int count;
  unsigned char padding[6000];  // beyond the 4 KiB that parameters were limited to before CUDA 12.1
  const float* from;
  float* to;
};
__global__ void add_from_large(const __grid_constant__ Large large) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < large.count) large.to[i] = large.from[i] + static_cast<float>(large.padding[i % 6000]);
}

constexpr int kTileWidth = 32, kTileHeight = 16;

// One tile of a matrix that only the descriptor knows, summed up by rows.
__global__ void sum_tile(const __grid_constant__ CUtensorMap matrix, float* sums) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) float tile[kTileHeight][kTileWidth];
  __shared__ alignas(8) uint64_t arrived;
  const auto tile_at = static_cast<uint32_t>(__cvta_generic_to_shared(&tile[0][0]));
  const auto barrier_at = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at),
                 "r"(static_cast<uint32_t>(sizeof(tile)))
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            tile_at),
        "l"(reinterpret_cast<uint64_t>(&matrix)), "r"(static_cast<int>(blockIdx.x) * kTileWidth),
        "r"(static_cast<int>(blockIdx.y) * kTileHeight), "r"(barrier_at)
        : "memory");
  }
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred complete; mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], 0;"
        " selp.u32 %0, 1, 0, complete; }"
        : "=r"(done)
        : "r"(barrier_at)
        : "memory");
  }
  if (threadIdx.x < kTileHeight) {
    float sum = 0;
    for (int column = 0; column < kTileWidth; ++column) sum += tile[threadIdx.x][column];
    sums[(blockIdx.y * gridDim.x + blockIdx.x) * kTileHeight + threadIdx.x] = sum;
  }
#endif
}

namespace {

void run_plain() {
  const Floats x = make(1024);
  plain_add<<<blocks_for(x.count), kThreads>>>(x.data, x.count);
  handed("plain_add", {x.bytes()});
}

void run_extended() {
  const Floats x = make(2048);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks_for(x.count);
  config.blockDim = kThreads;
  config.attrs = &cluster;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, clustered_add, x.data, x.count));
  handed("clustered_add", {x.bytes()});
}

void run_cooperative() {
  Floats x = make(512), partial = make(1);
  void* arguments[] = {&x.data, &partial.data, &x.count};
  CHECK(cudaLaunchCooperativeKernel(cooperative_sum, blocks_for(x.count), kThreads, arguments, 0, nullptr));
  handed("cooperative_sum", {x.bytes(), partial.bytes()});
}

void run_struct() {
  const Floats from = make(4096), to = make(5120);
  scale_by_struct<<<blocks_for(from.count), kThreads>>>({0.5f, from.data, from.count, to.data});
  handed("scale_by_struct", {from.bytes(), to.bytes()});
}

void run_large() {
  const Floats from = make(6144), to = make(7168);
  Large large{};
  large.count = from.count;
  for (int i = 0; i < 6000; ++i) large.padding[i] = static_cast<unsigned char>(i);
  large.from = from.data, large.to = to.data;
  add_from_large<<<blocks_for(from.count), kThreads>>>(large);
  handed("add_from_large", {from.bytes(), to.bytes()});
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* address,
                                 const cuuint64_t* shape, const cuuint64_t* pitches, const cuuint32_t* tile,
                                 const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

void run_tma() {
  int major = 0;
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) return;  // the same in every run on this device
  constexpr int kWidth = 128, kHeight = 96;
  const Floats matrix = make(kWidth * kHeight), sums = make(kWidth / kTileWidth * kHeight);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  alignas(64) CUtensorMap descriptor{};
  const cuuint64_t shape[] = {kWidth, kHeight}, pitches[] = {kWidth * sizeof(float)};
  const cuuint32_t tile[] = {kTileWidth, kTileHeight}, steps[] = {1, 1};
  const CUresult encoded =
      reinterpret_cast<EncodeTiled>(entry)(&descriptor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix.data, shape, pitches,
                                           tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                           CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS) {
    fprintf(stderr, "launch_plain: cuTensorMapEncodeTiled: %d\n", static_cast<int>(encoded));
    exit(1);
  }
  sum_tile<<<dim3(kWidth / kTileWidth, kHeight / kTileHeight), 32>>>(descriptor, sums.data);
  handed("sum_tile", {matrix.bytes(), sums.bytes()});
}

void run_pool() {
  constexpr int kCount = 9 * 1024;
  float* data = nullptr;
  CHECK(cudaMallocAsync(&data, kCount * sizeof(float), nullptr));
  const Floats x = fill(data, kCount);
  pool_add<<<blocks_for(x.count), kThreads>>>(x.data, x.count);
  handed("pool_add", {x.bytes()});
}

void run_managed() {
  constexpr int kCount = 10 * 1024;
  float* data = nullptr;
  CHECK(cudaMallocManaged(&data, kCount * sizeof(float)));
  memcpy(data, values(kCount).data(), kCount * sizeof(float));
  all_floats.push_back({data, kCount});
  managed_add<<<blocks_for(kCount), kThreads>>>(data, kCount);
  handed("managed_add", {kCount * sizeof(float)});
  CHECK(cudaDeviceSynchronize());
  add_to_checksum(data, kCount * sizeof(float));
}

void run_pitch() {
  constexpr int kWidth = 300, kHeight = 40;
  constexpr size_t kRowBytes = kWidth * sizeof(float);
  float* data = nullptr;
  size_t pitch = 0;
  CHECK(cudaMallocPitch(&data, &pitch, kRowBytes, kHeight));
  const std::vector<float> host = values(kWidth * kHeight);
  CHECK(cudaMemset(data, 0, pitch * kHeight));
  CHECK(cudaMemcpy2D(data, pitch, host.data(), kRowBytes, kRowBytes, kHeight, cudaMemcpyHostToDevice));
  pitched_add<<<kHeight, kThreads>>>(data, pitch, kWidth);
  handed("pitched_add", {pitch * kHeight});
  std::vector<float> back(host.size());
  CHECK(cudaMemcpy2D(back.data(), kRowBytes, data, pitch, kRowBytes, kHeight, cudaMemcpyDeviceToHost));
  add_to_checksum(back.data(), back.size() * sizeof(float));
}

void run_streams() {
  const Floats made = make(11 * 1024), used = make(12 * 1024);
  CHECK(cudaDeviceSynchronize());  // the streams do not wait for the copies on the default stream
  cudaStream_t producing = nullptr, consuming = nullptr;
  cudaEvent_t produced = nullptr;
  CHECK(cudaStreamCreateWithFlags(&producing, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&consuming, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&produced, cudaEventDisableTiming));
  for (int round = 0; round < 3; ++round) {
    produce<<<blocks_for(made.count), kThreads, 0, producing>>>(made.data, made.count);
    handed("produce", {made.bytes()});
    CHECK(cudaEventRecord(produced, producing));
    CHECK(cudaStreamWaitEvent(consuming, produced, 0));
    consume<<<blocks_for(made.count), kThreads, 0, consuming>>>(made.data, used.data, made.count);
    handed("consume", {made.bytes(), used.bytes()});
    CHECK(cudaEventRecord(produced, consuming));
    CHECK(cudaStreamWaitEvent(producing, produced, 0));
  }
  CHECK(cudaDeviceSynchronize());
}

void run_set() {
  const Floats x = make(13 * 1024), y = make(14 * 1024);
  CHECK(cudaMemset(x.data, 0x41, x.bytes()));
  CHECK(cudaMemsetAsync(y.data, 0, y.bytes() / 2, nullptr));
  CHECK(cudaMemcpyAsync(y.data, x.data, x.bytes() / 2, cudaMemcpyDeviceToDevice, nullptr));
}

constexpr Part kParts[] = {{"plain", run_plain},
                           {"extended", run_extended},
                           {"cooperative", run_cooperative},
                           {"struct", run_struct},
                           {"large", run_large},
                           {"tma", run_tma},
                           {"pool", run_pool},
                           {"managed", run_managed},
                           {"pitch", run_pitch},
                           {"streams", run_streams},
                           {"set", run_set}};

}  // namespace

int main(int count, char** names) {
  mark_step<<<1, 1>>>();
  return run_parts(kParts, count, names);
}
