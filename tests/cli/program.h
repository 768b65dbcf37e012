// Runs the forkpoint program that was built, as a user would.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace forkpoint {

struct ProgramResult {
  int status = -1;  // 128 + n: died of signal n
  std::string out, err;
};

struct ProgramOptions {
  std::string directory = {};                                          // empty: as it is
  std::map<std::string, std::optional<std::string>> environment = {};  // to set, or to remove
  std::string input = {};                                              // stdin
  std::string program = {};                                            // empty: the forkpoint of this build
};

ProgramResult run_forkpoint(const std::vector<std::string>& arguments, const ProgramOptions& options = {});
// A command line for sh, in which $FORKPOINT is the program.
ProgramResult run_shell(const std::string& script, const ProgramOptions& options = {});

}  // namespace forkpoint
