#include "probes/stream_appender.h"

#include <fmt/format.h>

#include "lib/digest_mix.h"
#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr size_t kMaxPending = 1u << 18;
// Digest, statistics and columns of one record before they are written: an upper bound of what they take on disk.
constexpr uint64_t kRecordBytesEstimate = 40;

// Equal in every process: masked runs can be compared with each other.
std::string masked_name(std::string_view name) {
  const Digest digest = digest_only(name.data(), name.size());
  return fmt::format("~{:016x}", mix64(digest.a ^ mix64(digest.b + name.size())));
}

// The name of a communicator that has none.
std::string members_name(const CommunicatorEntry& communicator) {
  const auto* end = communicator.members + communicator.member_count;
  if (communicator.member_count <= 16) return fmt::format("{}", fmt::join(communicator.members, end, ","));
  const auto bytes = static_cast<size_t>(communicator.member_count) * sizeof(int32_t);
  return fmt::format("{},..,{} ({} ranks, {:016x})", communicator.members[0], end[-1], communicator.member_count,
                     mix64(digest_only(communicator.members, bytes).a));
}

}  // namespace

StreamAppender::StreamAppender(const Settings& settings, uint32_t session, HashStreamWriter& writer, LossLog& losses,
                               LimitSet& limits)
    : settings_(settings), session_(session), writer_(writer), losses_(losses), limits_(limits) {}

void StreamAppender::begin_step(int64_t step, bool wanted, uint64_t serial) {
  // A thread that starts the session while another begins a step tells of that step twice.
  if (serial <= serial_) return;
  // A step whose begin was lost (a Gap says so) took what was pending with it.
  if (serial != serial_ + 1) pending_.clear();
  serial_ = serial;
  if (open_) close_step();
  any_step_ = true;
  step_ = step;
  if (wanted) {
    open_step(step);
    for (const Event& event : pending_) append(event);
  }
  pending_.clear();
}

void StreamAppender::end_step() {
  if (!any_step_) return;  // nothing but the prologue yet
  any_explicit_end_ = true;
  if (open_) close_step();
}

void StreamAppender::add(const Event& event) {
  if (waits_for_step(event)) {
    if (pending_.size() < kMaxPending) return pending_.push_back(event);
    if (any_step_) return losses_.add(Loss::pending_full, kPrologueStep);
    append_without_step();
  }
  if (!open_) open_step(kPrologueStep);
  append(event);
}

// What comes before a step begins belongs to it: also before the first one, unless it is said to be loading. Otherwise a
// batch drawn ahead of its step would stand elsewhere in a run that was resumed there than in one that went through.
bool StreamAppender::waits_for_step(const Event& event) const {
  return any_step_ ? !open_ : !stepless_ && event.site->key.phase != Phase::load;
}

// A program without steps: all that it records stands before the first one.
void StreamAppender::append_without_step() {
  stepless_ = true;
  if (!open_) open_step(kPrologueStep);
  for (const Event& event : pending_) append(event);
  pending_.clear();
}

void StreamAppender::open_step(int64_t step) {
  writer_.begin_step(step);
  open_ = true;
  ++step_serial_;
  further_calls_.clear();
}

void StreamAppender::close_step() {
  add_losses();
  add_limits();
  writer_.end_step();
  open_ = false;
  unflushed_ = 0;
}

void StreamAppender::append(const Event& event) {
  Record record;
  record.site = site_id(*event.site);
  record.layout = layout_id(*event.layout);
  record.micro_step = event.micro_step;
  record.call = next_call(record.site, event.micro_step);
  record.digest = event.digest;
  record.stats = event.stats;
  writer_.append(record, event.layout->size_bytes);
  ++unflushed_;
}

uint32_t StreamAppender::site_id(const SiteEntry& entry) {
  if (entry.stream_id.session == session_) return entry.stream_id.id;
  Site site;
  site.phase = entry.key.phase;
  site.kind = entry.key.kind;
  site.role = entry.key.role;
  site.layer = written(entry.key.layer);
  site.op = written(entry.key.op);
  site.tensor = written(entry.key.tensor);
  if (entry.key.communicator) site.communicator = written(entry.key.communicator);
  entry.stream_id = {session_, writer_.site_id(site)};
  return entry.stream_id.id;
}

uint32_t StreamAppender::layout_id(const LayoutEntry& entry) {
  if (entry.stream_id.session != session_) entry.stream_id = {session_, writer_.layout_id(entry.layout)};
  return entry.stream_id.id;
}

uint32_t StreamAppender::next_call(uint32_t site, int32_t micro_step) {
  if (site >= calls_.size()) calls_.resize(site + 64);
  Calls& calls = calls_[site];
  if (calls.step_serial != step_serial_) calls = {step_serial_, micro_step, 0};
  if (calls.micro_step == micro_step) return calls.count++;
  return further_calls_[uint64_t{site} << 32 | static_cast<uint32_t>(micro_step)]++;
}

std::string StreamAppender::written(const Name* name) const {
  if (!name || name->length == 0) return {};
  return settings_.mask_names ? masked_name(name->view()) : std::string(name->view());
}

std::string StreamAppender::written(const CommunicatorEntry* communicator) {
  const auto [known, is_new] = communicator_names_.try_emplace(communicator);
  if (!is_new) return known->second;
  std::string name = written(communicator->name);
  const std::string members = members_name(*communicator);
  if (name.empty()) name = members;
  // One name for two sets of members would make one communicator of them.
  if (communicators_by_name_.contains(name)) name += fmt::format("[{}]", members);
  communicators_by_name_.emplace(name, communicator);
  writer_.add_communicator(
      {name, std::vector<int>(communicator->members, communicator->members + communicator->member_count)});
  return known->second = name;
}

void StreamAppender::add_losses() {
  for (int i = 0; i < static_cast<int>(Loss::count_); ++i) {
    LossLog::Taken taken;
    if (!losses_.take(static_cast<Loss>(i), &taken)) continue;
    taken.gap.reason = loss_reason(static_cast<Loss>(i));
    if (static_cast<Loss>(i) == Loss::step_lost) taken.gap.records_lost = 0;  // steps were counted, not their records
    if (taken.detail) taken.gap.reason += fmt::format(" (CUDA error {})", taken.detail);
    writer_.add_gap(taken.gap);
  }
}

void StreamAppender::add_limits() {
  const uint32_t bits = limits_.bits();
  for (int i = 0; i < static_cast<int>(Limit::count_); ++i) {
    if ((bits & ~limits_written_) >> i & 1) writer_.add_coverage_limit(coverage_limit(static_cast<Limit>(i)));
  }
  limits_written_ |= bits;
}

void StreamAppender::flush() {
  add_losses();
  add_limits();
  if (unflushed_ == 0) return;
  writer_.flush();
  unflushed_ = 0;
}

void StreamAppender::finish(bool cut_short) {
  if (!any_step_ && !pending_.empty()) append_without_step();
  if (!pending_.empty()) limits_.add(Limit::after_last_step);
  // A program that never calls step_end means its last step to end with it; one that does has left the step half done.
  const bool ends_here = open_ && !cut_short && (!any_step_ || !any_explicit_end_);
  if (ends_here && any_step_) limits_.add(Limit::implied_end);
  add_losses();
  add_limits();
  if (ends_here) close_step();
  writer_.finish();
}

bool StreamAppender::is_full() const {
  return settings_.max_size_bytes != 0 &&
         writer_.size_bytes() + unflushed_ * kRecordBytesEstimate >= settings_.max_size_bytes;
}

}  // namespace forkpoint
