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

}  // namespace forkpoint
