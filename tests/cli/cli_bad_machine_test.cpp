// Machines and programs that cannot be recorded: no driver or a useless one, static and 32-bit programs, a full disk. The
// job runs on untouched, its own exit status is kept, and few lines say what was not recorded.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "lib/run.h"
#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
bool is_static_possible() { return std::string(STATIC_PROGRAM) != ""; }

size_t count_of(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// Every line of it is forkpoint's.
bool only_ours(const std::string& text) {
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  return count_of("\n" + text, "\nforkpoint: ") == lines;
}

using Variables = std::map<std::string, std::optional<std::string>>;

ProgramResult record(const TemporaryFolder& folder, const std::string& level, std::vector<std::string> command,
                     Variables variables = {}) {
  std::vector<std::string> words{"record", "--level", level, "-o", "run", "--"};
  words.insert(words.end(), command.begin(), command.end());
  return run_forkpoint(words, {.directory = folder.path(), .environment = std::move(variables)});
}

// Ends with status 7 by int 0x80, in 84 + 12 bytes that need no loader.
void write_32_bit_program(const std::string& path) {
  const unsigned char elf[] = {
      0x7f, 'E', 'L', 'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,                       // 32 bits, little-endian
      2, 0, 3, 0, 1, 0, 0, 0, 0x54, 0x80, 0x04, 0x08, 0x34, 0, 0, 0, 0, 0, 0, 0,     // a program for i386
      0, 0, 0, 0, 0x34, 0, 0x20, 0, 1, 0, 0, 0, 0, 0, 0, 0,                          // one segment
      1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x04, 0x08, 0, 0x80, 0x04, 0x08,              // loaded as a whole
      0x60, 0, 0, 0, 0x60, 0, 0, 0, 5, 0, 0, 0, 0, 0x10, 0, 0,
      0xb8, 1, 0, 0, 0, 0xbb, 7, 0, 0, 0, 0xcd, 0x80};                               // exit(7)
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(elf), sizeof(elf));
  fs::permissions(path, fs::perms::owner_all);
}

// What a shell says of it; 126 and more: this kernel runs no 32-bit programs.
int status_of(const std::string& program) { return run_shell("exec '" + program + "'").status; }

}  // namespace

TEST_CASE("without a driver, or with one that cannot start, the program's own words and status are kept") {
  const Variables useless{{"LD_LIBRARY_PATH", BAD_CUDA_FOLDER}, {"BAD_CUDA_INIT", "100"}};
  Variables too_old = useless;
  too_old["BAD_CUDA_INIT"] = "35", too_old["BAD_CUDA_VERSION"] = "11000";
  const std::vector<Variables> machines{{{"LD_LIBRARY_PATH", std::nullopt}}, useless, too_old};
  for (const Variables& machine : machines) {
    const ProgramResult plain = run_shell(NEEDS_CUDA, {.environment = machine});
    if (plain.status != 3) continue;  // the first one, on a machine that has a driver
    for (const char* level : {"step", "launch"}) {
      const TemporaryFolder folder;
      const ProgramResult result = record(folder, level, {NEEDS_CUDA}, machine);
      INFO(level << ": " << result.err);
      CHECK(result.status == 3);
      CHECK(result.out == plain.out);
      CHECK(only_ours(result.err));
      CHECK(contains(result.err, "forkpoint: run: no records."));
      CHECK(contains(result.err, "the command exited with status 3"));
      CHECK(count_of(result.err, "\n") <= 3);
      CHECK(read_manifest(folder / "run").exit_status == 3);
    }
  }
}

TEST_CASE("a driver that is too old costs the launches and one line, and the program runs on") {
  const Variables old{{"LD_LIBRARY_PATH", BAD_CUDA_FOLDER}, {"BAD_CUDA_VERSION", "11000"}};
  const ProgramResult plain = run_shell(NEEDS_CUDA, {.environment = old});
  REQUIRE(plain.out == "version 11000 (0), cuInit 0\n");
  const TemporaryFolder folder;
  const ProgramResult result = record(folder, "launch", {NEEDS_CUDA}, old);
  INFO(result.err);
  CHECK(result.status == plain.status);
  CHECK(result.out == plain.out);
  CHECK(only_ours(result.err));
#ifdef FORKPOINT_HAVE_CUDA
  CHECK(count_of(result.err, "kernel launches are not recorded, the job goes on") == 1);
#endif
}

TEST_CASE("a statically linked program runs as it does alone, and is said to have made no records") {
  if (!is_static_possible()) {
    MESSAGE("skipped: no static C library is installed");
    return;
  }
  for (const char* level : {"step", "launch"}) {
    const TemporaryFolder folder;
    const ProgramResult result = record(folder, level, {STATIC_PROGRAM});
    INFO(result.err);
    CHECK(result.status == 0);
    CHECK(result.out == "static\n");
    CHECK(only_ours(result.err));
    CHECK(count_of(result.err, "warning: ") == 1);
    CHECK(contains(result.err, "statically linked"));
  }
}

TEST_CASE("a 32-bit program runs as it does alone, and its status is kept") {
  const TemporaryFolder folder;
  const std::string program = folder / "program32";
  write_32_bit_program(program);
  if (status_of(program) != 7) {
    MESSAGE("skipped: this kernel runs no 32-bit programs");
    return;
  }
  for (const char* level : {"step", "launch"}) {
    fs::remove_all(folder / "run");
    const ProgramResult result = record(folder, level, {program});
    INFO(result.err);
    CHECK(result.status == 7);
    CHECK(result.out == "");
    CHECK(only_ours(result.err));
    CHECK(contains(result.err, "no records"));
  }
}

TEST_CASE("a 64-bit program that starts a 32-bit one is recorded, and the status is its own") {
  const TemporaryFolder folder;
  const std::string program = folder / "program32";
  write_32_bit_program(program);
  if (status_of(program) != 7) {
    MESSAGE("skipped: this kernel runs no 32-bit programs");
    return;
  }
  const ProgramResult result =
      record(folder, "step", {"sh", "-c", program + "; status=$?; " + TINY_TRAINER + " 3; exit $status"});
  INFO(result.err);
  CHECK(result.status == 7);
  CHECK(Run::open(folder / "run").state() == RunState::whole);
}

TEST_CASE("a disk that is full leaves the job alone at each level, and the run says that it was cut") {
  for (const char* level : {"step", "launch"}) {
    const TemporaryFolder folder;
    const std::string script = std::string("ulimit -f 8; exec ") + TINY_TRAINER + " 3000";  // 8 blocks of 1 KiB
    const ProgramResult result = record(folder, level, {"bash", "-c", script});
    INFO(level << ": " << result.err);
    CHECK(result.status == 0);
    CHECK(only_ours(result.err));
    CHECK(count_of(result.err, "recording of rank 0 ended, the job goes on") == 1);
    CHECK(Run::open(folder / "run").state() == RunState::died);
  }
}

}  // namespace forkpoint
