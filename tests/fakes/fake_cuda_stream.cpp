// Streams and events of the fake libcuda.
#include <cuda.h>

#include <algorithm>
#include <set>

#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

struct Streams {
  CUstream_st legacy;
  std::set<CUstream> live;           // named ones
  std::vector<CUstream> of_threads;  // never destroyed
  std::set<CUevent> events;
  uint64_t last_id = 0;
};
Streams& streams() {
  static Streams* one = [] {
    auto* made = new Streams;
    made->legacy.queue = Engine::get().legacy();
    return made;
  }();
  return *one;
}

// Never destroyed: work may be on it when the thread ends.
CUstream stream_of_thread() {
  static thread_local CUstream stream = nullptr;
  if (!stream) {
    stream = new CUstream_st;
    stream->queue = Engine::get().make_queue(true);
    const std::lock_guard lock(objects());
    stream->id = ++streams().last_id;
    streams().of_threads.push_back(stream);
  }
  return stream;
}

CUresult make_stream(CUstream* handle, unsigned int flags) {
  auto* stream = new CUstream_st;
  stream->flags = flags;
  stream->queue = Engine::get().make_queue((flags & CU_STREAM_NON_BLOCKING) == 0);
  const std::lock_guard lock(objects());
  stream->id = ++streams().last_id;
  streams().live.insert(stream);
  *handle = stream;
  return CUDA_SUCCESS;
}

CUresult destroy_stream(CUstream handle) {
  {
    const std::lock_guard lock(objects());
    if (streams().live.erase(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (handle->capture) abandon_capture(handle);
  }
  Engine::get().retire(handle->queue);
  delete handle;
  return CUDA_SUCCESS;
}

bool is_event(CUevent event) { return streams().events.count(event) != 0; }

CUresult record_event(CUevent event, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult refused = before_legacy_use(stream); refused != CUDA_SUCCESS) return refused;
  {
    const std::lock_guard lock(objects());
    if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    event->recorded = true;
    event->capture = stream->capture;
    event->captured = stream->captured;
    if (stream->capture) return CUDA_SUCCESS;
  }
  Engine::get().enqueue(stream->queue, [] {});
  const Point end = Engine::get().end_of(stream->queue);
  const std::lock_guard lock(objects());
  event->point = end;
  return CUDA_SUCCESS;
}

// A node of the stream's capture that has to do with an event outside of it. false: it is none.
bool capture_outside(CUstream stream, CUgraphNodeType type, CUevent event, CUresult* result) {
  std::shared_ptr<Capture> capture;
  {
    const std::lock_guard lock(objects());
    if (!stream || !is_event(event) || !(capture = stream->capture)) return false;
    (type == CU_GRAPH_NODE_TYPE_WAIT_EVENT ? capture->graph->waits : capture->graph->records).push_back(event);
  }
  return *result = submit(stream, type, [] {}), true;
}

CUresult wait_event(CUstream stream, CUevent event, unsigned int flags) {
  CUresult outside = CUDA_SUCCESS;
  if (flags & CU_EVENT_WAIT_EXTERNAL && capture_outside(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, &outside))
    return outside;
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult refused = before_legacy_use(stream); refused != CUDA_SUCCESS) return refused;
  Point point;
  {
    const std::lock_guard lock(objects());
    if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->recorded) return CUDA_SUCCESS;
    if (event->capture) return join_capture(stream, *event);
    if (stream->capture) {
      stream->capture->invalid = true;
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    point = event->point;
  }
  Engine::get().enqueue(stream->queue, [] {}, {point});
  return CUDA_SUCCESS;
}

CUresult record_event_as(CUevent event, CUstream stream, unsigned int flags) {
  CUresult outside = CUDA_SUCCESS;
  if (flags & CU_EVENT_RECORD_EXTERNAL && capture_outside(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, &outside))
    return outside;
  return record_event(event, stream);
}

CUresult point_of_event(CUevent event, Point* point) {
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  const std::lock_guard lock(objects());
  if (!is_event(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (event->recorded && event->capture) return CUDA_ERROR_CAPTURED_EVENT;
  if (event->recorded) *point = event->point;
  return CUDA_SUCCESS;
}

CUresult synchronize(CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  return wait_for_stream(stream);
}

CUresult query(CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult refused = before_unsafe_call(); refused != CUDA_SUCCESS) return refused;
  if (fails_here("cuStreamQuery")) return CUDA_ERROR_UNKNOWN;
  return Engine::get().pending(stream->queue) == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

}  // namespace

CUstream find_stream(CUstream handle, bool per_thread) {
  if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread)) return stream_of_thread();
  if (!handle || handle == CU_STREAM_LEGACY) return &streams().legacy;
  const std::lock_guard lock(objects());
  return streams().live.count(handle) ? handle : nullptr;
}

std::vector<CUstream> all_streams() {
  std::vector<CUstream> all(streams().live.begin(), streams().live.end());
  all.insert(all.end(), streams().of_threads.begin(), streams().of_threads.end());
  return all;
}

bool is_legacy(CUstream stream) { return stream == &streams().legacy; }

CUresult wait_for_stream(CUstream stream) {
  {
    const std::lock_guard lock(objects());
    if (stream->capture) {
      stream->capture->invalid = true;
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  Engine::get().wait_for(Engine::get().end_of(stream->queue));
  return CUDA_SUCCESS;
}

}  // namespace forkpoint::fake

using namespace forkpoint::fake;

FAKE cuStreamCreate(CUstream* stream, unsigned int flags) {
  FAKE_TRACE(cuStreamCreate, stream, flags);
  return traced.end(make_stream(stream, flags));
}
FAKE cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  FAKE_TRACE(cuStreamCreateWithPriority, stream, flags, priority);
  return traced.end(make_stream(stream, flags));
}
FAKE cuStreamDestroy_v2(CUstream stream) {
  FAKE_TRACE(cuStreamDestroy_v2, stream);
  return traced.end(destroy_stream(stream));
}
FAKE_TWINS(cuStreamSynchronize, _ptsz, synchronize(find_stream(stream, per_thread)), (CUstream stream), stream)
FAKE_TWINS(cuStreamQuery, _ptsz, query(find_stream(stream, per_thread)), (CUstream stream), stream)
FAKE_TWINS(cuStreamWaitEvent, _ptsz, wait_event(find_stream(stream, per_thread), event, flags),
           (CUstream stream, CUevent event, unsigned int flags), stream, event, flags)
FAKE cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  FAKE_TRACE(cuStreamWriteValue32_v2, stream, address, value, flags);
  const CUresult result = synchronize(find_stream(stream, false));
  if (result == CUDA_SUCCESS) *reinterpret_cast<cuuint32_t*>(address) = value;
  return traced.end(result);
}
FAKE cuStreamGetFlags(CUstream stream, unsigned int* flags) {
  const CUstream known = find_stream(stream, false);
  if (!known) return CUDA_ERROR_INVALID_HANDLE;
  return *flags = known->flags, CUDA_SUCCESS;
}
FAKE cuStreamGetId(CUstream stream, unsigned long long* id) {
  const CUstream known = find_stream(stream, false);
  if (!known) return CUDA_ERROR_INVALID_HANDLE;
  return *id = known->id, CUDA_SUCCESS;
}
FAKE cuStreamGetCtx(CUstream stream, CUcontext* context) {
  if (!find_stream(stream, false)) return CUDA_ERROR_INVALID_HANDLE;
  return *context = primary_context(), CUDA_SUCCESS;
}

FAKE cuEventCreate(CUevent* event, unsigned int flags) {
  FAKE_TRACE(cuEventCreate, event, flags);
  auto* made = new CUevent_st;
  {
    const std::lock_guard lock(objects());
    streams().events.insert(made);
  }
  *event = made;
  return traced.end(CUDA_SUCCESS);
}
FAKE cuEventDestroy_v2(CUevent event) {
  FAKE_TRACE(cuEventDestroy_v2, event);
  std::unique_lock lock(objects());
  const bool known = streams().events.erase(event) != 0;
  lock.unlock();
  if (known) delete event;
  return traced.end(known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}
FAKE_TWINS(cuEventRecord, _ptsz, record_event(event, find_stream(stream, per_thread)), (CUevent event, CUstream stream),
           event, stream)
FAKE_TWINS(cuEventRecordWithFlags, _ptsz, record_event_as(event, find_stream(stream, per_thread), flags),
           (CUevent event, CUstream stream, unsigned int flags), event, stream, flags)
FAKE cuEventSynchronize(CUevent event) {
  FAKE_TRACE(cuEventSynchronize, event);
  Point point;
  const CUresult result = point_of_event(event, &point);
  if (result == CUDA_SUCCESS && point.queue) Engine::get().wait_for(point);
  return traced.end(result);
}
FAKE cuEventQuery(CUevent event) {
  FAKE_TRACE(cuEventQuery, event);
  Point point;
  const CUresult result = point_of_event(event, &point);
  const bool done = !point.queue || Engine::get().is_done(point);
  return traced.end(result == CUDA_SUCCESS && !done ? CUDA_ERROR_NOT_READY : result);
}
FAKE cuEventElapsedTime_v2(float* ms, CUevent first, CUevent second) {
  FAKE_TRACE(cuEventElapsedTime_v2, ms, first, second);
  return *ms = 0, traced.end(CUDA_SUCCESS);
}
