// The command line as data: a verb is a table of options, examples and a function; parsing, help and the completion
// test all read the same table. Boost.Program_options does the splitting.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/error.h"
#include "lib/nearest.h"

namespace forkpoint {

// The user asked for something that does not exist or cannot be meant. hint() names the nearest thing that does.
class UsageError : public Error {
 public:
  using Error::Error;
};

struct Option {
  std::string_view name;   // "steps", without dashes
  char letter;             // 'o', or 0
  std::string_view value;  // "A:B"; empty: a switch
  std::string_view text;
};

// Spelled and explained alike in every verb that has them.
inline constexpr Option kStepsOption{"steps", 0, "A:B", "only steps A to B, both inclusive (also A:, :B or A)"};
inline constexpr Option kRanksOption{"ranks", 0, "LIST", "only these ranks, as in 0,2,4-7"};
inline constexpr Option kJsonOption{"json", 0, "", "print one JSON object instead of text"};

class Arguments {
 public:
  bool has(std::string_view option) const { return values_.contains(option); }
  // The value of an option that was given, else nothing.
  std::optional<std::string> value(std::string_view option) const;
  const std::vector<std::string>& positional() const { return positional_; }
  const std::vector<std::string>& command() const { return command_; }  // what follows `--`

 private:
  friend class ArgumentParser;
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<std::string> positional_, command_;
};

struct Example {
  std::string_view command, meaning;
};

struct Verb {
  std::string_view name;
  std::string_view summary;  // one line of `forkpoint -h`
  std::string_view usage;    // after "forkpoint "
  std::string_view about;    // a paragraph of `forkpoint VERB -h`
  std::vector<Option> options;
  std::vector<Example> examples;
  size_t min_positional = 0;
  size_t max_positional = 0;
  bool takes_command = false;  // everything after `--` is somebody else's command line
  bool command_optional = false;
  int trouble_status = 2;      // exit status for an Error
  int (*run)(const Arguments& arguments) = nullptr;
};

// Throws UsageError. Returns nothing when the arguments ask for help.
std::optional<Arguments> parse_arguments(const Verb& verb, const std::vector<std::string>& words);
std::string verb_help(const Verb& verb);

// Values of options. `option` ("--steps") is for the message of the UsageError.
struct StepRange {
  std::optional<int64_t> first, last;  // inclusive
};
StepRange parse_steps(std::string_view text, std::string_view option = "--steps");
std::vector<int> parse_ranks(std::string_view text, std::string_view option = "--ranks");  // sorted, unique
std::string parse_launch(std::string_view text);  // of --launch: "7:1234", checked
std::string parse_operands(std::string_view text, std::string_view option);  // "step=7;layer=blocks.3", as kSave has it
int64_t parse_count(std::string_view text, std::string_view option, int64_t least);
uint64_t parse_size_bytes(std::string_view text, std::string_view option);  // "500M", "2GiB", "1000000"

}  // namespace forkpoint
