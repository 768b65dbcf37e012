// One communicator whose reductions the deterministic kernels may do: what its members agreed upon, and the memory
// through which they do it. Used by one thread at a time, as NCCL's communicators are; found, and ended, by any.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "probes/nccl_library.h"
#include "probes/swap_means.h"

namespace forkpoint {

struct SwapMode {
  bool wide = false, tree = false, messages = false;
  bool says = false;  // what the members have decided
};

inline constexpr int kNcclBytes = 1;  // ncclUint8
inline constexpr NcclResult kNcclCudaError = 1;
// Waits until a call of ours is enqueued, on a communicator that may be non-blocking. false: it failed.
bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result);

class SwapCommunicator {
 public:
  // family: the same number for all members of one communicator, in all processes; 0: not known.
  SwapCommunicator(const NcclLibrary& library, const CudaDriver& driver, NcclComm comm, SwapMode mode, uint64_t family)
      : handle(comm), family(family), library_(library), driver_(driver), mode_(mode) {}
  ~SwapCommunicator();
  SwapCommunicator(const SwapCommunicator&) = delete;
  SwapCommunicator& operator=(const SwapCommunicator&) = delete;

  // The members' decision for all of these, which this thread holds and NCCL has made: those of one family, which may
  // be each other's members, ask in one group; families ask in the order of their numbers, which is the same in all
  // processes, and none waits for another. Waits for the other members, until they have answered, NCCL knows of an
  // error, or end().
  static void decide(std::vector<std::shared_ptr<SwapCommunicator>> communicators);
  // The same for one that does not block, in as many calls as it takes; waits for nobody. It prepares
  // itself, and where it may asks the others. true: decided. Any thread, outside of NCCL's groups. REQUIRES: nobody
  // reduces on it meanwhile; whoever holds several members of one communicator prepares all of them before it lets one
  // ask, since what prepares may wait for a device, on which the question would wait for the rest.
  bool advance(bool may_ask);
  bool is_prepared() const { return prepared_.load(); }
  bool is_decided() const { return decided_.load(std::memory_order_acquire); }
  bool tell_once() { return !told_.exchange(true); }  // true for the first who asks

  // REQUIRES, here and below: is_decided().
  bool swaps() const { return outcome_ != Outcome::nccl; }
  bool by_messages() const { return outcome_ == Outcome::messages; }  // through NCCL's send and receive
  // This member could not tell the others what it can, or not hear what all agreed upon, and NCCL or its device are to
  // blame: what the program gets for each reduction. 0: it is well.
  NcclResult broken() const { return broken_; }
  const char* refusal() const { return refusal_; }  // why not
  int size() const { return size_; }
  // One member's part of a call. spec: equal on all members but for addresses.
  struct Launch {
    SwapCommunicator* one;  // REQUIRES: swaps()
    collective::CollectiveSpec spec;
    const void* in;
    void* out;
    CUstream stream;
    collective::CollectiveLaunch planned = {};
    uint64_t capture = 0;
  };
  // Of one call the parts of all the members for which this thread makes it.
  static NcclResult launch(std::span<Launch> calls);

  // The program destroys it. What waits for other members ends soon; aborts: kernels do too.
  void end(bool aborts);

  std::atomic<NcclComm> handle{nullptr};
  const uint64_t family;
  std::atomic<uint32_t> children{0};  // splits and shrinks so far

 private:
  struct Record;
  using Bundle = std::vector<SwapCommunicator*>;              // of one family
  enum class Awaits : uint8_t { nothing, launch, data };      // of a round
  enum class Outcome : uint8_t { nccl, kernels, messages };
  enum class Link : uint8_t { own, nvlink, other, none, unknown };

  // Making.
  bool prepare();
  bool find_context();
  bool find_means();
  bool make_voice();
  void make_kernels();
  bool make_staging();
  // Asking.
  static bool is_over(const Bundle& bundle);
  static void begin_round_of(const Bundle& bundle);
  void fill(Record* record) const;
  void post(bool entered);
  void begin_round();
  bool round_is_over();
  bool has_heard();
  CUresult copy_answers();
  bool is_trouble(CUresult result);
  bool nccl_has_failed();
  void end_round(bool heard);
  void end_decision();
  NcclResult state_of_making() const;
  // Hearing.
  void judge(bool heard);
  void accept(const Record* records);
  const char* reason_against(const Record* records) const;
  void agree_on_blocks(const Record* records);
  // Reaching each other.
  Link link_to(const Record& peer) const;
  bool map_peers(const Record* records);
  bool map_peer(const Record& peer, int place);
  bool write_tokens();
  bool has_all_tokens(const Record* records) const;
  void clear_tokens();

  void refuse(const char* why) {
    if (!refusal_[0]) refusal_ = why;
  }
  void fail(NcclResult result, const char* why) {
    refuse(why);
    broken_ = result;
  }
  Record* host_records() const;  // own, then everybody's; nullptr: this member is deaf
  NcclResult run(collective::CollectiveLaunch& launch, CUstream stream);
  NcclResult begin_launch(Launch& call);
  NcclResult end_launch(const Launch& call);
  static NcclResult send_and_add(std::span<Launch> calls);
  NcclResult send_inputs(const collective::CollectiveParams& call, uint64_t round, CUstream stream);
  NcclResult send_sums(const collective::CollectiveParams& call, uint64_t round, CUstream stream);
  NcclResult add_round(collective::CollectiveSpec spec, const collective::CollectiveParams& call, uint64_t round,
                       CUstream stream);
  uint64_t message_room() const;  // bytes of a round and owner
  char* received_from(int peer) const {
    return reinterpret_cast<char*>(means_->staging) + static_cast<uint64_t>(peer) * message_room();
  }
  // Of a stream: 0: it is not capturing.
  CUresult capture_of(CUstream stream, uint64_t* capture) const;
  CUresult order_before(CUstream stream, uint64_t capture);
  CUresult order_behind(CUstream stream, uint64_t capture);

  const NcclLibrary& library_;
  const CudaDriver& driver_;
  const SwapMode mode_;
  std::atomic<bool> prepared_{false}, decided_{false}, told_{false}, ended_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;  // somebody decides
  bool asks_ = false, began_asking_ = false, said_ = false;
  int64_t say_at_ns_ = 0, look_at_ns_ = 0, trouble_until_ns_ = 0;
  Awaits awaits_ = Awaits::nothing;
  NcclResult began_ = kNcclSuccess;  // what NCCL said to the round's call
  uint32_t round_ = 0;
  Outcome outcome_ = Outcome::nccl;
  NcclResult broken_ = kNcclSuccess;
  bool reaches_all_ = false, proven_ = false;
  bool said_yes_ = false;  // in this round
  bool lost_ = false;      // its memory: others may still write to it
  const char* refusal_ = "";
  char heard_refusal_[96] = "";
  int size_ = 0, place_ = -1;
  int device_ = -1;
  CUcontext context_ = nullptr;
  SwapMeans* means_ = nullptr;
  uint64_t token_ = 0;
  collective::StagingShape shape_;
  void* reached_[collective::kMostRanks] = {};  // each member's staging memory, as this device reaches it
  uint64_t capture_ = 0;
  std::atomic<bool> any_launch_{false}, any_capture_{false};
};

void forget_swap_process_in_child();

}  // namespace forkpoint
