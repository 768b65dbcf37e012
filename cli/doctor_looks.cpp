#include "cli/doctor_looks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "cli/doctor_child.h"
#include "cli/doctor_libraries.h"
#include "cli/machine.h"
#include "cli/probe_file.h"
#include "cli/target.h"
#include "lib/control.h"
#include "lib/elf_file.h"
#include "lib/probe_contract.h"

namespace forkpoint {
namespace fs = std::filesystem;

std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text(*entry);
    const size_t equals = text.find('=');
    if (equals != text.npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::string find_program(const std::string& word, const std::string& path, bool* executable) {
  const auto is_there = [&](const std::string& file) {
    struct stat status {};
    if (stat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
    *executable = access(file.c_str(), X_OK) == 0;
    return true;
  };
  *executable = true;
  if (word.find('/') != word.npos) return is_there(word) ? word : "";
  std::string unusable;
  std::stringstream folders(path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = (folder.empty() ? "." : folder) + "/" + word;
    if (!is_there(file)) continue;
    if (*executable) return file;
    if (unusable.empty()) unusable = file;
  }
  return unusable;
}

std::map<std::string, std::optional<std::string>> quiet_environment() {
  std::map<std::string, std::optional<std::string>> changes;
  for (const char* name : {"LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", contract::kRun,
                           contract::kJob, contract::kDeterministic})
    changes[name] = std::nullopt;
  return changes;
}

namespace {

using std::chrono::milliseconds;

void append(Findings* findings, Findings more) {
  for (Finding& finding : more) findings->push_back(std::move(finding));
}

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

bool defines(const std::string& path, const char* symbol) {
  const SymbolPlace place = find_symbol(path, symbol);
  return place == SymbolPlace::exported || place == SymbolPlace::inside;
}

// Names of libraries by which profilers come into a process.
bool is_tools_name(const std::string& name) {
  for (const char* part : {"libToolsInjection", "libcuda-injection", "libcupti", "libsanitizer-collection",
                           "TreeLauncherTargetInjection", "libdlprof"}) {
    if (name.find(part) != name.npos) return true;
  }
  return false;
}

PreloadEntry look_at_preload(const std::string& path) {
  PreloadEntry entry;
  entry.path = path;
  const std::string name = fs::path(path).filename().string();
  entry.is_tool = is_tools_name(name);
  if (path.find('/') == path.npos) return entry;  // looked for by the loader, in its own places
  std::error_code error;
  if (!fs::exists(path, error)) return entry.trouble = "there is no such file", entry;
  try {
    const ElfFile elf = read_elf(path);
    if (elf.bits != 64) return entry.trouble = "it is of 32 bits", entry;
    if (elf.machine != own_elf_machine()) return entry.trouble = "it is for " + elf_machine_name(elf.machine), entry;
    entry.other_probe = name == contract::kProbeFile || defines(path, "forkpoint_get_api");
    entry.has_nccl = defines(path, "ncclAllReduce");
    for (const std::string& soname : elf.needed) entry.is_tool |= is_tools_name(soname);
  } catch (const Error& failure) {
    entry.trouble = failure.what();
  }
  return entry;
}

Findings look_at_preloads(const std::string& probe) {
  std::vector<PreloadEntry> entries;
  std::string text = variable("LD_PRELOAD");
  for (char& c : text) c = c == ':' ? ' ' : c;
  std::stringstream words(text);
  for (std::string word; words >> word;) entries.push_back(look_at_preload(word));
  return judge_preload(entries, getauxval(AT_SECURE) != 0, probe);
}

GpuSigns look_for_gpus() {
  GpuSigns signs;
  const auto versions = machine_versions();
  if (const auto found = versions.find("nvidia_driver"); found != versions.end()) signs.kernel_driver = found->second;
  for (int i = 0; i < 64; ++i) {
    if (access(fmt::format("/dev/nvidia{}", i).c_str(), F_OK) == 0) ++signs.device_files;
  }
  return signs;
}

// What it has is read and not imported: that takes seconds, and may start CUDA.
constexpr char kAskPython[] = R"(
import sys
sys.path[:] = [p for p in sys.path if p]
def say(key, value): print("%s=%s" % (key, value), flush=True)
say("executable", sys.executable)
say("implementation", sys.implementation.name)
say("version", "%d.%d.%d" % sys.version_info[:3])
import sysconfig
say("gil", 0 if sysconfig.get_config_var("Py_GIL_DISABLED") else 1)
try:
    import glob, os, importlib.metadata as metadata, importlib.util as util
    try: torch = metadata.version("torch")
    except metadata.PackageNotFoundError: torch = ""
    spec = util.find_spec("torch")
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    if folder and not torch:
        names = {}
        with open(os.path.join(folder, "version.py")) as file: exec(file.read(), names)
        torch = names.get("__version__", "")
    say("torch", torch)
    if folder: say("torch_folder", folder)
    for path in sys.path:
        for found in glob.glob(os.path.join(path, "nvidia", "*", "lib")):
            if glob.glob(os.path.join(found, "libnccl.so.2")): say("nccl", os.path.join(found, "libnccl.so.2"))
            if glob.glob(os.path.join(found, "libcupti.so.*")): say("cupti", found)
except Exception as error:
    say("error", "%s: %s" % (type(error).__name__, error))
)";

Findings look_at_python(const MachineRequest& request, MachineLooks* looks) {
  bool executable = false;
  const std::string name = request.python.empty() ? "python3" : request.python;
  looks->python_path = find_program(name, variable("PATH"), &executable);
  if (!executable) looks->python_path.clear();
  if (!looks->python_path.empty()) {
    const std::string path = fs::absolute(looks->python_path).string();
    looks->python = look_by_program({path, "-c", kAskPython}, quiet_environment(), request.limit);
  }
  return judge_python(looks->python, name, looks->python_path, !request.python.empty());
}

// As a recording would: a folder, a file in it, its lock. Removed again.
std::string try_folder(const fs::path& parent) {
  std::string place = (parent / ".forkpoint-doctor-XXXXXX").string();
  if (!mkdtemp(place.data()))
    return fmt::format("nothing can be made in {}: {}", parent.string(), std::strerror(errno));
  const std::string file = place + "/file";
  std::string trouble;
  const int descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0)
    trouble = fmt::format("no file can be made in {}: {}", parent.string(), std::strerror(errno));
  else if (write(descriptor, "x", 1) != 1)
    trouble = fmt::format("nothing can be written in {}: {}", parent.string(), std::strerror(errno));
  else if (flock(descriptor, LOCK_EX | LOCK_NB) != 0)
    trouble = fmt::format("no file can be locked in {}: {}", parent.string(), std::strerror(errno));
  if (descriptor >= 0) close(descriptor);
  unlink(file.c_str());
  rmdir(place.c_str());
  return trouble;
}

FolderLook look_at_folder(const std::string& run_directory) {
  FolderLook look;
  look.path = run_directory;
  std::error_code error;
  fs::path above = fs::absolute(run_directory, error).lexically_normal();
  if (fs::is_directory(above, error) && !fs::is_empty(above, error)) look.trouble = "it is there, and not empty";
  while (!fs::exists(above, error) && above.has_relative_path()) above = above.parent_path();
  look.nearest = above.string();
  if (!fs::is_directory(above, error)) look.trouble = fmt::format("{} is no folder", above.string());
  if (look.trouble.empty()) look.trouble = try_folder(above);
  struct statvfs system {};
  if (statvfs(above.c_str(), &system) == 0) {
    look.known_size = true;
    look.free_bytes = static_cast<uint64_t>(system.f_bavail) * system.f_frsize;
    look.free_files = system.f_favail;
  }
  return look;
}

std::optional<uint64_t> limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::nullopt;
  return limit.rlim_cur;
}

SystemLook look_at_system(milliseconds limit) {
  SystemLook look;
  struct statvfs memory {};
  if (statvfs("/dev/shm", &memory) != 0)
    look.shared_memory_trouble = std::strerror(errno);
  else if (access("/dev/shm", W_OK) != 0)
    look.shared_memory_trouble = fmt::format("cannot be written: {}", std::strerror(errno));
  else
    look.shared_memory_bytes = static_cast<uint64_t>(memory.f_blocks) * memory.f_frsize;
  const char *chosen = std::getenv(contract::kSockets), *runtime = std::getenv("XDG_RUNTIME_DIR");
  look.sockets = control::socket_folder(chosen, runtime, geteuid());
  struct stat status {};
  if (lstat(look.sockets.c_str(), &status) == 0) {
    try {
      close(control::open_socket_folder(look.sockets, geteuid(), false));
    } catch (const Error& error) {
      look.sockets_trouble = error.what();
      look.sockets_hint = fmt::format("chmod 700 {}", look.sockets);
    }
  } else if (access(fs::path(look.sockets).parent_path().c_str(), W_OK) != 0) {
    look.sockets_trouble = fmt::format("{} cannot be made: {}", look.sockets, std::strerror(errno));
    look.sockets_hint = "export FORKPOINT_SOCKETS=\"$HOME/.forkpoint-sockets\"";
  }
  look.fixed_addresses =
      look_in_child([](const LookWriter& out) { out.say("fixed", fix_addresses() ? 1 : 0); }, {}, limit)
          .number("fixed") == 1;
  look.file_size_limit_bytes = limit_of(RLIMIT_FSIZE);
  look.address_space_limit_bytes = limit_of(RLIMIT_AS);
  look.open_files_limit = limit_of(RLIMIT_NOFILE).value_or(UINT64_MAX);
  return look;
}

Findings look_for_probe(milliseconds limit, std::string* probe) {
  try {
    *probe = find_probe();
  } catch (const Error& error) {
    std::string text = error.what();
    if (text.ends_with('.')) text.pop_back();
    return judge_probe("", text, "export FORKPOINT_PROBE=/path/of/libforkpoint.so", {}, contract::kProbeAbi);
  }
  return judge_probe(*probe, "", "", look_at_probe(*probe, limit), contract::kProbeAbi);
}

void look_at_cuda(const MachineRequest& request, const std::map<std::string, std::string>& environment,
                  MachineLooks* looks, Findings* findings) {
  looks->driver = look_at_driver(request.limit);
  const bool devices = has_devices(looks->driver);
  append(findings, judge_driver(looks->driver, look_for_gpus(), {FORKPOINT_CUDA_VERSION, FORKPOINT_CUDA_ARCHITECTURES},
                                environment));
  if (devices) append(findings, judge_devices(look_at_devices(request.limit), true));
  if (devices || environment.contains(contract::kCupti)) {
    std::string beside;
    for (const std::string& folder : looks->python.values("cupti")) beside += (beside.empty() ? "" : ":") + folder;
    append(findings,
           judge_cupti(look_at_cupti(driver_major(looks->driver), beside, request.limit), looks->driver, environment));
  }
  std::optional<Look> of_python;
  if (const auto file = looks->python.value("nccl")) of_python = look_at_nccl(*file, request.limit);
  append(findings, judge_nccl(look_at_nccl("libnccl.so.2", request.limit), of_python, devices));
}

}  // namespace

Findings look_at_machine(const MachineRequest& request, MachineLooks* looks) {
  auto environment = own_environment();
  for (const auto& [name, value] : request.environment) {
    if (value)
      environment[name] = *value;
    else
      environment.erase(name);
  }
  std::string probe;
  Findings findings = look_for_probe(request.limit, &probe);
  append(&findings, look_at_preloads(probe));
  append(&findings, judge_tools(environment, probe));
  append(&findings, look_at_python(request, looks));
  look_at_cuda(request, environment, looks, &findings);
  append(&findings, judge_run_folder(look_at_folder(request.run_directory)));
  append(&findings, judge_system(look_at_system(request.limit)));
  append(&findings, judge_knobs(resolve(parse_knobs("all"), environment), environment));
  append(&findings, judge_other_variables(numeric_environment()));
  return findings;
}

}  // namespace forkpoint
