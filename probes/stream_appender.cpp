#include "probes/stream_appender.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/digest_mix.h"
#include "probes/launch_packet.h"
#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr size_t kMaxPending = 1u << 18;
constexpr size_t kMaxPendingEval = kMaxPending / 2;  // so that no evaluation, however long, takes the place of what counts
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
  if (communicator.member_count == 0) return fmt::format("{} ranks", communicator.size);
  if (communicator.member_count <= 16) return fmt::format("{}", fmt::join(communicator.members, end, ","));
  const auto bytes = static_cast<size_t>(communicator.member_count) * sizeof(int32_t);
  return fmt::format("{},..,{} ({} ranks, {:016x})", communicator.members[0], end[-1], communicator.member_count,
                     mix64(digest_only(communicator.members, bytes).a));
}

constexpr auto is_evaluation = [](const auto& pending) {
  return pending.has_record && !pending.launch_site && (pending.event.flags & kRecordEval) != 0;
};

// Two entries for one communicator: the program's and NCCL's, or two places in it that this process holds.
bool are_one(const CommunicatorEntry& left, const CommunicatorEntry& right) {
  const bool told = !(left.id == Digest{}) && !(right.id == Digest{});
  if (told) return left.id == right.id;
  return left.member_count > 0 && left.member_count == right.member_count &&
         std::equal(left.members, left.members + left.member_count, right.members);
}

}  // namespace

StreamAppender::StreamAppender(const Settings& settings, uint32_t session, HashStreamWriter& writer, LossLog& losses,
                               LimitSet& limits, Notes& notes)
    : settings_(settings), session_(session), writer_(writer), losses_(losses), limits_(limits), notes_(notes) {}

void StreamAppender::begin_step(int64_t step, bool wanted, uint64_t serial, uint8_t flags) {
  // A thread that starts the session while another begins a step tells of that step twice.
  if (serial <= serial_) return;
  // A step whose begin was lost (a Gap says so) took what was pending with it.
  if (serial != serial_ + 1) forget_pending();
  serial_ = serial;
  if (open_) close_step();
  any_step_ = true;
  step_ = step;
  settle_candidates((flags & kStepComputed) != 0);
  if ((flags & kStepFinal) != 0) keep_evaluation();
  if (wanted) {
    mark_ahead();
    open_step(step);
    append_pending();
    final_ = (flags & kStepFinal) != 0;
  }
  forget_pending();
}

void StreamAppender::settle_candidates(bool training) {
  for (Pending& pending : pending_) {
    uint8_t& flags = pending.event.flags;
    if (!pending.has_record || (flags & kRecordCandidate) == 0) continue;
    flags = static_cast<uint8_t>((flags & ~kRecordCandidate) | (training ? 0 : kRecordEval));
  }
}

// At a first step some of it is what the program called to set itself up: a resumed run does there what the other did at its
// own first step. diff tells the two apart (lib/diff_set_up.h).
void StreamAppender::mark_ahead() {
  for (Pending& pending : pending_) {
    if (pending.has_record && pending.event.site->key.phase == Phase::collective) pending.event.flags |= kRecordAhead;
  }
}

// Behind the last step: what else came there has no place.
void StreamAppender::keep_evaluation() {
  const auto rest = std::stable_partition(pending_.begin(), pending_.end(), is_evaluation);
  if (rest != pending_.end()) limits_.add(Limit::after_last_step);
  pending_.erase(rest, pending_.end());
}

void StreamAppender::forget_pending() {
  pending_.clear();
  pending_eval_ = 0;
}

void StreamAppender::end_step() {
  if (!any_step_) return;  // nothing but the prologue yet
  any_explicit_end_ = true;
  if (open_) close_step();
}

void StreamAppender::add(const Event& event) {
  Pending pending;
  pending.has_record = true;
  pending.event = event;
  if (const LaunchPacket* packet = event.packet) {
    pending.launch_site = packet->site;
    pending.row = packet->row;
    for (uint32_t i = 0; i < packet->row.buffers; ++i) {
      pending.buffers.push_back(packet->buffers[i].row);
      // What the record says of the same bytes.
      pending.buffers.back().digest = event.digest;
      pending.buffers.back().flags = static_cast<uint8_t>(pending.buffers.back().flags & ~kBufferNoDigest);
    }
  }
  keep_or_append(std::move(pending));
}

void StreamAppender::add_launch(const LaunchRow& row, const SiteEntry& site, const BufferRow* buffers) {
  Pending pending;
  pending.launch_site = &site;
  pending.row = row;
  pending.buffers.assign(buffers, buffers + row.buffers);
  keep_or_append(std::move(pending));
}

void StreamAppender::keep_or_append(Pending&& pending) {
  if (waits_for_step(pending)) {
    const bool eval = is_evaluation(pending);
    if (eval && pending_eval_ >= kMaxPendingEval) return limits_.add(Limit::long_evaluation);
    pending_eval_ += eval ? 1 : 0;
    if (pending_.size() < kMaxPending) return pending_.push_back(std::move(pending));
    if (any_step_) return losses_.add(Loss::pending_full, kPrologueStep);
    append_without_step();
  }
  if (!open_) open_step(kPrologueStep);
  append(pending);
}

void StreamAppender::append_pending() {
  for (const Pending& pending : pending_) append(pending);
}

void StreamAppender::append(const Pending& pending) {
  uint64_t object = pending.row.object;
  if (pending.has_record) {
    object = records_in_step_++;
    append_record(pending.event);
  }
  if (pending.launch_site && !final_) append_launch(pending, object);
}

void StreamAppender::append_launch(const Pending& pending, uint64_t object) {
  LaunchRow row = pending.row;
  row.site = site_id(*pending.launch_site);
  row.object = object;
  row.buffers = static_cast<uint32_t>(pending.buffers.size());
  writer_.append_launch(row, pending.buffers.data());
  ++unflushed_;
}

// What comes before a step begins belongs to it: also before the first one, unless it is said to be loading. Otherwise a
// batch drawn ahead of its step would stand elsewhere in a run that was resumed there than in one that went through.
// Launches before the first step are no part of it: they make what it starts from.
bool StreamAppender::waits_for_step(const Pending& pending) const {
  if (any_step_) return !open_;
  return !stepless_ && pending.has_record && pending.event.site->key.phase != Phase::load;
}

// A program without steps: all that it records stands before the first one.
void StreamAppender::append_without_step() {
  stepless_ = true;
  if (!open_) open_step(kPrologueStep);
  settle_candidates(false);
  append_pending();
  forget_pending();
}

void StreamAppender::open_step(int64_t step) {
  writer_.begin_step(step);
  open_ = true;
  ++step_serial_;
  further_calls_.clear();
  records_in_step_ = 0;
}

void StreamAppender::close_step() {
  add_losses();
  add_limits();
  writer_.end_step();
  open_ = false;
  final_ = false;
  unflushed_ = 0;
}

void StreamAppender::append_record(const Event& event) {
  Record record;
  record.site = site_id(*event.site);
  record.layout = layout_id(*event.layout);
  record.micro_step = event.micro_step;
  record.flags = static_cast<uint8_t>(event.flags & ~kRecordCandidate);  // within a step it is training
  record.call = next_call(record.site, event.micro_step, (event.flags & kRecordEval) != 0);
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

uint32_t StreamAppender::next_call(uint32_t site, int32_t micro_step, bool eval) {
  const uint64_t place = uint64_t{site} * 2 + (eval ? 1 : 0);
  if (place >= calls_.size()) calls_.resize(place + 128);
  Calls& calls = calls_[place];
  if (calls.step_serial != step_serial_) calls = {step_serial_, micro_step, 0};
  if (calls.micro_step == micro_step) return calls.count++;
  return further_calls_[place << 32 | static_cast<uint32_t>(micro_step)]++;
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
  const auto namesake = communicators_by_name_.find(name);
  if (namesake != communicators_by_name_.end() && !are_one(*namesake->second, *communicator)) {
    name += fmt::format("[{}]", members);
  }
  communicators_by_name_.emplace(name, communicator);
  writer_.add_communicator(
      {name, std::vector<int>(communicator->members, communicator->members + communicator->member_count),
       communicator->id, communicator->own_rank, communicator->size});
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
  add_notes();
}

// What the program says in its own words may hold its names: masked, only the words before them are kept.
void StreamAppender::add_notes() {
  const auto shown = [this](const char* text) {
    const std::string_view all = text;
    return std::string(settings_.mask_names ? all.substr(0, all.find(':')) : all);
  };
  while (const Note* note = notes_.limits.at(noted_limits_written_)) {
    writer_.add_coverage_limit({shown(note->what), settings_.mask_names ? std::string() : note->detail});
    ++noted_limits_written_;
  }
  for (uint32_t i = 0; Note* note = notes_.gaps.at(i); ++i) {
    Gap gap;
    if (!note->when.take(&gap.first_step, &gap.last_step)) continue;
    gap.reason = shown(note->what);
    writer_.add_gap(gap);
  }
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
  settle_candidates(false);
  keep_evaluation();  // what that finds to be in no verdict's path needs no word
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
