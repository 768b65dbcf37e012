// The request of a bisect: from the command line, from the manifests of recorded runs, and to and from the log.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "cli/bisect.h"
#include "cli/job_command.h"
#include "cli/knob_options.h"
#include "cli/machine.h"
#include "cli/recording.h"
#include "cli/recording_options.h"
#include "cli/replay.h"
#include "cli/terminal.h"
#include "lib/run.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Json = BisectLog::Json;

std::string absolute(const std::string& path) {
  return path.empty() ? "" : fs::absolute(path).lexically_normal().string();
}

// NAME=VALUE, as a shell takes it before a command.
bool is_assignment(const std::string& word) {
  const size_t equals = word.find('=');
  if (equals == std::string::npos || equals == 0 || std::isdigit(static_cast<unsigned char>(word[0]))) return false;
  return std::all_of(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(equals),
                     [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

// Words as a shell splits them, with assignments before; what needs a shell goes to one.
void set_command(const std::string& text, const char* option, BisectArm* arm) {
  std::vector<std::string> words = split_words(text, option);
  auto begin = words.begin();
  for (; begin != words.end() && is_assignment(*begin); ++begin) {
    const size_t equals = begin->find('=');
    arm->environment[begin->substr(0, equals)] = begin->substr(equals + 1);
  }
  if (begin == words.end()) throw UsageError(fmt::format("bisect: {} `{}` holds no command.", option, text));
  arm->command.assign(begin, words.end());
  if (text.find_first_of("|&;<>()$`*?\n") != std::string::npos) {
    arm->command = {"sh", "-c", text};
    arm->environment = numeric_environment();
  }
}

// What record itself had set is set again where it is needed, and only there.
bool is_set_by_forkpoint(const Manifest& manifest, const std::string& variable) {
  const auto found = manifest.versions.find("set by forkpoint");
  return found != manifest.versions.end() && found->second.find(variable + "=") != std::string::npos;
}

// Lists of flags begin with the user's own, and go on with those of the knobs, which are set again.
void keep_own_flags(const Manifest& manifest, BisectArm* arm) {
  for (const RecordedKnob& recorded : recorded_knobs(manifest)) {
    const Knob* knob = recorded.state == "set" ? find_knob(recorded.name) : nullptr;
    for (const KnobVariable& variable : knob ? knob->variables : std::vector<KnobVariable>{}) {
      const std::string name(variable.name);
      if (!variable.is_flag || !manifest.environment.contains(name)) continue;
      std::string own;
      for (const std::string& flag : split_words(manifest.environment.at(name), name)) {
        const bool ours = std::any_of(knob->variables.begin(), knob->variables.end(),
                                      [&](const KnobVariable& other) { return other.value == flag; });
        if (!ours) own += (own.empty() ? "" : " ") + flag;
      }
      if (!own.empty()) arm->environment[name] = own;
    }
  }
}

void read_run(const std::string& path, BisectArm* arm, std::optional<std::string>* step_on) {
  const Manifest manifest = Run::open(path).manifest();
  arm->run = absolute(path);
  arm->command = manifest.command;
  arm->working_directory = manifest.working_directory;
  arm->environment.clear();
  for (const auto& [variable, value] : manifest.environment) {
    if (!is_set_by_forkpoint(manifest, variable)) arm->environment[variable] = value;
  }
  keep_own_flags(manifest, arm);
  if (const auto knobs = knobs_of(manifest)) arm->knobs = knob_list(*knobs);
  if (manifest.names_masked) arm->command.clear();
  const bool is_replay = std::any_of(manifest.notes.begin(), manifest.notes.end(),
                                     [](const std::string& note) { return note.starts_with("replayed from "); });
  if (is_replay) arm->command.clear();  // it names a copy of a checkpoint that is gone
  const auto options = manifest.versions.find("recorded with");
  if (options == manifest.versions.end() || *step_on) return;
  const auto words = split_words(options->second, "--step-on");
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == "--step-on") *step_on = words[i + 1];
  }
}

BisectArm read_arm(const Arguments& arguments, size_t position, const char* name, std::optional<std::string>* step_on) {
  BisectArm arm;
  arm.name = name;
  arm.working_directory = fs::current_path().string();
  arm.environment = numeric_environment();
  if (!arguments.positional().empty()) read_run(arguments.positional()[position], &arm, step_on);
  const std::string option = fmt::format("--{}", name);
  if (const auto text = arguments.value(name)) {
    set_command(*text, option.c_str(), &arm);
    arm.working_directory = fs::current_path().string();
  }
  if (const auto knobs = read_knobs(arguments, "bisect")) arm.knobs = knob_list(*knobs);
  if (arm.command.empty()) {
    throw UsageError(
        arm.run.empty() ? fmt::format("bisect: {} is missing.", option)
                        : fmt::format("{}: the run does not say by which command it can be run again (a replay, or "
                                      "recorded with --mask-names).",
                                      arm.run),
        fmt::format("Give it: {} 'CMD'. The same command twice is right for faults that come and go.", option));
  }
  if (!fs::is_directory(arm.working_directory)) {
    throw Error(fmt::format("{}: it was recorded in {}, which is not there.", arm.run, arm.working_directory),
                fmt::format("Give the command as it is run here: {} 'CMD'.", option));
  }
  return arm;
}

// Who names a folder of checkpoints wants windows to begin there, and not at the start without a word.
void check_whole(const std::string& folder, const std::string& pattern) {
  const std::vector<Checkpoint> all = find_checkpoints(folder, pattern);
  if (std::any_of(all.begin(), all.end(), [](const Checkpoint& checkpoint) { return checkpoint.whole; })) return;
  if (all.empty()) {
    throw Error(
        fmt::format("{}: nothing in it is named as a checkpoint {}.", folder,
                    pattern.empty() ? "of a known framework" : fmt::format("by --checkpoint-pattern '{}'", pattern)),
        "Say how its checkpoints are named, as in --checkpoint-pattern 'ckpt_{step}.pt', or leave --checkpoint out.");
  }
  throw Error(fmt::format("{}: no checkpoint in it is whole: {}: {}.", folder, all.front().path, all.front().why_not),
              "Without --checkpoint each window begins at the start.");
}

void read_checkpoints(const Arguments& arguments, BisectRequest* request) {
  request->good.checkpoints = absolute(arguments.value("checkpoint").value_or(""));
  request->bad.checkpoints = absolute(arguments.value("bad-checkpoint").value_or(""));
  if (request->good.checkpoints.empty() && !request->bad.checkpoints.empty())
    throw UsageError("bisect: --bad-checkpoint comes on top of --checkpoint.",
                     "Name those of the good arm with --checkpoint.");
  for (const BisectArm* arm : {&request->good, &request->bad}) {
    if (!arm->checkpoints.empty() && !fs::exists(arm->checkpoints))
      throw Error(fmt::format("{}: there is no such folder of checkpoints.", arm->checkpoints));
  }
  request->pattern = arguments.value("checkpoint-pattern").value_or("");
  for (const BisectArm* arm : {&request->good, &request->bad}) {
    if (!arm->checkpoints.empty()) check_whole(arm->checkpoints, request->pattern);
  }
  if (request->bad.checkpoints.empty()) request->bad.checkpoints = request->good.checkpoints;
  if (const auto folders = arguments.value("only-read")) request->only_read = parse_only_read(*folders);
  request->preset = arguments.value("preset").value_or("");
  const auto& known = presets();
  if (!request->preset.empty() && std::find(known.begin(), known.end(), request->preset) == known.end()) {
    throw UsageError(fmt::format("bisect: --preset `{}` is not known.", request->preset),
                     fmt::format("There are {}.", fmt::join(known, ", ")));
  }
}

bool looks_like_saved(const fs::path& path) {
  static constexpr const char* kEndings[] = {".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar"};
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](const char* ending) { return path.extension() == ending; });
}

// Folders in the command that hold what may be checkpoints, and that the job is not kept from: by no known layout, or
// of an option that may as well be one to read from.
void warn_of_overwriting(const BisectArm& arm, const BisectRequest& request) {
  const auto warn = [&](const std::string& path, const std::string& option) {
    const fs::path folder = fs::path(arm.working_directory) / path;
    std::error_code error;
    if (path.empty() || !fs::is_directory(folder, error) || is_same_folder(folder.string(), arm.working_directory))
      return false;
    const auto is_it = [&](const std::string& other) { return is_same_folder(folder.string(), other); };
    if (is_it(arm.checkpoints) || std::any_of(request.only_read.begin(), request.only_read.end(), is_it)) return false;
    const bool known = holds_checkpoints(folder.string(), request.pattern);
    if (known && is_saving_option(option)) return false;  // the job gets another folder
    const fs::directory_iterator all(folder, error), end;
    const auto saved = std::find_if(all, end, [&](const auto& entry) { return looks_like_saved(entry.path()); });
    if (error || (!known && saved == end)) return false;
    print_warning(
        fmt::format("the {} command is run again as it is, and may save over what lies in {}: give it other folders "
                    "(--{} 'CMD', with {{run}} in a word), or say that it only reads there: --only-read {}",
                    arm.name, folder.string(), arm.name, path));
    return false;
  };
  std::vector<std::string> command = arm.command;
  redirect(warn, "", &command);
}

std::vector<std::string> read_script(const Arguments& arguments) {
  const auto text = arguments.value("script");
  if (!text) return {};
  BisectArm script;
  set_command(*text, "--script", &script);
  if (script.command.size() != 3 || script.command[0] != "sh") {
    const auto words = split_words(*text, "--script");
    if (is_assignment(words.front())) return {"sh", "-c", *text};
  }
  return script.command;
}

Json to_json(const BisectArm& arm) {
  return {{"run", arm.run},
          {"command", arm.command},
          {"working_directory", arm.working_directory},
          {"environment", arm.environment},
          {"knobs", arm.knobs ? Json(*arm.knobs) : Json()},
          {"checkpoints", arm.checkpoints}};
}

BisectArm arm_from(const Json& json, const char* name) {
  BisectArm arm;
  arm.name = name;
  json.at("run").get_to(arm.run);
  json.at("command").get_to(arm.command);
  json.at("working_directory").get_to(arm.working_directory);
  json.at("environment").get_to(arm.environment);
  json.at("checkpoints").get_to(arm.checkpoints);
  if (const auto knobs = json.find("knobs"); knobs != json.end() && !knobs->is_null()) arm.knobs = knobs->get<std::string>();
  return arm;
}

}  // namespace

BisectRequest read_bisect_request(const Arguments& arguments) {
  if (arguments.positional().size() == 1)
    throw UsageError("bisect: it takes two runs.",
                     "As in forkpoint bisect runs/good runs/bad, or --good 'CMD' --bad 'CMD'.");
  BisectRequest request;
  request.step_on = arguments.value("step-on");
  if (request.step_on) check_step_on(*request.step_on, "bisect");
  request.good = read_arm(arguments, 0, "good", &request.step_on);
  request.bad = read_arm(arguments, 1, "bad", &request.step_on);
  read_checkpoints(arguments, &request);
  warn_of_overwriting(request.good, request);
  if (request.bad.command != request.good.command) warn_of_overwriting(request.bad, request);
  if (const auto text = arguments.value("steps")) {
    const StepRange range = parse_steps(*text);
    request.first = range.first, request.last = range.last;
  }
  request.script = read_script(arguments);
  if (const auto text = arguments.value("level")) request.level = parse_level(*text, "bisect");
  if (const auto text = arguments.value("tries")) request.tries = parse_count(*text, "--tries", 1);
  if (const auto text = arguments.value("timeout"))
    request.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  request.show_output = arguments.has("show-output");
  request.folder = arguments.value("output").value_or("");
  if (request.folder.empty()) request.folder = default_run_directory("bisect");
  request.folder = absolute(request.folder);
  return request;
}

Json to_json(const BisectRequest& request) {
  Json json = {{"good", to_json(request.good)}, {"bad", to_json(request.bad)}, {"folder", request.folder}};
  json["first"] = request.first ? Json(*request.first) : Json();
  json["last"] = request.last ? Json(*request.last) : Json();
  json["pattern"] = request.pattern;
  json["preset"] = request.preset;
  json["only_read"] = request.only_read;
  json["step_on"] = request.step_on ? Json(*request.step_on) : Json();
  json["script"] = request.script;
  json["level"] = name(request.level);
  json["tries"] = request.tries;
  json["patience_s"] = request.patience.count();
  json["show_output"] = request.show_output;
  return json;
}

BisectRequest bisect_request_from(const Json& json) {
  try {
    BisectRequest request;
    request.good = arm_from(json.at("good"), "good");
    request.bad = arm_from(json.at("bad"), "bad");
    json.at("folder").get_to(request.folder);
    if (!json.at("first").is_null()) request.first = json["first"].get<int64_t>();
    if (!json.at("last").is_null()) request.last = json["last"].get<int64_t>();
    json.at("pattern").get_to(request.pattern);
    json.at("preset").get_to(request.preset);
    request.only_read = json.value("only_read", request.only_read);
    if (!json.at("step_on").is_null()) request.step_on = json["step_on"].get<std::string>();
    json.at("script").get_to(request.script);
    request.level = parse_level(json.at("level").get<std::string>(), "bisect");
    json.at("tries").get_to(request.tries);
    request.patience = std::chrono::seconds(json.at("patience_s").get<int64_t>());
    json.at("show_output").get_to(request.show_output);
    return request;
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("the log's first line is not a request of bisect: {}", error.what()),
                "Start anew with another folder (-o).");
  }
}

}  // namespace forkpoint
