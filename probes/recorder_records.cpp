// The recorder's scopes and records.
#include "probes/cuda_digest.h"
#include "probes/exits.h"
#include "probes/launch_level.h"
#include "probes/operands.h"
#include "probes/record_batch.h"
#include "probes/recorder.h"
#include "probes/watch_control.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {
namespace {

constexpr int32_t kMaxMembers = 1 << 20;

// Where no scope says it.
Phase default_phase(Role role) {
  switch (role) {
    case Role::batch: return Phase::data;
    case Role::gradient: return Phase::backward;
    case Role::parameter:
    case Role::optimizer_state: return Phase::optimizer;
    case Role::rng:
    case Role::sampler: return Phase::state;
    default: return Phase::forward;
  }
}

}  // namespace

const ScopeFrame& Recorder::scope(const Token& token) const {
  static constexpr ScopeFrame kNone;
  const ScopeStack* stack = ScopeStack::of_thread_if_any(token);
  return stack ? stack->top() : kNone;
}

void Recorder::push_scope(const Token& token, const ScopeFrame& frame) {
  ScopeStack* stack = ScopeStack::of_thread(token);
  if (!stack) return lose(Loss::no_memory);
  if (!stack->push(frame)) limits_.add(Limit::scope_depth);
}

void Recorder::begin_scope(const Token& token, int32_t phase, const char* layer, const char* op) {
  if (!names_.create()) return lose(Loss::no_memory);
  ScopeFrame frame = scope(token);
  if (phase >= 0 && phase < kPhaseCount) {
    frame.phase = static_cast<int8_t>(phase);
    frame.collective = false;
    frame.communicator = nullptr;
  }
  if (layer) frame.layer = names_.name(layer);
  if (op) frame.op = names_.name(op);
  if ((layer && !frame.layer) || (op && !frame.op)) lose(Loss::names_full);
  push_scope(token, frame);
}

void Recorder::begin_collective(const Token& token, const char* op, const char* communicator, const int32_t* members,
                                int32_t member_count, const char* layer) {
  if (!names_.create()) return lose(Loss::no_memory);
  ScopeFrame frame = scope(token);
  frame.phase = static_cast<int8_t>(Phase::collective);
  frame.collective = true;
  frame.communicator = nullptr;
  if (layer) frame.layer = names_.name(layer);
  if (op) frame.op = names_.name(op);
  if (member_count < 0 || member_count > kMaxMembers || (member_count > 0 && !members)) {
    lose(Loss::bad_collective);
  } else if (const Name* name = names_.name(communicator)) {
    frame.communicator = names_.communicator({name, members, member_count});
    if (!frame.communicator) lose(Loss::names_full);
  }
  if ((layer && !frame.layer) || (op && !frame.op)) lose(Loss::names_full);
  push_scope(token, frame);
}

void Recorder::enter_frame(const Token& token, const ScopeFrame& frame) { push_scope(token, frame); }

void Recorder::set_backward(const Token& token, const ScopeFrame* frame) {
  ScopeStack* stack = frame ? ScopeStack::of_thread(token) : ScopeStack::of_thread_if_any(token);
  if (stack) stack->set_backward(frame);
  else if (frame) lose(Loss::no_memory);
}

uint32_t Recorder::frame(const Token&, int32_t phase, const char* layer, const char* op, uint32_t communicator, uint8_t flags) {
  if (!names_.create() || !frames_.create()) return lose(Loss::no_memory), 0;
  ScopeFrame frame;
  if (phase >= 0 && phase < kPhaseCount) frame.phase = static_cast<int8_t>(phase);
  frame.collective = frame.phase == static_cast<int8_t>(Phase::collective);
  frame.flags = flags;
  if (layer && *layer) frame.layer = names_.name(layer);
  if (op && *op) frame.op = names_.name(op);
  frame.communicator = frames_.communicator(communicator);
  const uint32_t handle = frames_.add(frame);
  if (handle == 0 || (layer && *layer && !frame.layer) || (op && *op && !frame.op)) lose(Loss::names_full);
  return handle;
}

uint32_t Recorder::communicator(const Token&, const char* name, const int32_t* members, int32_t member_count,
                                const Digest& id, int32_t own_place) {
  if (!names_.create() || !frames_.create()) return lose(Loss::no_memory), 0;
  if (member_count < 0 || member_count > kMaxMembers) return lose(Loss::bad_collective), 0;
  const Name* text = names_.name(name);
  CommunicatorKey key{text, members, member_count};
  if (!(id == Digest{})) key.id = id, key.own_rank = own_place, key.size = member_count;
  const CommunicatorEntry* entry = text ? names_.communicator(key) : nullptr;
  const uint32_t handle = entry ? frames_.add(entry) : 0;
  if (handle == 0) lose(Loss::names_full);
  return handle;
}

void Recorder::end_scope(const Token& token) {
  if (ScopeStack* stack = ScopeStack::of_thread_if_any(token)) stack->pop();
}

bool Recorder::skips(Role role, bool collective) const {
  return level_now(*settings_) == Level::step && !collective && (role == Role::input || role == Role::output);
}

SiteKey Recorder::site_key_of(const ScopeFrame& frame, Role role, Kind kind, const Name* name) const {
  SiteKey key = {};
  const Phase otherwise = kind == Kind::state                      ? Phase::state
                          : any_step_.load(std::memory_order_relaxed) ? default_phase(role)
                                                                      : Phase::load;
  key.phase = frame.phase >= 0 ? static_cast<Phase>(frame.phase) : otherwise;
  key.kind = kind;
  key.role = role;
  key.layer = frame.layer;
  key.op = frame.op;
  key.tensor = name;
  key.communicator = kind == Kind::collective ? frame.communicator : nullptr;
  return key;
}

void Recorder::record(const Token& token, const SiteKey& site, uint8_t flags, const LayoutKey& layout, const DigestResult& result) {
  Session* session = this->session(token);
  if (!session) return;
  const SiteEntry* site_entry = names_.site(site);
  const LayoutEntry* layout_entry = names_.layout(layout);
  if (!site_entry || !layout_entry) return lose(Loss::names_full);
  Session::Ring::Claim claim;
  if (!session->claim(token, &claim)) return lose(Loss::ring_full);
  fill_record(*claim.event, *site_entry, *layout_entry, flags, result);
  session->publish(token, claim);
}

void Recorder::fill_record(Event& event, const SiteEntry& site, const LayoutEntry& layout, uint8_t flags,
                           const DigestResult& result) const {
  event.kind = EventKind::record;
  event.packet = nullptr;
  event.flags = flags;
  event.micro_step = micro_step_.load(std::memory_order_relaxed);
  event.site = &site;
  event.layout = &layout;
  event.digest = result.digest;
  event.stats = result.stats;
}

void Recorder::record_on_device(const Token& token, const SiteKey& site, uint8_t flags, const CheckedTensor& tensor) {
  Session* session = this->session(token);
  if (!session) return;
  const SiteEntry* site_entry = names_.site(site);
  const LayoutEntry* layout_entry = names_.layout(tensor.layout);
  if (!site_entry || !layout_entry) return lose(Loss::names_full);
  // The place first: a kernel that was enqueued without one would have a result that nobody fetches.
  BatchPlace place = {site_entry, layout_entry, flags, true, {}, {}, {}};
  if (!session->claim(token, &place.claim)) return lose(Loss::ring_full);
  place.tensor = {tensor.data, tensor.view(), tensor.lowest_offset, tensor.end_offset, tensor.stream, tensor.owned_on};
  publish_on_device(token, *session, place, enqueue_device_digest(token, place.tensor, settings_->ring_slots));
}

void Recorder::publish_on_device(const Token& token, Session& session, const BatchPlace& place,
                                 const DeviceOutcome& outcome) {
  Event& event = *place.claim.event;
  event.kind = EventKind::none;
  event.packet = nullptr;
  event.flags = place.flags;
  if (outcome.kind == DeviceOutcome::Kind::enqueued) {
    const DeviceTensor& tensor = place.tensor;
    event.kind = EventKind::device_record;
    event.micro_step = micro_step_.load(std::memory_order_relaxed);
    event.site = place.site;
    event.layout = place.layout;
    event.device_slot = outcome.slot;
    if (settings_->level == Level::launch) event.packet = launch_row_of_record(token, tensor.stream, tensor.data, tensor.lowest_offset, tensor.end_offset);
    if (event.packet) next_row_.fetch_add(1, std::memory_order_relaxed);
  }
  session.publish(token, place.claim);
  if (outcome.kind == DeviceOutcome::Kind::lost) lose(outcome.loss, outcome.error);
  if (outcome.kind == DeviceOutcome::Kind::captured) limits_.add(Limit::graph_replay);
  if (outcome.kind == DeviceOutcome::Kind::enqueued && !drain_registered_.exchange(true)) drain_before_libraries_go();
}

void Recorder::tensor(const Token& token, const forkpoint_tensor_desc* desc) {
  if (desc && is_owned_on_device(desc->device)) return lose(Loss::bad_device);  // not from here
  tensor_in(token, scope(token), desc);
}

void Recorder::tensor_in(const Token& token, const ScopeFrame& frame, const forkpoint_tensor_desc* desc, uint8_t flags) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  CheckedTensor tensor;
  const Loss problem = check_tensor(desc, &tensor);
  if (problem != Loss::count_) return lose(problem);
  if (skips(tensor.role, frame.collective)) return;
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* name = names_.name(desc->name);
  if (!name) return lose(Loss::names_full);
  const SiteKey site = site_key_of(frame, tensor.role, frame.collective ? Kind::collective : Kind::tensor, name);
  flags = static_cast<uint8_t>(flags | frame.flags);
  if (settings_->save.wanted) save_operand(token, site, tensor);
  if (tensor.on_device && tensor.elements > 0) return record_on_device(token, site, flags, tensor);
  record(token, site, flags, tensor.layout, tensor.digest());
}

void Recorder::scalar(const Token& token, const char* name, int32_t role, double value) {
  scalar_in(token, scope(token), name, role, value);
}

void Recorder::scalar_in(const Token& token, const ScopeFrame& frame, const char* name, int32_t role, double value,
                         uint8_t flags) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!name) return lose(Loss::bad_name);
  if (!is_role(role)) return lose(Loss::bad_role);
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  const SiteKey site = site_key_of(frame, static_cast<Role>(role), Kind::scalar, text);
  record_number(token, site, static_cast<uint8_t>(flags | frame.flags), value);
}

void Recorder::argument_in(const Token& token, const ScopeFrame& frame, const char* name, double value) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  SiteKey site = site_key_of(frame, Role::scalar, Kind::scalar, text);
  site.communicator = frame.communicator;  // it belongs to the collective's call
  record_number(token, site, frame.flags, value);
}

void Recorder::record_number(const Token& token, const SiteKey& site, uint8_t flags, double value) {
  DigestResult result = digest_bytes(&value, sizeof(value), DType::f64);
  result.digest = scalar_digest(value);
  LayoutKey layout;
  layout.dtype = DType::f64;
  record(token, site, flags, layout, result);
}

void Recorder::state(const Token& token, const char* name, int32_t role, const void* data, size_t size_bytes) {
  state_in(token, scope(token), name, role, data, size_bytes);
}

void Recorder::state_in(const Token& token, const ScopeFrame& frame, const char* name, int32_t role, const void* data,
                        size_t size_bytes, uint8_t flags) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!name) return lose(Loss::bad_name);
  if (!is_role(role)) return lose(Loss::bad_role);
  if ((!data && size_bytes > 0) || size_bytes > INT64_MAX) return lose(Loss::bad_state);
  if (!names_.create()) return lose(Loss::no_memory);
  const Name* text = names_.name(name);
  if (!text) return lose(Loss::names_full);
  const auto shape = static_cast<int64_t>(size_bytes);
  LayoutKey layout;
  layout.dims = 1;
  layout.shape = &shape;
  const DigestResult result = size_bytes ? digest_bytes(data, size_bytes) : DigestResult{};
  const SiteKey site = site_key_of(frame, static_cast<Role>(role), Kind::state, text);
  record(token, site, static_cast<uint8_t>(flags | frame.flags), layout, result);
}

}  // namespace forkpoint
