#include "probes/run_folder.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "lib/error.h"
#include "lib/run.h"
#include "probes/os.h"
#include "probes/step_marks.h"
#include "probes/watch_control.h"

namespace forkpoint {
namespace {

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> command;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\0', start), text.size());
    command.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return command;
}

// From /proc, as it was when the process started: environ may be changed by the host while we read it.
std::map<std::string, std::string> own_numeric_environment() {
  std::ifstream file("/proc/self/environ", std::ios::binary);
  std::map<std::string, std::string> variables;
  for (std::string line; std::getline(file, line, '\0');) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos || !is_numeric_environment(line.substr(0, equals))) continue;
    variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return variables;
}

std::string utc_now() {
  const time_t now = time(nullptr);
  tm parts = {};
  gmtime_r(&now, &parts);
  char text[32];
  strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Manifest minimal_manifest(const Settings& settings, int world_size) {
  Manifest manifest;
  // No program will close this run: its state is that of its streams.
  manifest.state = RunState::whole;
  manifest.forkpoint_version = FORKPOINT_VERSION;
  manifest.command = own_command();
  std::error_code ignored;
  manifest.working_directory = std::filesystem::current_path(ignored).string();
  manifest.environment = own_numeric_environment();
  manifest.world_size = world_size;
  for (int rank = 0; settings.ranks[0] && rank < world_size; ++rank) {
    if (settings.wants_rank(rank)) manifest.ranks.push_back(rank);
  }
  manifest.level = settings.level;
  manifest.step_base = step_base();
  manifest.every = settings.every;
  manifest.names_masked = settings.mask_names;
  manifest.started_at = utc_now();
  char host[HOST_NAME_MAX + 1] = {};
  if (gethostname(host, sizeof(host) - 1) == 0) manifest.hosts = {host};
  manifest.end_reason = "not known: recorded with LD_PRELOAD, without `forkpoint record`";
  return manifest;
}

// Removed whatever happens.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& parent) : path_(parent + "/.manifest-XXXXXX") {
    if (!mkdtemp(path_.data())) {
      throw Error(fmt::format("{}: cannot be written to: {}.", parent, std::system_category().message(errno)),
                  "Check the permissions of the run folder.");
    }
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

void prepare_run_folder(const Settings& settings, int world_size) {
  const std::string directory = settings.run_directory;
  const std::string manifest_path = directory + "/run.json";
  if (access(manifest_path.c_str(), F_OK) == 0) return;
  if (is_watched(settings)) {
    say("FORKPOINT_WATCH is set, but nobody watches this run: `forkpoint record --watch` does, and it has not made %s",
        directory.c_str());
  }
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw Error(fmt::format("{}: the run folder cannot be made: {}.", directory, error.message()),
                "Choose another folder or check the permissions.");
  }
  const TemporaryFolder temporary(directory);
  write_manifest(temporary.path(), minimal_manifest(settings, world_size));
  // link, unlike rename, fails when somebody was quicker: theirs stays.
  const std::string written = temporary.path() + "/run.json";
  if (link(written.c_str(), manifest_path.c_str()) == 0 || errno == EEXIST) return;
  // A file system without hard links: the last of several equal ones wins.
  if (rename(written.c_str(), manifest_path.c_str()) != 0) {
    throw Error(fmt::format("{}: cannot be created: {}.", manifest_path, std::system_category().message(errno)),
                "Check the permissions of the run folder.");
  }
}

void note_refusal(const Settings& settings, int rank, const char* why) noexcept {
  try {
    const std::string path = fmt::format("{}/{}", settings.run_directory, refusal_file_name(rank, getpid()));
    std::ofstream(path) << fmt::format("process {}, rank {}: nothing is recorded of it: {}", getpid(), rank, why) << '\n';
  } catch (const std::exception&) {  // what made the stream impossible may forbid this too; stderr has it
  }
}

int find_descriptor(const std::string& path) {
  struct stat wanted = {};
  if (stat(path.c_str(), &wanted) != 0) return -1;
  DIR* folder = opendir("/proc/self/fd");
  if (!folder) return -1;
  int found = -1;
  while (const dirent* entry = readdir(folder)) {
    const int descriptor = atoi(entry->d_name);
    struct stat status = {};
    if (entry->d_name[0] == '.' || descriptor == dirfd(folder) || fstat(descriptor, &status) != 0) continue;
    if (status.st_dev == wanted.st_dev && status.st_ino == wanted.st_ino) found = descriptor;
  }
  closedir(folder);
  return found;
}

}  // namespace forkpoint
