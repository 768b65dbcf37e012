#include "cli/job_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "cli/arguments.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;
using Places = std::vector<size_t>;

// What a framework's usual script takes. An option with `only_if_there` replaces a value of the user's and is not
// added.
struct PresetOption {
  std::string_view option;
  std::string_view value;  // with placeholders; empty: a switch
  bool only_if_there = false;
};
struct Preset {
  std::string_view name;
  std::vector<PresetOption> resume, save;
};

const std::vector<Preset>& table() {
  static const std::vector<Preset> presets{
      {"megatron",
       {{"--load", "{checkpoint_dir}"}, {"--ckpt-step", "{step}"}, {"--save", "{checkpoint_dir}", true}},
       {{"--save", "{checkpoint_dir}"}, {"--save-interval", "{step}"}}},
      {"hf-trainer",
       {{"--resume_from_checkpoint", "{checkpoint}"}, {"--output_dir", "{checkpoint_dir}", true}},
       {{"--output_dir", "{checkpoint_dir}"}, {"--save_strategy", "steps"}, {"--save_steps", "{step}"}}},
      // torchtitan. An absolute folder stands by itself, whatever --job.dump_folder is.
      {"dcp",
       {{"--checkpoint.folder", "{checkpoint_dir}"}, {"--checkpoint.load_step", "{step}"}},
       {{"--checkpoint.folder", "{checkpoint_dir}"}, {"--checkpoint.interval", "{step}"}}},
      {"lightning", {{"--ckpt_path", "{checkpoint}"}}, {}},
      // Scripts name the option as they like, and follow the `latest` in the folder.
      {"deepspeed",
       {{"--load", "{checkpoint_dir}", true},
        {"--load-dir", "{checkpoint_dir}", true},
        {"--load_dir", "{checkpoint_dir}", true},
        {"--save", "{checkpoint_dir}", true}},
       {}},
      {"minigpt",
       {{"--resume", ""}, {"--checkpoint-dir", "{checkpoint_dir}"}},
       {{"--checkpoint-dir", "{checkpoint_dir}"}, {"--checkpoint-every", "{step}"}}}};
  return presets;
}

const Preset* find_preset(const std::string& name) {
  for (const Preset& preset : table()) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

void replace_all(std::string* text, std::string_view what, const std::string& with) {
  for (size_t at = text->find(what); at != std::string::npos; at = text->find(what, at + with.size())) {
    text->replace(at, what.size(), with);
  }
}

std::string fill_word(std::string word, const CommandValues& values) {
  if (!values.checkpoint.empty()) replace_all(&word, "{checkpoint}", values.checkpoint);
  replace_all(&word, "{checkpoint_dir}", values.checkpoint_dir);
  replace_all(&word, "{step}", std::to_string(values.step));
  replace_all(&word, "{run}", values.run);
  return word;
}

// Many parsers take an option with '-' and with '_' between its words.
bool is_option(std::string_view word, std::string_view option) {
  return std::equal(word.begin(), word.end(), option.begin(), option.end(),
                    [](char a, char b) { return a == b || ((a == '-' || a == '_') && (b == '-' || b == '_')); });
}

// `--option V` and `--option=V`. false: it is not there.
bool set_value(Words* words, std::string_view option, const std::string& value) {
  bool found = false;
  for (size_t i = 0; i < words->size(); ++i) {
    std::string& word = (*words)[i];
    const size_t equals = word.find('=');
    if (is_option(word, option) && value.empty()) found = true;
    if (is_option(word, option) && !value.empty() && i + 1 < words->size())
      (*words)[++i] = value, found = true;
    else if (!value.empty() && equals != std::string::npos && is_option(word.substr(0, equals), option))
      word.replace(equals + 1, std::string::npos, value), found = true;
  }
  return found;
}

// How many options took effect.
size_t apply(const std::vector<PresetOption>& options, const CommandValues& values, Words* words) {
  size_t set = 0;
  for (const PresetOption& option : options) {
    const std::string value = fill_word(std::string(option.value), values);
    if (set_value(words, option.option, value)) {
      ++set;
    } else if (!option.only_if_there && !is_shell_line(*words)) {
      words->emplace_back(option.option);
      if (!value.empty()) words->push_back(value);
      ++set;
    }
  }
  return set;
}

constexpr char kPlaceholders[] = "{checkpoint}, {checkpoint_dir} and {step}";

}  // namespace

bool is_same_folder(const std::string& path, const std::string& folder) {
  std::error_code ignored;
  return !path.empty() && (path == folder || fs::equivalent(path, folder, ignored));
}

Words redirect(const IsUsers& is_users, const std::string& own, Words* command) {
  Words users;
  for (size_t i = 1; i < command->size(); ++i) {
    std::string& word = (*command)[i];
    const std::string& before = (*command)[i - 1];
    const std::string option = before.starts_with('-') && before.find('=') == std::string::npos ? before : "";
    const size_t equals = word.find('=');  // "--dir=X", and "dir=X" as hydra takes it
    const size_t value = equals == std::string::npos ? 0 : equals + 1;
    for (const size_t begin : value > 0 ? Places{value, 0} : Places{0}) {  // a folder may have '=' in its name
      if (!is_users(word.substr(begin), begin > 0 ? word.substr(0, equals) : option)) continue;
      users.push_back(word.substr(begin));
      word.replace(begin, std::string::npos, own);
      break;
    }
  }
  return users;
}

bool is_saving_option(std::string_view option) {
  static constexpr std::string_view kLoading[] = {"load",     "resume",  "from",  "init", "pretrain",
                                                  "teacher", "model", "data", "read"};
  const auto has_part = [&](std::string_view name) {
    for (size_t begin = 0; begin < option.size();) {
      const size_t end = std::min(option.find_first_of("-_.", begin), option.size());
      if (option.substr(begin, end - begin).starts_with(name)) return true;
      begin = end + 1;
    }
    return false;
  };
  if (std::any_of(std::begin(kLoading), std::end(kLoading), has_part)) return false;
  // --checkpoint X and --ckpt-path X are what is loaded as often as not.
  const bool checkpoints = has_part("checkpoint") || has_part("ckpt");
  return has_part("out") || has_part("save") || (checkpoints && (has_part("dir") || has_part("folder")));
}

Words fill_in(const Words& command, const CommandValues& values) {
  Words filled;
  for (const std::string& word : command) filled.push_back(fill_word(word, values));
  return filled;
}

bool has_placeholder(const Words& command) {
  return std::any_of(command.begin(), command.end(), [](const std::string& word) {
    for (const char* name : {"{checkpoint}", "{checkpoint_dir}", "{step}"}) {
      if (word.find(name) != std::string::npos) return true;
    }
    return false;
  });
}

bool is_shell_line(const Words& words) {
  const std::string program = words.empty() ? "" : fs::path(words.front()).filename().string();
  return words.size() >= 2 && (program == "sh" || program == "bash" || program == "zsh" || program == "dash") &&
         words[1].starts_with('-') && words[1].ends_with('c');
}

Words split_words(std::string_view text, std::string_view option) {
  Words words;
  bool open = false;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      open = false;
      continue;
    }
    if (!open) words.emplace_back(), open = true;
    if (c == '\\' && quote != '\'' && i + 1 < text.size())
      words.back() += text[++i];
    else if (c == quote)
      quote = 0;
    else if (quote == 0 && (c == '\'' || c == '"'))
      quote = c;
    else
      words.back() += c;
  }
  if (quote != 0) throw UsageError(fmt::format("{} `{}`: the quotation mark {} is not closed.", option, text, quote));
  return words;
}

const std::vector<std::string_view>& presets() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> found;
    for (const Preset& preset : table()) found.push_back(preset.name);
    return found;
  }();
  return names;
}

std::string preset_of_program(const Words& command) {
  for (const std::string& word : command) {
    if (fs::path(word).filename() == "minigpt") return "minigpt";
    if (word.starts_with("torchtitan.")) return "dcp";
  }
  return "";
}

Words resuming(const Words& command, const std::string& preset, const CommandValues& values) {
  Words words = fill_in(command, values);
  size_t told = has_placeholder(command) ? 1 : 0;
  if (told == 0) {
    if (const Preset* known = find_preset(preset)) told += apply(known->resume, values, &words);
  }
  const auto is_users = [&](const std::string& path, const std::string&) {
    return is_same_folder(path, values.user_directory);
  };
  if (!values.user_directory.empty()) told += redirect(is_users, values.checkpoint_dir, &words).size();
  if (told > 0) return words;
  throw UsageError(fmt::format("nothing in the command says where its checkpoint is: it would begin anew{}.",
                               is_shell_line(command) ? " (nothing can be added to a shell's line)" : ""),
                   fmt::format("Put {} where the command takes them, or name the framework (--preset {}).",
                               kPlaceholders, fmt::join(presets(), "|")));
}

Words saving(const Words& command, const std::string& preset, const CommandValues& values) {
  Words words = fill_in(command, values);
  if (has_placeholder(command)) return words;
  const Preset* known = find_preset(preset);
  if (known && !known->save.empty() && apply(known->save, values, &words) > 0) return words;
  throw UsageError(
      fmt::format("nothing tells the command to save a checkpoint behind {} steps.", values.step),
      fmt::format(
          "Give --save-args with {{checkpoint_dir}} and {{step}} in them, put these into the command, or name the "
          "framework (--preset {}).",
          fmt::join(presets(), "|")));
}

}  // namespace forkpoint
