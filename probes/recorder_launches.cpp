// The recorder's part of the launch level: rows on their way to the writer.
#include "probes/cuda_digest.h"
#include "probes/exits.h"
#include "probes/launch_packet.h"
#include "probes/recorder.h"

namespace forkpoint {

bool Recorder::claim_row(const Token& token, RowPlace* place) {
  place->session = session(token);
  if (!place->session) return false;
  if (place->session->claim(token, &place->claim)) return true;
  lose(Loss::ring_full);
  return false;
}

bool Recorder::await_writer(const Token& token) {
  Session* session = session_if_running();
  return session && session->await_progress(token);
}

bool Recorder::is_stalled() const {
  const Session* session = session_.load(std::memory_order_acquire);
  return session && session->is_stalled();
}

void Recorder::note_stall() {
  if (Session* session = session_.load(std::memory_order_acquire)) session->note_stall();
}

void Recorder::publish_row(const Token& token, const RowPlace& place, LaunchPacket* packet) {
  if (!packet->discard) next_row_.fetch_add(packet->rows, std::memory_order_relaxed);
  packet->row.micro_step = micro_step_.load(std::memory_order_relaxed);
  Event& event = *place.claim.event;
  event.kind = EventKind::launch;
  event.packet = packet;
  place.session->publish(token, place.claim);
  if (!drain_registered_.exchange(true)) drain_before_libraries_go();
}

const SiteEntry* Recorder::launch_site(const Token& token, const Name* kernel, bool* recompute) {
  const ScopeStack* stack = ScopeStack::of_thread_if_any(token);
  const ScopeFrame& frame = stack ? stack->of_launches() : scope(token);
  if (recompute) *recompute = (frame.flags & kRecordRecompute) != 0;
  return kernel ? names_.site(site_key_of(frame, Role::other, Kind::launch, kernel)) : nullptr;
}

CudaContext* Recorder::digest_context(const Token& token, CUctx_st* context, int* error) {
  return make_digest_context(token, context, settings_->ring_slots, error);
}

}  // namespace forkpoint
