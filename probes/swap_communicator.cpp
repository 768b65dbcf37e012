#include "probes/swap_communicator.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/collective_fatbin.h"
#include "lib/digest_mix.h"
#include "probes/os.h"

namespace forkpoint {

// What a member tells the others. Twice: what it can, then whether it reaches all of them.
struct SwapCommunicator::Record {
  char magic[16];
  uint32_t version, mode, willing, reaches;
  uint64_t host, process;
  uint64_t address, context;
  int32_t device;
  uint32_t reserved;
  CUipcMemHandle shared;
  collective::StagingShape shape;
  char why[96];
  char unused[16];
};

namespace {

constexpr char kMagic[16] = "forkpoint-swap";
constexpr uint32_t kVersion = 1;  // of the rule, the protocol and the planner's cut
constexpr int64_t kPauseNs = 50'000, kPatienceNs = 60'000'000'000;

constinit std::atomic<SwapKernels*> all_kernels{nullptr};
constinit std::atomic<uint32_t> nobody_wakes{0};

// Staging memory that a destroyed communicator has left, by its size and context. Taken and given back whole.
struct Spare {
  std::atomic<CUdeviceptr> memory{0};
  CUcontext context = nullptr;
  uint64_t size_bytes = 0;
  std::atomic<bool> filling{false};
};
Spare spares[64];

CUdeviceptr take_spare(CUcontext context, uint64_t size_bytes) {
  for (Spare& spare : spares) {
    CUdeviceptr memory = spare.memory.load(std::memory_order_acquire);
    if (!memory || spare.context != context || spare.size_bytes != size_bytes) continue;
    if (!spare.memory.compare_exchange_strong(memory, 0)) continue;
    spare.filling.store(false, std::memory_order_release);
    return memory;
  }
  return 0;
}

bool keep_spare(CUcontext context, uint64_t size_bytes, CUdeviceptr memory) {
  for (Spare& spare : spares) {
    if (spare.filling.exchange(true)) continue;
    spare.context = context;
    spare.size_bytes = size_bytes;
    spare.memory.store(memory, std::memory_order_release);
    return true;
  }
  return false;
}

// Of this machine since it was started: processes that share it may share memory.
uint64_t host_number() {
  char text[64] = "";
  const int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  const ssize_t got = file < 0 ? 0 : read(file, text, sizeof(text) - 1);
  if (file >= 0) close(file);
  uint64_t number = 1;
  for (ssize_t i = 0; i < got; ++i) number = mix64(number ^ static_cast<unsigned char>(text[i]));
  return number;
}

// Of this process. Its pid would be another one's too, in another container.
constinit std::atomic<uint64_t> own_number{0};
uint64_t process_number() {
  uint64_t number = own_number.load();
  if (number) return number;
  if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != static_cast<ssize_t>(sizeof(number))) {
    number = mix64(static_cast<uint64_t>(now_ns()) ^ static_cast<uint64_t>(getpid()) << 40);
  }
  uint64_t none = 0;
  own_number.compare_exchange_strong(none, number | 1);
  return own_number.load();
}

bool has_all(const CudaDriver& driver) {
  return driver.cuDeviceCanAccessPeer_ && driver.cuCtxEnablePeerAccess_ && driver.cuIpcGetMemHandle_ &&
         driver.cuIpcOpenMemHandle_ && driver.cuIpcCloseMemHandle_ && driver.cuEventRecordWithFlags_;
}

// Loaded now and not at their first launch, which may wait for the device while a peer waits for it.
const SwapKernels* kernels_of(const CudaDriver& driver, CUcontext context) {
  for (SwapKernels* known = all_kernels.load(std::memory_order_acquire); known; known = known->next) {
    if (known->context == context) return known;
  }
  auto* made = new (std::nothrow) SwapKernels;
  CUmodule module = nullptr;
  if (!made || driver.cuModuleLoadData_(&module, forkpoint_collective_fatbin_data) != CUDA_SUCCESS) return nullptr;
  made->context = context;
  for (int i = 0; i < collective::kCollectiveKernelCount; ++i) {
    int registers = 0;
    CUresult result = driver.cuModuleGetFunction_(&made->function[i], module, collective::kCollectiveKernelNames[i]);
    if (result == CUDA_SUCCESS) {
      result = driver.cuFuncLoad_
                   ? driver.cuFuncLoad_(made->function[i])
                   : driver.cuFuncGetAttribute_(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, made->function[i]);
    }
    if (result != CUDA_SUCCESS) return nullptr;
  }
  made->next = all_kernels.load();
  while (!all_kernels.compare_exchange_weak(made->next, made)) {
  }
  return made;
}

}  // namespace

bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result) {
  while (result == kNcclInProgress) {
    if (!library.CommGetAsyncError || library.CommGetAsyncError(comm, &result) != kNcclSuccess) return false;
    if (result == kNcclInProgress) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  return result == kNcclSuccess;
}

// ---- Deciding

bool SwapCommunicator::enter_context() {
  CUcontext before = nullptr;
  if (driver_.cuCtxGetCurrent_(&before) != CUDA_SUCCESS) return false;
  pushed_ = before != context_;
  if (pushed_ && driver_.cuCtxPushCurrent_(context_) != CUDA_SUCCESS) return pushed_ = false;
  return true;
}
void SwapCommunicator::leave_context() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent_(&popped);
  pushed_ = false;
}

// The one in which NCCL works: the current one, if it is on the communicator's device, else the device's primary one.
bool SwapCommunicator::find_context() {
  if (!library_.CommCuDevice || library_.CommCuDevice(handle.load(), &device_) != kNcclSuccess) return false;
  CUcontext current = nullptr;
  CUdevice on = -1;
  if (driver_.cuCtxGetCurrent_(&current) != CUDA_SUCCESS) return false;
  if (current && driver_.cuCtxGetDevice_(&on) == CUDA_SUCCESS && on == device_) return context_ = current, true;
  return driver_.cuDevicePrimaryCtxRetain_(&context_, device_) == CUDA_SUCCESS;
}

// Whole pages of the device: smaller pieces share an allocation with others, and a handle opens all of it.
uint64_t SwapCommunicator::staging_bytes() const {
  constexpr uint64_t kPage = 2 << 20;
  return (shape_.total_bytes() + kPage - 1) / kPage * kPage;
}

bool SwapCommunicator::make_staging() {
  shape_.ranks = static_cast<uint32_t>(size_);
  shape_.slots = kStagingSlots;
  const uint64_t size_bytes = staging_bytes();
  staging_ = take_spare(context_, size_bytes);
  if (!staging_ && driver_.cuMemAlloc_(&staging_, size_bytes) != CUDA_SUCCESS) return staging_ = 0, false;
  return driver_.cuMemsetD8Async_(staging_, 0, size_bytes, exchange_) == CUDA_SUCCESS;
}

bool SwapCommunicator::make_exchange() {
  const auto places = static_cast<size_t>(size_);
  host_records_ = static_cast<Record*>(calloc(places + 1, sizeof(Record)));
  abort_ = static_cast<uint32_t*>(map_zeroed(4096));
  return host_records_ && abort_ && driver_.cuStreamCreate_(&exchange_, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
         driver_.cuMemAlloc_(&records_, (places + 1) * sizeof(Record)) == CUDA_SUCCESS &&
         driver_.cuEventCreate_(&last_, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS &&
         driver_.cuMemHostRegister_(abort_, 4096, CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE) ==
             CUDA_SUCCESS &&
         driver_.cuMemHostGetDevicePointer_(&device_abort_, abort_, 0) == CUDA_SUCCESS && driver_.cuMemcpyHtoDAsync_ &&
         driver_.cuMemcpyDtoHAsync_ && driver_.cuStreamQuery_;
}

SwapCommunicator::~SwapCommunicator() { free(host_records_); }

// false: this member cannot even say so.
bool SwapCommunicator::prepare() {
  const NcclComm comm = handle.load();
  if (!library_.AllGather || !library_.CommCount || library_.CommCount(comm, &size_) != kNcclSuccess) return false;
  if (!library_.CommUserRank || library_.CommUserRank(comm, &place_) != kNcclSuccess) return false;
  if (size_ < 2) return refuse("it has one member"), false;  // the same on all of them
  if (size_ > static_cast<int>(collective::kMostRanks))
    return refuse("it has more members than the kernels take"), false;
  if (!find_context() || !enter_context()) return false;
  const RelaxedCapture relaxed(driver_);
  const bool can_say = make_exchange();
  if (can_say) {
    if (!has_all(driver_))
      refuse("the driver lacks a function");
    else if (!(kernels_ = kernels_of(driver_, context_)))
      refuse("the kernels could not be loaded");
    else if (!make_staging())
      refuse("there is no device memory for it");
  }
  leave_context();
  return can_say;
}

void SwapCommunicator::fill(Record* record) const {
  memcpy(record->magic, kMagic, sizeof(kMagic));
  record->version = kVersion;
  record->mode = (mode_.wide ? 1u : 0u) | (mode_.tree ? 2u : 0u) | (mode_.messages ? 4u : 0u);
  record->willing = refusal_[0] == '\0';
  record->reaches = reaches_all_;
  record->host = host_number();
  record->process = process_number();
  record->address = staging_;
  record->context = reinterpret_cast<uint64_t>(context_);
  record->device = device_;
  record->shape = shape_;
  strncpy(record->why, refusal_, sizeof(record->why) - 1);
}

// Why not all can, as each member sees it alike. nullptr: all can.
const char* SwapCommunicator::reason_against(const Record* records) const {
  for (int i = 0; i < size_; ++i) {
    const Record& one = records[i];
    if (memcmp(one.magic, kMagic, sizeof(kMagic)) != 0) return "a member answered something else";
    if (one.version != kVersion) return "a member's forkpoint is of another version";
    if (one.mode != records[0].mode) return "the members are to add in different ways";
    if (!one.willing) return one.why[0] ? one.why : "a member cannot";
    if (memcmp(&one.shape, &records[0].shape, sizeof(one.shape)) != 0) return "the members' staging memory differs";
  }
  return nullptr;
}

bool SwapCommunicator::map_peers(const Record* records) {
  for (int i = 0; i < size_; ++i) {
    reached_[i] = reinterpret_cast<void*>(records[i].address);
    if (i == place_) continue;
    if (records[i].host != records[place_].host) return false;
    if (records[i].process != process_number()) {
      CUdeviceptr opened = 0;
      if (driver_.cuIpcOpenMemHandle_(&opened, records[i].shared, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS)
        return false;
      reached_[i] = reinterpret_cast<void*>(opened);
      opened_[i] = true;
      continue;
    }
    if (records[i].device == device_) continue;
    int can = 0;
    if (driver_.cuDeviceCanAccessPeer_(&can, device_, records[i].device) != CUDA_SUCCESS || !can) return false;
    const CUresult result = driver_.cuCtxEnablePeerAccess_(reinterpret_cast<CUcontext>(records[i].context), 0);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return false;
  }
  return true;
}

// Waits for all members. One that does not run under the probe never comes: then this says so, once, and waits on.
bool SwapCommunicator::receive_records() {
  const size_t bytes = static_cast<size_t>(size_) * sizeof(Record);
  if (driver_.cuMemcpyDtoHAsync_(host_records_ + 1, records_ + sizeof(Record), bytes, exchange_) != CUDA_SUCCESS)
    return false;
  const int64_t say_at_ns = now_ns() + kPatienceNs;
  bool said = false;
  for (;;) {
    const CUresult state = driver_.cuStreamQuery_(exchange_);
    if (state != CUDA_ERROR_NOT_READY) return state == CUDA_SUCCESS;
    futex_wait(nobody_wakes, 0, kPauseNs);
    if (said || now_ns() < say_at_ns) continue;
    said = true;
    say("a communicator of %d ranks waits for members to agree on deterministic collectives: is forkpoint, with the "
        "same "
        "--deterministic, on every rank?",
        size_);
  }
}

// Puts what this member has to say where NCCL takes it from.
bool SwapCommunicator::post(bool first) {
  if (!enter_context()) return false;
  const RelaxedCapture relaxed(driver_);
  Record& own = host_records_[0];
  own = {};
  fill(&own);
  if (first && own.willing && driver_.cuIpcGetMemHandle_(&own.shared, staging_) != CUDA_SUCCESS) own.shared = {};
  const bool posted = driver_.cuMemcpyHtoDAsync_(records_, &own, sizeof(Record), exchange_) == CUDA_SUCCESS;
  leave_context();
  return posted;
}

NcclResult SwapCommunicator::gather() {
  if (!enter_context()) return kNcclCudaError;
  char* all = reinterpret_cast<char*>(records_) + sizeof(Record);
  const NcclResult result =
      library_.AllGather(reinterpret_cast<void*>(records_), all, sizeof(Record), kNcclBytes, handle.load(), exchange_);
  leave_context();
  return result;
}

void SwapCommunicator::judge(bool first) {
  if (!enter_context()) return refuse("its context is gone");
  const RelaxedCapture relaxed(driver_);
  const Record* all = host_records_ + 1;
  const char* against = receive_records() ? reason_against(all) : "NCCL could not ask its members";
  if (against)
    refuse(strdup(against));
  else if (first)
    reaches_all_ = !mode_.messages && map_peers(all);
  else
    swaps_ = true;
  for (int i = 0; i < size_ && swaps_; ++i) by_messages_ = by_messages_ || !all[i].reaches;
  leave_context();
}

// One round: all say something, all hear it. asks: which of them take part.
void SwapCommunicator::exchange(SwapCommunicator* const* all, size_t count, bool first, bool* asks) {
  for (size_t i = 0; i < count; ++i) asks[i] = asks[i] && all[i]->post(first);
  const NcclLibrary& library = all[0]->library_;
  if (count > 1) library.GroupStart();
  NcclResult results[kMostAtOnce] = {};
  for (size_t i = 0; i < count; ++i) {
    if (asks[i]) results[i] = all[i]->gather();
  }
  const NcclResult ended = count > 1 ? library.GroupEnd() : kNcclSuccess;
  for (size_t i = 0; i < count; ++i) {
    if (!asks[i]) continue;
    const NcclResult result = ended != kNcclSuccess ? ended : results[i];
    asks[i] = has_settled(library, all[i]->handle.load(), result);
    if (asks[i]) all[i]->judge(first);
  }
}

void SwapCommunicator::decide(SwapCommunicator* const* all, size_t count) {
  if (count > kMostAtOnce) {
    decide(all, kMostAtOnce);
    return decide(all + kMostAtOnce, count - kMostAtOnce);
  }
  bool asks[kMostAtOnce] = {};
  for (size_t i = 0; i < count; ++i) asks[i] = all[i]->prepare();
  for (const bool first : {true, false}) exchange(all, count, first, asks);
  for (size_t i = 0; i < count; ++i) {
    if (all[i]->swaps_) continue;
    all[i]->refuse("it could not be prepared");
    all[i]->give_back_staging();
  }
}

// Others may use it from now on: nobody writes to it any more.
void SwapCommunicator::give_back_staging() {
  for (int i = 0; i < size_ && i < static_cast<int>(collective::kMostRanks); ++i) {
    if (opened_[i]) driver_.cuIpcCloseMemHandle_(reinterpret_cast<CUdeviceptr>(reached_[i]));
    opened_[i] = false;
  }
  if (staging_) keep_spare(context_, staging_bytes(), staging_);
  staging_ = 0;
}

// ---- Ending

void SwapCommunicator::forget_all_in_child() {
  own_number.store(0);
  all_kernels.store(nullptr);
  for (Spare& spare : spares) spare.memory.store(0), spare.filling.store(false);
}

void SwapCommunicator::abort() {
  if (abort_) __atomic_store_n(abort_, 1u, __ATOMIC_RELEASE);
}

// A kernel of ours that has ended has heard from every member, so nobody writes to its memory any more.
void SwapCommunicator::release() {
  if (!swaps_ || !enter_context()) return;
  const RelaxedCapture relaxed(driver_);
  swaps_ = false;
  if (!any_capture_ && (!any_launch_ || driver_.cuEventQuery_(last_) == CUDA_SUCCESS)) give_back_staging();
  leave_context();
}

}  // namespace forkpoint
