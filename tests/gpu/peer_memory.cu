// Parts of `peer` about memory that is mapped, exported, pooled or managed.
#include <cuda.h>  // types only: the program is not linked with libcuda
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "peer.h"

extern char** environ;

__global__ void mapped_add(float* to, const float* from, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] += from[i] + 1;
}

namespace {

template <typename Function>
Function* driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  if (!entry) {
    fprintf(stderr, "peer: the driver has no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<Function*>(entry);
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  fprintf(stderr, "peer: %s: CUDA error %d\n", call, static_cast<int>(result));
  exit(1);
}

// Physical memory of one device at an address that both may use.
struct Mapped {
  CUdeviceptr address = 0;
  size_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;

  Mapped(int device, size_t wanted) {
    CUmemAllocationProp form{};
    form.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    form.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    size_t grain = 0;
    check_driver(driver_entry<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity")(
                     &grain, &form, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "cuMemGetAllocationGranularity");
    bytes = (wanted + grain - 1) / grain * grain;
    check_driver(driver_entry<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&address, bytes, 0, 0, 0),
                 "cuMemAddressReserve");
    check_driver(driver_entry<decltype(cuMemCreate)>("cuMemCreate")(&handle, bytes, &form, 0), "cuMemCreate");
    check_driver(driver_entry<decltype(cuMemMap)>("cuMemMap")(address, bytes, 0, handle, 0), "cuMemMap");
    CUmemAccessDesc access[2] = {};
    for (int i = 0; i < 2; ++i) {
      access[i].location = {CU_MEM_LOCATION_TYPE_DEVICE, i};
      access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    check_driver(driver_entry<decltype(cuMemSetAccess)>("cuMemSetAccess")(address, bytes, access, 2), "cuMemSetAccess");
  }
  void unmap() {
    check_driver(driver_entry<decltype(cuMemUnmap)>("cuMemUnmap")(address, bytes), "cuMemUnmap");
    check_driver(driver_entry<decltype(cuMemRelease)>("cuMemRelease")(handle), "cuMemRelease");
    check_driver(driver_entry<decltype(cuMemAddressFree)>("cuMemAddressFree")(address, bytes), "cuMemAddressFree");
  }
  float* floats() const { return reinterpret_cast<float*>(address); }
};

// One after the other, on both devices; afterwards in the checksum.
void add_on_both(float* shared, size_t shared_bytes, int owner, int count) {
  for (const int device : {0, 1}) {
    const Floats own = make_on(device, count);
    CHECK(cudaDeviceSynchronize());
    mapped_add<<<blocks_for(count), kThreads>>>(shared, own.data, count);
    if (device == owner) handed_peer("mapped_add", {shared_bytes, own.bytes()}, {});
    else handed_peer("mapped_add", {own.bytes()}, {shared_bytes});
    CHECK(cudaDeviceSynchronize());
  }
  std::vector<float> host(count);
  CHECK(cudaSetDevice(owner));
  CHECK(cudaMemcpy(host.data(), shared, count * sizeof(float), cudaMemcpyDeviceToHost));
  add_to_checksum(host.data(), count * sizeof(float));
  CHECK(cudaSetDevice(0));
}

std::string in_hex(const void* data, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    char two[3];
    snprintf(two, sizeof(two), "%02x", static_cast<const unsigned char*>(data)[i]);
    text += two;
  }
  return text;
}

// Another process, which is rank 1, adds to what the handle names.
void let_other_process_add(const std::string& handle, const char* device) {
  std::string program = "/proc/self/exe", role = "opener", text = handle, where = device, rank = "RANK=1";
  char* words[] = {program.data(), role.data(), text.data(), where.data(), nullptr};
  std::vector<char*> variables = {rank.data()};
  for (char** entry = environ; *entry; ++entry) {
    if (strncmp(*entry, "RANK=", 5) != 0) variables.push_back(*entry);
  }
  variables.push_back(nullptr);
  pid_t child = 0;
  int status = -1;
  if (posix_spawn(&child, words[0], nullptr, nullptr, words, variables.data()) != 0 ||
      waitpid(child, &status, 0) != child || status != 0) {
    fprintf(stderr, "peer: the other process failed: status %d\n", status);
    exit(1);
  }
}

}  // namespace

void run_mapped() {
  for (const int owner : {0, 1}) {
    CHECK(cudaSetDevice(owner));
    Mapped memory(owner, 3u << 20);
    CHECK(cudaMemset(memory.floats(), 0, memory.bytes));
    CHECK(cudaDeviceSynchronize());
    add_on_both(memory.floats(), memory.bytes, owner, 9000);
    memory.unmap();
  }
}

// Exported to a process that uses it on device 1.
void run_exported() {
  const Floats x = make_on(0, 512 * 1024);  // an allocation of its own: 2 MiB
  CHECK(cudaDeviceSynchronize());
  fflush(stdout);
  cudaIpcMemHandle_t handle;
  CHECK(cudaIpcGetMemHandle(&handle, x.data));
  let_other_process_add(in_hex(&handle, sizeof(handle)), "1");
  peer_scale<<<blocks_for(x.count), kThreads>>>(x.data, 2.0f, x.count);
  handed_peer("peer_scale", {x.bytes()}, {});
  CHECK(cudaDeviceSynchronize());
}

int run_opener(const char* text, int device) {
  cudaIpcMemHandle_t handle;
  for (size_t i = 0; i < sizeof(handle); ++i) {
    unsigned value = 0;
    if (sscanf(text + 2 * i, "%2x", &value) != 1) return 2;
    reinterpret_cast<unsigned char*>(&handle)[i] = static_cast<unsigned char>(value);
  }
  CHECK(cudaSetDevice(device));
  mark_step<<<1, 1>>>();
  const Floats own = make(10000);
  float* opened = nullptr;
  CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&opened), handle, cudaIpcMemLazyEnablePeerAccess));
  CHECK(cudaDeviceSynchronize());
  mapped_add<<<blocks_for(own.count), kThreads>>>(opened, own.data, own.count);
  mapped_add<<<blocks_for(own.count), kThreads>>>(own.data, opened, own.count);
  std::vector<float> host(own.count);
  CHECK(cudaMemcpy(host.data(), own.data, own.bytes(), cudaMemcpyDeviceToHost));
  add_to_checksum(host.data(), own.bytes());
  CHECK(cudaIpcCloseMemHandle(opened));
  printf("opened: checksum %016llx\n", static_cast<unsigned long long>(checksum));
  return 0;
}

// A pool of device 0's that device 1 may use too.
void run_pool_of_both() {
  constexpr int kCount = 11000;
  CHECK(cudaSetDevice(0));
  cudaMemPoolProps form{};
  form.allocType = cudaMemAllocationTypePinned;
  form.location = {cudaMemLocationTypeDevice, 0};
  cudaMemPool_t pool = nullptr;
  CHECK(cudaMemPoolCreate(&pool, &form));
  cudaMemAccessDesc access{};
  access.location = {cudaMemLocationTypeDevice, 1};
  access.flags = cudaMemAccessFlagsProtReadWrite;
  CHECK(cudaMemPoolSetAccess(pool, &access, 1));
  for (int round = 0; round < 3; ++round) {  // the pool gives the same address again
    float* data = nullptr;
    CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&data), kCount * sizeof(float), pool, nullptr));
    CHECK(cudaMemsetAsync(data, 0, kCount * sizeof(float), nullptr));
    CHECK(cudaDeviceSynchronize());
    add_on_both(data, kCount * sizeof(float), 0, kCount);
    CHECK(cudaFreeAsync(data, nullptr));
    CHECK(cudaDeviceSynchronize());
  }
  CHECK(cudaMemPoolDestroy(pool));
}

void run_managed_by_both() {
  constexpr int kCount = 12000;
  float* data = nullptr;
  CHECK(cudaMallocManaged(&data, kCount * sizeof(float)));
  memcpy(data, values(kCount).data(), kCount * sizeof(float));
  for (const int device : {0, 1}) {
    CHECK(cudaSetDevice(device));
    peer_scale<<<blocks_for(kCount), kThreads>>>(data, 0.5f, kCount);
    handed_peer("peer_scale", {kCount * sizeof(float)}, {});
    CHECK(cudaDeviceSynchronize());
  }
  add_to_checksum(data, kCount * sizeof(float));
  CHECK(cudaFree(data));
  CHECK(cudaSetDevice(0));
}
