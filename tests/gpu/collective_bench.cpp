// The deterministic collectives against NCCL's in the same run, on two GPUs or more: a thread a rank, arms interleaved,
// medians. NCCL runs as it comes, but without multicast (NVLS), unless NCCL_NVLS_ENABLE says otherwise.
//
// Usage: collective_bench [--ranks N] [--largest BYTES] [--samples N] [--json FILE] [--graphs] [--check]
//                         [--blocks N] [--slots N] [--tile BYTES] [--chunks N] [--least-chunk BYTES] [--lines BYTES]
//                         [--lag N]
// --graphs: launches are captured and replayed, so that what the host takes to launch is not in it. --check: exit 1
// where a goal is missed. The second line of options moves the work about.
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <string>

#include "tests/gpu/collective_ranks.h"

namespace forkpoint::collective {
namespace {

void must(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  std::fprintf(stderr, "collective_bench: %s: %s\n", what, ncclGetErrorString(result));
  std::exit(2);
}
#define MUST_NCCL(call) must(call, #call)

struct Options {
  StagingShape shape = staging_for(2);
  CollectiveTuning tuning;
  uint64_t largest = 1u << 30;
  int samples = 15;
  std::string json;
  bool graphs = false, check = false, own_blocks = false;
};

Options read_options(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--graphs")
      options.graphs = true;
    else if (word == "--check")
      options.check = true;
    else if (i + 1 == count)
      std::fprintf(stderr, "collective_bench: what is %s?\n", words[i]), std::exit(2);
    else if (word == "--json")
      options.json = words[++i];
    else {
      const auto number = std::strtoull(words[++i], nullptr, 0);
      const auto small = static_cast<uint32_t>(number);
      if (word == "--ranks")
        options.shape = staging_for(small);
      else if (word == "--largest")
        options.largest = number;
      else if (word == "--samples")
        options.samples = static_cast<int>(small);
      else if (word == "--blocks")
        options.shape.blocks = small, options.own_blocks = true;
      else if (word == "--slots")
        options.shape.slots = small;
      else if (word == "--tile")
        options.shape.tile_bytes = small;
      else if (word == "--chunks")
        options.tuning.chunks = small;
      else if (word == "--least-chunk")
        options.tuning.least_chunk_bytes = small;
      else if (word == "--lag")
        options.tuning.lag = small;
      else if (word == "--lines")
        options.tuning.low_latency_bytes = small;
      else
        std::fprintf(stderr, "collective_bench: what is %s?\n", word.c_str()), std::exit(2);
    }
  }
  return options;
}

struct Measured {
  std::string what;
  uint64_t bytes;
  double ours_us, nccl_us, goal;
  double ratio() const { return nccl_us / ours_us; }
};

// What all threads share.
class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        kernels_(static_cast<int>(options.shape.ranks)),
        ranks_(kernels_, options.shape, static_cast<int>(options.shape.ranks), options.tuning),
        meeting_(static_cast<std::ptrdiff_t>(options.shape.ranks)),
        took_(options.shape.ranks) {
    MUST_NCCL(ncclGetUniqueId(&id_));
  }

  void run_rank(uint32_t rank) {
    ranks_.use(rank);
    ncclComm_t comm = nullptr;
    MUST_NCCL(ncclCommInitRank(&comm, static_cast<int>(options_.shape.ranks), id_, static_cast<int>(rank)));
    char *in = nullptr, *out = nullptr;
    MUST(cudaMalloc(&in, options_.largest));
    MUST(cudaMalloc(&out, options_.largest));
    MUST(cudaMemset(in, 0, options_.largest));
    for (const Kind kind : {Kind::all_reduce, Kind::reduce_scatter}) {
      for (const DType dtype : {DType::bf16, DType::f32}) {
        for (uint64_t bytes = 4 << 10; bytes <= options_.largest; bytes *= bytes < 1 << 20 ? 2 : 4) {
          measure(rank, comm, kind, dtype, bytes, in, out);
        }
      }
    }
    MUST_NCCL(ncclCommDestroy(comm));
  }

  const std::vector<Measured>& measured() const { return measured_; }

 private:
  using Call = std::function<void()>;

  // bytes: of a rank's input.
  void measure(uint32_t rank, ncclComm_t comm, Kind kind, DType dtype, uint64_t bytes, char* in, char* out) {
    const cudaStream_t stream = ranks_.stream(rank);
    uint64_t count = bytes / static_cast<uint64_t>(size_bytes(dtype));
    if (kind == Kind::reduce_scatter) count /= options_.shape.ranks;
    const CollectiveSpec spec{.kind = kind, .dtype = dtype, .count = count};
    const ncclDataType_t type = dtype == DType::bf16 ? ncclBfloat16 : ncclFloat32;
    const Call ours = [&] { ranks_.call(spec, rank, in, out); };
    const Call nccl = [&] {
      if (kind == Kind::all_reduce)
        MUST_NCCL(ncclAllReduce(in, out, count, type, ncclSum, comm, stream));
      else
        MUST_NCCL(ncclReduceScatter(in, out, count, type, ncclSum, comm, stream));
    };
    const int repetitions = bytes <= 1 << 20 ? 50 : bytes <= 64 << 20 ? 20 : 5;
    std::vector<double> times[2];
    cudaGraphExec_t graphs[2] = {};
    if (options_.graphs) graphs[0] = capture(stream, ours, repetitions), graphs[1] = capture(stream, nccl, repetitions);
    for (int sample = -2; sample < options_.samples; ++sample) {
      for (const int arm : {0, 1}) {
        const double us = time(rank, stream, arm == 0 ? ours : nccl, graphs[arm], repetitions);
        if (sample >= 0) times[arm].push_back(us);
      }
    }
    for (cudaGraphExec_t graph : graphs) {
      if (graph) MUST(cudaGraphExecDestroy(graph));
    }
    if (rank == 0) note(kind, dtype, bytes, times);
  }

  cudaGraphExec_t capture(cudaStream_t stream, const Call& call, int repetitions) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    call();  // what is set up at the first call is not captured
    MUST(cudaStreamSynchronize(stream));
    meeting_.arrive_and_wait();
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < repetitions; ++i) call();
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&executable, graph, 0));
    MUST(cudaGraphDestroy(graph));
    return executable;
  }

  // Microseconds a call, of the slowest rank.
  double time(uint32_t rank, cudaStream_t stream, const Call& call, cudaGraphExec_t graph, int repetitions) {
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    meeting_.arrive_and_wait();
    call();  // the ranks' streams meet here, so that nobody's clock runs while he waits for another to be launched
    MUST(cudaEventRecord(begin, stream));
    if (graph) MUST(cudaGraphLaunch(graph, stream));
    for (int i = 0; i < repetitions && !graph; ++i) call();
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, begin, end));
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    took_[rank] = 1000.0 * ms / repetitions;
    meeting_.arrive_and_wait();
    const double slowest = *std::max_element(took_.begin(), took_.end());
    meeting_.arrive_and_wait();
    return slowest;
  }

  static double median(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2), times.end());
    return times[times.size() / 2];
  }
  static double goal_of(uint64_t bytes) {
    if (bytes <= 64 << 10) return 1 / 1.2;
    return bytes >= 1 << 20 && bytes <= 64 << 20 ? 1.15 : bytes > 64 << 20 ? 1.0 : 0;
  }
  void note(Kind kind, DType dtype, uint64_t bytes, const std::vector<double> (&times)[2]) {
    const std::string what =
        std::string(kind == Kind::all_reduce ? "all_reduce " : "reduce_scatter ") + std::string(name(dtype));
    measured_.push_back({what, bytes, median(times[0]), median(times[1]), goal_of(bytes)});
    const Measured& one = measured_.back();
    // Bandwidth of the bus, as NCCL's own tests have it.
    const double n = options_.shape.ranks,
                 moved = (kind == Kind::all_reduce ? 2 : 1) * (n - 1) / n * static_cast<double>(bytes);
    const char* verdict = one.goal == 0 ? "no goal" : one.ratio() >= one.goal ? "met" : "MISSED";
    std::printf(
        "bench collective %-20s %8.0f KiB: ours %9.2f us %6.1f GB/s, NCCL %9.2f us %6.1f GB/s, ratio %5.3f, goal %.2f "
        "%s\n",
        what.c_str(), static_cast<double>(bytes) / 1024, one.ours_us, moved / one.ours_us / 1e3, one.nccl_us,
        moved / one.nccl_us / 1e3, one.ratio(), one.goal, verdict);
    std::fflush(stdout);
  }

  const Options& options_;
  Kernels kernels_;
  Ranks ranks_;
  ncclUniqueId id_;
  std::barrier<> meeting_;
  std::vector<double> took_;
  std::vector<Measured> measured_;
};

void write_json(const std::string& path, const std::vector<Measured>& measured) {
  FILE* file = std::fopen(path.c_str(), "w");
  if (!file) std::fprintf(stderr, "collective_bench: %s cannot be written\n", path.c_str()), std::exit(2);
  std::fprintf(file, "[");
  for (size_t i = 0; i < measured.size(); ++i) {
    const Measured& one = measured[i];
    std::fprintf(file,
                 "%s\n  {\"what\": \"%s\", \"bytes\": %llu, \"ours_us\": %.3f, \"nccl_us\": %.3f, \"ratio\": %.4f, "
                 "\"goal\": %.3f}",
                 i ? "," : "", one.what.c_str(), static_cast<unsigned long long>(one.bytes), one.ours_us, one.nccl_us,
                 one.ratio(), one.goal);
  }
  std::fprintf(file, "\n]\n");
  std::fclose(file);
}

int run(int count, char** words) {
  Options options = read_options(count, words);
  int devices = 0, multiprocessors = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  if (devices < static_cast<int>(options.shape.ranks) || connect_devices() < static_cast<int>(options.shape.ranks)) {
    std::printf("skipped: needs %u GPUs that reach each other's memory, found %d\n", options.shape.ranks, devices);
    return 77;
  }
  MUST(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const auto first = blocks_for_communicator(static_cast<uint32_t>(multiprocessors), 0, options.shape.blocks);
  if (!options.own_blocks) options.shape.blocks = std::max(first, 1u);
  std::printf("%u blocks%s\n", options.shape.blocks,
              options.own_blocks ? "" : ", as the first communicator of a device has them");
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  Bench bench(options);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < options.shape.ranks; ++rank) threads.emplace_back([&, rank] { bench.run_rank(rank); });
  for (std::thread& thread : threads) thread.join();
  if (!options.json.empty()) write_json(options.json, bench.measured());
  const bool all_met = std::all_of(bench.measured().begin(), bench.measured().end(),
                                   [](const Measured& one) { return one.ratio() >= one.goal; });
  return options.check && !all_met ? 1 : 0;
}

}  // namespace
}  // namespace forkpoint::collective

int main(int count, char** words) { return forkpoint::collective::run(count, words); }
