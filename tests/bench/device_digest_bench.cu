// The device digest against a kernel that only reads, at the same size in the same run. Every figure is a median over
// replays of a captured graph of launches, so that the host's launch cost is not in it; the reader is the best of
// several. Usage: device_digest_bench [FILTER]   (only figures whose name contains FILTER)
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device_digest.h"
#include "lib/digest_mix.h"
#include "tests/bench/device_timer.h"

namespace {

using namespace forkpoint;

template <int kLoads>
__global__ void __launch_bounds__(256) read_kernel(const uint4* data, size_t blocks, uint32_t* out) {
  uint32_t mixed = 0;
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kLoads - 1) * step < blocks; i += kLoads * step) {
    uint4 value[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) value[k] = __ldcs(data + i + k * step);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) mixed ^= value[k].x ^ value[k].y ^ value[k].z ^ value[k].w;
  }
  for (; i < blocks; i += step) {
    const uint4 value = __ldcs(data + i);
    mixed ^= value.x ^ value.y ^ value.z ^ value.w;
  }
  if (mixed == 0x12345678u) *out = mixed;
}

__global__ void empty_kernel() {}

__global__ void fill_kernel(uint64_t* data, size_t words, uint64_t mask) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) data[i] = mix64(i) & mask;
}

// Clears an exponent bit of every element: realistic data has no non-finite one.
uint64_t finite_mask(DType dtype) {
  switch (magnitude_rule(dtype).nonfinite_from == ~uint64_t{0} ? 0 : magnitude_rule(dtype).bytes) {
    case 1:
      return 0xBFBFBFBFBFBFBFBF;
    case 2:
      return 0xBFFFBFFFBFFFBFFF;
    case 4:
      return 0xBFFFFFFFBFFFFFFF;
    case 8:
      return 0xBFFFFFFFFFFFFFFF;
    default:
      return ~uint64_t{0};
  }
}

class Bench {
 public:
  Bench(std::string filter, size_t bytes) : filter_(std::move(filter)), bytes_(bytes) {
    cudaDeviceProp properties;
    OK(cudaGetDeviceProperties(&properties, 0));
    multiprocessors_ = properties.multiProcessorCount;
    std::printf("%s, %d multiprocessors\n", properties.name, multiprocessors_);
    OK(cudaMalloc(reinterpret_cast<void**>(&data_), bytes_));
    OK(cudaMalloc(reinterpret_cast<void**>(&scratch_), kTargets * sizeof(DigestScratch)));
    OK(cudaMemset(scratch_, 0, kTargets * sizeof(DigestScratch)));
    OK(cudaMalloc(reinterpret_cast<void**>(&out_), 4));
    OK(cudaHostAlloc(reinterpret_cast<void**>(&slots_), kTargets * sizeof(DigestSlot), cudaHostAllocMapped));
    std::memset(slots_, 0, kTargets * sizeof(DigestSlot));
  }
  void fill(DType dtype) {
    fill_kernel<<<1024, 256>>>(reinterpret_cast<uint64_t*>(data_), bytes_ / 8, finite_mask(dtype));
    OK(cudaDeviceSynchronize());
  }
  bool wanted(const std::string& name) const { return name.find(filter_) != std::string::npos; }
  DigestTarget target(size_t i = 0) const {
    DigestTarget target;
    target.slot = slots_ + i;
    target.scratch = scratch_ + i;
    target.ticket = 1;
    return target;
  }
  Launch digest(DType dtype, size_t size, size_t stride = 0, size_t rotate = 1) {
    return [=, this](int i, cudaStream_t stream) {
      DigestLaunch launch = plan_digest_bytes(data_ + i % rotate * stride, size, dtype, 0, target(), multiprocessors_);
      OK(launch_digest(launch, stream));
    };
  }
  std::vector<Launch> readers(size_t size, size_t stride = 0, size_t rotate = 1) {
    std::vector<Launch> all;
    for (unsigned blocks : {2, 4, 8}) {
      const auto add = [&](auto kernel) {
        all.push_back([=, this](int i, cudaStream_t stream) {
          kernel<<<blocks * multiprocessors_, 256, 0, stream>>>(
              reinterpret_cast<const uint4*>(data_ + i % rotate * stride), size / 16, out_);
        });
      };
      add(read_kernel<1>);
      add(read_kernel<2>);
      add(read_kernel<4>);
      add(read_kernel<8>);
    }
    return all;
  }
  // Times `launch` against the best reader of size bytes.
  void ratio(const std::string& name, const char* what, Launch launch, size_t size, double goal, size_t stride = 0,
             size_t rotate = 1) {
    if (!wanted(name)) return;
    const int repetitions = std::clamp<int>(static_cast<int>((size_t{1} << 33) / size), 4, 64);
    std::vector<Launch> all = readers(size, stride, rotate);
    all.push_back(std::move(launch));
    std::vector<double> times = timer_.medians(all, repetitions);
    const double digest_us = times.back();
    times.pop_back();
    const double read_us = *std::min_element(times.begin(), times.end());
    const double value = read_us / digest_us;
    std::printf("rate %s: %s %.0f GB/s (%.2f us), read %.0f GB/s (%.2f us)\n", name.c_str(), what,
                size / digest_us / 1000, digest_us, size / read_us / 1000, read_us);
    report(name, value, goal, value >= goal);
  }
  void micros(const std::string& name, Launch launch, double goal) {
    if (!wanted(name)) return;
    const double value = timer_.medians({std::move(launch)}, 64)[0];
    report(name, value, goal, value <= goal);
  }
  void report(const std::string& name, double value, double goal, bool ok) {
    if (goal == 0) {
      std::printf("info %s %.3f\n", name.c_str(), value);
    } else {
      std::printf("bench %s %.3f %.2f %s\n", name.c_str(), value, goal, ok ? "ok" : "miss");
    }
    std::fflush(stdout);
  }

  unsigned char* data() const { return data_; }
  int multiprocessors() const { return multiprocessors_; }
  static constexpr size_t kTargets = 1 << 15;
  // Of which everything is always consumed: results overwrite each other.
  DigestRing* endless_ring() {
    if (ring_) return ring_;
    uint64_t* counters = nullptr;
    OK(cudaHostAlloc(reinterpret_cast<void**>(&counters), 2 * sizeof(uint64_t), cudaHostAllocMapped));
    counters[0] = uint64_t{1} << 62;
    counters[1] = 0;
    DigestRing made;
    made.slots = slots_;
    made.consumed = counters;
    made.dropped = counters + 1;
    made.capacity = kTargets;
    OK(cudaMalloc(reinterpret_cast<void**>(&ring_), sizeof(made)));
    OK(cudaMemcpy(ring_, &made, sizeof(made), cudaMemcpyHostToDevice));
    return ring_;
  }
  DigestScratch* scratch() const { return scratch_; }
  std::vector<double> medians(const std::vector<Launch>& launches, int repetitions) {
    return timer_.medians(launches, repetitions);
  }

 private:
  std::string filter_;
  size_t bytes_;
  int multiprocessors_ = 0;
  unsigned char* data_ = nullptr;
  DigestScratch* scratch_ = nullptr;
  DigestSlot* slots_ = nullptr;
  DigestRing* ring_ = nullptr;
  uint32_t* out_ = nullptr;
  Timer timer_;
};

constexpr size_t kMiB = size_t{1} << 20;

void bench_sizes(Bench& bench, DType dtype, const std::string& type) {
  bench.ratio("digest_gpu_" + type + "_4GiB", "digest", bench.digest(dtype, 4096 * kMiB), 4096 * kMiB, 0.95);
  bench.ratio("digest_gpu_" + type + "_64MiB", "digest", bench.digest(dtype, 64 * kMiB), 64 * kMiB, 0);
  // Rotating over 2 GiB, so that nothing of it is in L2; and, for comparison, from L2.
  bench.ratio("digest_gpu_" + type + "_32MiB", "digest", bench.digest(dtype, 32 * kMiB, 32 * kMiB, 64), 32 * kMiB, 0.85,
              32 * kMiB, 64);
  bench.ratio("digest_gpu_" + type + "_32MiB_from_L2", "digest", bench.digest(dtype, 32 * kMiB), 32 * kMiB, 0);
  bench.ratio("digest_gpu_" + type + "_8MiB", "digest", bench.digest(dtype, 8 * kMiB), 8 * kMiB, 0);
  for (size_t kib : {4, 64, 256, 1024}) {
    bench.micros("digest_gpu_" + type + "_" + std::to_string(kib) + "KiB_us", bench.digest(dtype, kib << 10), 5);
  }
}

void bench_batch(Bench& bench) {
  constexpr size_t kTensors = 1000, kSize = 64 << 10;
  std::vector<DigestLaunch> singles;
  for (size_t i = 0; i < kTensors; ++i) {
    singles.push_back(
        plan_digest_bytes(bench.data() + i * kSize, kSize, DType::bf16, 0, bench.target(i), bench.multiprocessors()));
  }
  std::vector<DigestFlat> pieces(2 * kTensors);
  DigestFlat* device_pieces = nullptr;
  OK(cudaMalloc(reinterpret_cast<void**>(&device_pieces), pieces.size() * sizeof(DigestFlat)));
  DigestLaunch launch;
  plan_digest_batch(singles.data(), kTensors, device_pieces, pieces.data(), pieces.size(), bench.multiprocessors(),
                    &launch);
  OK(cudaMemcpy(device_pieces, pieces.data(), pieces.size() * sizeof(DigestFlat), cudaMemcpyHostToDevice));
  bench.ratio(
      "digest_gpu_1000x64KiB", "digest", [&](int, cudaStream_t stream) { OK(launch_digest(launch, stream)); },
      kTensors * kSize, 0.8);
  OK(cudaFree(device_pieces));
}

// One launch; piece i begins i * stride bytes after the first.
Launch pieces_launch(Bench& bench, const std::vector<size_t>& sizes, size_t stride, size_t rotate_bytes = 0,
                     size_t rotate = 1) {
  return [=, &bench](int index, cudaStream_t stream) {
    std::vector<DigestRequest> requests;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t offset = i * stride + index % rotate * rotate_bytes;
      requests.push_back({bench.data() + offset, sizes[i], bench.target(i)});
    }
    DigestPiecesLaunch launch;
    if (plan_digest_pieces(requests.data(), requests.size(), bench.multiprocessors(), &launch) != sizes.size()) {
      std::fprintf(stderr, "device_digest_bench: the pieces did not fit into one launch\n");
      std::exit(2);
    }
    OK(launch_digest(launch, stream));
  };
}

// What a step of an 8-layer GPT (d = 1024, 50,257 words, bf16) leaves to be looked at: parameters and two moments of each.
std::vector<size_t> gpt_state() {
  constexpr size_t kWide = 1024, kBf16 = 2;
  std::vector<size_t> sizes;
  for (int kind = 0; kind < 3; ++kind) {
    sizes.push_back(50'257 * kWide * kBf16);
    for (int layer = 0; layer < 8; ++layer) {
      for (const size_t width : {3 * kWide, kWide, 4 * kWide}) {
        sizes.push_back(width * kWide * kBf16);
        sizes.push_back(width * kBf16);
      }
      sizes.push_back(4 * kWide * kWide * kBf16);
      for (int vector = 0; vector < 5; ++vector) sizes.push_back(kWide * kBf16);
    }
    for (int vector = 0; vector < 2; ++vector) sizes.push_back(kWide * kBf16);
  }
  return sizes;
}

// Each as plan_digest has it.
std::vector<DigestLaunch> singles_of(const Bench& bench, const std::vector<size_t>& sizes) {
  std::vector<DigestLaunch> singles;
  size_t offset = 0;
  for (const size_t size : sizes) {
    singles.push_back(plan_digest_bytes(bench.data() + offset, size, DType::bf16, 0, bench.target(singles.size()),
                                        bench.multiprocessors()));
    offset += (size + 511) / 512 * 512;
  }
  return singles;
}

// Microseconds of the host's until all are launched, of the best of several rounds.
double host_us(const Launch& launch) {
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    OK(cudaDeviceSynchronize());
    const auto begin = std::chrono::steady_clock::now();
    launch(0, nullptr);
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
    best = std::min(best, spent.count());
  }
  OK(cudaDeviceSynchronize());
  return best;
}

void bench_tensors(Bench& bench, const std::string& name, const std::vector<size_t>& sizes, double goal) {
  if (!bench.wanted(name)) return;
  const std::vector<DigestLaunch> singles = singles_of(bench, sizes);
  std::vector<DigestFlat> runs;
  size_t bytes = 0;
  for (const DigestLaunch& single : singles) runs.push_back(single.flat);
  for (const size_t size : sizes) bytes += size;
  const Launch together = [&](int, cudaStream_t stream) {
    DigestTensorsLaunch launch;
    for (size_t done = 0; done < runs.size();) {
      done += plan_digest_tensors(&runs[done], runs.size() - done, bench.multiprocessors(), &launch);
      OK(launch_digest(launch, stream));
    }
  };
  const Launch alone = [&](int, cudaStream_t stream) {
    for (DigestLaunch single : singles) OK(launch_digest(single, stream));
  };
  bench.ratio(name, "together", together, bytes, goal);
  bench.ratio(name + "_alone", "one by one", alone, bytes, 0);
  const std::vector<double> us = bench.medians({together, alone}, 4);
  std::printf("rate %s: %zu tensors, %.1f MB: %.1f us together, %.1f us one by one on the device\n", name.c_str(),
              sizes.size(), static_cast<double>(bytes) / 1e6, us[0], us[1]);
  const auto count = static_cast<double>(sizes.size());
  const double together_us = host_us(together) / count, alone_us = host_us(alone) / count;
  bench.report(name + "_host_us_a_tensor", together_us, 0.5, together_us <= 0.5);
  bench.report(name + "_alone_host_us_a_tensor", alone_us, 0, true);
}

// What follows a launch of the program: its buffers lie in L2, or did not stay there.
void bench_pieces(Bench& bench) {
  constexpr size_t kKiB = 1 << 10;
  bench.micros("digest_gpu_3_pieces_4_16_64KiB_us", pieces_launch(bench, {4 * kKiB, 16 * kKiB, 64 * kKiB}, kMiB), 3);
  bench.micros("digest_gpu_3_pieces_512B_us", pieces_launch(bench, {512, 512, 512}, kMiB), 3);
  bench.micros("digest_gpu_3_pieces_64KiB_us", pieces_launch(bench, {64 * kKiB, 64 * kKiB, 64 * kKiB}, kMiB), 3);
  bench.micros("digest_gpu_16_pieces_16KiB_us", pieces_launch(bench, std::vector<size_t>(16, 16 * kKiB), kMiB), 0);
  bench.micros("digest_gpu_48_pieces_16KiB_us", pieces_launch(bench, std::vector<size_t>(48, 16 * kKiB), kMiB), 0);
  bench.micros("digest_gpu_48_pieces_64KiB_us", pieces_launch(bench, std::vector<size_t>(48, 64 * kKiB), kMiB), 0);
  const std::vector<size_t> mixed = {8 * kMiB, 4 * kKiB, 16 * kKiB};
  const size_t mixed_bytes = 8 * kMiB + 20 * kKiB;
  bench.ratio("digest_gpu_8MiB_and_2_small_from_L2", "digest", pieces_launch(bench, mixed, 10 * kMiB), mixed_bytes,
              0.8);
  bench.ratio("digest_gpu_8MiB_and_2_small", "digest", pieces_launch(bench, mixed, 10 * kMiB, 32 * kMiB, 64),
              mixed_bytes, 0.8, 32 * kMiB, 64);
  const std::vector<size_t> large(3, 32 * kMiB);
  bench.ratio("digest_gpu_3_pieces_32MiB", "digest", pieces_launch(bench, large, 32 * kMiB, 128 * kMiB, 16), 96 * kMiB,
              0.85, 128 * kMiB, 16);
}

// A graph of kGraphNodes launches, each with pieces of these sizes; their results go at once, or all at the end.
constexpr int kGraphNodes = 400;
Launch graph_nodes(Bench& bench, const std::vector<size_t>& sizes, bool flushed) {
  DigestRing* ring = bench.endless_ring();
  return [=, &bench](int index, cudaStream_t stream) {
    const auto count = static_cast<uint32_t>(sizes.size());
    std::vector<DigestRequest> requests;
    for (uint32_t i = 0; i < count; ++i) {
      DigestTarget target;
      target.node = 1 + static_cast<uint32_t>(index) * count + i;
      target.scratch = bench.scratch() + target.node;
      target.ring = flushed ? nullptr : ring;
      requests.push_back({bench.data() + i * kMiB, sizes[i], target});
    }
    DigestPiecesLaunch launch;
    plan_digest_pieces(requests.data(), requests.size(), bench.multiprocessors(), &launch);
    OK(launch_digest(launch, stream));
    if (!flushed || index != kGraphNodes - 1) return;
    std::vector<uint32_t> nodes;
    for (uint32_t i = 1; i <= kGraphNodes * count; ++i) nodes.push_back(i);
    for (size_t done = 0; done < nodes.size();) {
      DigestFlushLaunch flush;
      done += plan_digest_flush(ring, bench.scratch(), &nodes[done], nodes.size() - done, &flush);
      OK(launch_digest(flush, stream));
    }
  };
}

// What a digest adds to each node of a replayed graph: microseconds a node, beside a node that does nothing.
void bench_graph_nodes(Bench& bench) {
  if (!bench.wanted("digest_gpu_graph_node")) return;
  constexpr size_t kKiB = 1 << 10;
  const std::vector<std::pair<const char*, std::vector<size_t>>> all = {
      {"1x8B", {8}}, {"1x4KiB", {4 * kKiB}}, {"3x4KiB", std::vector<size_t>(3, 4 * kKiB)},
      {"3x64KiB", std::vector<size_t>(3, 64 * kKiB)}, {"16x2KiB", std::vector<size_t>(16, 2 * kKiB)},
      {"48x8B", std::vector<size_t>(48, 8)}, {"48x16KiB", std::vector<size_t>(48, 16 * kKiB)}};
  for (const auto& [name, sizes] : all) {
    const Launch empty = [](int, cudaStream_t stream) { empty_kernel<<<1, 32, 0, stream>>>(); };
    const std::vector<double> us =
        bench.medians({empty, graph_nodes(bench, sizes, true), graph_nodes(bench, sizes, false)}, kGraphNodes);
    const std::string of = std::string("digest_gpu_graph_node_") + name;
    std::printf("rate %s: %.2f us a node with its part of the flush, %.2f us with a slot each, %.2f us empty\n",
                of.c_str(), us[1], us[2], us[0]);
    bench.report(of + "_us", us[1], 2, us[1] <= 2);
    bench.report(of + "_over_empty_us", us[1] - us[0], 0, true);
  }
}

Launch view_launch(Bench& bench, const TensorView& view, size_t offset = 0) {
  return [&bench, view, offset](int, cudaStream_t stream) {
    DigestLaunch launch = plan_digest(bench.data() + offset, view, bench.target(), bench.multiprocessors());
    OK(launch_digest(launch, stream));
  };
}

void bench_views(Bench& bench) {
  constexpr size_t kBytes = 256 * kMiB;
  for (int64_t row : {64, 128, 256, 320, 512, 1024, 4096}) {
    // Rows of a matrix twice as wide, and of one whose rows begin at odd addresses.
    const int64_t shape[] = {static_cast<int64_t>(kBytes) / row, row / 2}, strides[] = {row, 1}, odd[] = {row + 1, 1};
    const double goal = row >= 256 ? 0.6 : 0;
    const size_t size = static_cast<size_t>(shape[0] * row);
    bench.ratio("digest_gpu_rows_" + std::to_string(row), "digest",
                view_launch(bench, whole_view(DType::bf16, shape, strides)), size, goal);
    if (row >= 256) {
      bench.ratio("digest_gpu_rows_" + std::to_string(row) + "_odd", "digest",
                  view_launch(bench, whole_view(DType::bf16, shape, odd)), size, 0.6);
    }
  }
  for (int64_t row : {256, 1024, 8192}) {
    // A contiguous shard of columns: its rows lie apart in the logical tensor.
    const int64_t shape[] = {static_cast<int64_t>(kBytes) / row, row / 2}, global[] = {shape[0], 4 * shape[1]},
                  offset[] = {0, shape[1]};
    bench.ratio("digest_gpu_shard_rows_" + std::to_string(row), "digest",
                view_launch(bench, shard_view(DType::bf16, shape, {}, global, offset)), kBytes, 0.6);
  }
  const int64_t flat[] = {static_cast<int64_t>(kBytes) / 4};
  bench.ratio("digest_gpu_misaligned_by_4", "digest", view_launch(bench, whole_view(DType::f32, flat), 4), kBytes, 0);
  const int64_t flat16[] = {static_cast<int64_t>(kBytes) / 2};
  bench.ratio("digest_gpu_misaligned_by_2", "digest", view_launch(bench, whole_view(DType::bf16, flat16), 2), kBytes,
              0);
  const int64_t square[] = {8192, 8192}, transposed[] = {1, 8192};
  bench.ratio("digest_gpu_transposed_f32", "digest", view_launch(bench, whole_view(DType::f32, square, transposed)),
              kBytes, 0);
  const int64_t square16[] = {8192, 16384}, transposed16[] = {1, 8192};
  bench.ratio("digest_gpu_transposed_bf16", "digest",
              view_launch(bench, whole_view(DType::bf16, square16, transposed16)), kBytes, 0);
  const int64_t heads[] = {16, 32, 2048, 128}, permuted[] = {2048 * 4096, 128, 4096, 1};
  bench.ratio("digest_gpu_heads_bf16", "digest", view_launch(bench, whole_view(DType::bf16, heads, permuted)), kBytes,
              0);
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: needs a CUDA device\n");
    return 77;
  }
  Bench bench(argc > 1 ? argv[1] : "", 4096 * kMiB + 4096);
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string type(name(dtype));
    bench.fill(dtype);
    bench.ratio("digest_gpu_" + type + "_256MiB", "digest", bench.digest(dtype, 256 * kMiB), 256 * kMiB, 0.95);
  }
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
    bench.fill(dtype);
    bench_sizes(bench, dtype, std::string(name(dtype)));
  }
  bench.fill(DType::bf16);
  bench_batch(bench);
  bench_tensors(bench, "digest_gpu_gpt_state", gpt_state(), 0.8);
  bench_tensors(bench, "digest_gpu_300_small_tensors", std::vector<size_t>(300, 4096), 0);
  bench_pieces(bench);
  bench_graph_nodes(bench);
  bench_views(bench);
  bench.fill(DType::raw);
  bench.ratio("digest_gpu_bf16_full_of_nan_256MiB", "digest", bench.digest(DType::bf16, 256 * kMiB), 256 * kMiB, 0);
  return 0;
}
