// Whether a checkpoint is whole. What each framework writes last (read in the frameworks' own sources):
//  Megatron   rank 0 writes latest_checkpointed_iteration.txt after a barrier; a distributed checkpoint gets metadata.json as its
//             last file, after .metadata (megatron/training/checkpointing.py, core/dist_checkpointing/serialization.py)
//  DeepSpeed  rank 0 writes `latest`, but before the last barrier, so other ranks' files may still be growing
//             (deepspeed/runtime/engine.py, save_checkpoint)
//  HF Trainer trainer_state.json, after the model, optimizer and generator states of that rank (versions before 4.36 wrote the
//             generator states after it); 4.36 to 4.38 worked in tmp-checkpoint-N and renamed (transformers/trainer.py)
//  DCP        .metadata, as .metadata.tmp and then renamed (torch/distributed/checkpoint/filesystem.py)
//  Lightning  a file: the zip end record; a folder (FSDP): meta.pt after DCP's .metadata
//  minigpt    COMPLETE (samples/minigpt/checkpoint.h)
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "lib/checkpoint_layouts.h"
#include "lib/error.h"
#include "lib/input_file.h"
#include "lib/safetensors.h"
#include "lib/zip_file.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kMaxTextBytes = 256ull << 20;

bool has(const std::vector<ListedFile>& files, std::string_view name) {
  const auto found = std::lower_bound(files.begin(), files.end(), name, [](const auto& a, auto& b) { return a.name < b; });
  return found != files.end() && found->name == name;
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

std::string small_text(const std::string& path) {
  const FileSlice slice = open_slice(path);
  if (slice.size_bytes() > kMaxTextBytes) throw Error(fmt::format("{} has {} bytes, too many.", path, slice.size_bytes()));
  return slice.text(0, slice.size_bytes(), "the text");
}

std::string word_in(const std::string& path) {
  const std::string text = small_text(path);
  const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
}

// Files that a *.index.json of Hugging Face names ("weight_map": tensor name to file).
std::string missing_in_index(const std::string& folder, const ListedFile& index, const std::vector<ListedFile>& files) {
  const Json json = Json::parse(small_text(folder + "/" + index.name), nullptr, false);
  if (!json.is_object()) return fmt::format("{} is no JSON object: it is cut or damaged", index.name);
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object()) return {};
  const std::string beside = fs::path(index.name).parent_path().string();
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) return fmt::format("{} is damaged at `{}`", index.name, tensor);
    const std::string name = beside.empty() ? file.get<std::string>() : beside + "/" + file.get<std::string>();
    if (!has(files, name)) return fmt::format("{}, which {} names, is missing", name, index.name);
  }
  return {};
}

// DCP names its data files __RANK_N.distcp; .metadata (a pickle) holds the names as plain text.
std::string missing_in_metadata(const std::string& folder, const std::string& name, const std::vector<ListedFile>& files) {
  const std::string text = small_text(folder + "/" + name);
  if (text.empty()) return fmt::format("{} is empty", name);
  if (text.back() != '.') return fmt::format("{} does not end as a pickle does: it is cut", name);
  const std::string beside = fs::path(name).parent_path().string();
  constexpr std::string_view kEnd = ".distcp";
  std::set<std::string> seen;
  for (size_t at = text.find(kEnd); at != text.npos; at = text.find(kEnd, at + 1)) {
    size_t begin = at;
    while (begin > 0 && (std::isalnum(static_cast<unsigned char>(text[begin - 1])) || text[begin - 1] == '_')) --begin;
    const std::string data = text.substr(begin, at + kEnd.size() - begin);
    const std::string path = beside.empty() ? data : beside + "/" + data;
    if (seen.insert(data).second && !has(files, path)) return fmt::format("{}, which {} names, is missing", path, name);
  }
  return {};
}

bool is_partial_name(const std::string& name) {
  const std::string file = fs::path(name).filename().string();
  return ends_with_any(file, {".tmp", ".partial", ".incomplete", ".part"}) || file.find(".tmp.") != file.npos;
}

std::string why_files_not_whole(const std::string& path, const std::vector<ListedFile>& files) {
  for (const ListedFile& file : files) {
    if (is_partial_name(file.name)) return fmt::format("{} is a file that was not finished", file.name);
    if (std::string why = why_file_not_whole(path, file); !why.empty()) return why;
    if (file.name.ends_with(".index.json")) {
      if (std::string why = missing_in_index(path, file, files); !why.empty()) return why;
    }
    if (fs::path(file.name).filename() == ".metadata") {
      if (std::string why = missing_in_metadata(path, file.name, files); !why.empty()) return why;
    }
  }
  return files.empty() ? "it is empty" : "";
}

// Also of an absolute path without a parent in it ("step-100" in the current folder).
std::string beside(const Checkpoint& checkpoint, const char* name) {
  return (fs::absolute(checkpoint.path).lexically_normal().parent_path() / name).string();
}

bool is_distributed(const std::vector<ListedFile>& files) {
  return std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with(".distcp"); }) ||
         has(files, ".metadata") || has(files, "common.pt");
}

std::string why_not_megatron(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (is_distributed(files)) {
    if (!has(files, ".metadata")) return ".metadata is missing, which is written when all tensors are";
    // torch_dcp and fsdp_dtensor checkpoints have no common.pt and no metadata.json.
    if (has(files, "common.pt") && !has(files, "metadata.json")) return "metadata.json is missing, which Megatron writes last";
  } else if (std::none_of(files.begin(), files.end(), [](auto& f) { return f.name.ends_with("/model_optim_rng.pt"); })) {
    return "it has no mp_rank_*/model_optim_rng.pt";
  }
  const std::string tracker = beside(checkpoint, "latest_checkpointed_iteration.txt");
  std::error_code error;
  if (!fs::exists(tracker, error)) {
    return "latest_checkpointed_iteration.txt is missing beside it, which Megatron writes last and reads first";
  }
  const std::string word = word_in(tracker);
  int64_t newest = -1;
  const auto [end, wrong] = std::from_chars(word.data(), word.data() + word.size(), newest);
  if (wrong != std::errc() || end != word.data() + word.size()) return fmt::format("latest_checkpointed_iteration.txt says `{}`", word);
  if (newest >= checkpoint.step) return {};
  return fmt::format("latest_checkpointed_iteration.txt names {} as the newest that was finished", newest);
}

// Optimizer shards of ZeRO: [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt. All D up to the largest must be there.
std::string missing_shard(const std::vector<ListedFile>& files) {
  std::map<std::string, std::set<int>> ranks;
  for (const ListedFile& file : files) {
    constexpr std::string_view kMark = "zero_pp_rank_";
    const std::string name = fs::path(file.name).filename().string();
    const size_t at = name.find(kMark);
    if (at == name.npos) continue;
    int rank = 0;
    const char* begin = name.data() + at + kMark.size();
    const auto [end, wrong] = std::from_chars(begin, name.data() + name.size(), rank);
    if (wrong == std::errc()) ranks[name.substr(0, at) + std::string(kMark) + "*" + end].insert(rank);
  }
  for (const auto& [shape, found] : ranks) {
    if (static_cast<size_t>(*found.rbegin()) + 1 != found.size()) {
      return fmt::format("{} of {} files {} are missing", static_cast<size_t>(*found.rbegin()) + 1 - found.size(), *found.rbegin() + 1, shape);
    }
  }
  return {};
}

std::string why_latest_not(const std::string& latest, const std::string& tag, int64_t step) {
  std::error_code error;
  if (!fs::exists(latest, error)) return "`latest` is missing beside it, which DeepSpeed writes last";
  const std::string word = word_in(latest);
  if (word == tag) return {};
  const auto named = known_name(word);
  if (named && named->kind == "deepspeed" && named->step >= step) return {};
  return fmt::format("`latest` names {} as the newest that was finished", word.empty() ? "nothing" : word);
}

std::string why_not_deepspeed(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  const auto is_state = [](const auto& f) { return ends_with_any(f.name, {"_model_states.pt", "_optim_states.pt"}); };
  if (std::none_of(files.begin(), files.end(), is_state)) return "it has no *_model_states.pt";
  return why_latest_not(beside(checkpoint, "latest"), fs::path(checkpoint.path).filename().string(), checkpoint.step);
}

std::string why_not_trainer(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (fs::path(checkpoint.path).filename().string().starts_with("tmp-")) return "the Trainer had not renamed it: it was not finished";
  if (!has(files, "trainer_state.json")) return "trainer_state.json is missing, which the Trainer writes last";
  const Json state = Json::parse(small_text(checkpoint.path + "/trainer_state.json"), nullptr, false);
  if (!state.is_object()) return "trainer_state.json is no JSON object: it is cut or damaged";
  const auto step = state.find("global_step");
  if (step == state.end() || !step->is_number_integer()) return "trainer_state.json has no global_step";
  if (step->get<int64_t>() != checkpoint.step) return fmt::format("trainer_state.json is of step {}", step->get<int64_t>());
  const std::string inner = fmt::format("global_step{}", checkpoint.step);  // of DeepSpeed, inside
  if (std::any_of(files.begin(), files.end(), [&](auto& f) { return f.name.starts_with(inner + "/"); })) {
    return why_latest_not(checkpoint.path + "/latest", inner, checkpoint.step);
  }
  return {};
}

std::string why_not_dcp(const std::vector<ListedFile>& files) {
  // torchtitan can export its last step as safetensors of Hugging Face instead.
  if (has(files, ".metadata") || has(files, "model.safetensors.index.json")) return {};
  return ".metadata is missing, which is written last";
}

std::string why_not_lightning(const std::vector<ListedFile>& files) {
  if (files.size() == 1 && files[0].name.empty()) return {};  // one file: its end was checked
  if (has(files, ".metadata")) return has(files, "meta.pt") ? "" : "meta.pt is missing, which Lightning writes last";
  if (std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with("_states.pt"); })) {
    return has(files, "latest") ? "" : "`latest` is missing, which DeepSpeed writes last";
  }
  return "it is a folder without .metadata";
}

}  // namespace

std::string why_file_not_whole(const std::string& folder, const ListedFile& file) {
  const std::string path = file.name.empty() ? folder : folder + "/" + file.name;
  const std::string shown = file.name.empty() ? fs::path(folder).filename().string() : file.name;
  const bool torch_name = ends_with_any(path, {".pt", ".pth", ".bin", ".ckpt", ".distcp"});
  const bool safetensors = path.ends_with(".safetensors");
  if ((torch_name || safetensors) && file.size_bytes == 0) {
    // DCP makes a file for each rank, also for one that has nothing to write.
    return path.ends_with(".distcp") ? "" : fmt::format("{} is empty", shown);
  }
  try {
    const FileSlice slice = open_slice(path);
    if (safetensors) read_safetensors(slice);
    // A .distcp file is a row of zip files, each as long as .metadata says.
    if (torch_name && !path.ends_with(".distcp") && ZipFile::begins(slice)) ZipFile{slice};
    if (torch_name && slice.size_bytes() >= 8 && slice.text(0, 8, "the begin") == std::string(8, '\0')) {
      return fmt::format("{} begins with zeros: its data never reached the disk", shown);
    }
  } catch (const Error& error) {
    std::string why = error.what();
    if (why.starts_with(path + ": ")) why = shown + ": " + why.substr(path.size() + 2);
    if (why.ends_with('.')) why.pop_back();
    return why;
  }
  return {};
}

std::string why_content_not_whole(const std::string& path, const std::vector<ListedFile>& files) {
  if (std::string why = why_files_not_whole(path, files); !why.empty()) return why;
  return missing_shard(files);
}

std::string why_not_whole(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (std::string why = why_content_not_whole(checkpoint.path, files); !why.empty()) return why;
  if (checkpoint.kind == "megatron") return why_not_megatron(checkpoint, files);
  if (checkpoint.kind == "deepspeed") return why_not_deepspeed(checkpoint, files);
  if (checkpoint.kind == "hf-trainer") return why_not_trainer(checkpoint, files);
  if (checkpoint.kind == "dcp") return why_not_dcp(files);
  if (checkpoint.kind == "lightning") return why_not_lightning(files);
  if (checkpoint.kind == "minigpt") return has(files, "COMPLETE") ? "" : "COMPLETE is missing, which is written last";
  const bool dcp = std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with(".distcp"); });
  return dcp ? why_not_dcp(files) : "";
}

}  // namespace forkpoint
