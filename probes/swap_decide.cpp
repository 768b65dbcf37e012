// How the members of a communicator agree: each says what it can, through NCCL itself, and hears all others.
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "lib/digest_mix.h"
#include "probes/os.h"
#include "probes/swap_communicator.h"

namespace forkpoint {

// What a member tells the others. Twice: what it can, then whether it reaches all of them.
struct SwapCommunicator::Record {
  char magic[16];
  uint32_t version, mode, willing, reaches;
  uint64_t host, process;
  uint64_t address, context;
  int32_t device;
  uint32_t round;
  CUipcMemHandle shared;
  collective::StagingShape shape;
  char why[96];
  char unused[16];
};

namespace {

constexpr char kMagic[16] = "forkpoint-swap";
constexpr uint32_t kVersion = 2;  // of the rule, the protocol and the planner's cut
constexpr uint32_t kRounds = 2;
constexpr int64_t kPauseNs = 50'000, kPatienceNs = 60'000'000'000;
constinit std::atomic<uint32_t> nobody_wakes{0};

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

// What the user forbids NCCL is forbidden here too. Levels between "never" and "always" ask how far apart two devices
// are, which NCCL knows and we do not: then it is NCCL that moves the data.
bool nccl_may_use_peers() {
  const char *disable = getenv("NCCL_P2P_DISABLE"), *level = getenv("NCCL_P2P_LEVEL");
  if (disable && atoi(disable) != 0) return false;
  return !level || !*level || strcasecmp(level, "SYS") == 0 || atoi(level) >= 4;
}

}  // namespace

void SwapCommunicator::forget_process_number() { own_number.store(0); }

bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result) {
  while (result == kNcclInProgress) {
    if (!library.CommGetAsyncError || library.CommGetAsyncError(comm, &result) != kNcclSuccess) return false;
    if (result == kNcclInProgress) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  return result == kNcclSuccess;
}

// ---- What a member says

// false: there is nothing to speak through, not even to say no.
bool SwapCommunicator::make_exchange() {
  constexpr size_t kPage = 4096;
  const size_t bytes = (static_cast<size_t>(size_) + 1) * sizeof(Record);
  char* host = static_cast<char*>(map_zeroed(kPage + bytes));  // pinned: copies to other memory would wait for members
  if (!host || !driver_.cuMemcpyHtoDAsync_ || !driver_.cuMemcpyDtoHAsync_ || !driver_.cuStreamQuery_ ||
      driver_.cuMemHostRegister_(host, kPage + bytes, CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE) !=
          CUDA_SUCCESS ||
      driver_.cuMemHostGetDevicePointer_(&device_abort_, host, 0) != CUDA_SUCCESS)
    return false;
  abort_ = reinterpret_cast<uint32_t*>(host);
  host_records_ = reinterpret_cast<Record*>(host + kPage);
  if (driver_.cuStreamCreate_(&exchange_, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) exchange_ = nullptr;
  // Where the device is full, NCCL takes the host's memory too.
  if (driver_.cuMemAlloc_(&records_, bytes) != CUDA_SUCCESS) records_ = device_abort_ + kPage;
  return true;
}

// false: this member does not take part: what is the same on all of them, or NCCL is broken here.
bool SwapCommunicator::prepare() {
  const NcclComm comm = handle.load();
  if (!library_.AllGather || !library_.CommCount || library_.CommCount(comm, &size_) != kNcclSuccess) return false;
  if (!library_.CommUserRank || library_.CommUserRank(comm, &place_) != kNcclSuccess) return false;
  if (size_ < 2) return refuse("it has one member"), false;
  if (size_ > static_cast<int>(collective::kMostRanks))
    return refuse("it has more members than the kernels take"), false;
  if (!find_context() || !enter_context()) return false;
  const RelaxedCapture relaxed(driver_);
  const bool can_say = make_exchange();
  if (can_say) make_means();
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
  record->round = round_;
  record->shape = shape_;
  strncpy(record->why, refusal_, sizeof(record->why) - 1);
}

// Puts what this member has to say where NCCL takes it from. What fails here is heard as no answer: what lies there is
// nothing, or of the round before.
void SwapCommunicator::post() {
  if (!enter_context()) return;
  const RelaxedCapture relaxed(driver_);
  Record& own = host_records_[0];
  own = {};
  fill(&own);
  if (round_ == 0 && own.willing && driver_.cuIpcGetMemHandle_(&own.shared, staging_) != CUDA_SUCCESS) own.shared = {};
  if (driver_.cuMemcpyHtoDAsync_(records_, &own, sizeof(Record), exchange_) != CUDA_SUCCESS)
    refuse("its device takes no data");
  leave_context();
}

NcclResult SwapCommunicator::gather() {
  if (!enter_context()) return kNcclCudaError;
  char* all = reinterpret_cast<char*>(records_) + sizeof(Record);
  const NcclResult result =
      library_.AllGather(reinterpret_cast<void*>(records_), all, sizeof(Record), kNcclBytes, handle.load(), exchange_);
  leave_context();
  return result;
}

// ---- What it hears

// Why not all can, as each member sees it alike. nullptr: all can.
const char* SwapCommunicator::reason_against(const Record* records) const {
  for (int i = 0; i < size_; ++i) {
    const Record& one = records[i];
    if (memcmp(one.magic, kMagic, sizeof(kMagic)) != 0) return "a member answered something else";
    if (one.version != kVersion) return "a member's forkpoint is of another version";
    if (one.round != round_) return "a member could not answer";
    if (one.mode != records[0].mode) return "the members are to add in different ways";
    if (!one.willing) return one.why[0] ? one.why : "a member cannot";
    if (memcmp(&one.shape, &records[0].shape, sizeof(one.shape)) != 0) return "the members' staging memory differs";
  }
  return nullptr;
}

bool SwapCommunicator::map_peers(const Record* records) {
  if (!nccl_may_use_peers()) return false;
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

// All members' last records. Messages of two members that one thread holds would have to leave in one group, which
// nobody forms for them: the first would wait for the second for ever.
void SwapCommunicator::accept(const Record* records) {
  for (int i = 0; i < size_; ++i) by_messages_ = by_messages_ || !records[i].reaches;
  for (int i = 0; i < size_ && by_messages_; ++i) {
    for (int j = 0; j < i; ++j) {
      if (records[i].host == records[j].host && records[i].process == records[j].process)
        return refuse("members in one process do not reach each other's devices");
    }
  }
  swaps_ = true;
}

void SwapCommunicator::judge(bool heard) {
  if (!enter_context()) return refuse("its context is gone");
  const RelaxedCapture relaxed(driver_);
  const Record* all = host_records_ + 1;
  const char* against = heard ? reason_against(all) : "NCCL could not ask its members";
  if (against)
    refuse(strdup(against));
  else if (round_ == 0)
    reaches_all_ = !mode_.messages && map_peers(all);
  else
    accept(all);
  leave_context();
}

// ---- Rounds

void SwapCommunicator::begin_round() {
  say_at_ns_ = now_ns() + kPatienceNs;
  post();
  began_ = gather();
  awaits_ = Awaits::launch;
}

// Has this member heard the others, or failed? Does not wait. One that does not run under the probe never comes: then
// this says so, once.
bool SwapCommunicator::round_is_over() {
  if (has_heard()) return true;
  if (said_ || now_ns() < say_at_ns_) return false;
  said_ = true;
  say("a communicator of %d ranks waits for members to agree on deterministic collectives: is forkpoint, with the "
      "same --deterministic, on every rank?",
      size_);
  return false;
}

bool SwapCommunicator::has_heard() {
  if (awaits_ == Awaits::launch) {
    if (began_ == kNcclInProgress &&
        (!library_.CommGetAsyncError || library_.CommGetAsyncError(handle.load(), &began_) != kNcclSuccess))
      began_ = kNcclSystemError;
    if (began_ == kNcclInProgress) return false;
    const size_t bytes = static_cast<size_t>(size_) * sizeof(Record);
    const bool copies = began_ == kNcclSuccess && enter_context();
    if (copies &&
        driver_.cuMemcpyDtoHAsync_(host_records_ + 1, records_ + sizeof(Record), bytes, exchange_) == CUDA_SUCCESS)
      awaits_ = Awaits::data;
    if (copies) leave_context();
    if (awaits_ != Awaits::data) return end_round(false), true;
  }
  if (awaits_ == Awaits::nothing) return true;
  if (!enter_context()) return end_round(false), true;
  const CUresult state = driver_.cuStreamQuery_(exchange_);
  leave_context();
  if (state == CUDA_ERROR_NOT_READY) return false;
  end_round(state == CUDA_SUCCESS);
  return true;
}

void SwapCommunicator::end_round(bool heard) {
  awaits_ = Awaits::nothing;
  judge(heard);
  ++round_;
}

void SwapCommunicator::end_decision() {
  if (!swaps_) {
    refuse("it could not be prepared");
    give_back_staging();
  }
  decided_.store(true, std::memory_order_release);
}

void SwapCommunicator::decide(SwapCommunicator* const* all, size_t count) {
  if (count > kMostAtOnce) {
    decide(all, kMostAtOnce);
    return decide(all + kMostAtOnce, count - kMostAtOnce);
  }
  bool asks[kMostAtOnce] = {};
  for (size_t i = 0; i < count; ++i) asks[i] = all[i]->prepare();
  const NcclLibrary& library = all[0]->library_;
  for (uint32_t round = 0; round < kRounds; ++round) {
    if (count > 1) library.GroupStart();
    for (size_t i = 0; i < count; ++i) {
      if (asks[i]) all[i]->begin_round();
    }
    const NcclResult ended = count > 1 ? library.GroupEnd() : kNcclSuccess;
    for (size_t i = 0; i < count; ++i) {
      if (!asks[i]) continue;
      if (ended != kNcclSuccess) all[i]->began_ = ended;
      while (!all[i]->round_is_over()) futex_wait(nobody_wakes, 0, kPauseNs);
    }
  }
  for (size_t i = 0; i < count; ++i) all[i]->end_decision();
}

bool SwapCommunicator::advance(bool may_ask) {
  if (is_decided()) return true;
  if (busy_.test_and_set(std::memory_order_acquire)) return false;  // another thread is at it
  if (!is_decided()) {
    if (!is_prepared() && is_ready()) {
      if (!prepare()) end_decision();
      prepared_.store(true);
    } else if (is_prepared() && !began_asking_ && may_ask) {
      began_asking_ = true;
      begin_round();
    } else if (began_asking_ && round_is_over()) {
      if (round_ < kRounds)
        begin_round();
      else
        end_decision();
    }
  }
  busy_.clear(std::memory_order_release);
  return is_decided();
}

bool SwapCommunicator::is_ready() const {
  NcclResult state = kNcclInProgress;
  return handle.load() && library_.CommGetAsyncError &&
         library_.CommGetAsyncError(handle.load(), &state) == kNcclSuccess && state == kNcclSuccess;
}

}  // namespace forkpoint
