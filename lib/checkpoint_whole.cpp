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

#include "lib/checkpoint_inside.h"
#include "lib/checkpoint_layouts.h"
#include "lib/checkpoint_readers.h"
#include "lib/error.h"
#include "lib/input_file.h"
#include "lib/python_json.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr uint64_t kMaxTextBytes = 256ull << 20;

const ListedFile* find(const std::vector<ListedFile>& files, std::string_view name) {
  const auto found = std::lower_bound(files.begin(), files.end(), name, [](const auto& a, auto& b) { return a.name < b; });
  return found != files.end() && found->name == name ? &*found : nullptr;
}

bool has(const std::vector<ListedFile>& files, std::string_view name) { return find(files, name) != nullptr; }

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
  const Json json = parse_python_json(small_text(folder + "/" + index.name));
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

// .metadata names each data file of DCP and says which bytes of it are whose.
std::string missing_in_metadata(const std::string& folder, const std::string& name, const std::vector<ListedFile>& files) {
  const FileSlice index = open_slice(folder + "/" + name);
  if (index.size_bytes() == 0) return fmt::format("{} is empty", name);
  if (index.text(index.size_bytes() - 1, 1, "the end") != ".") return fmt::format("{} does not end as a pickle does: it is cut", name);
  const std::string below = fs::path(name).parent_path().string();
  std::map<std::string, uint64_t> data_files;
  try {
    data_files = distributed_files(below.empty() ? folder : folder + "/" + below);
  } catch (const Error& error) {
    return fmt::format("{} cannot be read: {}", name, error.what());
  }
  for (const auto& [data, size_bytes] : data_files) {
    const std::string path = below.empty() ? data : below + "/" + data;
    const ListedFile* file = find(files, path);
    if (!file) return fmt::format("{}, which {} names, is missing", path, name);
    if (file->size_bytes < size_bytes) {
      return fmt::format("{} has {} bytes, of which {} says that there are {}: it is cut", path, file->size_bytes, name, size_bytes);
    }
  }
  return {};
}

bool is_partial_name(const std::string& name) {
  const fs::path path(name);
  return std::any_of(path.begin(), path.end(), [](const fs::path& part) {
    const std::string word = part.string();
    return !without_partial_ending(word).empty() || word.find(".tmp.") != word.npos;
  });
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

bool names_backend(const std::string& folder, std::string_view backend) {
  const Json metadata = parse_python_json(small_text(folder + "/metadata.json"));
  return metadata.is_object() && metadata.value("sharded_backend", Json()) == backend;
}

// Folders mp_rank_TT[_PPP][_EEE], one for each place in the grid of model-parallel ranks, with the same files in each.
std::string missing_of_megatron(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  std::map<std::string, std::set<std::string>> ranks;
  std::set<std::string> names;
  MegatronInside inside;
  for (const ListedFile& file : files) {
    const size_t slash = file.name.find('/');
    if (slash == file.name.npos || !file.name.starts_with("mp_rank_")) continue;
    const std::string name = file.name.substr(slash + 1);
    names.insert(name);
    ranks[file.name.substr(0, slash)].insert(name);
    if (name == "model_optim_rng.pt" && inside.tensor_parallel == 0) inside = look_inside_megatron(checkpoint.path + "/" + file.name);
  }
  if (!names.contains("model_optim_rng.pt")) return "it has no mp_rank_*/model_optim_rng.pt";
  for (const auto& [rank, held] : ranks) {
    for (const std::string& name : names) {
      if (!held.contains(name)) return fmt::format("{}/{} is missing, which other ranks have", rank, name);
    }
  }
  const int64_t expected = std::max<int64_t>(1, inside.tensor_parallel) * std::max<int64_t>(1, inside.pipeline_parallel) *
                           std::max<int64_t>(1, inside.expert_parallel);
  if (static_cast<int64_t>(ranks.size()) < expected) {
    return fmt::format("{} of {} folders mp_rank_* are missing", expected - static_cast<int64_t>(ranks.size()), expected);
  }
  if (inside.iteration >= 0 && inside.iteration != checkpoint.step) return fmt::format("what is in it is of iteration {}", inside.iteration);
  return {};
}

std::string why_not_megatron(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (is_distributed(files)) {
    if (!has(files, ".metadata")) return ".metadata is missing, which is written when all tensors are";
    // What is not sharded is in common.pt, or (Megatron Core 0.19) an entry of .metadata. torch_dcp and fsdp_dtensor checkpoints
    // have neither, and no metadata.json.
    const bool common = has(files, "common.pt") || small_text(checkpoint.path + "/.metadata").find("common_state") != std::string::npos;
    if (common && !has(files, "metadata.json")) return "metadata.json is missing, which Megatron writes last";
    if (!common && has(files, "metadata.json") && names_backend(checkpoint.path, "torch_dist")) {
      return "common.pt is missing, which holds all that is not sharded";
    }
  } else if (std::string why = missing_of_megatron(checkpoint, files); !why.empty()) {
    return why;
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

// Each rank of a model-parallel group saves its part of the optimizer for itself under ZeRO; how many there are, the model's
// files say.
std::string missing_of_deepspeed(const std::string& folder, const std::vector<ListedFile>& files) {
  constexpr std::string_view kRank = "mp_rank_", kModel = "_model_states.pt", kOptimizer = "_optim_states.pt";
  std::set<std::string> ranks;
  std::map<std::string, int64_t> parts;
  DeepSpeedInside inside;
  for (const ListedFile& file : files) {
    const std::string name = fs::path(file.name).filename().string();
    const size_t at = name.find(kRank);
    const bool model = name.ends_with(kModel);
    if (at == name.npos || (!model && !name.ends_with(kOptimizer))) continue;
    const size_t begin = at + kRank.size();
    const std::string rank = name.substr(begin, name.find_first_not_of("0123456789", begin) - begin);
    ranks.insert(rank);
    if (!model && name.find("zero_pp_rank_") != name.npos) ++parts[rank];
    if (model && inside.data_parallel == 0) inside = look_inside_deepspeed(folder + "/" + file.name);
  }
  const auto count = static_cast<int64_t>(ranks.size());
  if (inside.model_parallel > count) return fmt::format("{} of {} files mp_rank_*{} are missing", inside.model_parallel - count, inside.model_parallel, kModel);
  if (inside.has_optimizer || inside.zero_stage == 0) return {};  // an expert's part is one of as many as hold experts
  for (const std::string& rank : ranks) {
    if (parts[rank] >= inside.data_parallel) continue;
    return fmt::format("{} of {} files *mp_rank_{}{} are missing", inside.data_parallel - parts[rank], inside.data_parallel, rank, kOptimizer);
  }
  return {};
}

// "model-00001-of-00003.safetensors" implies two more.
std::string missing_in_row(const std::vector<ListedFile>& files) {
  struct Row {
    std::set<int64_t> numbers;
    std::string begin, end;  // what stands before and behind the number
    size_t width = 0;
    int64_t count = 0;
  };
  std::map<std::string, Row> rows;
  for (const ListedFile& file : files) {
    const fs::path path(file.name);
    const std::string stem = path.stem().string(), extension = path.extension().string();
    const auto place = numbered_file(stem);
    if (!place || (extension != ".safetensors" && extension != ".bin")) continue;
    const size_t of = stem.rfind("-of-");
    const std::string begin = (path.parent_path() / place->stem).string() + "-", end = stem.substr(of) + extension;
    Row& row = rows.try_emplace(begin + "*" + end, Row{{}, begin, end, of - place->stem.size() - 1, place->count}).first->second;
    row.numbers.insert(place->number);
  }
  for (const auto& [shape, row] : rows) {
    const int64_t first = row.numbers.contains(0) ? 0 : 1;
    for (int64_t i = first; i < first + std::min<int64_t>(row.count, 100'000); ++i) {
      if (!row.numbers.contains(i)) return fmt::format("{}{:0{}}{} is missing", row.begin, i, row.width, row.end);
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
  if (std::string why = missing_of_deepspeed(checkpoint.path, files); !why.empty()) return why;
  return why_latest_not(beside(checkpoint, "latest"), fs::path(checkpoint.path).filename().string(), checkpoint.step);
}

// The Trainer resumes without a word from a checkpoint that lacks its optimizer, schedule or generators: one that was saved
// with save_only_model, or that is being deleted.
std::string missing_of_trainer(const std::vector<ListedFile>& files) {
  const auto any = [&](const auto& test) { return std::any_of(files.begin(), files.end(), [&](const auto& f) { return test(f.name); }); };
  const auto starts = [&](std::string_view begin) { return any([&](const std::string& name) { return name.starts_with(begin); }); };
  if (!starts("global_step")) {
    const bool model = any([](const std::string& name) {
      const bool other = name == "training_args.bin" || name.starts_with("optimizer");
      return !other && (name.starts_with("pytorch_model") || ends_with_any(name, {".safetensors", ".bin", ".h5", ".msgpack"}));
    });
    if (!model) return "it holds no weights (model.safetensors, pytorch_model.bin, adapter_model.safetensors, ...)";
    for (const ListedFile& file : files) {
      const fs::path path(file.name);
      const auto place = numbered_file(path.stem().string());
      const std::string index = place ? (path.parent_path() / (place->stem + path.extension().string() + ".index.json")).string() : "";
      if (place && place->stem.find("model") != place->stem.npos && !has(files, index)) {
        return fmt::format("{} is missing, which says what is in which file", index);
      }
    }
    for (const std::string_view name : {"optimizer", "scheduler"}) {
      if (!starts(name)) return fmt::format("{}.pt is missing: nothing can be resumed from it as it was", name);
    }
  }
  std::set<int> ranks;
  for (const ListedFile& file : files) {
    constexpr std::string_view kBegin = "rng_state_";
    int rank = 0;
    const char* end = file.name.data() + file.name.size();
    if (file.name.starts_with(kBegin) && std::from_chars(file.name.data() + kBegin.size(), end, rank).ec == std::errc()) ranks.insert(rank);
  }
  if (ranks.empty() && !has(files, "rng_state.pth")) return "rng_state.pth is missing: nothing can be resumed from it as it was";
  for (int rank = 0; !ranks.empty() && rank <= std::max(1, *ranks.rbegin()); ++rank) {  // one rank alone has no number
    if (!ranks.contains(rank)) return fmt::format("rng_state_{}.pth is missing, which that rank saves", rank);
  }
  return {};
}

std::string why_not_trainer(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (fs::path(checkpoint.path).filename().string().starts_with("tmp-")) return "the Trainer had not renamed it: it was not finished";
  if (!has(files, "trainer_state.json")) return "trainer_state.json is missing, which the Trainer writes last";
  const Json state = parse_python_json(small_text(checkpoint.path + "/trainer_state.json"));
  if (!state.is_object()) return "trainer_state.json is no JSON object: it is cut or damaged";
  const auto step = state.find("global_step");
  if (step == state.end() || !step->is_number_integer()) return "trainer_state.json has no global_step";
  if (step->get<int64_t>() != checkpoint.step) return fmt::format("trainer_state.json is of step {}", step->get<int64_t>());
  if (std::string why = missing_of_trainer(files); !why.empty()) return why;
  const std::string inner = fmt::format("global_step{}", checkpoint.step);  // of DeepSpeed, inside
  if (std::any_of(files.begin(), files.end(), [&](auto& f) { return f.name.starts_with(inner + "/"); })) {
    if (std::string why = missing_of_deepspeed(checkpoint.path, files); !why.empty()) return why;
    return why_latest_not(checkpoint.path + "/latest", inner, checkpoint.step);
  }
  return {};
}

std::string why_not_dcp(const std::vector<ListedFile>& files) {
  // torchtitan can export its last step as safetensors of Hugging Face instead.
  if (has(files, ".metadata") || has(files, "model.safetensors.index.json")) return {};
  return ".metadata is missing, which is written last";
}

std::string why_not_lightning(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (files.size() == 1 && files[0].name.empty()) {  // one file: its end was checked
    const auto inside = look_inside_lightning(checkpoint.path);
    return inside && inside->weights_only ? "it holds weights alone (save_weights_only): nothing can be resumed from it" : "";
  }
  if (has(files, ".metadata")) return has(files, "meta.pt") ? "" : "meta.pt is missing, which Lightning writes last";
  if (std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with("_states.pt"); })) {
    return has(files, "latest") ? "" : "`latest` is missing, which DeepSpeed writes last";
  }
  return "it is a folder without .metadata";
}

std::string why_not_minigpt(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (!has(files, "COMPLETE")) return "COMPLETE is missing, which is written last";
  const Json complete = Json::parse(small_text(checkpoint.path + "/COMPLETE"), nullptr, false);
  const auto ranks = complete.is_object() ? complete.find("ranks") : complete.end();
  if (ranks == complete.end() || !ranks->is_number_unsigned())
    return "COMPLETE does not say how many ranks there are: it is cut or damaged";
  std::vector<std::string> names = {"model.safetensors", "optimizer.safetensors"};
  for (uint64_t rank = 0; rank < std::min<uint64_t>(ranks->get<uint64_t>(), files.size()); ++rank)
    names.push_back(fmt::format("rank-{:04}.json", rank));
  for (const std::string& name : names) {
    if (!has(files, name)) return fmt::format("{} is missing", name);
  }
  return "";
}

}  // namespace

std::string why_content_not_whole(const std::string& path, const std::vector<ListedFile>& files) {
  if (std::string why = why_files_not_whole(path, files); !why.empty()) return why;
  if (std::string why = missing_in_row(files); !why.empty()) return why;
  return missing_shard(files);
}

std::string why_not_whole(const Checkpoint& checkpoint, const std::vector<ListedFile>& files) {
  if (std::string why = why_content_not_whole(checkpoint.path, files); !why.empty()) return why;
  if (checkpoint.kind == "megatron") return why_not_megatron(checkpoint, files);
  if (checkpoint.kind == "deepspeed") return why_not_deepspeed(checkpoint, files);
  if (checkpoint.kind == "hf-trainer") return why_not_trainer(checkpoint, files);
  if (checkpoint.kind == "dcp") return why_not_dcp(files);
  if (checkpoint.kind == "lightning") return why_not_lightning(checkpoint, files);
  if (checkpoint.kind == "minigpt") return why_not_minigpt(checkpoint, files);
  const bool dcp = std::any_of(files.begin(), files.end(), [](const auto& f) { return f.name.ends_with(".distcp"); });
  return dcp ? why_not_dcp(files) : "";
}

}  // namespace forkpoint
