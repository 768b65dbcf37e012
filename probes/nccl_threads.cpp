#include "probes/nccl_threads.h"

#include <dlfcn.h>
#include <unwind.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace forkpoint {
namespace {

enum class Owner : uint8_t { not_asked, nccl, other };
thread_local Owner owner __attribute__((tls_model("initial-exec"))) = Owner::not_asked;

constexpr int kMostFrames = 512;  // deeper ones are no thread of NCCL's, which does little before it calls CUDA

// The frames next to the bottom of the stack, outermost first.
struct Bottom {
  static constexpr int kKept = 8;
  uintptr_t frames[kKept] = {};  // a ring
  int count = 0;

  static _Unwind_Reason_Code add(_Unwind_Context* context, void* self) {
    auto* bottom = static_cast<Bottom*>(self);
    const uintptr_t address = _Unwind_GetIP(context);
    if (address == 0) return _URC_END_OF_STACK;
    bottom->frames[bottom->count++ % kKept] = address;
    return bottom->count < kMostFrames ? _URC_NO_REASON : _URC_END_OF_STACK;
  }
  int kept() const { return count < kKept ? count : kKept; }
  const void* outermost(int i) const { return reinterpret_cast<const void*>(frames[(count - 1 - i) % kKept] - 1); }
};

const char* library_of(const void* address) {
  Dl_info info = {};
  if (dladdr(address, &info) == 0 || !info.dli_fname) return "";
  const char* slash = strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

bool begins(const char* text, const char* with) { return strncmp(text, with, strlen(with)) == 0; }

// What starts every thread: the C library, and the C++ library for a std::thread.
bool only_starts_threads(const char* library) {
  for (const char* name : {"libc.so", "libc-", "libpthread", "libstdc++"}) {
    if (begins(library, name)) return true;
  }
  return false;
}

Owner find_owner() {
  Bottom bottom;
  _Unwind_Backtrace(&Bottom::add, &bottom);
  if (bottom.count == 0 || bottom.count >= kMostFrames) return Owner::other;
  if (!only_starts_threads(library_of(bottom.outermost(0)))) return Owner::other;  // the stack was not readable to its end
  for (int i = 1; i < bottom.kept(); ++i) {
    const char* library = library_of(bottom.outermost(i));
    if (!only_starts_threads(library)) return begins(library, "libnccl") ? Owner::nccl : Owner::other;
  }
  return Owner::other;
}

}  // namespace

bool on_thread_of_nccl() {
  if (owner == Owner::not_asked) owner = find_owner();
  return owner == Owner::nccl;
}

}  // namespace forkpoint
