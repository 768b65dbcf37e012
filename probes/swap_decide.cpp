// How the members of a communicator agree: each says what it can, through NCCL itself, and hears all others. Three
// rounds, always, whatever was heard, so that nobody waits for one who has left:
//   0  what each can           then each maps the others' memory and writes a token into it
//   1  whether that was done   then each looks whether all tokens have come
//   2  whether they have       then all know, by the same records, what all do
// A member that fails takes part all the same, and says no in the next round. After the last there is none, so what it
// says is all that counts, and to hear it is tried again; one that cannot is broken: it fails, and does not go its way.
#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/digest_mix.h"
#include "probes/os.h"
#include "probes/swap_record.h"

namespace forkpoint {
namespace {

constexpr char kMagic[16] = "forkpoint-swap";
constexpr uint32_t kVersion = 4;  // of the rule, the protocol and the planner's cut
constexpr uint32_t kRounds = 3;
constexpr int64_t kPauseNs = 50'000, kLookNs = 1'000'000, kTroubleNs = 1'000'000'000, kPatienceNs = 60'000'000'000;
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

uint64_t random_number() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != static_cast<ssize_t>(sizeof(number)))
    number = mix64(static_cast<uint64_t>(now_ns()) ^ static_cast<uint64_t>(getpid()) << 40);
  return number | 1;
}

// Of this process. Its pid would be another one's too, in another container.
constinit std::atomic<uint64_t> own_number{0};
uint64_t process_number() {
  uint64_t none = 0;
  if (own_number.load() == 0) own_number.compare_exchange_strong(none, random_number());
  return own_number.load();
}

}  // namespace

void forget_swap_process_in_child() { own_number.store(0); }

bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result) {
  while (result == kNcclInProgress) {
    if (!library.CommGetAsyncError || library.CommGetAsyncError(comm, &result) != kNcclSuccess) return false;
    if (result == kNcclInProgress) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  return result == kNcclSuccess;
}

// ---- What a member says

SwapCommunicator::Record* SwapCommunicator::host_records() const {
  return means_->host ? reinterpret_cast<Record*>(means_->host + kRecordsAt) : nullptr;
}

void SwapCommunicator::fill(Record* record) const {
  memcpy(record->magic, kMagic, sizeof(kMagic));
  record->version = kVersion;
  record->mode = (mode_.wide ? 1u : 0u) | (mode_.tree ? 2u : 0u) | (mode_.messages ? 4u : 0u);
  record->willing = refusal_[0] == '\0';
  record->round = round_;
  record->reaches = reaches_all_;
  record->proven = proven_;
  record->blocks = means_->blocks;
  record->device = device_;
  record->host = host_number();
  record->process = process_number();
  record->address = means_->staging;
  record->context = reinterpret_cast<uint64_t>(context_);
  record->token = token_;
  record->family = family;
  record->shape = collective::staging_for(static_cast<uint32_t>(size_));
  strncpy(record->why, refusal_, sizeof(record->why) - 1);
}

// Puts what this member has to say where NCCL takes it from. Where that fails all hear no answer: what lies there is
// nothing, or of the round before.
void SwapCommunicator::post(bool entered) {
  static_assert(sizeof(Record) % 16 == 0 && sizeof(Record) <= SwapMeans::kRecordBytes);
  if (token_ == 0) token_ = random_number();
  Record own = {};
  fill(&own);
  if (round_ == 0 && own.willing && driver_.cuIpcGetMemHandle_(&own.shared, means_->staging) != CUDA_SUCCESS)
    own.shared = {};
  if (driver_.cuDeviceGetUuid_ && driver_.cuDeviceGetUuid_(&own.uuid, device_) != CUDA_SUCCESS) own.uuid = {};
  Record* from = host_records() ? host_records() : &own;
  if (from != &own) *from = own;
  said_yes_ = entered && own.willing;
  if (driver_.cuMemcpyHtoDAsync_(means_->records, from, sizeof(own), means_->exchange) == CUDA_SUCCESS) return;
  said_yes_ = false;
  refuse("its device takes no data");
}

void SwapCommunicator::begin_round() {
  say_at_ns_ = now_ns() + kPatienceNs;
  look_at_ns_ = now_ns() + kLookNs;
  trouble_until_ns_ = 0;
  const InContext here(driver_, context_);
  post(here.entered());
  char* all = reinterpret_cast<char*>(means_->records) + sizeof(Record);
  // In any case: the others wait for it.
  began_ = library_.AllGather(reinterpret_cast<void*>(means_->records), all, sizeof(Record), kNcclBytes, handle.load(),
                              means_->exchange);
  awaits_ = Awaits::launch;
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

// As many as the member has that has the least. 0: a device has too few left, so no kernel may wait there for others.
void SwapCommunicator::agree_on_blocks(const Record* records) {
  uint32_t least = records[0].blocks;
  for (int i = 1; i < size_; ++i) least = std::min(least, records[i].blocks);
  if (means_->blocks > least) means_->kernels->give_back(means_->blocks - least);
  means_->blocks = least;
  if (least > 0) shape_.blocks = least;
}

// All members' last records. Messages of two members that one thread holds have to leave in one group: the first would
// wait for the second for ever. Which belong together is known of communicators that were seen made.
void SwapCommunicator::accept(const Record* records) {
  bool all = true, shares = false, known = true;
  for (int i = 0; i < size_; ++i) {
    all = all && records[i].proven;
    known = known && records[i].family != 0;
    for (int j = 0; j < i; ++j)
      shares = shares || (records[i].host == records[j].host && records[i].process == records[j].process);
  }
  if (!all && shares && !known) return refuse("members in one process do not add by kernels, and it was not seen how they were made");
  outcome_ = all ? Outcome::kernels : Outcome::messages;
}

void SwapCommunicator::judge(bool heard) {
  const InContext here(driver_, context_);
  const bool is_last = round_ + 1 == kRounds;
  if (!heard) {
    if (is_last && said_yes_) return fail(kNcclSystemError, "it could not hear what its members agreed upon");
    return refuse("it could not hear its members");
  }
  const Record* all = host_records() + 1;
  if (const char* against = reason_against(all)) {
    strncpy(heard_refusal_, against, sizeof(heard_refusal_) - 1);
    refuse(heard_refusal_);
  } else if (round_ == 0) {
    agree_on_blocks(all);
    reaches_all_ = !refusal_[0] && !mode_.messages && means_->blocks > 0 && map_peers(all) && write_tokens();
  } else if (round_ == 1) {
    proven_ = std::all_of(all, all + size_, [](const Record& one) { return one.reaches != 0; }) && has_all_tokens(all);
    clear_tokens();
  } else {
    accept(all);
  }
}

// ---- Rounds

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

// Behind the members' answers. What they wrote into this one's memory came before those.
CUresult SwapCommunicator::copy_answers() {
  Record* to = host_records();
  if (!to) return CUDA_SUCCESS;
  const size_t bytes = static_cast<size_t>(size_) * sizeof(Record);
  CUresult result = driver_.cuMemcpyDtoHAsync_(to + 1, means_->records + sizeof(Record), bytes, means_->exchange);
  if (result == CUDA_SUCCESS && round_ == 1 && !refusal_[0])
    result = driver_.cuMemcpyDtoHAsync_(means_->host + kArrivedAt, means_->staging,
                                        static_cast<size_t>(size_) * sizeof(SwapToken), means_->exchange);
  return result;
}

// Is there no use in trying again? What is short now may be there in a moment.
bool SwapCommunicator::is_trouble(CUresult result) {
  if (trouble_until_ns_ == 0) trouble_until_ns_ = now_ns() + kTroubleNs;
  return is_fatal(result) || now_ns() > trouble_until_ns_;
}

// A member that is gone never answers, and somebody may have told NCCL.
bool SwapCommunicator::nccl_has_failed() {
  if (ended_.load()) return fail(kNcclSystemError, "it was ended while its members agreed"), true;
  if (!library_.CommGetAsyncError || (began_ != kNcclInProgress && now_ns() < look_at_ns_)) return false;
  look_at_ns_ = now_ns() + kLookNs;
  NcclResult state = kNcclSuccess;
  const NcclResult asked = library_.CommGetAsyncError(handle.load(), &state);
  if (began_ == kNcclInProgress) began_ = asked == kNcclSuccess ? state : asked;
  if (asked == kNcclSuccess && (state == kNcclSuccess || state == kNcclInProgress)) return false;
  return fail(asked == kNcclSuccess ? state : asked, "NCCL knows of an error"), true;
}

bool SwapCommunicator::has_heard() {
  if (broken_ != kNcclSuccess || awaits_ == Awaits::nothing || nccl_has_failed()) return true;
  if (began_ == kNcclInProgress) return false;
  if (began_ != kNcclSuccess) return fail(began_, "NCCL could not ask its members"), true;
  const InContext here(driver_, context_);
  if (awaits_ == Awaits::launch) {
    const CUresult result = copy_answers();
    if (result != CUDA_SUCCESS) return is_trouble(result) && (end_round(false), true);
    awaits_ = Awaits::data;
  }
  const CUresult state = driver_.cuStreamQuery_(means_->exchange);
  if (state == CUDA_ERROR_NOT_READY) return false;
  if (state != CUDA_SUCCESS && !is_trouble(state)) return false;
  end_round(state == CUDA_SUCCESS && host_records());
  return true;
}

void SwapCommunicator::end_round(bool heard) {
  awaits_ = Awaits::nothing;
  judge(heard);
  ++round_;
}

void SwapCommunicator::end_decision() {
  if (outcome_ == Outcome::nccl) refuse("it could not be prepared");
  lost_ = broken_ != kNcclSuccess;  // the others may still write
  if (means_ && outcome_ != Outcome::kernels) {
    if (means_->blocks > 0) means_->kernels->give_back(means_->blocks);
    means_->blocks = 0;
  }
  if (means_ && outcome_ == Outcome::nccl && !lost_) {
    const InContext here(driver_, context_);
    if (here.entered()) leave_swap_means(driver_, means_), means_ = nullptr;
  }
  decided_.store(true, std::memory_order_release);
}

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

void SwapCommunicator::begin_round_of(const Bundle& bundle) {
  const NcclLibrary& library = bundle[0]->library_;
  if (bundle.size() > 1) library.GroupStart();
  for (SwapCommunicator* one : bundle) one->begin_round();
  const NcclResult ended = bundle.size() > 1 ? library.GroupEnd() : kNcclSuccess;
  for (SwapCommunicator* one : bundle) {
    if (ended != kNcclSuccess) one->began_ = ended;
  }
}

void SwapCommunicator::decide(std::vector<std::shared_ptr<SwapCommunicator>> all) {
  std::erase_if(all, [](const auto& one) { return one->busy_.test_and_set(std::memory_order_acquire); });
  std::erase_if(all, [](const auto& one) { return one->is_decided() && (one->busy_.clear(), true); });
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a->family < b->family; });
  std::vector<Bundle> bundles;
  uint64_t family = 0;
  for (const auto& one : all) {
    one->asks_ = one->prepare();
    one->prepared_.store(true);
    if (bundles.empty() || one->family != family) bundles.emplace_back();
    family = one->family;
    if (one->asks_ || one->broken_ != kNcclSuccess) bundles.back().push_back(one.get());
  }
  std::erase_if(bundles, [](const Bundle& one) { return one.empty(); });
  while (!bundles.empty()) {
    std::erase_if(bundles, [](const Bundle& one) {
      if (!is_over(one)) return false;
      if (one[0]->broken_ != kNcclSuccess || one[0]->round_ == kRounds) return true;
      return begin_round_of(one), false;
    });
    if (!bundles.empty()) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  for (const auto& one : all) one->end_decision(), one->busy_.clear(std::memory_order_release);
}

bool SwapCommunicator::advance(bool may_ask) {
  if (is_decided()) return true;
  if (busy_.test_and_set(std::memory_order_acquire)) return false;  // another thread is at it
  if (!is_decided()) {
    const NcclResult state = is_prepared() ? kNcclSuccess : state_of_making();
    if (state != kNcclSuccess && state != kNcclInProgress) fail(state, "NCCL could not make it");
    if (broken_ == kNcclSuccess && !is_prepared() && state == kNcclSuccess) {
      asks_ = prepare();
      prepared_.store(true);
    } else if (asks_ && !began_asking_ && may_ask) {
      began_asking_ = true;
      begin_round();
    } else if (asks_ && began_asking_ && round_is_over() && broken_ == kNcclSuccess && round_ < kRounds) {
      begin_round();
    }
    if (broken_ != kNcclSuccess || (is_prepared() && !asks_) || round_ == kRounds) end_decision();
  }
  busy_.clear(std::memory_order_release);
  return is_decided();
}

// success: it is made.
NcclResult SwapCommunicator::state_of_making() const {
  if (ended_.load()) return kNcclSystemError;
  NcclResult state = kNcclInProgress;
  if (!handle.load() || !library_.CommGetAsyncError) return state;
  const NcclResult asked = library_.CommGetAsyncError(handle.load(), &state);
  return asked == kNcclSuccess ? state : asked;
}

}  // namespace forkpoint
