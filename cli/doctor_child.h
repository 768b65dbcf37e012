// Looks at what may crash or hang, in a child process: a broken driver ends the child and not the program.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "cli/target.h"
#include "lib/doctor_machine.h"

namespace forkpoint {

// What a look says, a line at a time, written at once: what was said before a crash counts.
class LookWriter {
 public:
  explicit LookWriter(int file) : file_(file) {}
  void say(const std::string& key, const std::string& value) const;  // control characters in it become blanks
  void say(const std::string& key, int64_t value) const { say(key, std::to_string(value)); }
  void at(const std::string& what) const { say("at", what); }

 private:
  int file_;
};

// Runs `look` in a child of this process, with these changes to its environment, nothing on stdin, stdout and stderr,
// and no core dump. After `limit` the child and all that it started are killed. A child that even SIGKILL does not end
// (it hangs in a driver) is left behind. Throws Error when no process can be made. REQUIRES: a single thread.
Look look_in_child(const std::function<void(const LookWriter&)>& look, const EnvironmentChanges& changes,
                   std::chrono::milliseconds limit);
// The same of a program (found through PATH), which says its lines on stdout. In folder `/`.
Look look_by_program(const std::vector<std::string>& command, const EnvironmentChanges& changes,
                     std::chrono::milliseconds limit);

}  // namespace forkpoint
