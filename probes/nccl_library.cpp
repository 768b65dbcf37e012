#include "probes/nccl_library.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "probes/os.h"

namespace forkpoint {
namespace {

constexpr uint32_t kMostLibraries = 32;
constexpr uint32_t kCallerCells = 1024;  // a power of two
constexpr int kIndexBits = 6;            // above the address in a cell of the table

struct Slot {
  std::atomic<uint32_t> state{0};  // 1: being filled in, 2: ready
  void* key = nullptr;             // its ncclGroupStart
  NcclLibrary library;
};
constinit Slot slots[kMostLibraries];
constinit std::atomic<uint64_t> callers[kCallerCells] = {};
constinit std::atomic<bool> absence_said{false};

const void* base_of(const void* address) {
  Dl_info info = {};
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

bool is_ours(const void* address) {
  static const void* const own_base = base_of(reinterpret_cast<const void*>(&is_ours));
  return own_base && base_of(address) == own_base;
}

// Where names are looked up, and how they are called there.
struct Source {
  void* handle = nullptr;  // RTLD_NEXT: whoever comes behind us, so another interposer is not passed over
  bool by_profiling_name = false;

  void* find(const char* name, const char* profiling_name) const {
    void* found = by_profiling_name ? dlsym(handle, profiling_name) : nullptr;
    if (!found) found = dlsym(handle, name);
    return found && !is_ours(found) ? found : nullptr;
  }
  void* key() const { return find("ncclGroupStart", "pncclGroupStart"); }
};

// The library of the caller, with what it was linked against. Its own search order is the global scope first, which
// RTLD_NEXT has covered, and then this.
void* open_caller(const void* caller) {
  Dl_info info = {};
  link_map* map = nullptr;
  if (dladdr1(caller, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || !map) return nullptr;
  const char* path = map->l_name && map->l_name[0] ? map->l_name : nullptr;
  return dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
}

// Paths of everything that is loaded. Opened only after the walk: that holds a lock which dlopen takes in another
// order.
struct PathList {
  char* text = nullptr;
  size_t used = 0, size_bytes = 0;

  static int add(dl_phdr_info* info, size_t, void* list) {
    if (info->dlpi_name && info->dlpi_name[0]) static_cast<PathList*>(list)->append(info->dlpi_name);
    return 0;
  }
  void append(const char* path) {
    const size_t length = strlen(path) + 1;
    if (used + length > size_bytes) {
      const size_t wanted = 2 * (used + length) + 4096;
      auto* more = static_cast<char*>(realloc(text, wanted));
      if (!more) return;
      text = more;
      size_bytes = wanted;
    }
    memcpy(text + used, path, length);
    used += length;
  }
};

bool is_named_nccl(const char* path) {
  const char* slash = strrchr(path, '/');
  return strncmp(slash ? slash + 1 : path, "libnccl.so", 10) == 0;
}

// A library that is loaded under the usual name, else any that holds NCCL within.
Source search_everywhere() {
  PathList paths;
  dl_iterate_phdr(&PathList::add, &paths);
  Source found;
  for (const bool usual_name : {true, false}) {
    for (size_t at = 0; at < paths.used && !found.handle; at += strlen(paths.text + at) + 1) {
      if (is_named_nccl(paths.text + at) != usual_name) continue;
      const Source source{dlopen(paths.text + at, RTLD_LAZY | RTLD_NOLOAD), true};
      if (source.handle && source.key())
        found = source;
      else if (source.handle)
        dlclose(source.handle);
    }
  }
  free(paths.text);
  return found;
}

Source source_for(const void* caller) {
  const Source behind_us{RTLD_NEXT, false};
  if (behind_us.key()) return behind_us;
  const Source of_caller{open_caller(caller), true};
  if (of_caller.handle && of_caller.key()) return of_caller;
  return search_everywhere();
}

// Each by itself: another interposer behind us may have only some of them.
void fill(const Source& source, NcclLibrary* library) {
  const Source behind_us{RTLD_NEXT, false};
  const auto find = [&](const char* name, const char* profiling_name) {
    void* found = behind_us.find(name, profiling_name);
    return found ? found : source.find(name, profiling_name);
  };
#define FORKPOINT_NCCL_FIND(name, parameters) \
  library->name = reinterpret_cast<decltype(library->name)>(find("nccl" #name, "pnccl" #name));
  FORKPOINT_NCCL_FUNCTIONS(FORKPOINT_NCCL_FIND)
  FORKPOINT_NCCL_QUERIES(FORKPOINT_NCCL_FIND)
#undef FORKPOINT_NCCL_FIND
}

// Index of the copy; kMostLibraries: no room.
uint32_t index_of(const Source& source) {
  void* key = source.key();
  for (uint32_t i = 0; i < kMostLibraries; ++i) {
    uint32_t state = 0;
    if (slots[i].state.compare_exchange_strong(state, 1, std::memory_order_acq_rel)) {
      slots[i].key = key;
      fill(source, &slots[i].library);
      slots[i].state.store(2, std::memory_order_release);
      return i;
    }
    // Bounded: whoever fills it in may be a thread that did not come along when the process forked.
    for (int tries = 0; tries < 100'000 && slots[i].state.load(std::memory_order_acquire) == 1; ++tries) sched_yield();
    if (slots[i].key == key) return i;
  }
  return kMostLibraries;
}

}  // namespace

const NcclLibrary* nccl_of_caller(const void* caller) {
  const auto place = reinterpret_cast<uint64_t>(caller) << kIndexBits;
  std::atomic<uint64_t>& cell = callers[(place * 0x9E3779B97F4A7C15ull) >> 54 & (kCallerCells - 1)];
  const uint64_t known = cell.load(std::memory_order_acquire);
  if (known != 0 && (known >> kIndexBits) == (place >> kIndexBits)) {
    return &slots[known & ((1u << kIndexBits) - 1)].library;
  }
  const Source source = source_for(caller);
  const uint32_t index = source.handle ? index_of(source) : kMostLibraries;
  if (index == kMostLibraries) return nullptr;
  cell.store(place | index, std::memory_order_release);
  return &slots[index].library;
}

bool has_settled(const NcclLibrary& library, NcclComm comm, NcclResult result) {
  static constinit std::atomic<uint32_t> nobody_wakes{0};
  constexpr int64_t kPauseNs = 50'000;
  while (result == kNcclInProgress) {
    if (!library.CommGetAsyncError || library.CommGetAsyncError(comm, &result) != kNcclSuccess) return false;
    if (result == kNcclInProgress) futex_wait(nobody_wakes, 0, kPauseNs);
  }
  return result == kNcclSuccess;
}

NcclResult nccl_not_there(const char* function) {
  if (!absence_said.exchange(true)) {
    say("%s was called, but no NCCL that has it is loaded in this process: the call fails", function);
  }
  return kNcclSystemError;
}

}  // namespace forkpoint
