#include "cli/certify.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/terminal.h"
#include "lib/certificate.h"
#include "lib/error.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

void redirect(int descriptor, const std::string& path) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file >= 0) dup2(file, descriptor);
}

constexpr int kPipePatience = 200;  // ms, for what writes into it to begin

// What the unhashed run reads in place of stdin, so that the recorded one finds what it would have found. -1: as it is.
int stdin_for_plain() {
  struct stat status = {};
  if (fstat(STDIN_FILENO, &status) != 0 || isatty(STDIN_FILENO)) return -1;
  if (S_ISREG(status.st_mode)) {
    // Opened once more: a place in the file of its own.
    const int file = open("/proc/self/fd/0", O_RDONLY | O_CLOEXEC);
    if (file >= 0) lseek(file, lseek(STDIN_FILENO, 0, SEEK_CUR), SEEK_SET);
    return file;
  }
  return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void require_repeatable_stdin() {
  struct stat status = {};
  if (fstat(STDIN_FILENO, &status) != 0 || (!S_ISFIFO(status.st_mode) && !S_ISSOCK(status.st_mode))) return;
  pollfd waited = {STDIN_FILENO, POLLIN, 0};
  int ready = 0;
  if (poll(&waited, 1, kPipePatience) <= 0 || ioctl(STDIN_FILENO, FIONREAD, &ready) != 0 || ready == 0) return;
  throw Error("--certify runs the command twice, and its stdin is a pipe, which can be read only once.",
              "Put what it reads into a file (`< FILE`), or give it nothing (`< /dev/null`).");
}

// In a process of its own: running a command changes how we take signals.
[[noreturn]] void run_plain(const RecordingRequest& request, const std::string& probe) {
  int status = 125;
  try {
    create_run(request.run_directory, manifest_before(request));
    const Manifest manifest = read_manifest(request.run_directory);
    redirect(STDOUT_FILENO, request.run_directory + "/stdout.txt");
    redirect(STDERR_FILENO, request.run_directory + "/stderr.txt");
    if (const int input = stdin_for_plain(); input >= 0) dup2(input, STDIN_FILENO);
    const TargetEnd end = run_target(request.command, contract_environment(request, probe));
    finish_recording(request, manifest, end);
    status = end.exit_status;
  } catch (const std::exception& error) {
    fmt::print(stderr, "forkpoint: {}\n", error.what());
  }
  _exit(status);
}

}  // namespace

std::string record_plain(const RecordingRequest& request, const std::string& probe) {
  require_repeatable_stdin();
  RecordingRequest plain = request;
  plain.run_directory += "-unhashed";
  plain.sequence = true;
  plain.keep_allocators = true;
  plain.inputs = false;
  plain.retry = 0;
  plain.retry_launch.reset();
  if (fs::exists(plain.run_directory)) {
    throw Error(fmt::format("certify: {} exists already.", plain.run_directory),
                "The unhashed run would be kept there: remove it, or choose another -o.");
  }
  print_note(fmt::format("certify: runs the command with nothing hashed first ({})", plain.run_directory));
  const pid_t child = fork();
  if (child < 0) throw Error("certify: no process could be started.");
  if (child == 0) run_plain(plain, probe);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw Error(fmt::format("certify: the command failed when nothing was hashed (status {}).",
                            WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)),
                fmt::format("Its output is in {}.", plain.run_directory));
  }
  return plain.run_directory;
}

bool certify(const std::string& run_directory, const std::string& plain_directory) {
  const Certificate certificate = certify_observer(Run::open(plain_directory), Run::open(run_directory));
  nlohmann::ordered_json json = {{"granted", certificate.granted},
                                 {"kernels", certificate.kernels},
                                 {"transfers", certificate.transfers},
                                 {"copies_to_host_equal", certificate.to_host},
                                 {"records", certificate.records},
                                 {"differences", certificate.differences},
                                 {"unhashed_run", plain_directory}};
  std::ofstream(run_directory + "/certificate.json") << json.dump(2) << '\n';
  if (certificate.granted) print_note(to_string(certificate));
  else print_warning(to_string(certificate));
  return certificate.granted;
}

}  // namespace forkpoint
