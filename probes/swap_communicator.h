// One communicator whose reductions the deterministic kernels may do: what its members agreed upon, and how they do it.
// Used by one thread at a time, as NCCL's communicators are; found, prepared and ended by any.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "probes/swap_member.h"
#include "probes/swap_messages.h"
#include "probes/swap_order.h"

namespace forkpoint {

class SwapCommunicator : public SwapMember {
 public:
  SwapCommunicator(const NcclLibrary& library, const CudaDriver& driver, SwapMode mode, const Origin& origin)
      : SwapMember(library, driver, mode, origin), order_(driver) {}
  ~SwapCommunicator();

  // The members' decision for all of these, which this thread holds and NCCL has made. All ask in one group of NCCL's
  // first, which knows of no order among them. Those that turn out to be members of one communicator go on together;
  // none waits for another communicator, but where NCCL_LAUNCH_MODE=GROUP makes NCCL's own calls wait. Waits for the
  // other members, until they have answered, NCCL knows of an error, or end().
  static void decide(std::vector<std::shared_ptr<SwapCommunicator>> communicators);
  // The same for one whose calls do not wait, in as many calls as it takes; waits for nobody. It prepares itself, and
  // where it may asks the others. true: decided. Any thread, outside of NCCL's groups. REQUIRES: nobody reduces on it
  // meanwhile.
  bool advance(bool may_ask);
  // Behind that, for those here of one communicator: where they have to be connected for their messages, and all of
  // them have come so far, they begin to.
  static void connect(const std::vector<std::shared_ptr<SwapCommunicator>>& members);
  bool is_decided() const { return decided_.load(std::memory_order_acquire); }
  bool tell_once() { return !told_.exchange(true); }  // true for the first who asks
  // A number that all members share, in all processes, and no other communicator has; 0: this one has not heard of
  // them. Of one that swaps it is known.
  uint64_t kin() const { return kin_.load(); }
  // Members of one communicator, as far as is known?
  bool is_kin_of(const SwapCommunicator& other) const;

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

 private:
  struct Record;
  using Bundle = std::vector<SwapCommunicator*>;
  enum class Awaits : uint8_t { nothing, launch, data };  // of a round
  enum class Outcome : uint8_t { nccl, kernels, messages };
  enum class Link : uint8_t { own, nvlink, other, none, unknown };

  // Asking.
  static Bundle prepare_all(const std::vector<std::shared_ptr<SwapCommunicator>>& all);
  static void share_kin(const Bundle& all);
  static std::vector<Bundle> by_communicator(const Bundle& all);
  static bool is_over(const Bundle& bundle);
  static void begin_round_of(const Bundle& bundle);
  static bool go_on(Bundle* all);
  void fill(Record* record) const;
  void post(bool entered);
  void begin_round();
  uint32_t rounds() const;
  bool round_is_over();
  bool has_heard();
  CUresult copy_answers();
  bool is_trouble(CUresult result);
  bool nccl_has_failed();
  void end_round(bool heard);
  void end_decision();
  // Hearing.
  void judge(bool heard);
  void accept(const Record* records);
  const char* reason_against(const Record* records) const;
  void agree_on_blocks(const Record* records);
  void learn_kin(const Record* records);
  bool has_member(uint64_t token) const;
  // Reaching each other.
  Link link_to(const Record& peer) const;
  bool map_peers(const Record* records);
  bool map_peer(const Record& peer, int place);
  bool write_tokens();
  bool has_all_tokens(const Record* records) const;
  void clear_tokens();

  Record* host_records() const;  // own, then everybody's; nullptr: this member is deaf
  SwapMessages messages_on(CUstream stream) const;
  static NcclResult send_and_add(std::span<Launch> calls);
  NcclResult begin_launch(Launch& call);
  NcclResult end_launch(const Launch& call);

  std::atomic<bool> decided_{false}, told_{false};
  std::atomic<uint64_t> kin_{0};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;  // somebody decides
  bool began_asking_ = false, said_ = false;
  int64_t say_at_ns_ = 0, look_at_ns_ = 0, trouble_until_ns_ = 0;
  Awaits awaits_ = Awaits::nothing;
  NcclResult began_ = kNcclSuccess;  // what NCCL said to the round's call
  uint32_t round_ = 0;
  Outcome outcome_ = Outcome::nccl;
  bool reaches_all_ = false, proven_ = false;
  bool said_yes_ = false;     // in this round
  bool any_returns_ = false;  // some member's calls do not wait
  bool lost_ = false;         // its memory: others may still write to it
  bool aborted_ = false;      // its kernels end as soon as they begin
  char heard_refusal_[96] = "";
  uint64_t token_ = 0;
  void* reached_[collective::kMostRanks] = {};  // each member's staging memory, as this device reaches it
  SwapOrder order_;
};

void forget_swap_process_in_child();

}  // namespace forkpoint
