#include "cli/arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/program_options.hpp>

#include "cli/terminal.h"

namespace forkpoint {
namespace po = boost::program_options;

namespace {

std::string spelled(const Option& option) {
  return option.letter ? fmt::format("{},{}", option.name, option.letter) : std::string(option.name);
}

po::options_description describe(const Verb& verb) {
  po::options_description description;
  description.add_options()("help,h", "");
  for (const Option& option : verb.options) {
    if (option.value.empty()) {
      description.add_options()(spelled(option).c_str(), "");
    } else {
      description.add_options()(spelled(option).c_str(), po::value<std::string>(), "");
    }
  }
  return description;
}

std::string see_help(const Verb& verb) { return fmt::format("`forkpoint {} -h` lists the options.", verb.name); }

UsageError unknown_option(const Verb& verb, const std::string& word) {
  std::vector<std::string_view> names{"help"};
  for (const Option& option : verb.options) names.push_back(option.name);
  const std::string bare = word.substr(std::min(word.find_first_not_of('-'), word.size()));
  const std::string near = nearest(bare, names);
  return UsageError(fmt::format("{}: there is no option {}.", verb.name, word),
                    near.empty() ? see_help(verb) : fmt::format("Did you mean --{}? {}", near, see_help(verb)));
}

// `--deterministic` is `--deterministic=default`: the library would take the next word for its value.
std::vector<std::string> with_left_out_values(const Verb& verb, std::vector<std::string> words) {
  for (std::string& word : words) {
    for (const Option& option : verb.options) {
      if (option.value.starts_with("[=") && word == fmt::format("--{}", option.name)) word += "=default";
    }
  }
  return words;
}

po::parsed_options split(const Verb& verb, const std::vector<std::string>& given) {
  const std::vector<std::string> words = with_left_out_values(verb, given);
  const po::options_description visible = describe(verb);
  po::options_description all;
  all.add(visible).add_options()("positional", po::value<std::vector<std::string>>(), "");
  po::positional_options_description positional;
  positional.add("positional", -1);
  const int style = po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
  try {
    return po::command_line_parser(words).options(all).positional(positional).style(style).run();
  } catch (const po::unknown_option& error) {
    throw unknown_option(verb, error.get_option_name());
  } catch (const po::invalid_command_line_syntax& error) {
    if (error.kind() == po::invalid_command_line_syntax::extra_parameter) {
      throw UsageError(fmt::format("{}: {} takes no value.", verb.name, error.get_option_name()), see_help(verb));
    }
    throw UsageError(fmt::format("{}: {} needs a value.", verb.name, error.get_option_name()), see_help(verb));
  } catch (const po::error& error) {
    throw UsageError(fmt::format("{}: {}.", verb.name, error.what()), see_help(verb));
  }
}

}  // namespace

class ArgumentParser {
 public:
  explicit ArgumentParser(const Verb& verb) : verb_(verb) {}

  std::optional<Arguments> parse(std::vector<std::string> words) {
    const auto dashes = std::find(words.begin(), words.end(), "--");
    const bool has_dashes = dashes != words.end();
    if (has_dashes && verb_.takes_command) {
      result_.command_.assign(dashes + 1, words.end());
      words.erase(dashes, words.end());
    }
    for (const po::option& option : split(verb_, words).options) {
      if (option.string_key == "help") return std::nullopt;
      keep(option);
    }
    check_positional(has_dashes);
    return std::move(result_);
  }

 private:
  void keep(const po::option& option) {
    if (option.string_key == "positional" || option.position_key >= 0) {
      result_.positional_.insert(result_.positional_.end(), option.value.begin(), option.value.end());
      return;
    }
    const std::string value = option.value.empty() ? "" : option.value.front();
    if (!result_.values_.emplace(option.string_key, value).second) {
      throw UsageError(fmt::format("{}: --{} was given twice.", verb_.name, option.string_key), "Give it once.");
    }
  }

  void check_positional(bool has_dashes) const {
    const std::string usage = fmt::format("Usage: forkpoint {}", verb_.usage);
    const size_t count = result_.positional_.size();
    const bool may_lack_command = verb_.command_optional && !has_dashes;
    if (verb_.takes_command && !may_lack_command && (!has_dashes || result_.command_.empty())) {
      throw UsageError(fmt::format("{}: the command to run is missing; it stands after `--`.", verb_.name), usage);
    }
    if (count > verb_.max_positional) {
      throw UsageError(
          fmt::format("{}: `{}` is one argument too many.", verb_.name, result_.positional_[verb_.max_positional]),
          usage);
    }
    if (count < verb_.min_positional) {
      throw UsageError(fmt::format("{}: {} of {} arguments given.", verb_.name, count, verb_.min_positional), usage);
    }
  }

  const Verb& verb_;
  Arguments result_;
};

std::optional<std::string> Arguments::value(std::string_view option) const {
  const auto found = values_.find(option);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

std::optional<Arguments> parse_arguments(const Verb& verb, const std::vector<std::string>& words) {
  return ArgumentParser(verb).parse(words);
}

namespace {

// "  -o, --output RUN      folder to make"; where the option takes more than its column, the text begins on a line of its own.
std::string option_help(const Option& option) {
  constexpr size_t kIndent = 25, kWidth = 110;
  const std::string letter = option.letter ? fmt::format("-{}, ", option.letter) : "    ";
  std::string label = fmt::format("  {}--{}", letter, option.name);
  if (!option.value.empty()) label += fmt::format("{}{}", option.value.starts_with("[=") ? "" : " ", option.value);
  const std::string gap = label.size() + 2 <= kIndent ? std::string(kIndent - label.size(), ' ')
                                                      : "\n" + std::string(kIndent, ' ');
  return label + gap + wrapped(option.text, kIndent, kWidth) + "\n";
}

}  // namespace

std::string verb_help(const Verb& verb) {
  std::string text = fmt::format("usage: forkpoint {}\n\n{}\n", verb.usage, verb.about);
  if (!verb.options.empty()) text += "\noptions:\n";
  for (const Option& option : verb.options) text += option_help(option);
  text += "\nexamples:\n";
  for (const Example& example : verb.examples) {
    text += fmt::format("  {}\n      {}\n", example.command, example.meaning);
  }
  return text;
}

}  // namespace forkpoint
