#include <doctest/doctest.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lib/run.h"
#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool wait_for(const std::string& path) {
  for (int i = 0; i < 500; ++i) {
    if (fs::exists(path)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Runs script under `forkpoint record` on a terminal of its own, presses Ctrl-C once the file `ready` exists, and gives
// the wait status.
int press_ctrl_c(const TemporaryFolder& folder, const std::string& script) {
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    if (chdir(folder.path().c_str()) != 0) _exit(99);
    execl(FORKPOINT_PROGRAM, "forkpoint", "record", "-o", "run", "--", "sh", "-c", script.c_str(), nullptr);
    _exit(98);
  }
  std::thread reader([terminal] {
    char buffer[4096];
    while (read(terminal, buffer, sizeof(buffer)) > 0) {
    }
  });
  REQUIRE(wait_for(folder / "ready"));
  REQUIRE(write(terminal, "\x03", 1) == 1);
  int status = 0;
  waitpid(child, &status, 0);
  reader.join();
  close(terminal);
  return status;
}

}  // namespace

TEST_CASE("Ctrl-C reaches a command that handles it exactly once, and its own exit status is passed on") {
  const TemporaryFolder folder;
  const int status =
      press_ctrl_c(folder, "trap 'echo int >> log; sleep 0.2; exit 3' INT; : > ready; while :; do sleep 0.02; done");
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK(content(folder / "log") == "int\n");
  CHECK(read_manifest(folder / "run").exit_status == 3);
}

TEST_CASE("Ctrl-C ends a trainer that does not handle it, and leaves a run that can be read") {
  const TemporaryFolder folder;
  const int status =
      press_ctrl_c(folder, std::string("(sleep 0.3; : > ready) & exec ") + TINY_TRAINER + " 1000 --pause 20");
  // Dying of the signal, as the command did, is what makes a shell's loop around us stop.
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGINT);
  CHECK(read_manifest(folder / "run").exit_status == 130);
  const Run run = Run::open(folder / "run");
  CHECK(run.state() != RunState::recording);
  CHECK(run.streams().front()->steps().size() > 2);
}

TEST_CASE("a signal sent to forkpoint alone is passed on to the command") {
  for (const char* signal : {"TERM", "INT", "HUP", "USR1"}) {
    CAPTURE(signal);
    const TemporaryFolder folder;
    const std::string script = std::string(
                                   "set -m\n"  // without job control a background job ignores SIGINT
                                   "$FORKPOINT record -o run -- sh -c 'trap \"echo got; exit 5\" ") +
                               signal +
                               "; : > ready; while :; do sleep 0.02; done' &\n"
                               "for i in $(seq 500); do [ -e ready ] && break; sleep 0.01; done\n"
                               "kill -" +
                               signal + " $!; wait $!; echo status $?";
    const ProgramResult result = run_shell(script, {.directory = folder.path()});
    CHECK(result.out == "got\nstatus 5\n");
    CHECK(read_manifest(folder / "run").exit_status == 5);
  }
}

TEST_CASE("a signal that was ignored before us is still ignored by the command, as nohup wants it") {
  const TemporaryFolder folder;
  const ProgramResult result =
      run_shell("trap '' HUP; $FORKPOINT record -o run -- sh -c 'kill -HUP $$; kill -HUP $PPID; echo alive'",
                {.directory = folder.path()});
  CHECK(result.status == 0);
  CHECK(result.out == "alive\n");
}

TEST_CASE("the command does not inherit the signal mask that we wait with") {
  const TemporaryFolder folder;
  const ProgramResult result = run_shell(
      "$FORKPOINT record -o run -- grep -E 'SigBlk|SigIgn' /proc/self/status > with; "
      "grep -E 'SigBlk|SigIgn' /proc/self/status > without; cmp with without",
      {.directory = folder.path()});
  CHECK(result.status == 0);
}

TEST_CASE("a reader of our stderr that has left does not cost the command its exit status") {
  const TemporaryFolder folder;
  const ProgramResult result = run_shell(
      "$FORKPOINT record -o run -- sh -c 'sleep 0.2; exit 4' 2> >(exec true); exit $?", {.directory = folder.path()});
  CHECK(result.status == 4);
}

}  // namespace forkpoint
