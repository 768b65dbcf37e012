// The rounds (swap_decide.cpp) of all communicators that one thread holds, or one asks about. The first of several is
// one group of NCCL's: it connects them in an order of its own, the same on all ranks, whatever is known of them here.
// By the answers members know each other.
#include <strings.h>

#include <algorithm>
#include <cstdlib>

#include "probes/os.h"
#include "probes/swap_record.h"

namespace forkpoint {
namespace {

constexpr int64_t kPauseNs = 50'000;
constinit std::atomic<uint32_t> nobody_wakes{0};

}  // namespace

// Of which one has failed, none asks any more: it would wait for that one.
bool SwapCommunicator::is_over(const Bundle& bundle) {
  bool over = true;
  NcclResult broken = kNcclSuccess;
  for (SwapCommunicator* one : bundle) over = one->round_is_over() && over;
  for (const SwapCommunicator* one : bundle) broken = broken != kNcclSuccess ? broken : one->broken_;
  for (SwapCommunicator* one : bundle) {
    if (broken != kNcclSuccess && one->broken_ == kNcclSuccess) one->fail(broken, "another member here has failed");
  }
  return over || broken != kNcclSuccess;
}

// In one group of each copy of NCCL.
void SwapCommunicator::begin_round_of(const Bundle& bundle) {
  std::vector<const NcclLibrary*> libraries;
  for (const SwapCommunicator* one : bundle) {
    if (std::find(libraries.begin(), libraries.end(), &one->library_) == libraries.end())
      libraries.push_back(&one->library_);
  }
  const bool grouped = bundle.size() > 1;
  for (const NcclLibrary* library : libraries) grouped ? library->GroupStart() : kNcclSuccess;
  for (SwapCommunicator* one : bundle) one->begin_round();
  for (const NcclLibrary* library : libraries) {
    const NcclResult ended = grouped ? library->GroupEnd() : kNcclSuccess;
    for (SwapCommunicator* one : bundle) {
      if (ended != kNcclSuccess && &one->library_ == library) one->began_ = ended;
    }
  }
}

// Those that can ask. Which members another one's failure leaves waiting is not known for certain where it was not seen
// how they were made: then it is all that may be.
SwapCommunicator::Bundle SwapCommunicator::prepare_all(const std::vector<std::shared_ptr<SwapCommunicator>>& all) {
  Bundle asking;
  for (const auto& one : all) one->prepare();
  for (const auto& one : all) {
    const bool leaves = std::any_of(all.begin(), all.end(), [&](const auto& other) {
      if (other->asks_ || other->broken_ == kNcclSuccess) return false;
      if (other->family != 0 && one->family != 0) return other->family == one->family;
      return other->size_ == 0 || (other->size_ == one->size_ && other->place_ != one->place_);
    });
    if (one->asks_ && leaves) one->fail(kNcclSystemError, "another member here has failed");
    if (one->asks_ && !leaves) asking.push_back(one.get());
  }
  return asking;
}

// Who hears of another one here tells it, which may be deaf.
void SwapCommunicator::share_kin(const Bundle& all) {
  for (const SwapCommunicator* one : all) {
    for (SwapCommunicator* other : all) {
      if (one->kin() != 0 && other->kin() == 0 && one->has_member(other->token_)) other->kin_.store(one->kin());
    }
  }
}

std::vector<SwapCommunicator::Bundle> SwapCommunicator::by_communicator(const Bundle& all) {
  std::vector<Bundle> bundles;
  for (SwapCommunicator* one : all) {
    const auto found = std::find_if(bundles.begin(), bundles.end(), [&](const Bundle& bundle) {
      return std::any_of(bundle.begin(), bundle.end(), [&](const auto* other) { return one->is_kin_of(*other); });
    });
    found == bundles.end() ? bundles.push_back({one}) : found->push_back(one);
  }
  return bundles;
}

// Begins the next round of each communicator of which all members here have heard the one before, and drops those that
// are through. false: there are no others. What NCCL may wait for others in is begun when none is under way here that
// they may wait for, and in one group.
bool SwapCommunicator::go_on(Bundle* all) {
  for (SwapCommunicator* one : *all) one->round_is_over();
  share_kin(*all);
  Bundle next;
  bool waits = false;
  const char* mode = getenv("NCCL_LAUNCH_MODE");
  const bool in_step = mode && strcasecmp(mode, "GROUP") == 0;
  for (const Bundle& bundle : by_communicator(*all)) {
    if (!is_over(bundle)) {
      waits = true;
    } else if (bundle[0]->broken_ != kNcclSuccess || bundle[0]->round_ >= bundle[0]->rounds()) {
      std::erase_if(*all, [&](auto* one) { return std::find(bundle.begin(), bundle.end(), one) != bundle.end(); });
    } else if (in_step || bundle[0]->round_ >= kSwapRounds) {
      next.insert(next.end(), bundle.begin(), bundle.end());
    } else {
      begin_round_of(bundle);
    }
  }
  if (!next.empty() && !waits) begin_round_of(next);
  return !all->empty();
}

void SwapCommunicator::decide(std::vector<std::shared_ptr<SwapCommunicator>> all) {
  std::erase_if(all, [](const auto& one) { return one->busy_.test_and_set(std::memory_order_acquire); });
  std::erase_if(all, [](const auto& one) { return one->is_decided() && (one->busy_.clear(), true); });
  // The order in which older versions of NCCL connect them.
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a->family < b->family; });
  Bundle asking = prepare_all(all);
  if (!asking.empty()) begin_round_of(asking);
  while (go_on(&asking)) futex_wait(nobody_wakes, 0, kPauseNs);
  for (const auto& one : all) one->end_decision(), one->busy_.clear(std::memory_order_release);
}

bool SwapCommunicator::advance(bool may_ask) {
  if (is_decided()) return true;
  if (busy_.test_and_set(std::memory_order_acquire)) return false;  // another thread is at it
  if (!is_decided()) {
    const NcclResult state = is_prepared() ? kNcclSuccess : state_of_making();
    if (state != kNcclSuccess && state != kNcclInProgress) fail(state, "NCCL could not make it");
    if (broken_ == kNcclSuccess && !is_prepared() && state == kNcclSuccess) {
      prepare();
    } else if (asks_ && !began_asking_ && may_ask) {
      began_asking_ = true;
      begin_round();
    } else if (asks_ && began_asking_ && round_is_over() && broken_ == kNcclSuccess && round_ < kSwapRounds) {
      begin_round();
    }
    if (broken_ != kNcclSuccess || (is_prepared() && !asks_) || round_ >= rounds()) end_decision();
  }
  busy_.clear(std::memory_order_release);
  return is_decided();
}

void SwapCommunicator::connect(const std::vector<std::shared_ptr<SwapCommunicator>>& members) {
  Bundle bundle;
  for (const auto& one : members) {
    if (!one->busy_.test_and_set(std::memory_order_acquire)) bundle.push_back(one.get());
  }
  const bool ready = bundle.size() == members.size() && std::all_of(bundle.begin(), bundle.end(), [](const auto* one) {
                       return !one->is_decided() && one->round_ == kSwapRounds && one->awaits_ == Awaits::nothing;
                     });
  if (ready) begin_round_of(bundle);
  for (SwapCommunicator* one : bundle) one->busy_.clear(std::memory_order_release);
}

}  // namespace forkpoint
