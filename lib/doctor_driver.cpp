// The driver, its devices, CUPTI and NCCL.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "lib/doctor_machine.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr auto kRepeating = FindingAbout::repeating;
constexpr auto kRecording = FindingAbout::recording;

std::string variable(const std::map<std::string, std::string>& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

}  // namespace

namespace {

struct Device {
  std::string name;
  std::vector<int> capability;
  int64_t compute_mode = 0;
};

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields{""};
  for (const char c : line) {
    if (c == '|')
      fields.emplace_back();
    else
      fields.back() += c;
  }
  return fields;
}

std::vector<Device> devices_of(const Look& look) {
  std::vector<Device> devices;
  for (const std::string& line : look.values("device")) {
    const auto fields = fields_of(line);
    if (fields.size() >= 5) devices.push_back({fields[1], version_numbers(fields[2]), std::atoi(fields[3].c_str())});
  }
  return devices;
}

std::string cuda_text(int64_t version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

// Code for this device, or code that its driver can translate for it. 90-real,90-virtual or 80 or 100a-real.
bool is_built_for(const std::vector<int>& capability, const std::string& architectures) {
  if (capability.size() < 2) return false;
  const int wanted = capability[0] * 10 + capability[1];
  std::string_view rest = architectures;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(','), rest.size());
    const std::string_view entry = rest.substr(0, end);
    const int built = version_numbers(entry).empty() ? 0 : version_numbers(entry).front();
    const bool exact = entry.find('a') < entry.find('-');  // 90a: of no other device
    const bool real = !entry.ends_with("-virtual"), can_translate = !entry.ends_with("-real") && !exact;
    if (real && (built == wanted || (!exact && built / 10 == wanted / 10 && built <= wanted))) return true;
    if (can_translate && built != 0 && built <= wanted) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

void judge_version(int64_t version, const BuiltFor& built, Findings* findings) {
  const auto needed = version_numbers(built.cuda);
  if (needed.empty()) {
    findings->push_back({"built-without-cuda", FindingKind::fix, kRecording, "this forkpoint was built without CUDA",
                         "tensors on a GPU cannot be digested",
                         "cmake --preset default -DFORKPOINT_CUDA=ON && cmake --build build"});
  } else if (version / 1000 < needed[0]) {
    findings->push_back(
        {"driver-version", FindingKind::fix, kRecording,
         fmt::format("the driver is of CUDA {}, the probe's device code of CUDA {}", cuda_text(version), built.cuda),
         "a driver does not load code of a later major version: tensors on the GPU cannot be digested",
         "CUDACXX=/usr/local/cuda-" + std::to_string(version / 1000) +
             "/bin/nvcc cmake --preset default && cmake --build build"});
  } else {
    findings->push_back({"driver-version", FindingKind::ok, kRecording,
                         fmt::format("driver of CUDA {}, probe built with CUDA {}", cuda_text(version), built.cuda), "",
                         ""});
  }
}

void judge_models(const std::vector<Device>& devices, Findings* findings) {
  std::map<std::string, int> models;
  for (const Device& device : devices) ++models[device.name];
  std::string text;
  for (const auto& [model, count] : models) text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, model);
  if (models.size() < 2) {
    findings->push_back({"devices", FindingKind::ok, kRepeating, text, "", ""});
    return;
  }
  std::vector<size_t> alike;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].name == devices[0].name) alike.push_back(i);
  }
  findings->push_back(
      {"mixed-devices", FindingKind::fix, kRepeating, fmt::format("GPUs of {} models: {}", models.size(), text),
       "libraries choose other algorithms on another model: a rank that lands on another one computes other bits",
       fmt::format("export CUDA_VISIBLE_DEVICES={}", fmt::join(alike, ","))});
}

void judge_each(const std::vector<Device>& devices, const BuiltFor& built, Findings* findings) {
  std::set<std::string> unbuilt;
  std::vector<size_t> prohibited, exclusive;
  for (size_t i = 0; i < devices.size(); ++i) {
    const Device& device = devices[i];
    if (!built.cuda.empty() && !is_built_for(device.capability, built.architectures))
      unbuilt.insert(fmt::format("{} ({})", device.name, fmt::join(device.capability, ".")));
    if (device.compute_mode == 2) prohibited.push_back(i);
    if (device.compute_mode == 3) exclusive.push_back(i);
  }
  if (!unbuilt.empty()) {
    findings->push_back({"device-architecture", FindingKind::fix, kRecording,
                         fmt::format("the probe has no device code for {}: built for {}", fmt::join(unbuilt, ", "),
                                     built.architectures),
                         "tensors on such a GPU cannot be digested", "cmake --preset release && cmake --build build"});
  }
  if (!prohibited.empty()) {
    findings->push_back({"compute-mode", FindingKind::fix, kRecording,
                         fmt::format("compute mode of GPU {}: prohibited", fmt::join(prohibited, ", ")),
                         "no job can use it",
                         fmt::format("sudo nvidia-smi -i {} -c DEFAULT", fmt::join(prohibited, ","))});
  } else if (!exclusive.empty()) {
    findings->push_back({"compute-mode", FindingKind::note, kRecording,
                         fmt::format("compute mode of GPU {}: exclusive process", fmt::join(exclusive, ", ")),
                         "two ranks cannot share it", ""});
  }
}

// Nothing to find a driver by, so that a machine without one is no trouble.
bool expects_driver(const GpuSigns& signs) { return !signs.kernel_driver.empty() || signs.device_files > 0; }

}  // namespace

bool has_devices(const Look& driver) { return driver.number("init") == 0 && !driver.values("device").empty(); }
int driver_major(const Look& driver) { return static_cast<int>(driver.number("version").value_or(0) / 1000); }

Findings judge_driver(const Look& look, const GpuSigns& signs, const BuiltFor& built,
                      const std::map<std::string, std::string>& environment) {
  constexpr char kWhy[] = "what runs on a GPU needs it, and the probe too";
  Findings findings;
  if (const auto error = look.value("error")) {
    if (!expects_driver(signs))
      return {{"driver", FindingKind::note, kRecording, "no NVIDIA driver here: jobs run on the CPU",
               "kernel launches cannot be recorded", ""}};
    return {{"driver", FindingKind::fix, kRecording,
             fmt::format("a GPU is there, but libcuda.so.1 cannot be loaded: {}", *error), kWhy,
             "docker run --gpus all ...   # in a container; else install the driver's libcuda"}};
  }
  const auto version = look.number("version");
  if (version && *version > 0) judge_version(*version, built, &findings);
  if (!look.whole) {
    findings.push_back(not_looked("driver", kRecording, "looking at the driver", look,
                                  "a driver that does not answer ends any job on a GPU"));
    return findings;
  }
  const auto init = look.number("init");
  if (init == 0) {
    findings.push_back({"driver", FindingKind::ok, kRecording,
                        fmt::format("{} starts", look.value("library").value_or("libcuda.so.1")), "", ""});
    const auto devices = devices_of(look);
    if (devices.empty())
      findings.push_back(
          {"devices", FindingKind::note, kRecording, "the driver shows no GPU", "jobs run on the CPU", ""});
    else
      judge_models(devices, &findings), judge_each(devices, built, &findings);
    return findings;
  }
  if (!init) {
    findings.push_back(
        {"driver", FindingKind::unknown, kRecording, "libcuda.so.1 lacks cuInit: it is no driver", kWhy, ""});
    return findings;
  }
  const auto hidden = environment.find("CUDA_VISIBLE_DEVICES");
  const bool none = *init == 100;  // CUDA_ERROR_NO_DEVICE
  if (none && hidden != environment.end() && (hidden->second.empty() || hidden->second.starts_with('-'))) {
    findings.push_back({"driver", FindingKind::note, kRecording,
                        fmt::format("CUDA_VISIBLE_DEVICES=\"{}\" hides all GPUs", hidden->second),
                        "jobs run on the CPU", "unset CUDA_VISIBLE_DEVICES"});
  } else if (none && !expects_driver(signs)) {
    findings.push_back({"driver", FindingKind::note, kRecording, "the driver's library is there, and no GPU",
                        "jobs run on the CPU", ""});
  } else {
    findings.push_back(
        {"driver", FindingKind::fix, kRecording, fmt::format("the driver does not start: cuInit gives error {}", *init),
         kWhy,
         *init == 803
             ? "sudo modprobe -r nvidia_uvm nvidia && sudo modprobe nvidia   # library and kernel module differ"
             : "nvidia-smi"});
  }
  return findings;
}

Findings judge_devices(const Look& look, bool devices) {
  if (!devices) return {};
  constexpr char kWhy[] = "whether memory errors are corrected and GPUs are cut into slices is not known";
  if (const auto error = look.value("error"))
    return {{"nvml", FindingKind::unknown, kRepeating, fmt::format("libnvidia-ml.so.1: {}", *error), kWhy,
             "nvidia-smi -q -d ECC,MIG"}};
  if (!look.whole) return {not_looked("nvml", kRepeating, "asking NVML", look, kWhy)};
  std::vector<std::string> off, slices;
  size_t with_ecc = 0, count = 0;
  for (const std::string& line : look.values("device")) {
    const auto fields = fields_of(line);
    if (fields.size() < 6) continue;
    ++count;
    if (fields[2] == "0") off.push_back(fields[0]);
    if (fields[2] == "1") ++with_ecc;
    if (fields[4] == "1") slices.push_back(fields[0]);
  }
  Findings findings;
  if (!off.empty()) {
    findings.push_back({"ecc", FindingKind::fix, kRepeating, fmt::format("ECC is off on GPU {}", fmt::join(off, ", ")),
                        "a flipped bit in memory goes unnoticed and looks like a nondeterministic op",
                        fmt::format("sudo nvidia-smi -i {} -e 1", fmt::join(off, ","))});
  } else {
    findings.push_back({"ecc", with_ecc == count && count > 0 ? FindingKind::ok : FindingKind::note, kRepeating,
                        fmt::format("ECC is on for {} of {}, the others have none", counted(with_ecc, "GPU"), count),
                        "", ""});
    if (with_ecc == count) findings.back().found = fmt::format("ECC is on for {}", counted(count, "GPU"));
  }
  if (!slices.empty()) {
    const bool some = slices.size() < count;
    findings.push_back({"mig", some ? FindingKind::fix : FindingKind::note, kRepeating,
                        fmt::format("MIG is on for GPU {}", fmt::join(slices, ", ")),
                        "a slice has fewer processors than a whole GPU: libraries choose other algorithms on it",
                        fmt::format("sudo nvidia-smi -i {} -mig 0", fmt::join(slices, ","))});
  }
  return findings;
}

Findings judge_cupti(const Look& look, const Look& driver, const std::map<std::string, std::string>& environment) {
  constexpr char kWhy[] = "level launch sees kernels through it; step and layer need none";
  const std::string chosen = variable(environment, "FORKPOINT_CUPTI");
  if (!has_devices(driver) && chosen.empty()) return {};
  if (!look.whole) return {not_looked("cupti", kRecording, "looking at CUPTI", look, kWhy)};
  const auto library = look.value("library");
  if (!library) {
    const std::string fix = chosen.empty() ? fmt::format("pip install nvidia-cuda-cupti-cu{}", driver_major(driver))
                                           : "unset FORKPOINT_CUPTI";
    return {{"cupti", FindingKind::fix, kRecording,
             chosen.empty() ? "libcupti was not found"
                            : fmt::format("FORKPOINT_CUPTI={} names no library that can be loaded", chosen),
             kWhy, driver_major(driver) >= 13 && chosen.empty() ? "pip install nvidia-cuda-cupti" : fix}};
  }
  const size_t at = library->rfind(".so.");
  const auto version =
      at == library->npos ? std::vector<int>{} : version_numbers(std::string_view(*library).substr(at + 4));
  if (!version.empty() && driver_major(driver) > 0 && version[0] > driver_major(driver) && version[0] < 2000) {
    return {{"cupti-version", FindingKind::fix, kRecording,
             fmt::format("{} is of CUDA {}, the driver of CUDA {}", *library, version[0], driver_major(driver)), kWhy,
             "unset FORKPOINT_CUPTI"}};
  }
  const auto subscribed = look.number("subscribe");
  if (subscribed && *subscribed != 0) {
    const bool taken = *subscribed == 39;  // CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    return {{taken ? "cupti-taken" : "cupti", FindingKind::fix, kRecording,
             taken ? fmt::format("another tool holds CUPTI ({})", *library)
                   : fmt::format("{} refuses to be subscribed to: error {}", *library, *subscribed),
             kWhy, taken ? "unset CUDA_INJECTION64_PATH LD_PRELOAD" : "nvidia-smi"}};
  }
  if (!subscribed)
    return {{"cupti", FindingKind::note, kRecording,
             fmt::format("{} is there; whether it can be subscribed to was not tried", *library), kWhy, ""}};
  return {{"cupti", FindingKind::ok, kRecording, fmt::format("{} can be subscribed to", *library), "", ""}};
}

namespace {

std::string nccl_text(int64_t version) {
  return version >= 10000 ? fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100)
                          : fmt::format("{}.{}.{}", version / 1000, version % 1000 / 100, version % 100);
}

}  // namespace

Findings judge_nccl(const Look& on_path, const std::optional<Look>& of_python, bool devices) {
  constexpr char kWhy[] = "ranks and runs with other versions of NCCL add in another order";
  Findings findings;
  std::set<std::string> versions;
  const auto judge = [&](const Look& look, const char* whose) {
    if (const auto version = look.number("version")) {
      versions.insert(nccl_text(*version));
      findings.push_back({"nccl", FindingKind::ok, kRecording,
                          fmt::format("NCCL {} {}: {}", nccl_text(*version), whose, look.value("library").value_or("")),
                          "", ""});
    } else if (!look.whole) {
      findings.push_back(not_looked("nccl", kRecording, fmt::format("looking at the NCCL {}", whose), look, kWhy));
    } else if (!look.value("error")) {
      findings.push_back(
          {"nccl", FindingKind::unknown, kRecording,
           fmt::format("the NCCL {} ({}) does not tell its version", whose, look.value("library").value_or("?")), kWhy,
           ""});
    } else if (&look != &on_path) {
      findings.push_back({"nccl", FindingKind::fix, kRecording,
                          fmt::format("the NCCL {} cannot be loaded: {}", whose, *look.value("error")), kWhy, ""});
    }
  };
  judge(on_path, "on the library path");
  if (of_python) judge(*of_python, "of PyTorch");
  if (findings.empty()) {
    return {{"nccl", FindingKind::note, kRecording, "no libnccl.so.2 on the library path",
             devices ? "jobs of several GPUs bring their own, or have none" : "jobs on the CPU need none", ""}};
  }
  if (versions.size() > 1) {
    findings.push_back({"nccl-versions", FindingKind::note, kRepeating,
                        fmt::format("NCCL {} are installed", fmt::join(versions, " and ")), kWhy,
                        "env -u LD_LIBRARY_PATH CMD   # PyTorch's own"});
  }
  return findings;
}

}  // namespace forkpoint
