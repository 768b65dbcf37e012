#include "probes/cupti.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <type_traits>

namespace forkpoint {
namespace {

constinit Cupti found;

void* open_library(const char* path) { return dlopen(path, RTLD_LAZY | RTLD_LOCAL); }

// Folders of libraries that come with a CUPTI beside them or in a place known from there.
struct Neighbour {
  const char* soname;  // wanted
  void* library = nullptr;
};

int look_beside(dl_phdr_info* info, size_t, void* data) {
  auto& neighbour = *static_cast<Neighbour*>(data);
  const char* name = info->dlpi_name;
  if (!name || !strstr(name, "libcudart.so")) return 0;
  const char* slash = strrchr(name, '/');
  if (!slash) return 0;
  static constexpr const char* kFrom[] = {"", "../../cuda_cupti/lib/", "../extras/CUPTI/lib64/", "../../../extras/CUPTI/lib64/"};
  for (const char* relative : kFrom) {
    char path[4096];
    const int length = snprintf(path, sizeof(path), "%.*s%s%s", static_cast<int>(slash - name + 1), name, relative, neighbour.soname);
    if (length <= 0 || length >= static_cast<int>(sizeof(path))) continue;
    neighbour.library = open_library(path);
    if (neighbour.library) return 1;
  }
  return 0;
}

void* look_everywhere(const char* soname) {
  if (void* loaded = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD)) return loaded;
  if (void* on_path = open_library(soname)) return on_path;
  Neighbour neighbour{soname};
  dl_iterate_phdr(look_beside, &neighbour);
  if (neighbour.library) return neighbour.library;
  static constexpr const char* kFolders[] = {"/usr/local/cuda/targets/x86_64-linux/lib", "/usr/local/cuda/extras/CUPTI/lib64",
                                             "/usr/local/cuda/lib64", "/opt/cuda/extras/CUPTI/lib64"};
  for (const char* folder : kFolders) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", folder, soname);
    if (void* library = open_library(path)) return library;
  }
  return nullptr;
}

bool bind(void* library, Cupti* cupti) {
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    return *function != nullptr;
  };
  return find(&cupti->subscribe, "cuptiSubscribe") && find(&cupti->unsubscribe, "cuptiUnsubscribe") &&
         find(&cupti->enable_callback, "cuptiEnableCallback") && find(&cupti->result_string, "cuptiGetResultString") &&
         find(&cupti->version, "cuptiGetVersion");
}

}  // namespace

const Cupti* find_cupti(const Token&, const char* path, int driver_version, const char** problem) {
  if (found.subscribe) return &found;
  void* library = nullptr;
  if (path && *path) {
    library = open_library(path);
    if (!library) *problem = "FORKPOINT_CUPTI names no library that can be loaded";
  } else {
    const int major = driver_version / 1000;
    for (int version = major < 13 ? major : 13; version >= 11 && !library; --version) {
      char soname[32];
      snprintf(soname, sizeof(soname), version >= 12 ? "libcupti.so.%d" : "libcupti.so.%d.8", version);
      library = look_everywhere(soname);
    }
    if (!library) *problem = "libcupti was not found: install CUPTI of the driver's CUDA version, or set FORKPOINT_CUPTI to its path";
  }
  if (!library) return nullptr;
  Cupti cupti;
  if (!bind(library, &cupti)) {
    *problem = "the libcupti that was found lacks a function: it is too old, or is something else";
    return nullptr;
  }
  found = cupti;
  return &found;
}

}  // namespace forkpoint
