// One communicator whose reductions the deterministic kernels may do: what its members agreed upon, and the memory
// through which they do it. Used by one thread at a time, as NCCL's communicators are; found by any.
#pragma once

#include <atomic>

#include "kernels/deterministic_collective.h"
#include "probes/cuda_driver.h"
#include "probes/nccl_library.h"

namespace forkpoint {

struct SwapMode {
  bool wide = false, tree = false, messages = false;
};

// The kernels in one context, loaded eagerly. Never freed: a context that goes takes them along.
struct SwapKernels {
  CUcontext context = nullptr;
  CUfunction function[collective::kCollectiveKernelCount] = {};
  SwapKernels* next = nullptr;
};

inline constexpr int kNcclBytes = 1;  // ncclUint8
inline constexpr NcclResult kNcclCudaError = 1;
// Waits until a call of ours is enqueued, on a communicator that may be non-blocking. false: it failed.
bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result);

class SwapCommunicator {
 public:
  static constexpr size_t kMostAtOnce = 64;

  SwapCommunicator(const NcclLibrary& library, const CudaDriver& driver, NcclComm comm, SwapMode mode)
      : handle(comm), library_(library), driver_(driver), mode_(mode) {}
  SwapCommunicator(const SwapCommunicator&) = delete;
  SwapCommunicator& operator=(const SwapCommunicator&) = delete;

  // The members' decision for all of `communicators`, which this thread holds and NCCL has made: in one group where it
  // is several, so that they may be each other's members. Waits for the other members.
  static void decide(SwapCommunicator* const* communicators, size_t count);
  // The same for one that NCCL makes in the background, in as many calls as it takes; waits for nobody. It prepares
  // itself, and where it may asks the others. true: decided. Any thread, outside of NCCL's groups. REQUIRES: nobody
  // reduces on it meanwhile; whoever holds several members of one communicator prepares all of them before it lets one
  // ask, since what prepares may wait for a device, on which the question would wait for the rest.
  bool advance(bool may_ask);
  bool is_prepared() const { return prepared_.load(); }
  bool is_decided() const { return decided_.load(std::memory_order_acquire); }
  bool tell_once() { return !told_.exchange(true); }  // true for the first who asks

  // REQUIRES, here and below: is_decided().
  bool swaps() const { return swaps_; }
  bool by_messages() const {
    return by_messages_;
  }  // through NCCL's send and receive, because not all devices reach each other's memory
  const char* refusal() const { return refusal_; }  // why not
  int size() const { return size_; }
  // REQUIRES: swaps(). spec: equal on all members but for addresses.
  NcclResult launch(const collective::CollectiveSpec& spec, const void* in, void* out, void* stream);
  // Kernels that wait for a peer end soon; of no use afterwards.
  void abort();
  // Its memory is free for others, unless something may still be on its way.
  void release();
  static void forget_all_in_child();

  std::atomic<NcclComm> handle{nullptr};
  SwapCommunicator* next = nullptr;
  // Of one that NCCL makes in the background: where the handle will be once the parent is ready, and by which thread.
  const NcclComm* handle_at = nullptr;
  NcclComm parent = nullptr;
  int maker = 0;
  uint64_t family = 0;  // the same for members of one communicator; 0: not known

 private:
  struct Record;
  enum class Awaits : uint8_t { nothing, launch, data };  // of a round
  bool prepare();
  void make_means();
  bool enter_context();
  void leave_context();
  bool find_context();
  bool make_staging();
  uint64_t staging_bytes() const;
  bool make_exchange();
  static void forget_process_number();
  void post();
  NcclResult gather();
  void begin_round();
  bool round_is_over();
  bool has_heard();
  void end_round(bool heard);
  void end_decision();
  bool is_ready() const;
  void judge(bool heard);
  void accept(const Record* records);
  void fill(Record* record) const;
  const char* reason_against(const Record* records) const;
  bool map_peers(const Record* records);
  void give_back_staging();
  void refuse(const char* why) {
    if (!refusal_[0]) refusal_ = why;
  }
  NcclResult run(collective::CollectiveLaunch& launch, CUstream stream);
  NcclResult send_and_add(const collective::CollectiveSpec& spec, collective::CollectiveParams call, CUstream stream);
  NcclResult send_inputs(const collective::CollectiveParams& call, uint64_t round, CUstream stream);
  NcclResult send_sums(const collective::CollectiveParams& call, uint64_t round, CUstream stream);
  NcclResult add_round(collective::CollectiveSpec spec, const collective::CollectiveParams& call, uint64_t round,
                       CUstream stream);
  uint64_t message_room() const;  // bytes of a round and owner
  char* received_from(int peer) const {
    return reinterpret_cast<char*>(staging_) + static_cast<uint64_t>(peer) * message_room();
  }
  // Of a stream: 0: it is not capturing.
  CUresult capture_of(CUstream stream, uint64_t* capture) const;
  CUresult order_before(CUstream stream, uint64_t capture);
  CUresult order_behind(CUstream stream, uint64_t capture);

  const NcclLibrary& library_;
  const CudaDriver& driver_;
  const SwapMode mode_;
  std::atomic<bool> prepared_{false}, decided_{false}, told_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  bool began_asking_ = false, said_ = false;
  int64_t say_at_ns_ = 0;
  Awaits awaits_ = Awaits::nothing;
  NcclResult began_ = kNcclSuccess;  // what NCCL said to the round's call
  uint32_t round_ = 0;
  bool swaps_ = false, reaches_all_ = false, by_messages_ = false;
  const char* refusal_ = "";
  int size_ = 0, place_ = -1;
  int device_ = -1;
  CUcontext context_ = nullptr;
  bool pushed_ = false;
  const SwapKernels* kernels_ = nullptr;
  collective::StagingShape shape_;
  CUdeviceptr staging_ = 0;
  void* reached_[collective::kMostRanks] = {};  // each member's staging memory, as this device reaches it
  bool opened_[collective::kMostRanks] = {};    // by a handle of another process
  uint32_t* abort_ = nullptr;                   // in the host's memory
  CUdeviceptr device_abort_ = 0;
  CUstream exchange_ = nullptr;  // of the decision
  CUdeviceptr records_ = 0;      // own record, then everybody's
  Record* host_records_ = nullptr;
  CUevent last_ = nullptr;      // behind the last kernel, of a graph's too once that runs
  CUevent captured_ = nullptr;  // behind the last kernel in capture_
  uint64_t capture_ = 0;
  bool any_launch_ = false, any_capture_ = false;
};

}  // namespace forkpoint
