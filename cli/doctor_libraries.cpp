#include "cli/doctor_libraries.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <sstream>

#include "cli/doctor_child.h"
#include "cli/doctor_looks.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace {

using std::chrono::milliseconds;

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// nullptr: the answer says why not.
void* open_library(const LookWriter& out, const std::string& file) {
  out.at("loading " + file);
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    out.say("error", why ? why : "no reason given");
  }
  return library;
}

// Where a function of it lies.
std::string path_of(void* function) {
  Dl_info info = {};
  return function && dladdr(function, &info) != 0 && info.dli_fname ? info.dli_fname : "";
}

// Of cuda.h.
constexpr int kProcessors = 16, kComputeMode = 20, kCapabilityMajor = 75, kCapabilityMinor = 76;

void say_device(const LookWriter& out, void* library, int index) {
  auto* get = find<int(int*, int)>(library, "cuDeviceGet");
  auto* get_name = find<int(char*, int, int)>(library, "cuDeviceGetName");
  auto* get_attribute = find<int(int*, int, int)>(library, "cuDeviceGetAttribute");
  int device = 0;
  if (!get || !get_name || !get_attribute || get(&device, index) != 0) return;
  char name[256] = {};
  get_name(name, sizeof(name) - 1, device);
  const auto attribute = [&](int which) {
    int value = 0;
    get_attribute(&value, which, device);
    return value;
  };
  out.say("device", fmt::format("{}|{}|{}.{}|{}|{}", index, name, attribute(kCapabilityMajor),
                                attribute(kCapabilityMinor), attribute(kComputeMode), attribute(kProcessors)));
}

void look_at_libcuda(const LookWriter& out) {
  void* library = open_library(out, "libcuda.so.1");
  if (!library) return;
  auto* get_version = find<int(int*)>(library, "cuDriverGetVersion");
  auto* init = find<int(unsigned)>(library, "cuInit");
  auto* count_devices = find<int(int*)>(library, "cuDeviceGetCount");
  out.say("library", path_of(reinterpret_cast<void*>(init)));
  out.at("asking for its version");
  int version = 0, count = 0;
  if (get_version && get_version(&version) == 0) out.say("version", version);
  if (!init) return;
  out.at("starting it (cuInit)");
  const int result = init(0);
  out.say("init", result);
  out.at("counting its devices");
  if (result != 0 || !count_devices || count_devices(&count) != 0) return;
  for (int i = 0; i < count; ++i) say_device(out, library, i);
}

// "1", "0", or "?" where the device has none.
std::string mode_text(int result, unsigned mode) { return result == 0 ? std::to_string(mode) : "?"; }

void look_at_nvml(const LookWriter& out) {
  void* library = open_library(out, "libnvidia-ml.so.1");
  if (!library) return;
  auto* init = find<int()>(library, "nvmlInit_v2");
  auto* count_devices = find<int(unsigned*)>(library, "nvmlDeviceGetCount_v2");
  auto* get = find<int(unsigned, void**)>(library, "nvmlDeviceGetHandleByIndex_v2");
  auto* get_name = find<int(void*, char*, unsigned)>(library, "nvmlDeviceGetName");
  auto* get_ecc = find<int(void*, unsigned*, unsigned*)>(library, "nvmlDeviceGetEccMode");
  auto* get_mig = find<int(void*, unsigned*, unsigned*)>(library, "nvmlDeviceGetMigMode");
  if (!init || !count_devices || !get || !get_ecc) return out.say("error", "it lacks functions");
  out.at("starting it");
  if (const int result = init(); result != 0) return out.say("error", fmt::format("nvmlInit gives error {}", result));
  unsigned count = 0;
  if (const int result = count_devices(&count); result != 0) return out.say("error", fmt::format("error {}", result));
  for (unsigned i = 0; i < count; ++i) {
    out.at(fmt::format("asking GPU {}", i));
    void* device = nullptr;
    if (const int result = get(i, &device); result != 0)
      return out.say("error", fmt::format("GPU {}: error {}", i, result));
    char name[96] = {};
    if (get_name) get_name(device, name, sizeof(name) - 1);
    unsigned ecc = 0, ecc_pending = 0, mig = 0, mig_pending = 0;
    const int ecc_result = get_ecc(device, &ecc, &ecc_pending);
    const int mig_result = get_mig ? get_mig(device, &mig, &mig_pending) : -1;
    out.say("device",
            fmt::format("{}|{}|{}|{}|{}|{}", i, name, mode_text(ecc_result, ecc), mode_text(ecc_result, ecc_pending),
                        mode_text(mig_result, mig), mode_text(mig_result, mig_pending)));
  }
}

// As the probe looks (probes/cupti.cpp), and besides in the folders in which a framework would bring its own.
void* find_cupti(const LookWriter& out, int major, const std::string& beside) {
  const char* chosen = std::getenv(contract::kCupti);
  if (chosen && *chosen) return out.at(std::string("loading ") + chosen), dlopen(chosen, RTLD_LAZY | RTLD_LOCAL);
  std::vector<std::string> folders{""};
  std::stringstream list(beside);
  for (std::string folder; std::getline(list, folder, ':');) folders.push_back(folder + "/");
  for (const char* folder : {"/usr/local/cuda/targets/x86_64-linux/lib/", "/usr/local/cuda/extras/CUPTI/lib64/",
                             "/usr/local/cuda/lib64/", "/opt/cuda/extras/CUPTI/lib64/"}) {
    folders.push_back(folder);
  }
  constexpr int kNewest = 13, kOldest = 11;
  for (int version = major > 0 && major < kNewest ? major : kNewest; version >= kOldest; --version) {
    for (const std::string& folder : folders) {
      const std::string file = folder + fmt::format("libcupti.so.{}{}", version, version >= 12 ? "" : ".8");
      out.at("loading " + file);
      if (void* library = dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL)) return library;
    }
  }
  return nullptr;
}

void on_call(void*, int, uint32_t, const void*) {}

void look_at_libcupti(const LookWriter& out, int major, const std::string& beside) {
  void* library = find_cupti(out, major, beside);
  if (!library) return;
  auto* subscribe = find<int(void**, void (*)(void*, int, uint32_t, const void*), void*)>(library, "cuptiSubscribe");
  auto* unsubscribe = find<int(void*)>(library, "cuptiUnsubscribe");
  auto* get_version = find<int(uint32_t*)>(library, "cuptiGetVersion");
  out.say("library", path_of(reinterpret_cast<void*>(subscribe)));
  uint32_t version = 0;
  if (get_version && get_version(&version) == 0) out.say("version", version);
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  auto* init = driver ? find<int(unsigned)>(driver, "cuInit") : nullptr;
  out.at("starting the driver");
  if (!subscribe || !unsubscribe || !init || init(0) != 0) return;
  out.at("subscribing to it");
  void* subscriber = nullptr;
  const int result = subscribe(&subscriber, on_call, nullptr);
  out.say("subscribe", result);
  if (result == 0) unsubscribe(subscriber);
}

void look_at_libnccl(const LookWriter& out, const std::string& file) {
  void* library = open_library(out, file);
  if (!library) return;
  auto* get_version = find<int(int*)>(library, "ncclGetVersion");
  out.say("library", path_of(reinterpret_cast<void*>(get_version)));
  out.at("asking for its version");
  int version = 0;
  if (get_version && get_version(&version) == 0) out.say("version", version);
}

}  // namespace

Look look_at_probe(const std::string& path, milliseconds limit) {
  const auto look = [&](const LookWriter& out) {
    void* library = open_library(out, path);
    if (!library) return;
    out.at("asking for its version");
    if (auto* abi = find<int()>(library, "forkpoint_probe_abi")) out.say("abi", abi());
  };
  return look_in_child(look, quiet_environment(), limit);
}

Look look_at_driver(milliseconds limit) { return look_in_child(look_at_libcuda, quiet_environment(), limit); }
Look look_at_devices(milliseconds limit) { return look_in_child(look_at_nvml, quiet_environment(), limit); }

Look look_at_cupti(int major, const std::string& beside, milliseconds limit) {
  return look_in_child([&](const LookWriter& out) { look_at_libcupti(out, major, beside); }, quiet_environment(),
                       limit);
}

Look look_at_nccl(const std::string& file, milliseconds limit) {
  return look_in_child([&](const LookWriter& out) { look_at_libnccl(out, file); }, quiet_environment(), limit);
}

}  // namespace forkpoint
