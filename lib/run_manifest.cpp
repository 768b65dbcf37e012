// run.json: reading, writing, creating.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <type_traits>
#include <utility>

#include "lib/error.h"
#include "lib/hash_stream_file.h"
#include "lib/run.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kManifestFormat = 1;
constexpr size_t kMaxManifestBytes = 64u << 20;
constexpr int kMaxDepth = 64;
constexpr int kMaxWorldSize = 1 << 20;

std::string manifest_path(const std::string& directory) { return directory + "/run.json"; }

std::string errno_text(int number) { return std::system_category().message(number); }

RunState state_from_name(const std::string& text, const std::string& path) {
  for (RunState state : {RunState::recording, RunState::died, RunState::whole}) {
    if (name(state) == text) return state;
  }
  throw Error(fmt::format("{}: state is \"{}\"; expected recording, died or whole.", path, text));
}

// The JSON library converts 1e300 to int without a word.
template <typename Value>
bool numbers_fit(const Json& json) {
  if constexpr (std::is_same_v<Value, std::vector<int>>) {
    return std::all_of(json.begin(), json.end(), [](const Json& item) { return numbers_fit<int>(item); });
  } else if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
    if (json.is_number_unsigned()) return std::in_range<Value>(json.get<uint64_t>());
    return !json.is_number() || (json.is_number_integer() && std::in_range<Value>(json.get<int64_t>()));
  }
  return true;
}

// Moves known fields out of the object, so that what is left is unknown.
class FieldReader {
 public:
  FieldReader(Json object, std::string path) : object_(std::move(object)), path_(std::move(path)) {}

  template <typename Value>
  void take(const char* field, Value* value) {
    const auto found = object_.find(field);
    if (found == object_.end()) return;
    bool fits = numbers_fit<Value>(*found);
    try {
      if (fits) *value = found->template get<Value>();
    } catch (const nlohmann::json::exception&) {
      fits = false;
    }
    if (!fits) {
      throw Error(
          fmt::format("{}: field \"{}\" is of type {}, which is not what belongs there.", path_, field, found->type_name()),
          "Correct the field or restore the file.");
    }
    object_.erase(found);
  }

  // What was not taken, as text; empty when nothing is left.
  std::string rest() const {
    return object_.empty() ? std::string() : object_.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

 private:
  Json object_;
  std::string path_;
};

Json parse(const std::string& path, const std::string& text) {
  // Depth is bounded because writing unknown fields back recurses.
  bool too_deep = false;
  const auto bound_depth = [&](int depth, Json::parse_event_t, Json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return !too_deep;
  };
  Json object;
  try {
    object = Json::parse(text, bound_depth);
  } catch (const nlohmann::json::parse_error& error) {
    throw Error(fmt::format("{}: not valid JSON at byte {} of {}.", path, error.byte, text.size()),
                "Restore the file; the streams beside it are not affected.");
  } catch (const nlohmann::json::exception&) {
    throw Error(fmt::format("{}: not valid JSON.", path), "Restore the file; the streams beside it are not affected.");
  }
  if (too_deep || !object.is_object()) {
    throw Error(fmt::format("{}: expected one JSON object (at most {} levels deep).", path, kMaxDepth),
                "Restore the file; the streams beside it are not affected.");
  }
  return object;
}

std::string read_text(const std::string& directory) {
  const std::string path = manifest_path(directory);
  struct stat status = {};
  if (stat(directory.c_str(), &status) != 0) {
    throw Error(fmt::format("{}: no such run: {}.", directory, errno_text(errno)), "Check the path.");
  }
  if (!S_ISDIR(status.st_mode)) {
    throw Error(fmt::format("{}: not a run: it is not a folder.", directory), "Give the folder that holds run.json.");
  }
  if (stat(path.c_str(), &status) != 0 && errno == ENOENT) {
    throw Error(fmt::format("{}: not a run: there is no run.json in it.", directory),
                "Give the folder that holds run.json.");
  }
  const InputFile file(path);
  if (file.size_bytes() > kMaxManifestBytes) {
    throw Error(fmt::format("{}: {} bytes; expected at most {}.", path, file.size_bytes(), kMaxManifestBytes));
  }
  std::string text(file.size_bytes(), '\0');
  text.resize(file.read_at(0, text.data(), text.size()));
  return text;
}

std::string to_text(const Manifest& manifest) {
  Json object = {
      {"format", manifest.format},
      {"state", name(manifest.state)},
      {"forkpoint_version", manifest.forkpoint_version},
      {"command", manifest.command},
      {"working_directory", manifest.working_directory},
      {"environment", manifest.environment},
      {"versions", manifest.versions},
      {"gpus", manifest.gpus},
      {"world_size", manifest.world_size},
      {"ranks", manifest.ranks},
      {"level", name(manifest.level)},
      {"step_base", manifest.step_base},
      {"every", manifest.every},
      {"names_masked", manifest.names_masked},
      {"started_at", manifest.started_at},
      {"ended_at", manifest.ended_at},
      {"hosts", manifest.hosts},
      {"exit_status", manifest.exit_status},
      {"end_reason", manifest.end_reason},
      {"notes", manifest.notes},
      {"merged_from", manifest.merged_from},
      {"recorder",
       {{"host", manifest.recorder.host},
        {"pid", manifest.recorder.pid},
        {"boot_id", manifest.recorder.boot_id},
        {"pid_start_ticks", manifest.recorder.pid_start_ticks},
        {"pid_namespace", manifest.recorder.pid_namespace}}},
  };
  if (!manifest.unknown_fields.empty()) {
    const Json unknown = Json::parse(manifest.unknown_fields, nullptr, false);
    if (unknown.is_object()) object.insert(unknown.begin(), unknown.end());
  }
  // Commands and variables may hold bytes that are not UTF-8; they are shown as U+FFFD rather than refused.
  return object.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void write_all(const std::string& path, const std::string& text) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) {
    throw Error(fmt::format("{}: cannot be created: {}.", path, errno_text(errno)),
                "Check that the run folder exists and is writable.");
  }
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t put = write(file.get(), text.data() + done, text.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const std::string why = errno_text(put < 0 ? errno : ENOSPC);
      unlink(path.c_str());
      throw Error(fmt::format("{}: {} bytes could not be written: {}.", path, text.size(), why),
                  "Free space on this file system or record to another one.");
    }
    done += static_cast<size_t>(put);
  }
}

void take_state(FieldReader* in, const std::string& path, Manifest* manifest) {
  std::string state(name(manifest->state)), level(name(manifest->level));
  in->take("state", &state);
  in->take("level", &level);
  manifest->state = state_from_name(state, path);
  const auto known = level_from_name(level);
  if (!known) throw Error(fmt::format("{}: level is \"{}\"; expected step, layer or launch.", path, level));
  manifest->level = *known;
}

void take_recorder(FieldReader* in, const std::string& path, RecorderProcess* recorder) {
  Json object;
  in->take("recorder", &object);
  if (!object.is_object()) return;
  FieldReader fields(std::move(object), path);
  fields.take("host", &recorder->host);
  fields.take("pid", &recorder->pid);
  fields.take("boot_id", &recorder->boot_id);
  fields.take("pid_start_ticks", &recorder->pid_start_ticks);
  fields.take("pid_namespace", &recorder->pid_namespace);
}

std::string temporary_path(const std::string& directory) {
  return fmt::format("{}/.run.json.{}.{}", directory, getpid(), gettid());
}

}  // namespace

std::string_view name(RunState state) {
  switch (state) {
    case RunState::recording:
      return "recording";
    case RunState::died:
      return "died";
    case RunState::whole:
      return "whole";
  }
  return "unknown";
}

Manifest read_manifest(const std::string& run_directory) {
  const std::string path = manifest_path(run_directory);
  FieldReader in(parse(path, read_text(run_directory)), path);
  Manifest manifest;
  in.take("format", &manifest.format);
  if (manifest.format != kManifestFormat) {
    throw Error(
        fmt::format("{}: manifest format {}; this forkpoint reads format {}.", path, manifest.format, kManifestFormat),
        "Read it with the forkpoint that recorded it, or a later one.");
  }
  take_state(&in, path, &manifest);
  in.take("forkpoint_version", &manifest.forkpoint_version);
  in.take("command", &manifest.command);
  in.take("working_directory", &manifest.working_directory);
  in.take("environment", &manifest.environment);
  in.take("versions", &manifest.versions);
  in.take("gpus", &manifest.gpus);
  in.take("world_size", &manifest.world_size);
  in.take("ranks", &manifest.ranks);
  in.take("step_base", &manifest.step_base);
  in.take("every", &manifest.every);
  in.take("names_masked", &manifest.names_masked);
  in.take("started_at", &manifest.started_at);
  in.take("ended_at", &manifest.ended_at);
  in.take("hosts", &manifest.hosts);
  in.take("exit_status", &manifest.exit_status);
  in.take("end_reason", &manifest.end_reason);
  in.take("notes", &manifest.notes);
  in.take("merged_from", &manifest.merged_from);
  take_recorder(&in, path, &manifest.recorder);
  if (manifest.world_size < 0 || manifest.world_size > kMaxWorldSize) {
    throw Error(fmt::format("{}: world_size is {}; expected 0 to {}.", path, manifest.world_size, kMaxWorldSize));
  }
  manifest.unknown_fields = in.rest();
  return manifest;
}

void write_manifest(const std::string& run_directory, const Manifest& manifest) {
  const std::string temporary = temporary_path(run_directory);
  write_all(temporary, to_text(manifest));
  if (rename(temporary.c_str(), manifest_path(run_directory).c_str()) != 0) {
    const std::string why = errno_text(errno);
    unlink(temporary.c_str());
    throw Error(fmt::format("{}: cannot be replaced: {}.", manifest_path(run_directory), why),
                "Check that the run folder is writable.");
  }
}

void create_run(const std::string& run_directory, const Manifest& manifest) {
  std::error_code error;
  std::filesystem::create_directories(run_directory, error);
  if (!std::filesystem::is_directory(run_directory)) {
    throw Error(fmt::format("{}: the run folder cannot be made: {}.", run_directory,
                            error ? error.message() : "something else has that name"),
                "Choose a folder that you can write to with -o.");
  }
  const bool empty = std::filesystem::is_empty(run_directory, error);
  if (error) throw Error(fmt::format("{}: cannot be read: {}.", run_directory, error.message()));
  const std::string occupied = fmt::format("{}: the run folder is not empty.", run_directory);
  const std::string hint = "Choose a new folder with -o, or remove the old run first.";
  if (!empty) throw Error(occupied, hint);
  Manifest first = manifest;
  first.state = RunState::recording;
  if (first.recorder.pid == 0) {
    StreamHeader process;
    describe_this_process(&process);
    first.recorder = {process.host, process.pid, process.boot_id, process.pid_start_ticks, process.pid_namespace};
  }
  // A link, unlike a rename, fails when another process was quicker.
  const std::string temporary = temporary_path(run_directory);
  write_all(temporary, to_text(first));
  const int failure = link(temporary.c_str(), manifest_path(run_directory).c_str()) == 0 ? 0 : errno;
  if (failure == EEXIST) {
    unlink(temporary.c_str());
    throw Error(occupied, hint);
  }
  if (failure != 0) return write_manifest(run_directory, first);  // a file system without links
  unlink(temporary.c_str());
}

}  // namespace forkpoint
