// The message mode of the deterministic collectives, as the preloaded probe does it, against NCCL's own reductions: one
// rank a process, arms interleaved, medians. NCCL's are called by their profiling names, which the probe leaves alone.
//
// Usage: two_ranks.sh torchrun env LD_PRELOAD=libforkpoint.so FORKPOINT_DETERMINISTIC=collectives
//          FORKPOINT_TEST_COLLECTIVES=messages collective_message_bench [--largest BYTES] [--check]
// --check: exit 1 where the goal, 0.75 of NCCL's speed, is missed. collective_messages.sh does all of this.
#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr double kGoal = 0.75;
constexpr int kSamples = 11;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "collective_message_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
void must(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  std::fprintf(stderr, "collective_message_bench: %s: %s\n", what, ncclGetErrorString(result));
  std::exit(2);
}
#define MUST(call) must(call, #call)

int number_of(const char* variable) {
  const char* text = std::getenv(variable);
  if (!text) std::fprintf(stderr, "collective_message_bench: %s is not set: run two_ranks.sh\n", variable), std::exit(2);
  return std::atoi(text);
}

// Rank 0 leaves it in a file.
ncclUniqueId meet(int rank) {
  const char* folder = std::getenv("NCCL_PROGRAM_MEETING");
  if (!folder) std::fprintf(stderr, "collective_message_bench: run two_ranks.sh\n"), std::exit(2);
  const std::string path = std::string(folder) + ".messages", part = path + ".part";
  ncclUniqueId id;
  if (rank == 0) {
    MUST(ncclGetUniqueId(&id));
    FILE* file = std::fopen(part.c_str(), "wb");
    const bool written = file && std::fwrite(&id, sizeof(id), 1, file) == 1 && std::fclose(file) == 0;
    if (!written || std::rename(part.c_str(), path.c_str()) != 0) std::perror(path.c_str()), std::exit(2);
    return id;
  }
  FILE* file = nullptr;
  for (int tries = 0; tries < 6000 && !(file = std::fopen(path.c_str(), "rb")); ++tries) usleep(10'000);
  if (!file || std::fread(&id, sizeof(id), 1, file) != 1) std::perror(path.c_str()), std::exit(2);
  std::fclose(file);
  return id;
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

class Bench {
 public:
  Bench(int rank, int ranks, uint64_t largest) : rank_(rank), ranks_(ranks) {
    MUST(ncclCommInitRank(&comm_, ranks, meet(rank), rank));
    MUST(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    MUST(cudaEventCreate(&begin_));
    MUST(cudaEventCreate(&end_));
    MUST(cudaMalloc(&in_, largest));
    MUST(cudaMalloc(&out_, largest));
    MUST(cudaMalloc(&slowest_, sizeof(float)));
    MUST(cudaMemset(in_, 0, largest));
  }

  // false: the goal is missed. bytes: of a rank's input.
  bool measure(bool scatters, uint64_t bytes) {
    const size_t count = bytes / sizeof(float) / static_cast<size_t>(scatters ? ranks_ : 1);
    const auto call = [&](bool ours) {
      if (scatters && ours) MUST(ncclReduceScatter(in_, out_, count, ncclFloat, ncclSum, comm_, stream_));
      if (scatters && !ours) MUST(pncclReduceScatter(in_, out_, count, ncclFloat, ncclSum, comm_, stream_));
      if (!scatters && ours) MUST(ncclAllReduce(in_, out_, count, ncclFloat, ncclSum, comm_, stream_));
      if (!scatters && !ours) MUST(pncclAllReduce(in_, out_, count, ncclFloat, ncclSum, comm_, stream_));
    };
    std::vector<double> times[2];
    for (int sample = -2; sample < kSamples; ++sample) {
      for (const int arm : {0, 1}) {
        const double us = time([&] { call(arm == 0); }, bytes <= 1 << 20 ? 50 : bytes <= 64 << 20 ? 20 : 5);
        if (sample >= 0) times[arm].push_back(us);
      }
    }
    const double ours = median(times[0]), nccl = median(times[1]), ratio = nccl / ours;
    if (rank_ == 0)
      std::printf("bench messages %-14s float32 %8llu KiB: ours %9.2f us, NCCL %9.2f us, ratio %5.3f, goal %.2f %s\n",
                  scatters ? "reduce_scatter" : "all_reduce", static_cast<unsigned long long>(bytes >> 10), ours, nccl,
                  ratio, kGoal, ratio >= kGoal ? "met" : "MISSED");
    std::fflush(stdout);
    return ratio >= kGoal;
  }

 private:
  // Microseconds a call, of the slowest rank.
  double time(const std::function<void()>& call, int repetitions) {
    meet_all(0);
    call();  // the ranks' streams meet here
    MUST(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < repetitions; ++i) call();
    MUST(cudaEventRecord(end_, stream_));
    MUST(cudaEventSynchronize(end_));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, begin_, end_));
    return 1000.0 * meet_all(ms) / repetitions;
  }
  // The largest of what the ranks have.
  float meet_all(float own) {
    MUST(cudaMemcpyAsync(slowest_, &own, sizeof(own), cudaMemcpyHostToDevice, stream_));
    MUST(pncclAllReduce(slowest_, slowest_, 1, ncclFloat, ncclMax, comm_, stream_));
    MUST(cudaMemcpyAsync(&own, slowest_, sizeof(own), cudaMemcpyDeviceToHost, stream_));
    MUST(cudaStreamSynchronize(stream_));
    return own;
  }

  const int rank_, ranks_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  char *in_ = nullptr, *out_ = nullptr;
  float* slowest_ = nullptr;
};

}  // namespace

int main(int count, char** words) {
  uint64_t largest = 256 << 20;
  bool check = false;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(words[i], "--check") == 0)
      check = true;
    else if (std::strcmp(words[i], "--largest") == 0 && i + 1 < count)
      largest = std::strtoull(words[++i], nullptr, 0);
    else
      std::fprintf(stderr, "collective_message_bench: what is %s?\n", words[i]), std::exit(2);
  }
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const int rank = number_of("RANK"), ranks = number_of("WORLD_SIZE"), device = number_of("LOCAL_RANK");
  int devices = 0;
  MUST(cudaGetDeviceCount(&devices));
  MUST(cudaSetDevice(device % devices));  // one of its own by CUDA_VISIBLE_DEVICES, or one of all
  Bench bench(rank, ranks, largest);
  bool all_met = true;
  for (const bool scatters : {false, true}) {
    for (uint64_t bytes = 64 << 10; bytes <= largest; bytes *= 4) all_met = bench.measure(scatters, bytes) && all_met;
  }
  return check && !all_met ? 1 : 0;
}
