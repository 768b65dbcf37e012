// What a command line starts, as far as its words tell: launchers, wrappers, a shell's plain line, python.
#pragma once

#include <string>
#include <vector>

#include "lib/doctor_job.h"

namespace forkpoint {

struct JobLine {
  JobLineLook look;
  // So many of look.programs are named beyond doubt; those behind a launcher whose options are not all known are a
  // guess.
  size_t certain = 0;
};
JobLine read_job_line(const std::vector<std::string>& command);

// Of a script: the words of its first line behind "#!"; empty: it has none. Throws Error when it cannot be read.
std::vector<std::string> interpreter_words(const std::string& path);

}  // namespace forkpoint
