#include "tests/probe/nccl_program.h"

#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/fakes/fake_cuda.h"

namespace nccl_program {
namespace {

void* cuda = nullptr;

template <typename Function>
Function* find(const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(cuda, name));
  if (!found) exit(91);
  return found;
}

}  // namespace

void load_cuda(const std::string& library) {
  cuda = dlopen(library.c_str(), RTLD_NOW);
  if (!cuda) exit(92);
  find<CUresult(unsigned)>("cuInit")(0);
}

float* device_floats(const std::vector<float>& values) {
  CUdeviceptr address = 0;
  find<CUresult(CUdeviceptr*, size_t)>("cuMemAlloc_v2")(&address, values.size() * sizeof(float) + 4);
  auto* memory = reinterpret_cast<float*>(address);
  memcpy(memory, values.data(), values.size() * sizeof(float));
  return memory;
}

std::vector<float> host_floats(const float* device, size_t count) {
  synchronize();
  return {device, device + count};
}

void* new_stream() {
  CUstream stream = nullptr;
  find<CUresult(CUstream*, unsigned)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING);
  return stream;
}

void order(void* first, void* then) {
  CUevent event = nullptr;
  find<CUresult(CUevent*, unsigned)>("cuEventCreate")(&event, 0);
  find<CUresult(CUevent, void*)>("cuEventRecord")(event, first);
  find<CUresult(void*, CUevent, unsigned)>("cuStreamWaitEvent")(then, event, 0);
}

void* captured(void* stream, const std::function<void()>& body, bool global) {
  CUgraph graph = nullptr;
  CUgraphExec made = nullptr;
  find<CUresult(void*, CUstreamCaptureMode)>("cuStreamBeginCapture_v2")(
      stream, global ? CU_STREAM_CAPTURE_MODE_GLOBAL : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  body();
  const CUresult result = find<CUresult(void*, CUgraph*)>("cuStreamEndCapture")(stream, &graph);
  if (result == CUDA_SUCCESS)
    find<CUresult(CUgraphExec*, CUgraph, unsigned long long)>("cuGraphInstantiateWithFlags")(&made, graph, 0);
  else
    printf("the capture ends with %d: WRONG\n", result);
  return made;
}

void launch_graph(void* graph, void* stream) { find<CUresult(void*, void*)>("cuGraphLaunch")(graph, stream); }

void defer_device_work() { find<void(int)>("fake_cuda_set_mode")(kFakeDeferred); }

void synchronize() { find<CUresult()>("cuCtxSynchronize")(); }

size_t free_device_bytes() {
  size_t free_bytes = 0, all_bytes = 0;
  find<CUresult(size_t*, size_t*)>("cuMemGetInfo_v2")(&free_bytes, &all_bytes);
  return free_bytes;
}

void reset_context() { find<void()>("fake_cuda_reset")(); }

forkpoint::NcclUniqueId shared_id(const Ranks& ranks, const std::string& name) {
  forkpoint::NcclUniqueId id = {};
  const std::string path = ranks.folder + "/id-" + name;
  if (ranks.rank == 0 || name.starts_with("own-")) {
    check(ncclGetUniqueId(&id), "unique id");
    std::ofstream(path + ".part", std::ios::binary).write(id.bytes, sizeof(id.bytes));
    std::filesystem::rename(path + ".part", path);
    return id;
  }
  for (int i = 0; i < 20'000 && !std::filesystem::exists(path); ++i) usleep(1000);
  std::ifstream(path, std::ios::binary).read(id.bytes, sizeof(id.bytes));
  return id;
}

forkpoint::NcclComm world_communicator(const Ranks& ranks) {
  forkpoint::NcclComm comm = nullptr;
  check(ncclCommInitRank(&comm, ranks.size, shared_id(ranks, "world"), ranks.rank), "init");
  return comm;
}

void check(forkpoint::NcclResult result, const char* what, forkpoint::NcclResult expected) {
  if (result == expected) return;
  printf("%s returned %d, expected %d\n", what, result, expected);
  fflush(stdout);
  exit(90);
}
}  // namespace nccl_program
