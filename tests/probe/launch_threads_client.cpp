// A process whose threads are the ranks of a job and call CUDA and NCCL at the same time, on the fakes of both:
// launch_threads_client LIBCUDA SCENARIO.
//   ranks        in each step the ranks are threads of their own, which end with it. Prints "right" when every
//   all-reduce
//                gave what it must
//   failing      likewise; one call of the driver in fifty is out of memory, the probe's own calls as well as the
//                program's, which goes on without what it did not get
//   marks        each step begins with a range and the kernel in it, both called after the mark
//   many_marks   the ranks launch the mark's kernel at the same time
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "probes/forkpoint.h"
#include "tests/fakes/fake_nccl.h"
#include "tests/probe/fake_gpu_program.h"
#include "tests/probe/launch_threads_client.h"

using namespace launch_threads;
using forkpoint::NcclComm;
using forkpoint::NcclResult;
using forkpoint::NcclUniqueId;
using forkpoint::fake_gpu::Gpu;
using forkpoint::fake_gpu::Kernel;

namespace {

constexpr int kFloat = 7, kSum = 0;  // of NCCL

// More than a launch's usual parameters and pointers.
struct Large {
  float* buffers[kLargeBuffers];
  char rest[2400];
};

struct Kernels {
  Kernel<float*, float> put;
  Kernel<Large, float> put_all;
  Kernel<float*, float> mark;
};

struct Job {
  Gpu& gpu;
  Kernels kernels;
  bool failing = false;
  std::atomic<bool> wrong{false};
};

// In a failing process what failed is left out.
bool ok(const Job& job, CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return true;
  if (!job.failing) forkpoint::fake_gpu::require(result, call);
  return false;
}
#define OK(call) ok(job_, (call), #call)

struct Ids {
  NcclUniqueId world, late;
};

// One rank in one step.
class Rank {
 public:
  Rank(Job& job, int rank, int step, const Ids& ids) : job_(job), gpu_(job.gpu), rank_(rank), step_(step), ids_(ids) {}

  void run() {
    if (!OK(gpu_.driver().cuStreamCreate_(&stream_, CU_STREAM_NON_BLOCKING))) return;
    if (!OK(gpu_.driver().cuEventCreate_(&event_, 0))) return;
    for (float*& buffer : buffers_) buffer = allocate();
    forkpoint_scope_begin(FORKPOINT_FORWARD, rank_ % 2 ? "odd" : "even", nullptr);
    for (int round = 0; round < kRounds; ++round) launch_round(round);
    forkpoint_scope_end();
    replay_graph();
    reduce();
    OK(gpu_.driver().cuStreamSynchronize_(stream_));
    for (float* buffer : buffers_) release(buffer);
    OK(gpu_.driver().cuEventDestroy_(event_));
    OK(gpu_.driver().cuStreamDestroy_(stream_));
  }

 private:
  float* allocate() {
    CUdeviceptr address = 0;
    if (!OK(gpu_.driver().cuMemAllocAsync_(&address, kCount * sizeof(float), stream_))) return nullptr;
    return reinterpret_cast<float*>(address);
  }
  void release(float* buffer) {
    if (buffer) OK(gpu_.driver().cuMemFreeAsync_(Gpu::address(buffer), stream_));
  }
  template <typename... Args>
  void launch(const Kernel<Args...>& kernel, std::type_identity_t<Args>... arguments) {
    void* params[] = {static_cast<void*>(&arguments)..., nullptr};
    OK(gpu_.driver().cuLaunchKernel_(kernel.function, 1, 1, 1, 32, 1, 1, 0, stream_, params, nullptr));
  }

  void launch_round(int round) {
    float* passing = allocate();
    if (passing) launch(job_.kernels.put, passing, put_value(rank_, step_, round));
    if (round % 8 == 0) launch_large(round);
    float* to = buffers_[round % kBuffers];
    const size_t bytes = kCount * sizeof(float);
    if (passing && to) OK(gpu_.driver().cuMemcpyDtoDAsync_(Gpu::address(to), Gpu::address(passing), bytes, stream_));
    if (to) OK(gpu_.driver().cuMemsetD32Async_(Gpu::address(to), static_cast<unsigned>(round), kCount, stream_));
    OK(gpu_.driver().cuEventRecord_(event_, stream_));
    OK(gpu_.driver().cuStreamWaitEvent_(stream_, event_, 0));
    if (round % 16 == 0 && to) read(to);
    release(passing);
  }
  void launch_large(int round) {
    Large large;
    std::memset(static_cast<void*>(&large), 0, sizeof(large));
    for (int i = 0; i < kLargeBuffers; ++i) large.buffers[i] = buffers_[i % kBuffers];
    for (float* buffer : buffers_) {
      if (!buffer) return;
    }
    launch(job_.kernels.put_all, large, put_value(rank_, step_, round));
  }
  void read(const float* from) {
    float host[kCount];
    OK(gpu_.driver().cuMemcpyDtoHAsync_(host, Gpu::address(from), sizeof(host), stream_));
    OK(gpu_.driver().cuStreamSynchronize_(stream_));
  }

  void replay_graph() {
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    float* buffer = buffers_[0];
    if (!buffer) return;
    if (!OK(gpu_.driver().cuStreamBeginCapture_(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))) return;
    launch(job_.kernels.put, buffer, graph_value(rank_, step_));
    const bool captured = OK(gpu_.driver().cuStreamEndCapture_(stream_, &graph));
    if (captured && OK(gpu_.driver().cuGraphInstantiate_(&executable, graph, 0))) {
      for (int i = 0; i < kReplays; ++i) OK(gpu_.driver().cuGraphLaunch_(executable, stream_));
      OK(gpu_.driver().cuStreamSynchronize_(stream_));
      OK(gpu_.driver().cuGraphExecDestroy_(executable));
    }
    if (graph) OK(gpu_.driver().cuGraphDestroy_(graph));
  }

  // On communicators that are made, split and destroyed in every step, while the other ranks do the same.
  void reduce() {
    if (job_.failing) return;
    launch(job_.kernels.put, buffers_[0], static_cast<float>(rank_ + step_));
    NcclComm world = nullptr, reversed = nullptr, alone = nullptr, late = nullptr, late_split = nullptr;
    forkpoint::FakeNcclConfig config;
    config.blocking = 0;
    good(ncclCommInitRank(&world, kRanks, ids_.world, rank_));
    good(ncclCommInitRankConfig(&late, kRanks, ids_.late, rank_, &config));
    settle(late);
    good(ncclCommSplit(world, 0, -rank_, &reversed, nullptr));
    good(ncclCommSplit(world, rank_, 0, &alone, nullptr));
    good(ncclCommSplit(late, 0, rank_, &late_split, nullptr));
    settle(late), settle(late_split);
    for (NcclComm comm : {world, reversed, late, late_split}) reduce_on(comm, kRanks);
    reduce_on(alone, 1);
    OK(gpu_.driver().cuStreamSynchronize_(stream_));
    for (NcclComm comm : {late_split, alone, reversed}) good(ncclCommDestroy(comm));
    good(ncclCommFinalize(late));
    settle(late);
    good(ncclCommAbort(late));
    good(ncclCommDestroy(world));
  }
  // Alone, and two in a group.
  void reduce_on(NcclComm comm, int ranks) {
    float* in = buffers_[0];
    const auto all_reduce = [&](float* out) { good(ncclAllReduce(in, out, kCount, kFloat, kSum, comm, stream_)); };
    all_reduce(buffers_[1]);
    settle(comm);
    good(ncclGroupStart());
    all_reduce(buffers_[2]);
    all_reduce(buffers_[3]);
    good(ncclGroupEnd());
    settle(comm);
    OK(gpu_.driver().cuStreamSynchronize_(stream_));
    const float sum = static_cast<float>(ranks == 1 ? rank_ + step_ : ranks * (ranks - 1) / 2 + ranks * step_);
    for (int i = 1; i < kBuffers; ++i) job_.wrong = job_.wrong || buffers_[i][kCount - 1] != sum;
  }
  void good(NcclResult result) {
    if (result != forkpoint::kNcclSuccess && result != forkpoint::kNcclInProgress) job_.wrong = true;
  }
  void settle(NcclComm comm) {
    NcclResult state = forkpoint::kNcclInProgress;
    while (state == forkpoint::kNcclInProgress) good(ncclCommGetAsyncError(comm, &state));
    good(state);
  }

  Job& job_;
  Gpu& gpu_;
  const int rank_, step_;
  const Ids& ids_;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
  float* buffers_[kBuffers] = {};
};

void marks(Job& job) {
  float* buffer = job.gpu.allocate<float>(kCount);
  job.gpu.launch(job.kernels.mark, nullptr, buffer, 0.0f);  // in no range
  for (int step = 1; step < kSteps; ++step) {
    nvtxRangePushA("launch of the mark");
    nvtxRangePushA("inner");
    std::thread([&] { job.gpu.allocate<float>(kCount); }).join();
    job.gpu.launch(job.kernels.mark, nullptr, buffer, static_cast<float>(step));
    nvtxRangePop();
    nvtxRangePop();
    job.gpu.launch(job.kernels.put, nullptr, buffer, static_cast<float>(step));
  }
  job.gpu.synchronize();
}

void many_marks(Job& job) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      CUstream stream = job.gpu.stream();
      float* buffer = job.gpu.allocate<float>(kCount);
      for (int i = 0; i < kMarks; ++i) {
        job.gpu.launch(job.kernels.mark, stream, buffer, 0.0f);
        job.gpu.launch(job.kernels.put, stream, buffer, put_value(rank, 0, i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_step(Job& job, int step) {
  Ids ids = {};
  for (NcclUniqueId* id : {&ids.world, &ids.late}) ncclGetUniqueId(id);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back([&, rank] { Rank(job, rank, step, ids).run(); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  Gpu gpu(words[1]);
  const std::string scenario = words[2];
  Job job{gpu, {}, scenario == "failing", false};
  const auto fill = +[](float* out, float value) {
    for (size_t i = 0; i < kCount; ++i) out[i] = value;
  };
  job.kernels.put = gpu.kernel("put", fill);
  job.kernels.mark = gpu.kernel("mark", fill);
  job.kernels.put_all = gpu.kernel(
      "put_all", +[](Large large, float value) {
        for (float* buffer : large.buffers) buffer[0] = value;
      });
  if (std::getenv("SLOW")) gpu.find<decltype(fake_cuda_set_mode)>("fake_cuda_set_mode")(kFakeSlow);
  if (scenario == "marks") return marks(job), 0;
  if (scenario == "many_marks") return many_marks(job), 0;
  const auto fail_some = gpu.find<decltype(fake_cuda_set_failures)>("fake_cuda_set_failures");
  for (int step = 0; step < kSteps; ++step) {
    forkpoint_step_begin(step);
    if (job.failing && step > 0) fail_some(20, CUDA_ERROR_OUT_OF_MEMORY);
    run_step(job, step);
    fail_some(0, CUDA_SUCCESS);
    forkpoint_step_end();
  }
  std::printf("%s\n", job.wrong ? "wrong" : "right");
  return 0;
}
