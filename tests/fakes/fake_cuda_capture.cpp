// Captures of the fake libcuda: what streams are given to do becomes nodes of a graph.
#include <cuda.h>

#include <algorithm>
#include <set>

#include "tests/fakes/fake_cuda_objects.h"
#include "tests/fakes/fake_cuda_trace.h"

namespace forkpoint::fake {
namespace {

struct Captures {
  uint64_t last_id = 0;
  std::vector<std::shared_ptr<Capture>> under_way;
};
Captures& captures() {
  static Captures* one = new Captures;
  return *one;
}

thread_local CUstreamCaptureMode capture_mode_of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (is_legacy(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::lock_guard lock(objects());
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = ++captures().last_id;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->graph = new CUgraph_st;
  captures().under_way.push_back(capture);
  stream->capture = capture;
  stream->captured.clear();
  return CUDA_SUCCESS;
}

bool all_joined(const Capture& capture, const std::vector<CUgraphNode>& ends) {
  std::set<CUgraphNode> reached;
  std::vector<CUgraphNode> left = ends;
  while (!left.empty()) {
    const CUgraphNode node = left.back();
    left.pop_back();
    if (reached.insert(node).second) left.insert(left.end(), node->after.begin(), node->after.end());
  }
  return reached.size() == capture.graph->nodes.size();
}

CUresult end_capture(CUstream stream, CUgraph* graph) {
  *graph = nullptr;
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(objects());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  CUresult result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS && !all_joined(*capture, stream->captured)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  capture->ended = true;
  std::erase(captures().under_way, capture);
  for (const CUstream other : all_streams()) {
    if (other->capture == capture) other->capture = nullptr;
  }
  if (result == CUDA_SUCCESS) {
    *graph = capture->graph;
  } else {
    delete capture->graph;
  }
  return result;
}

CUstreamCaptureStatus status_of(const CUstream_st& stream) {
  if (!stream.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return stream.capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

struct CaptureInfo {
  CUstreamCaptureStatus* status;
  cuuint64_t* id;
  CUgraph* graph;
  const CUgraphNode** after;
  size_t* after_count;
};
CUresult tell_capture(CUstream stream, const CaptureInfo& info) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (forced_capture() == 2) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (forced_capture() == 1) {
    *info.status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (info.id) *info.id = ~cuuint64_t{0} >> 1;
    return CUDA_SUCCESS;
  }
  const std::lock_guard lock(objects());
  if (is_legacy(stream) &&
      std::any_of(captures().under_way.begin(), captures().under_way.end(),
                  [](const auto& capture) { return (capture->origin->flags & CU_STREAM_NON_BLOCKING) == 0; })) {
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  *info.status = status_of(*stream);
  if (*info.status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  if (info.id) *info.id = stream->capture->id;
  if (info.graph) *info.graph = stream->capture->graph;
  if (info.after) *info.after = stream->captured.data();
  if (info.after_count) *info.after_count = stream->captured.size();
  return CUDA_SUCCESS;
}

}  // namespace

// A captured stream goes.
void abandon_capture(CUstream stream) {
  const std::shared_ptr<Capture> capture = stream->capture;
  capture->invalid = true;
  if (capture->origin != stream) return;
  capture->ended = true;
  std::erase(captures().under_way, capture);
  for (const CUstream other : all_streams()) {
    if (other->capture == capture) other->capture = nullptr;
  }
  delete capture->graph;
}

// The stream joins the event's capture, or orders itself behind more of its own.
CUresult join_capture(CUstream stream, const CUevent_st& event) {
  if (event.capture->ended) return CUDA_ERROR_CAPTURED_EVENT;
  if (stream->capture && stream->capture != event.capture) {
    stream->capture->invalid = event.capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (is_legacy(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stream->capture = event.capture;
  for (const CUgraphNode node : event.captured) {
    if (std::find(stream->captured.begin(), stream->captured.end(), node) == stream->captured.end()) {
      stream->captured.push_back(node);
    }
  }
  return CUDA_SUCCESS;
}

bool is_captured(CUstream stream) {
  const std::lock_guard lock(objects());
  return stream->capture != nullptr;
}

void forget_captures() {
  const std::lock_guard lock(objects());
  for (const auto& capture : captures().under_way) capture->ended = true;
  captures().under_way.clear();
  for (const CUstream stream : all_streams()) stream->capture = nullptr;
}

// What the driver calls potentially unsafe: by the modes of the thread and of the captures under way.
CUresult before_unsafe_call() {
  if (capture_mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(objects());
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : captures().under_way) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids = capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
                         (mine || (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                   capture_mode_of_thread == CU_STREAM_CAPTURE_MODE_GLOBAL));
    if (!forbids) continue;
    capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

// The legacy default stream waits for a captured stream, which cannot be.
CUresult before_legacy_use(CUstream stream) {
  if (!is_legacy(stream)) return CUDA_SUCCESS;
  const std::lock_guard lock(objects());
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : captures().under_way) {
    if (capture->origin->flags & CU_STREAM_NON_BLOCKING) continue;
    capture->invalid = true;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return result;
}

CUresult submit(CUstream stream, CUgraphNodeType type, Work work) {
  if (const CUresult refused = before_legacy_use(stream); refused != CUDA_SUCCESS) return refused;
  {
    const std::lock_guard lock(objects());
    if (stream->capture) {
      if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      auto node = std::make_unique<CUgraphNode_st>(CUgraphNode_st{type, std::move(work), stream->captured});
      stream->captured = {node.get()};
      stream->capture->graph->nodes.push_back(std::move(node));
      return CUDA_SUCCESS;
    }
  }
  Engine::get().enqueue(stream->queue, std::move(work));
  return CUDA_SUCCESS;
}

}  // namespace forkpoint::fake

using namespace forkpoint::fake;

FAKE_TWINS(cuStreamBeginCapture_v2, _ptsz, begin_capture(find_stream(stream, per_thread), mode),
           (CUstream stream, CUstreamCaptureMode mode), stream, mode)
FAKE_TWINS(cuStreamEndCapture, _ptsz, end_capture(find_stream(stream, per_thread), graph),
           (CUstream stream, CUgraph* graph), stream, graph)
FAKE_TWINS(cuStreamIsCapturing, _ptsz,
           tell_capture(find_stream(stream, per_thread), {status, nullptr, nullptr, nullptr, nullptr}),
           (CUstream stream, CUstreamCaptureStatus* status), stream, status)
FAKE_TWINS(cuStreamGetCaptureInfo_v2, _ptsz,
           tell_capture(find_stream(stream, per_thread), {status, id, graph, after, count}),
           (CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** after,
            size_t* count),
           stream, status, id, graph, after, count)
FAKE_TWINS(cuStreamGetCaptureInfo_v3, _ptsz,
           (edges ? * edges = nullptr : nullptr,
            tell_capture(find_stream(stream, per_thread), {status, id, graph, after, count})),
           (CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** after,
            const CUgraphEdgeData** edges, size_t* count),
           stream, status, id, graph, after, edges, count)
FAKE cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  FAKE_TRACE(cuThreadExchangeStreamCaptureMode, mode);
  std::swap(*mode, capture_mode_of_thread);
  return traced.end(CUDA_SUCCESS);
}
