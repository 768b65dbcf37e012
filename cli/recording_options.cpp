#include "cli/recording_options.h"

#include <fmt/format.h>
#include <regex.h>

namespace forkpoint {

Level parse_level(const std::string& text, std::string_view verb) {
  const auto level = level_from_name(text);
  if (!level) {
    throw UsageError(
        fmt::format("{}: --level `{}` is none of step, layer and launch.", verb, text),
        "step: batch, loss, gradients, weights, optimizer state; layer: also every layer's inputs and outputs; launch: "
        "also every buffer of every CUDA kernel.");
  }
  return *level;
}

void check_step_on(const std::string& expression, std::string_view verb) {
  if (expression.empty()) {
    throw UsageError(fmt::format("{}: --step-on is empty.", verb), "Name a kernel or NVTX range, such as '^step$'.");
  }
  regex_t compiled;
  const int error = regcomp(&compiled, expression.c_str(), REG_EXTENDED | REG_NOSUB);
  if (error == 0) return regfree(&compiled);
  char text[200];
  regerror(error, &compiled, text, sizeof(text));
  throw UsageError(fmt::format("{}: --step-on `{}` is not a regular expression: {}.", verb, expression, text),
                   "A POSIX extended one is expected, such as '^step$'.");
}

std::string parse_ops(const std::string& globs, Level level, std::string_view verb) {
  constexpr size_t kMostBytes = 1023;  // the probe has room for so many
  constexpr char kHint[] = "Name layers, as in --ops 'blocks.3.*,head'; '*' stands for all of them.";
  if (level == Level::step) {
    throw UsageError(fmt::format("{}: --ops needs the layers, and the level is step.", verb), "Add --level layer (or launch).");
  }
  if (globs.find_first_not_of(", ") == std::string::npos) throw UsageError(fmt::format("{}: --ops names no layer.", verb), kHint);
  if (globs.size() > kMostBytes) {
    throw UsageError(fmt::format("{}: --ops is {} bytes long, and {} is the most.", verb, globs.size(), kMostBytes), kHint);
  }
  return globs;
}

}  // namespace forkpoint
