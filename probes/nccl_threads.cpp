#include "probes/nccl_threads.h"

#include <dlfcn.h>
#include <unwind.h>

#include <cstdint>
#include <cstring>

namespace forkpoint {
namespace {

enum class Owner : uint8_t { not_asked, nccl, other };
thread_local Owner owner __attribute__((tls_model("initial-exec"))) = Owner::not_asked;

constexpr int kMostFrames = 512;  // deeper ones are no thread of NCCL's, which does little before it calls CUDA

struct Place {
  const void* base = nullptr;
  const char* name = "";  // of the library's file
};

Place place_of(uintptr_t address) {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(address), &info) == 0 || !info.dli_fname) return {};
  const char* slash = strrchr(info.dli_fname, '/');
  return {info.dli_fbase, slash ? slash + 1 : info.dli_fname};
}

template <size_t count>
bool begins_with_any(const char* text, const char* const (&beginnings)[count]) {
  for (const char* beginning : beginnings) {
    if (strncmp(text, beginning, strlen(beginning)) == 0) return true;
  }
  return false;
}

constexpr const char* kNccl[] = {"libnccl"};
constexpr const char* kThreadStarters[] = {"libc.so", "libc-", "libpthread", "libstdc++"};
constexpr const char* kCuda[] = {"libcuda", "libcupti"};

// The stack from the innermost frame on.
struct Frames {
  const void* own_base;
  bool left_own = false;   // the frames of the probe itself are the innermost
  bool any_nccl = false;
  bool any_other = false;
  bool at_starter = false; // the last one that was seen started the thread
  int count = 0;

  static _Unwind_Reason_Code add(_Unwind_Context* context, void* self) {
    const uintptr_t address = _Unwind_GetIP(context);
    return address == 0 || !static_cast<Frames*>(self)->take(place_of(address - 1)) ? _URC_END_OF_STACK : _URC_NO_REASON;
  }
  bool take(const Place& place) {
    at_starter = begins_with_any(place.name, kThreadStarters);
    left_own = left_own || place.base != own_base;
    if (begins_with_any(place.name, kNccl)) any_nccl = true;
    else if (left_own && !at_starter && !begins_with_any(place.name, kCuda)) any_other = true;
    return !any_other && ++count < kMostFrames;
  }
};

// Nobody but NCCL stands between the start of the thread and CUDA. Where the thread began is not enough: a libnccl that brings its
// own C++ library may be what starts everybody's threads.
Owner find_owner() {
  Frames frames{place_of(reinterpret_cast<uintptr_t>(&on_thread_of_nccl)).base};
  _Unwind_Backtrace(&Frames::add, &frames);
  return frames.any_nccl && !frames.any_other && frames.at_starter ? Owner::nccl : Owner::other;
}

}  // namespace

bool on_thread_of_nccl() {
  if (owner == Owner::not_asked) owner = find_owner();
  return owner == Owner::nccl;
}

}  // namespace forkpoint
