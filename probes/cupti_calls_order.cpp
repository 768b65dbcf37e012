// What orders work on streams: events, waits, and the host's own waiting.
#include <cuda.h>

#include "probes/cupti_calls.h"
#include "probes/cupti_hooks.h"
#include "probes/launch_recorder.h"
#include "probes/launch_streams.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

bool is_wanted(const DriverCall& call) { return call.succeeded() && recorder.wants_launches(); }

void note_on(const Token& token, const DriverCall& call, CUstream stream, LaunchKind kind, uint64_t object) {
  stream = stream_of(call, stream);
  // Within a capture these order the graph's nodes, which stand in the order of their capture.
  const CudaDriver* driver = find_cuda_driver(token);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!driver || (driver->cuStreamIsCapturing_(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)) return;
  launch_recorder.note(token, {call.context, stream_of(call, stream), call.per_thread, call.correlation}, kind, object);
}

template <typename Params>
void on_record(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  note_on(token, call, params.hStream, LaunchKind::event_record, stream_numbers.event(params.hEvent));
}

void on_wait(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const cuStreamWaitEvent_params*>(call.params);
  note_on(token, call, params.hStream, LaunchKind::event_wait, stream_numbers.event(params.hEvent));
}

template <typename Params>
void on_event_done(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  launch_recorder.note_everywhere(token, LaunchKind::synchronize, stream_numbers.event(params.hEvent));
}
template <typename Params>
void on_stream_done(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  launch_recorder.note(token, {call.context, stream_of(call, params.hStream), call.per_thread, call.correlation}, LaunchKind::synchronize, 0);
}
// A query that says "done" is as good as a wait, to a thread that goes on to launch. What a watchdog is told makes no launch
// wait: taken for a wait, it would hide a race.
template <typename Params>
void on_event_query(const Token& token, const DriverCall& call) {
  if (thread_has_launched()) on_event_done<Params>(token, call);
}
template <typename Params>
void on_stream_query(const Token& token, const DriverCall& call) {
  if (thread_has_launched()) on_stream_done<Params>(token, call);
}
void on_all_done(const Token& token, const DriverCall& call) {
  if (is_wanted(call)) launch_recorder.note_everywhere(token, LaunchKind::synchronize, 0);
}

void on_host_function(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  note_on(token, call, static_cast<const cuLaunchHostFunc_params*>(call.params)->hStream, LaunchKind::host_function, 0);
}

void on_stream_value(const Token&, const DriverCall& call) {
  if (is_wanted(call)) recorder.limit(Limit::stream_values);
}

void on_stream_destroy(const Token&, const DriverCall& call) {
  if (call.entry) stream_numbers.stream_destroyed(static_cast<const cuStreamDestroy_v2_params*>(call.params)->hStream);
}
void on_event_destroy(const Token&, const DriverCall& call) {
  if (call.entry) stream_numbers.event_destroyed(static_cast<const cuEventDestroy_v2_params*>(call.params)->hEvent);
}

constexpr CallEntry kCalls[] = {
    FORKPOINT_CALL_PTSZ(cuEventRecord, on_record<cuEventRecord_params>),
    FORKPOINT_CALL_PTSZ(cuEventRecordWithFlags, on_record<cuEventRecordWithFlags_params>),
    FORKPOINT_CALL_PTSZ(cuStreamWaitEvent, on_wait),
    FORKPOINT_CALL(cuEventSynchronize, on_event_done<cuEventSynchronize_params>),
    FORKPOINT_CALL(cuEventQuery, on_event_query<cuEventQuery_params>),
    FORKPOINT_CALL_PTSZ(cuStreamSynchronize, on_stream_done<cuStreamSynchronize_params>),
    FORKPOINT_CALL_PTSZ(cuStreamQuery, on_stream_query<cuStreamQuery_params>),
    FORKPOINT_CALL(cuCtxSynchronize, on_all_done),
    FORKPOINT_CALL_PTSZ(cuLaunchHostFunc, on_host_function),
    FORKPOINT_CALL_PTSZ(cuStreamWriteValue32, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWriteValue32_v2, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWriteValue64, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWriteValue64_v2, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWaitValue32, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWaitValue32_v2, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWaitValue64, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamWaitValue64_v2, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamBatchMemOp, on_stream_value),
    FORKPOINT_CALL_PTSZ(cuStreamBatchMemOp_v2, on_stream_value),
    FORKPOINT_CALL(cuStreamDestroy_v2, on_stream_destroy),
    FORKPOINT_CALL(cuEventDestroy_v2, on_event_destroy),
};

}  // namespace

CallTable order_calls() { return {kCalls, sizeof(kCalls) / sizeof(kCalls[0])}; }

}  // namespace forkpoint
