// How the members of a communicator agree: each says what it can, through NCCL itself, and hears all others. Three
// rounds, always, whatever was heard, so that nobody waits for one who has left:
//   0  what each can           then each maps the others' memory and writes a token into it
//   1  whether that was done   then each looks whether all tokens have come
//   2  whether they have       then all know, by the same records, what all do
// A member that fails takes part all the same, and says no in the next round. After the last there is none, so what it
// says is all that counts, and to hear it is tried again; one that cannot is broken: it fails, and does not go its way.
// Where some member's calls do not wait, and they go by messages, a fourth follows in which each sends to each: NCCL
// has connected them then, and no later call waits for anybody who has not come to it yet.
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
constexpr uint32_t kVersion = 5;  // of the rule, the protocol and the planner's cut
constexpr int64_t kLookNs = 1'000'000, kTroubleNs = 1'000'000'000, kPatienceNs = 60'000'000'000;

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

// ---- What a member says

SwapCommunicator::Record* SwapCommunicator::host_records() const {
  return means_->host ? reinterpret_cast<Record*>(means_->host + SwapMeans::kRecordsAt) : nullptr;
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
  record->waits = waits;
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
  char *own = reinterpret_cast<char*>(means_->records), *all = own + sizeof(Record);
  awaits_ = Awaits::launch;
  // In any case: the others wait for it.
  if (round_ == kSwapRounds) {
    began_ = connect_by_messages(messages_on(means_->exchange), own, all, sizeof(Record));
    return;
  }
  post(here.entered());
  began_ = library_.AllGather(own, all, sizeof(Record), kNcclBytes, handle.load(), means_->exchange);
}

uint32_t SwapCommunicator::rounds() const {
  return kSwapRounds + (outcome_ == Outcome::messages && any_returns_ ? 1 : 0);
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

// All members' last records.
void SwapCommunicator::accept(const Record* records) {
  bool all = true;
  for (int i = 0; i < size_; ++i) {
    all = all && records[i].proven;
    any_returns_ = any_returns_ || !records[i].waits;
  }
  outcome_ = all ? Outcome::kernels : Outcome::messages;
}

// What all of them have drawn: nobody else has drawn the same.
void SwapCommunicator::learn_kin(const Record* records) {
  uint64_t mixed = static_cast<uint64_t>(size_);
  for (int i = 0; i < size_; ++i) {
    if (memcmp(records[i].magic, kMagic, sizeof(kMagic)) != 0) return;
    mixed = mix64(mixed ^ records[i].token) + records[i].token;
  }
  if (kin_.load() == 0) kin_.store(mixed | 1);
}

bool SwapCommunicator::has_member(uint64_t token) const {
  const Record* all = host_records();
  return token != 0 && all &&
         std::any_of(all + 1, all + 1 + size_, [&](const Record& one) { return one.token == token; });
}

bool SwapCommunicator::is_kin_of(const SwapCommunicator& other) const {
  if (this == &other) return true;
  if (kin() != 0 && other.kin() != 0) return kin() == other.kin();
  return family != 0 && family == other.family;
}

void SwapCommunicator::judge(bool heard) {
  if (round_ == kSwapRounds)
    return heard ? void() : fail(kNcclSystemError, "it could not be connected with its members");
  const InContext here(driver_, context_);
  const bool is_last = round_ + 1 == kSwapRounds;
  if (!heard) {
    if (is_last && said_yes_) return fail(kNcclSystemError, "it could not hear what its members agreed upon");
    return refuse("it could not hear its members");
  }
  const Record* all = host_records() + 1;
  learn_kin(all);
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
  if (!to || round_ == kSwapRounds) return CUDA_SUCCESS;
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

}  // namespace forkpoint
