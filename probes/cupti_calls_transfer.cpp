// Copies and sets, in every form that names plain memory.
#include <cuda.h>

#include "probes/cupti_calls.h"
#include "probes/launch_recorder.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

bool is_wanted(const DriverCall&) { return recorder.wants_launches(); }
bool is_done(const DriverCall& call) { return call.succeeded() && recorder.wants_launches(); }

CallPlace place_of(const DriverCall& call, CUstream stream) { return {call.context, stream_of(call, stream), call.per_thread, call.correlation}; }

void note_copy(const Token& token, const DriverCall& call, CUstream stream, const CopyCall& copy) {
  const CallPlace place = place_of(call, stream);
  if (call.entry) launch_recorder.before_copy(token, place, copy);
  else launch_recorder.after_copy(token, place, copy, call.succeeded());
}

void copied(const Token& token, const DriverCall& call, CUstream stream, uint64_t target, uint64_t source, uint64_t bytes,
            bool returns_done) {
  CopyCall copy;
  copy.name = call.name;
  copy.target = target;
  copy.source = source;
  copy.bytes = bytes;
  copy.returns_done = returns_done;
  note_copy(token, call, stream, copy);
}

// Each structure has its own names for the same three things.
template <typename Params, bool kAsync>
void on_plain(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  CUstream stream = nullptr;
  if constexpr (kAsync) stream = params.hStream;
  copied(token, call, stream, params.dst, params.src, params.ByteCount, !kAsync);
}
template <typename Params, bool kAsync>
void on_to_device(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  CUstream stream = nullptr;
  if constexpr (kAsync) stream = params.hStream;
  copied(token, call, stream, params.dstDevice, address_of(params.srcHost), params.ByteCount, !kAsync);
}
template <typename Params, bool kAsync>
void on_to_host(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  CUstream stream = nullptr;
  if constexpr (kAsync) stream = params.hStream;
  copied(token, call, stream, address_of(params.dstHost), params.srcDevice, params.ByteCount, !kAsync);
}
// On the device the host does not wait, whatever the name.
template <typename Params, bool kAsync>
void on_device(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  CUstream stream = nullptr;
  if constexpr (kAsync) stream = params.hStream;
  copied(token, call, stream, params.dstDevice, params.srcDevice, params.ByteCount, false);
}

// Two and three dimensions: plain memory on both sides, else a declared limit.
bool plain_end(CUmemorytype type, const void* host, CUdeviceptr device, uint64_t* address) {
  if (type == CU_MEMORYTYPE_ARRAY) return false;
  *address = type == CU_MEMORYTYPE_HOST ? address_of(host) : device;
  return true;
}

template <typename Params, bool kAsync>
void on_rectangle(const Token& token, const DriverCall& call) {
  if (!is_wanted(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  if (!params.pCopy) return;
  const auto& form = *params.pCopy;
  CUstream stream = nullptr;
  if constexpr (kAsync) stream = params.hStream;
  CopyCall copy;
  if (!plain_end(form.srcMemoryType, form.srcHost, form.srcDevice, &copy.source) ||
      !plain_end(form.dstMemoryType, form.dstHost, form.dstDevice, &copy.target)) {
    return recorder.limit(Limit::arrays);
  }
  copy.name = call.name;
  copy.bytes = form.WidthInBytes;
  copy.source_pitch = form.srcPitch ? form.srcPitch : form.WidthInBytes;
  copy.target_pitch = form.dstPitch ? form.dstPitch : form.WidthInBytes;
  copy.source += form.srcY * copy.source_pitch + form.srcXInBytes;
  copy.target += form.dstY * copy.target_pitch + form.dstXInBytes;
  copy.rows = form.Height;
  if constexpr (requires { form.Depth; }) {
    if (form.Depth > 1) return recorder.limit(Limit::arrays);  // slices with gaps of their own
    copy.source += form.srcZ * form.srcHeight * copy.source_pitch;
    copy.target += form.dstZ * form.dstHeight * copy.target_pitch;
    copy.rows = form.Depth <= 1 ? form.Height : (form.Depth - 1) * (form.dstHeight ? form.dstHeight : form.Height) + form.Height;
  }
  copy.returns_done = !kAsync;
  note_copy(token, call, stream, copy);
}

// Many at once: there is one place for what was begun before a call, so their sources are digested after it, on its stream.
template <typename Params>
void on_batch(const Token& token, const DriverCall& call) {
  if (!is_done(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  const CallPlace place = place_of(call, params.hStream);
  for (size_t i = 0; i < params.count; ++i) {
    CopyCall copy;
    copy.name = call.name;
    copy.target = params.dsts[i];
    copy.source = params.srcs[i];
    copy.bytes = params.sizes[i];
    launch_recorder.before_copy(token, place, copy);
    launch_recorder.after_copy(token, place, copy, true);
  }
}

void on_array(const Token&, const DriverCall& call) {
  if (is_done(call)) recorder.limit(Limit::arrays);
}

// ---- Sets

template <typename Params>
uint32_t pattern_of(const Params& params) {
  if constexpr (requires { params.uc; }) return params.uc;
  else if constexpr (requires { params.us; }) return params.us;
  else return params.ui;
}
template <typename Params>
constexpr uint32_t pattern_bytes_of(const Params& params) {
  if constexpr (requires { params.uc; }) return 1;
  else if constexpr (requires { params.us; }) return 2;
  else return 4;
}

template <typename Params>
void on_set(const Token& token, const DriverCall& call) {
  if (!is_done(call)) return;
  const auto& params = *static_cast<const Params*>(call.params);
  CUstream stream = nullptr;
  if constexpr (requires { params.hStream; }) stream = params.hStream;
  SetCall set;
  set.name = call.name;
  set.target = params.dstDevice;
  set.pattern = pattern_of(params);
  set.pattern_bytes = pattern_bytes_of(params);
  if constexpr (requires { params.Width; }) {
    set.bytes = params.Width * set.pattern_bytes;
    set.rows = params.Height;
    set.pitch = params.dstPitch;
  } else {
    set.bytes = params.N * set.pattern_bytes;
  }
  launch_recorder.after_set(token, place_of(call, stream), set);
}

#define FORKPOINT_SETS(name)                                                \
  FORKPOINT_CALL_PTDS(name##_v2, on_set<name##_v2_params>), FORKPOINT_CALL_PTSZ(name##Async, on_set<name##Async_params>)

constexpr CallEntry kCalls[] = {
    FORKPOINT_CALL_PTDS(cuMemcpy, (on_plain<cuMemcpy_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyAsync, (on_plain<cuMemcpyAsync_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpyHtoD_v2, (on_to_device<cuMemcpyHtoD_v2_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyHtoDAsync_v2, (on_to_device<cuMemcpyHtoDAsync_v2_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpyDtoH_v2, (on_to_host<cuMemcpyDtoH_v2_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyDtoHAsync_v2, (on_to_host<cuMemcpyDtoHAsync_v2_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpyDtoD_v2, (on_device<cuMemcpyDtoD_v2_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyDtoDAsync_v2, (on_device<cuMemcpyDtoDAsync_v2_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpyPeer, (on_device<cuMemcpyPeer_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyPeerAsync, (on_device<cuMemcpyPeerAsync_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpy2D_v2, (on_rectangle<cuMemcpy2D_v2_params, false>)),
    FORKPOINT_CALL_PTDS(cuMemcpy2DUnaligned_v2, (on_rectangle<cuMemcpy2DUnaligned_v2_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpy2DAsync_v2, (on_rectangle<cuMemcpy2DAsync_v2_params, true>)),
    FORKPOINT_CALL_PTDS(cuMemcpy3D_v2, (on_rectangle<cuMemcpy3D_v2_params, false>)),
    FORKPOINT_CALL_PTSZ(cuMemcpy3DAsync_v2, (on_rectangle<cuMemcpy3DAsync_v2_params, true>)),
    FORKPOINT_CALL_PTSZ(cuMemcpyBatchAsync, on_batch<cuMemcpyBatchAsync_params>),
    FORKPOINT_CALL_PTSZ(cuMemcpyBatchAsync_v2, on_batch<cuMemcpyBatchAsync_v2_params>),
    FORKPOINT_CALL_PTDS(cuMemcpyDtoA_v2, on_array),
    FORKPOINT_CALL_PTDS(cuMemcpyAtoD_v2, on_array),
    FORKPOINT_CALL_PTDS(cuMemcpyHtoA_v2, on_array),
    FORKPOINT_CALL_PTDS(cuMemcpyAtoH_v2, on_array),
    FORKPOINT_CALL_PTDS(cuMemcpyAtoA_v2, on_array),
    FORKPOINT_CALL_PTSZ(cuMemcpyHtoAAsync_v2, on_array),
    FORKPOINT_CALL_PTSZ(cuMemcpyAtoHAsync_v2, on_array),
    FORKPOINT_CALL_PTDS(cuMemcpy3DPeer, on_array),
    FORKPOINT_CALL_PTSZ(cuMemcpy3DPeerAsync, on_array),
    FORKPOINT_CALL_PTSZ(cuMemcpy3DBatchAsync, on_array),
    FORKPOINT_CALL_PTSZ(cuMemcpy3DBatchAsync_v2, on_array),
    FORKPOINT_SETS(cuMemsetD8),
    FORKPOINT_SETS(cuMemsetD16),
    FORKPOINT_SETS(cuMemsetD32),
    FORKPOINT_SETS(cuMemsetD2D8),
    FORKPOINT_SETS(cuMemsetD2D16),
    FORKPOINT_SETS(cuMemsetD2D32),
};

}  // namespace

CallTable transfer_calls() { return {kCalls, sizeof(kCalls) / sizeof(kCalls[0])}; }

}  // namespace forkpoint
