#include <fmt/format.h>

#include <csignal>
#include <exception>
#include <string>
#include <vector>

#include "cli/terminal.h"
#include "cli/verbs.h"

namespace forkpoint {
namespace {

constexpr int kUsageStatus = 2;

UsageError unknown_verb(const std::string& word) {
  std::vector<std::string_view> names;
  for (const Verb* verb : verbs()) names.push_back(verb->name);
  const bool is_option = word.starts_with('-');
  const std::string near = is_option ? "" : nearest(word, names);
  const std::string did_you_mean = near.empty() ? "" : fmt::format("Did you mean `forkpoint {}`? ", near);
  return UsageError(fmt::format("there is no {} `{}`.", is_option ? "option" : "verb", word),
                    did_you_mean + "`forkpoint -h` lists the verbs.");
}

int run_verb(const Verb& verb, const std::vector<std::string>& words) {
  // `| head` must not turn the exit status into that of a signal; record leaves signals to the command's needs.
  if (!verb.takes_command) std::signal(SIGPIPE, SIG_IGN);
  const auto arguments = parse_arguments(verb, words);
  int status = 0;
  if (arguments) {
    status = verb.run(*arguments);
  } else {
    print_answer(verb_help(verb));
  }
  if (!verb.takes_command || !arguments) flush_answer();
  return status;
}

int help(const std::vector<std::string>& words) {
  const Verb* verb = words.empty() ? nullptr : find_verb(words.front());
  if (!words.empty() && !verb) throw unknown_verb(words.front());
  print_answer(verb ? verb_help(*verb) : program_help());
  flush_answer();
  return 0;
}

int dispatch(std::vector<std::string> words, int* trouble_status) {
  if (words.empty()) {
    std::fputs(program_help().c_str(), stderr);
    return kUsageStatus;
  }
  std::string name = words.front();
  words.erase(words.begin());
  if (name == "-h" || name == "--help" || name == "help") return help(words);
  if (name == "--version" || name == "-V") name = "version";
  const Verb* verb = find_verb(name);
  if (!verb) throw unknown_verb(name);
  *trouble_status = verb->trouble_status;
  return run_verb(*verb, words);
}

}  // namespace
}  // namespace forkpoint

int main(int argc, char** argv) {
  int trouble_status = forkpoint::kUsageStatus;
  try {
    return forkpoint::dispatch(std::vector<std::string>(argv + 1, argv + argc), &trouble_status);
  } catch (const forkpoint::Error& error) {
    std::fflush(stdout);
    forkpoint::print_error(error);
  } catch (const std::bad_alloc&) {
    forkpoint::print_error(forkpoint::Error("out of memory."));
  } catch (const std::exception& error) {
    forkpoint::print_error(forkpoint::Error(fmt::format("internal error: {}", error.what()),
                                            "This is a defect of forkpoint; please report it with the command line."));
  }
  return trouble_status;
}
