#include "tests/cli/program.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/support/temporary_folder.h"

namespace forkpoint {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

[[noreturn]] void become(const std::vector<std::string>& words, const ProgramOptions& options,
                         const std::string& folder) {
  for (const auto& [name, value] : options.environment) {
    value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
  }
  // Files and not pipes: a process that outlives the program cannot make us wait for its end of a pipe.
  const std::array<std::pair<std::string, int>, 3> files{
      {{"in", O_RDONLY}, {"out", O_WRONLY | O_CREAT}, {"err", O_WRONLY | O_CREAT}}};
  for (int i = 0; i < 3; ++i) dup2(open((folder + "/" + files[i].first).c_str(), files[i].second, 0600), i);
  if (!options.directory.empty() && chdir(options.directory.c_str()) != 0) _exit(99);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  _exit(98);
}

ProgramResult run_words(const std::vector<std::string>& words, const ProgramOptions& options) {
  const TemporaryFolder folder;
  std::ofstream(folder / "in", std::ios::binary) << options.input;
  const pid_t child = fork();
  if (child == 0) become(words, options, folder.path());
  int status = 0;
  waitpid(child, &status, 0);
  ProgramResult result;
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result.out = content_of(folder / "out");
  result.err = content_of(folder / "err");
  return result;
}

}  // namespace

ProgramResult run_forkpoint(const std::vector<std::string>& arguments, const ProgramOptions& options) {
  std::vector<std::string> words{options.program.empty() ? FORKPOINT_PROGRAM : options.program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_words(words, options);
}

ProgramResult run_shell(const std::string& script, const ProgramOptions& options) {
  ProgramOptions with_program = options;
  with_program.environment["FORKPOINT"] = options.program.empty() ? FORKPOINT_PROGRAM : options.program;
  return run_words({"bash", "-c", script}, with_program);
}

}  // namespace forkpoint
