// What of a machine and its environment keeps jobs from repeating, or forkpoint from seeing them. Pure judgements: the
// caller has looked (cli/doctor_looks.h). Nothing is `ok` that the look did not come to.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/doctor.h"
#include "lib/knobs.h"

namespace forkpoint {

// What a child process said, line by line: it looks at libraries that may crash or hang.
struct Look {
  std::vector<std::pair<std::string, std::string>> lines;  // in the order in which they came
  bool whole = false;                                      // it came to its end
  std::string trouble;  // not whole: "did not end within 30 s", "was killed by signal 11 (Segmentation fault)"
  std::optional<std::string> value(std::string_view key) const;  // the first of that name
  std::optional<int64_t> number(std::string_view key) const;
  std::vector<std::string> values(std::string_view key) const;
  std::string where() const;  // "at": what it was about to do last
};
Look parse_look(std::string_view text);  // KEY=VALUE lines
// The finding of a look that did not come to its end. what: "looking at the driver".
Finding not_looked(std::string id, FindingAbout about, const std::string& what, const Look& look, std::string why);

// path: empty where it was not found, with `trouble` and `hint` then. Keys: at, error, abi.
Findings judge_probe(const std::string& path, const std::string& trouble, const std::string& hint, const Look& look,
                     int abi);

struct PreloadEntry {
  std::string path;
  std::string
      trouble;  // why it cannot be loaded into anything: "there is no such file", "is of 32 bits"; empty: it can
  bool other_probe = false;  // a second libforkpoint.so
  bool has_nccl = false;     // functions of NCCL of its own: it stands between a job and NCCL
  bool is_tool = false;      // of a profiler that takes CUPTI, by its name or by what it links
};
Findings judge_preload(const std::vector<PreloadEntry>& entries, bool secure_execution, const std::string& probe);
// CUDA_INJECTION64_PATH, NVTX_INJECTION64_PATH, FORKPOINT_*, KINETO_USE_DAEMON, from the environment.
Findings judge_tools(const std::map<std::string, std::string>& environment, const std::string& probe);

// What this program was built with. Empty: without CUDA.
struct BuiltFor {
  std::string cuda;           // "13.0"
  std::string architectures;  // as CMake has them, by commas: "90-real,90-virtual"
};
// Signs of a GPU that need no library: /proc/driver/nvidia/version, /dev/nvidia0.
struct GpuSigns {
  std::string kernel_driver;  // "580.65.06"; empty: none
  int device_files = 0;
};
// Keys: at, error (of dlopen), library, version, init, device ("0|NVIDIA H200|9.0|compute mode|processors").
Findings judge_driver(const Look& look, const GpuSigns& signs, const BuiltFor& built,
                      const std::map<std::string, std::string>& environment);
bool has_devices(const Look& driver);
int driver_major(const Look& driver);  // 13; 0: not known
// Of NVML. Keys: at, error, device ("0|name|ecc now|ecc pending|mig now|mig pending", each 0, 1 or ? where it has
// none).
Findings judge_devices(const Look& look, bool devices);
// Keys: at, library, version, subscribe (its result). driver: of judge_driver.
Findings judge_cupti(const Look& look, const Look& driver, const std::map<std::string, std::string>& environment);
// Keys: at, error, library, version (22809). of_python: the copy that lies with PyTorch; nothing: there is none.
Findings judge_nccl(const Look& on_path, const std::optional<Look>& of_python, bool devices);
// Keys: executable, implementation, version, gil, torch, hash_seed. name: as it was called ("python3"); empty path: not
// on PATH.
Findings judge_python(const Look& look, const std::string& name, const std::string& path, bool is_the_jobs);

struct FolderLook {
  std::string path;                         // the run folder that is meant
  std::string trouble;                      // why nothing can be made there
  std::string nearest;                      // the folder above it that is there
  uint64_t free_bytes = 0, free_files = 0;  // files: 0 where the file system does not count them
  bool known_size = false;
};
Findings judge_run_folder(const FolderLook& look);
struct SystemLook {
  std::optional<uint64_t> shared_memory_bytes;  // nothing: /dev/shm is missing or cannot be asked
  std::string shared_memory_trouble;
  std::string sockets, sockets_trouble, sockets_hint;  // the folder for attach
  bool fixed_addresses = false;
  std::optional<uint64_t> file_size_limit_bytes, address_space_limit_bytes;  // nothing: unlimited
  uint64_t open_files_limit = 0;
};
Findings judge_system(const SystemLook& look);

// The knobs of deterministic mode (lib/knobs.h) against the environment in which a job would run: variables that are in
// conflict with one, those that are as good, and in one finding what deterministic mode would set besides. plan: of all
// knobs.
Findings judge_knobs(const KnobPlan& plan, const std::map<std::string, std::string>& users);
// Variables that can change results and belong to no knob: what a run depends on besides.
Findings judge_other_variables(const std::map<std::string, std::string>& numeric_environment);

std::vector<int> version_numbers(std::string_view text);  // "2.11.0+cu130" as {2, 11, 0}

}  // namespace forkpoint
