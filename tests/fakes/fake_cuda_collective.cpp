// The deterministic collectives' kernels on host memory (tests/collectives/world.h), and memory that processes share,
// which they need: with FAKE_CUDA_SHARED=1 all device memory can be opened by other processes, which have each a device
// of their own. Of the process with that RANK:
//   FAKE_CUDA_NO_PEERS=RANK             it cannot open the others' memory
//   FAKE_CUDA_ASTRAY=RANK               it can, but what it stores there does not arrive
//   FAKE_CUDA_NO_RECORDS=RANK           it has no device memory to ask its members through
//   FAKE_CUDA_NO_COLLECTIVES=RANK       it cannot load these kernels
//   FAKE_CUDA_MPS=RANK                  it shares its device with others
//   FAKE_CUDA_FEW=RANK                  its device has 4 multiprocessors (else FAKE_CUDA_MULTIPROCESSORS, or 128)
//   FAKE_CUDA_FAILS=RANK:CALL:LEAST:MOST:FIRST:COUNT
//                                       of the calls for LEAST to MOST bytes COUNT fail, from the FIRST (0) on
//   FAKE_CUDA_STALL=RANK:KERNEL:MS      a call that launches that kernel takes so long
// FAKE_CUDA_LINK=nvlink|pcie|none: each of two processes sees both devices, of which that is the link.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/collectives/world.h"
#include "tests/fakes/fake_cuda_digest.h"
#include "tests/fakes/fake_cuda_memory.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

using collective::CollectiveParams;

void run_collective(const FakeKernelCall* call, void* user) {
  CollectiveParams params;
  memcpy(&params, call->params, sizeof(params));
  if (!*static_cast<collective::RunWorker*>(user)) abort();  // of a type that this library was not built with
  if (params.protocol == collective::Protocol::local) params.blocks = 1;
  if ((params.protocol != collective::Protocol::local && call->grid[0] != params.blocks) ||
      call->block[0] != collective::kBlockThreads)
    abort();
  collective::run_on_threads(params, *static_cast<collective::RunWorker*>(user), 1, false);
}

struct Shared {
  int pid, file;
  uint64_t offset, size_bytes;
};
static_assert(sizeof(Shared) <= sizeof(CUipcMemHandle));

CUresult open_shared(CUdeviceptr* address, const CUipcMemHandle& handle) {
  Shared shared;
  memcpy(&shared, &handle, sizeof(shared));
  const std::string path = "/proc/" + std::to_string(shared.pid) + "/fd/" + std::to_string(shared.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0 || is_for_this_rank("FAKE_CUDA_NO_PEERS")) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = shared.offset / page * page, inside = shared.offset - begin;
  const int kind = is_for_this_rank("FAKE_CUDA_ASTRAY") ? MAP_PRIVATE : MAP_SHARED;
  void* memory =
      mmap(nullptr, inside + shared.size_bytes, PROT_READ | PROT_WRITE, kind, file, static_cast<off_t>(begin));
  close(file);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<uint64_t>(memory) + inside;
  Memory::get().add(reinterpret_cast<void*>(*address), shared.size_bytes, MemoryKind::device);
  return CUDA_SUCCESS;
}

}  // namespace

bool is_for_this_rank(const char* variable) {
  const char *chosen = getenv(variable), *rank = getenv("RANK");
  return chosen && rank && strcmp(chosen, rank) == 0;
}

int multiprocessors() {
  const char* count = getenv("FAKE_CUDA_MULTIPROCESSORS");
  if (is_for_this_rank("FAKE_CUDA_FEW") || !getenv("FAKE_CUDA_SHARED")) return 4;
  return count ? atoi(count) : 128;
}

bool fails_here(const char* call, size_t size_bytes) {
  const char *chosen = getenv("FAKE_CUDA_FAILS"), *rank = getenv("RANK");
  char name[32] = "";
  int of = -1, first = 0, count = 0;
  size_t least = 0, most = 0;
  if (!chosen || !rank || sscanf(chosen, "%d:%31[^:]:%zu:%zu:%d:%d", &of, name, &least, &most, &first, &count) != 6)
    return false;
  if (atoi(rank) != of || strcmp(name, call) != 0 || size_bytes < least || size_bytes > most) return false;
  static std::atomic<int> calls{0};
  const int number = calls++;
  return number >= first && number < first + count;
}

void stall_at(const char* kernel) {
  const char* chosen = getenv("FAKE_CUDA_STALL");
  char name[64] = "";
  int rank = -1;
  unsigned ms = 0;
  if (!chosen || !getenv("RANK") || sscanf(chosen, "%d:%63[^:]:%u", &rank, name, &ms) != 3) return;
  if (kernel && rank == atoi(getenv("RANK")) && strcmp(kernel, name) == 0) usleep(1000 * ms);
}

const KernelDefinition* collective_kernel(const char* name) {
  if (is_for_this_rank("FAKE_CUDA_NO_COLLECTIVES")) return nullptr;
  static const auto* all = [] {
    auto* made = new std::vector<KernelDefinition>;
    for (const char* kernel : collective::kCollectiveKernelNames) {
      auto* worker = new collective::RunWorker(collective::worker_of_kernel(kernel));
      made->push_back({kernel, &run_collective, worker, {{0, sizeof(CollectiveParams)}}});
    }
    return made;
  }();
  for (const KernelDefinition& one : *all) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

}  // namespace forkpoint::fake

using namespace forkpoint::fake;

FAKE cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  Block block;
  const int file = Memory::get().shared_file();
  if (file < 0 || !Memory::get().find(address, &block)) return CUDA_ERROR_NOT_SUPPORTED;
  const Shared shared = {getpid(), file, Memory::get().offset_of(block.start), block.size_bytes};
  memcpy(handle, &shared, sizeof(shared));
  return CUDA_SUCCESS;
}
FAKE cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned int) {
  return open_shared(address, handle);
}
FAKE cuIpcCloseMemHandle(CUdeviceptr address) {
  return Memory::get().remove(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) { return *can = 0, CUDA_SUCCESS; }
FAKE cuCtxEnablePeerAccess(CUcontext, unsigned int) { return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED; }

// The processes' first devices, in turn.
FAKE cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  const char* rank = getenv("RANK");
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(1 + ((rank ? atoi(rank) : 0) + device) % (getenv("FAKE_CUDA_LINK") ? 2 : 100));
  return CUDA_SUCCESS;
}
FAKE cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice, CUdevice) {
  const char* link = getenv("FAKE_CUDA_LINK");
  const bool is_none = !link || strcmp(link, "none") == 0;
  *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ? !is_none : link && strcmp(link, "nvlink") == 0;
  return CUDA_SUCCESS;
}
