// Options of a recording that several verbs have. All throw UsageError; `verb` is for its message.
#pragma once

#include <string>
#include <string_view>

#include "cli/recording.h"

namespace forkpoint {

Level parse_level(const std::string& text, std::string_view verb);
// Here, and not in the job, which would run unrecorded.
void check_step_on(const std::string& expression, std::string_view verb);
// Layers whose framework ops are recorded: globs, by commas.
std::string parse_ops(const std::string& globs, Level level, std::string_view verb);

}  // namespace forkpoint
