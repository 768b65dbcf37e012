// Several records at once: first all are looked at, then they get their places in the ring, then the digests are launched
// together, and the records are published in their order.
#include <algorithm>

#include "probes/exits.h"
#include "probes/launch_level.h"
#include "probes/operands.h"
#include "probes/record_batch.h"
#include "probes/recorder.h"

#define FORKPOINT_PROBE_ITSELF 1
#include "probes/forkpoint.h"

namespace forkpoint {

// false: it is no record.
bool Recorder::stage(const Token& token, const TensorRequest& request, BatchPlace* place) {
  CheckedTensor tensor;
  const Loss problem = check_tensor(request.desc, &tensor);
  if (problem != Loss::count_) return lose(problem), false;
  const ScopeFrame& frame = *request.frame;
  if (skips(tensor.role, frame.collective)) return false;
  const Name* name = names_.name(request.desc->name);
  if (!name) return lose(Loss::names_full), false;
  const SiteKey site = site_key_of(frame, tensor.role, frame.collective ? Kind::collective : Kind::tensor, name);
  if (settings_->save.wanted) save_operand(token, site, tensor);
  place->site = names_.site(site);
  place->layout = names_.layout(tensor.layout);
  if (!place->site || !place->layout) return lose(Loss::names_full), false;
  place->flags = static_cast<uint8_t>(request.flags | frame.flags);
  place->on_device = tensor.on_device && tensor.elements > 0;
  if (place->on_device) {
    place->tensor = {tensor.data, tensor.view(), tensor.lowest_offset, tensor.end_offset, tensor.stream, tensor.owned_on};
  } else {
    place->result = tensor.digest();
  }
  return true;
}

void Recorder::tensors_in(const Token& token, const TensorRequest* requests, size_t count, RecordBatch& batch) {
  if (!wanted_.load(std::memory_order_relaxed)) return;
  if (!names_.create()) {
    for (size_t i = 0; i < count; ++i) lose(Loss::no_memory);
    return;
  }
  // Places that are claimed hold up all that come behind them: never more than a part of the ring.
  const size_t most = std::clamp<size_t>(settings_->ring_slots / 8, 1, RecordBatch::kMost);
  batch.count_ = 0;
  for (size_t i = 0; i < count; ++i) {
    const forkpoint_tensor_desc& desc = *requests[i].desc;
    const bool other_stream = desc.device != FORKPOINT_HOST && batch.has_stream_ && batch.stream_ != desc.stream;
    if (batch.count_ > 0 && other_stream) flush(token, batch);
    BatchPlace& place = batch.place_[batch.count_];
    if (!stage(token, requests[i], &place)) continue;
    if (place.on_device) batch.has_stream_ = true, batch.stream_ = place.tensor.stream;
    if (++batch.count_ == most) flush(token, batch);
  }
  flush(token, batch);
}

void Recorder::flush(const Token& token, RecordBatch& batch) {
  const size_t count = batch.count_;
  batch.count_ = 0;
  batch.has_stream_ = false;
  Session* session = count > 0 ? this->session(token) : nullptr;
  if (!session) return;
  size_t first = 0;  // of those that hold a place and are not published
  for (size_t i = 0; i < count; ++i) {
    Session::Ring::Claim& claim = batch.place_[i].claim;
    if (session->try_claim(token, &claim)) continue;
    // The ring is full. To wait while holding places would be to wait for a writer who waits for them.
    publish(token, *session, batch, first, i);
    first = i;
    if (session->claim(token, &claim)) continue;
    lose(Loss::ring_full);
    first = i + 1;
  }
  publish(token, *session, batch, first, count);
}

// Those of the batch from `first` to before `end`, which all hold places.
void Recorder::publish(const Token& token, Session& session, RecordBatch& batch, size_t first, size_t end) {
  size_t devices = 0;
  for (size_t i = first; i < end; ++i) {
    if (batch.place_[i].on_device) batch.device_[devices++] = &batch.place_[i].tensor;
  }
  if (devices > 0) enqueue_device_digests(token, batch.device_, devices, settings_->ring_slots, batch.outcome_);
  size_t device = 0;
  for (size_t i = first; i < end; ++i) {
    const BatchPlace& place = batch.place_[i];
    if (place.on_device) {
      publish_on_device(token, session, place, batch.outcome_[device++]);
    } else {
      fill_record(*place.claim.event, *place.site, *place.layout, place.flags, place.result);
      session.publish(token, place.claim);
    }
  }
}

}  // namespace forkpoint
