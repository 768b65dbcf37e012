#include "samples/minigpt/checkpoint.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "samples/minigpt/error.h"
#include "samples/minigpt/safetensors.h"

namespace minigpt {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::string_view kPrefix = "step-";

std::string folder_of(const std::string& directory, int64_t step) {
  return fmt::format("{}/{}{:06}", directory, kPrefix, step);
}
std::string rank_file(const std::string& folder, int rank) { return fmt::format("{}/rank-{:04}.json", folder, rank); }

// Settings that a resumed run must share, as what it computes depends on them.
Json settings(const Options& o, const World& world) {
  return {{"layers", o.model.layers}, {"dim", o.model.dim},  {"heads", o.model.heads}, {"seq", o.model.seq},
          {"batch", o.model.batch},   {"ranks", world.size}, {"seed", o.seed}};
}

template <typename P>
auto model_tensors(P& parameters) {
  std::vector<std::pair<std::string, decltype(&parameters.front().value)>> tensors;
  for (auto& p : parameters) tensors.emplace_back(p.layer + "." + p.name, &p.value);
  return tensors;
}
template <typename P>
auto optimizer_tensors(P& parameters) {
  std::vector<std::pair<std::string, decltype(&parameters.front().value)>> tensors;
  for (auto& p : parameters) {
    tensors.emplace_back(p.layer + "." + p.name + ".exp_avg", &p.exp_avg);
    tensors.emplace_back(p.layer + "." + p.name + ".exp_avg_sq", &p.exp_avg_sq);
  }
  return tensors;
}

Json read_json(const std::string& path) {
  Json json = Json::parse(read_file(path), nullptr, false);
  if (!json.is_object()) throw Error(fmt::format("{}: damaged, expected a JSON object", path));
  return json;
}

void check_settings(const std::string& path, const Json& expected) {
  const Json found = read_json(path);
  for (const auto& [name, value] : expected.items())
    if (!found.contains(name) || found.at(name) != value)
      throw Error(fmt::format("{}: the checkpoint was made with {} {}, this run has {}", path, name,
                              found.contains(name) ? found.at(name).dump() : "missing", value.dump()));
}

}  // namespace

void save_checkpoint(const Options& options, const World& world, Communicator& communicator, int64_t step,
                     const std::deque<Parameter>& parameters, const RankState& state) {
  const std::string folder = folder_of(options.checkpoint_dir, step);
  if (world.rank == 0) {
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) throw Error(fmt::format("{}: cannot be made: {}", folder, error.message()));
    fs::remove(folder + "/COMPLETE", error);  // of an earlier run: it is not complete while we write
  }
  communicator.barrier();
  const Json mine = {
      {"dropout_seed", state.dropout_seed},
      {"sampler", {{"seed", state.sampler.seed}, {"epoch", state.sampler.epoch}, {"cursor", state.sampler.cursor}}}};
  write_file(rank_file(folder, world.rank), mine.dump(2) + "\n");
  if (world.rank == 0) {
    write_file(folder + "/model.safetensors", to_safetensors(model_tensors(parameters)));
    write_file(folder + "/optimizer.safetensors", to_safetensors(optimizer_tensors(parameters)));
  }
  communicator.barrier();
  if (world.rank == 0) write_file(folder + "/COMPLETE", settings(options, world).dump(2) + "\n");
}

int64_t newest_checkpoint(const std::string& directory) {
  int64_t newest = -1;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kPrefix) || !fs::exists(entry->path() / "COMPLETE")) continue;
    int64_t step = -1;
    const auto [rest, wrong] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (wrong == std::errc() && rest == name.data() + name.size()) newest = std::max(newest, step);
  }
  if (error) throw Error(fmt::format("{}: cannot be read: {}", directory, error.message()));
  if (newest < 0)
    throw Error(
        fmt::format("{}: there is no complete checkpoint (step-NNNNNN/COMPLETE); run without --resume", directory));
  return newest;
}

RankState load_checkpoint(const Options& options, const World& world, int64_t step, std::deque<Parameter>& parameters) {
  const std::string folder = folder_of(options.checkpoint_dir, step);
  check_settings(folder + "/COMPLETE", settings(options, world));
  from_safetensors(folder + "/model.safetensors", model_tensors(parameters));
  from_safetensors(folder + "/optimizer.safetensors", optimizer_tensors(parameters));
  const std::string path = rank_file(folder, world.rank);
  const Json mine = read_json(path);
  try {
    const Json& sampler = mine.at("sampler");
    return {{sampler.at("seed"), sampler.at("epoch"), sampler.at("cursor")}, mine.at("dropout_seed")};
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: damaged: {}", path, error.what()));
  }
}

}  // namespace minigpt
