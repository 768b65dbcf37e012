#include "tests/probe/harness.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace forkpoint::probe_test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kPatienceSeconds = 30;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> environment_strings(const Environment& more) {
  std::vector<std::string> strings;
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable;
    const std::string name = text.substr(0, text.find('='));
    const bool hidden = name.starts_with("FORKPOINT_") || name.starts_with("SLURM_") || name.starts_with("OMPI_") ||
                        name.starts_with("PMI") || name == "RANK" || name == "WORLD_SIZE" || name == "LD_PRELOAD";
    if (!hidden && !more.contains(name)) strings.push_back(text);
  }
  for (const auto& [name, value] : more) strings.push_back(name + "=" + value);
  return strings;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& text : strings) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

pid_t start(std::vector<std::string> command, const Environment& more, const std::string& out, const std::string& err) {
  std::vector<std::string> environment = environment_strings(more);
  std::vector<char*> arguments = pointers(command), variables = pointers(environment);
  const pid_t child = fork();
  if (child != 0) return child;
  const int flags = O_WRONLY | O_CREAT | O_TRUNC;
  const int in_fd = open("/dev/null", O_RDONLY), out_fd = open(out.c_str(), flags, 0600), err_fd = open(err.c_str(), flags, 0600);
  if (dup2(in_fd, 0) < 0 || dup2(out_fd, 1) < 0 || dup2(err_fd, 2) < 0) _exit(96);
  for (int fd = 3; fd < 64; ++fd) close(fd);
  execvpe(arguments[0], arguments.data(), variables.data());
  _exit(97);
}

Outcome finish(const std::vector<std::string>& command, const Environment& environment, bool kill_at_output) {
  const TempFolder folder;
  const std::string out = folder.path() + "/out", err = folder.path() + "/err";
  const auto begin = Clock::now();
  const pid_t child = start(command, environment, out, err);
  Outcome outcome;
  int status = 0;
  bool killed = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (kill_at_output && !killed && !read_file(out).empty()) {
      kill(child, SIGKILL);
      killed = true;
    }
    if (seconds_since(begin) > kPatienceSeconds) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      outcome.err = "did not end in time\n" + read_file(err);
      outcome.status = -2;
      return outcome;
    }
    usleep(1000);
  }
  outcome.seconds = seconds_since(begin);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.out = read_file(out);
  outcome.err = read_file(err);
  return outcome;
}

}  // namespace

TempFolder::TempFolder() : path_((std::filesystem::temp_directory_path() / "forkpoint-probe-XXXXXX").string()) {
  if (!mkdtemp(path_.data())) throw std::runtime_error(path_ + ": " + strerror(errno));
}
TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Outcome run_program(const std::vector<std::string>& command, const Environment& environment) {
  return finish(command, environment, false);
}
Outcome run_and_kill(const std::vector<std::string>& command, const Environment& environment) {
  return finish(command, environment, true);
}

Environment under_probe(const std::string& run, const Environment& more) {
  Environment environment = more;
  environment.insert({{"LD_PRELOAD", preload()}, {"FORKPOINT_RUN", run}, {"FORKPOINT_LEVEL", "layer"}});
  return environment;
}

std::string probe_path() { return FORKPOINT_TEST_PROBE; }
// A probe with sanitizers inside wants their library to come first.
std::string preload() { return std::string(FORKPOINT_TEST_PRELOAD_FIRST) + probe_path(); }
// A file beside the clients.
std::string client_path(const std::string& name) { return std::string(FORKPOINT_TEST_CLIENTS) + "/" + name; }

std::vector<std::string> client(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), client_path());
  return arguments;
}

std::unique_ptr<HashStreamReader> open_stream(const std::string& run, int rank) {
  return HashStreamReader::open(run + "/" + stream_file_name(rank));
}

std::vector<Row> all_rows(const HashStreamReader& stream) {
  std::vector<Row> rows;
  StepColumns columns;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    stream.read_step(i, &columns);
    for (size_t j = 0; j < columns.size(); ++j) {
      const Record record = columns.row(j);
      rows.push_back({stream.steps()[i].step, stream.sites()[record.site], stream.layouts()[record.layout], record});
    }
  }
  return rows;
}

std::vector<Row> rows_of(const std::vector<Row>& rows, const std::string& tensor) {
  std::vector<Row> found;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(found), [&](const Row& row) { return row.site.tensor == tensor; });
  return found;
}

bool has_gap(const HashStreamReader& stream, const std::string& reason) {
  const auto gaps = stream.gaps();
  return std::any_of(gaps.begin(), gaps.end(), [&](const Gap& gap) { return gap.reason.find(reason) != std::string::npos; });
}

bool has_limit(const HashStreamReader& stream, const std::string& what) {
  const auto limits = stream.coverage_limits();
  return std::any_of(limits.begin(), limits.end(),
                     [&](const CoverageLimit& limit) { return limit.what.find(what) != std::string::npos; });
}

uint64_t records_lost(const HashStreamReader& stream) {
  uint64_t lost = 0;
  for (const Gap& gap : stream.gaps()) lost += gap.records_lost;
  return lost;
}

int line_count(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

}  // namespace forkpoint::probe_test
