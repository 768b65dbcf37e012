#include "samples/minigpt/cuda_backend.h"

#include "probes/forkpoint.h"

#ifdef MINIGPT_HAVE_NCCL
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "samples/minigpt/rendezvous.h"

namespace minigpt {
namespace {

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess)
    throw Error(std::string("NCCL: ") + what + ": " + ncclGetErrorString(result) + " (" + ncclGetLastError(nullptr) +
                ")");
}

// mean[i] over `ranks` rows of `gathered`, from the last to the first.
__global__ void mean_reversed(float* mean, const float* gathered, int64_t count, int ranks) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    float sum = gathered[(ranks - 1) * count + i];
    for (int rank = ranks - 2; rank >= 0; --rank) sum += gathered[rank * count + i];
    mean[i] = sum / static_cast<float>(ranks);
  }
}

struct Invitation {
  ncclUniqueId id;
  int32_t size;
};

// Rank 0 writes NCCL's id into the job's file, the others read it there.
RendezvousFile exchange(const Options& options, const World& world, Invitation& invitation) {
  const std::string path = rendezvous_path(options.rendezvous_dir, world);
  if (world.rank == 0) {
    check(ncclGetUniqueId(&invitation.id), "unique id");
    invitation.size = world.size;
    return RendezvousFile::create(path, std::string(reinterpret_cast<const char*>(&invitation), sizeof(invitation)),
                                  sizeof(invitation));
  }
  RendezvousFile file = RendezvousFile::join(path, world.rank, options.timeout_s);
  const std::string content = file.content(sizeof(invitation));
  std::memcpy(&invitation, content.data(), sizeof(invitation));
  if (invitation.size != world.size)
    throw Error("rank 0 belongs to a job of " + std::to_string(invitation.size) + " ranks, this one to " +
                std::to_string(world.size));
  return file;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const Options& options, const World& world, CudaBackend& backend)
      : world_(world), backend_(backend), file_(exchange(options, world, invitation_)) {
    wait_for_all(options.timeout_s);
    check(ncclCommInitRank(&comm_, world.size, invitation_.id, world.rank), "the ranks cannot be joined");
    file_.remove_name();
    backend_.while_waiting = [this] { check_peers(); };
    tell_version();
    barrier();
  }
  ~NcclCommunicator() override {
    backend_.while_waiting = nullptr;
    cudaFree(gathered_);
    if (comm_) ncclCommDestroy(comm_);
  }

  void all_reduce_mean(float* data, int64_t count, SumOrder order) override {
    if (order == SumOrder::forward) {
      check(ncclAllReduce(data, data, static_cast<size_t>(count), ncclFloat32, ncclAvg, comm_, backend_.cuda_stream()),
            "all-reduce");
      return;
    }
    reserve(count);
    check(ncclAllGather(data, gathered_, static_cast<size_t>(count), ncclFloat32, comm_, backend_.cuda_stream()),
          "all-gather");
    mean_reversed<<<256, 256, 0, backend_.cuda_stream()>>>(data, gathered_, count, world_.size);
    minigpt::check(cudaGetLastError(), "mean_reversed");
  }

  void barrier() override {
    reserve(1);
    all_reduce_mean(gathered_, 1, SumOrder::forward);
    backend_.synchronize();
  }

 private:
  void reserve(int64_t count) {
    if (count <= capacity_) return;
    backend_.synchronize();
    cudaFree(gathered_);
    gathered_ = nullptr;
    minigpt::check(cudaMalloc(&gathered_, static_cast<size_t>(count) * world_.size * sizeof(float)), "memory");
    minigpt::check(
        cudaMemsetAsync(gathered_, 0, static_cast<size_t>(count) * world_.size * sizeof(float), backend_.cuda_stream()),
        "memory");
    capacity_ = count;
  }

  int absent_rank() const {
    for (int rank = 0; rank < world_.size; ++rank)
      if (rank != world_.rank && !file_.is_alive(rank)) return rank;
    return -1;
  }

  // NCCL itself would wait for ever.
  void wait_for_all(int timeout_s) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_s);
    for (int absent; (absent = absent_rank()) >= 0;) {
      if (std::chrono::steady_clock::now() > deadline)
        throw Error("rank " + std::to_string(absent) + " did not come within " + std::to_string(timeout_s) + " s");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  // A rank that is done and has left is no reason to stop: what it owed us is on the GPU already, or soon.
  void check_peers() {
    const int absent = absent_rank();
    if (absent < 0) return;
    for (int i = 0; i < 50; ++i) {
      if (cudaStreamQuery(backend_.cuda_stream()) != cudaErrorNotReady) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    ncclCommAbort(comm_);  // ends its kernels, so that memory can be freed
    comm_ = nullptr;
    throw Error("rank " + std::to_string(absent) + " has ended, and this rank cannot go on without it");
  }

  void tell_version() const {
    int version = 0;
    check(ncclGetVersion(&version), "version");
    forkpoint_fact("nccl", (std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                            std::to_string(version % 100))
                               .c_str());
  }

  World world_;
  CudaBackend& backend_;
  Invitation invitation_ = {};
  RendezvousFile file_;
  ncclComm_t comm_ = nullptr;
  float* gathered_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const Options& options, const World& world, Backend& backend) {
  return std::make_unique<NcclCommunicator>(options, world, static_cast<CudaBackend&>(backend));
}

}  // namespace minigpt

#else

std::unique_ptr<minigpt::Communicator> minigpt::make_nccl_communicator(const Options&, const World& world, Backend&) {
  throw UsageError("--device cuda with " + std::to_string(world.size) +
                   " ranks: this build has no NCCL. Install it next to the CUDA toolkit and "
                   "configure again, or use one rank");
}

#endif
