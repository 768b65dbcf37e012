#include "samples/minigpt/fault.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "samples/minigpt/error.h"

namespace minigpt {
namespace {

constexpr const char* kKinds = "bitflip, reorder, unordered, data, dropout-seed, lr, skip-allreduce, lost-momentum, lost-sampler, nan";

[[noreturn]] void refuse(const std::string& fault, const std::string& why) {
  throw UsageError(fmt::format("--fault {}: {}", fault, why));
}

int64_t number(const std::string& fault, const std::string& key, const std::string& value) {
  int64_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || result < 0 || result > INT32_MAX)
    refuse(fault, fmt::format("{} is \"{}\", expected a whole number from 0", key, value));
  return result;
}

using Fields = std::map<std::string, std::string>;

Fields split_fields(const std::string& fault, std::string_view list) {
  static const std::set<std::string> known = {"step", "rank", "layer", "target", "module"};
  Fields fields;
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) refuse(fault, fmt::format("\"{}\" is not of the form FIELD=VALUE", item));
    const std::string key(item.substr(0, equals));
    if (!known.contains(key))
      refuse(fault, fmt::format("unknown field \"{}\", expected step, rank, layer, target or module", key));
    if (!fields.emplace(key, item.substr(equals + 1)).second) refuse(fault, fmt::format("{} is given twice", key));
  }
  return fields;
}

FaultKind find_kind(const std::string& fault, const std::string& kind, const Fields& fields) {
  if (kind == "bitflip") {
    const std::string target = fields.contains("target") ? fields.at("target") : "grad";
    if (target == "weight") return FaultKind::bitflip_weight;
    if (target == "activation") return FaultKind::bitflip_activation;
    if (target == "grad") return FaultKind::bitflip_grad;
    refuse(fault, fmt::format("unknown target \"{}\", expected weight, activation or grad", target));
  }
  if (fields.contains("target")) refuse(fault, "only bitflip has a target");
  if (kind == "reorder") return fields.contains("rank") ? FaultKind::reorder_forward : FaultKind::reorder_reduce;
  if (kind == "unordered") return FaultKind::reorder_forward;
  if (kind == "data") return FaultKind::data;
  if (kind == "dropout-seed") return FaultKind::dropout_seed;
  if (kind == "lr") return FaultKind::lr;
  if (kind == "skip-allreduce") return FaultKind::skip_all_reduce;
  if (kind == "lost-momentum") return FaultKind::lost_momentum;
  if (kind == "lost-sampler") return FaultKind::lost_sampler;
  if (kind == "nan") return FaultKind::nan;
  refuse(fault, fmt::format("unknown kind \"{}\", expected one of {}", kind, kKinds));
}

bool belongs_to_a_module(FaultKind kind) {
  return kind != FaultKind::data && kind != FaultKind::dropout_seed && kind != FaultKind::lr &&
         kind != FaultKind::lost_sampler;
}

// As with cuBLAS on several streams: a sum's order is chosen at run time, unless its variable says not to.
bool is_unordered(const Fault& fault) { return fault.text.starts_with("unordered"); }

bool is_workspace_fixed() {
  const char* config = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  return config && (std::string_view(config) == ":4096:8" || std::string_view(config) == ":16:8");
}

bool by_chance() {
  static std::random_device entropy;
  return (entropy() & 1) != 0;
}

bool strikes_on_resume(FaultKind kind) { return kind == FaultKind::lost_momentum || kind == FaultKind::lost_sampler; }

// Modules in which a fault of this kind means something.
std::vector<std::string> modules_of(FaultKind kind) {
  if (kind == FaultKind::reorder_forward) return {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"};
  if (kind == FaultKind::bitflip_activation || kind == FaultKind::nan) return block_modules();
  return {"ln1", "attn.qkv", "attn.proj", "ln2", "mlp.fc1", "mlp.fc2"};
}

}  // namespace

const std::vector<std::string>& block_modules() {
  static const std::vector<std::string> modules = {"ln1", "attn.qkv", "attn",     "attn.proj", "attn.dropout",
                                                   "ln2", "mlp.fc1",  "mlp.gelu", "mlp.fc2",   "mlp.dropout"};
  return modules;
}

Fault parse_fault(const std::string& text) {
  const size_t at = text.find('@');
  const Fields fields = at == std::string::npos ? Fields{} : split_fields(text, std::string_view(text).substr(at + 1));
  Fault fault;
  fault.text = text;
  fault.kind = find_kind(text, text.substr(0, at), fields);
  const bool on_resume = strikes_on_resume(fault.kind);
  const bool bound = !on_resume && !is_unordered(fault);
  if (!fields.contains("step") && bound) refuse(text, "when? Add @step=S");
  if (!on_resume && fields.contains("step")) fault.step = number(text, "step", fields.at("step"));
  const bool all_ranks = fault.kind == FaultKind::lr || fault.kind == FaultKind::reorder_reduce || on_resume;
  fault.rank = fields.contains("rank") ? static_cast<int>(number(text, "rank", fields.at("rank"))) : all_ranks ? -1 : 0;
  if (fields.contains("layer")) fault.layer = static_cast<int>(number(text, "layer", fields.at("layer")));
  fault.module = fields.contains("module") ? fields.at("module") : "mlp.fc1";
  const std::vector<std::string> modules = modules_of(fault.kind);
  if (std::find(modules.begin(), modules.end(), fault.module) == modules.end())
    refuse(text,
           fmt::format("no such fault in module \"{}\", expected one of {}", fault.module, fmt::join(modules, ", ")));
  return fault;
}

void validate(const Fault& fault, int layers, int ranks, bool resume) {
  if (fault.layer >= layers)
    refuse(fault.text, fmt::format("layer {} does not exist, the model has layers 0 to {}", fault.layer, layers - 1));
  if (fault.rank >= ranks)
    refuse(fault.text, fmt::format("rank {} does not exist, the job has ranks 0 to {}", fault.rank, ranks - 1));
  if (fault.kind == FaultKind::skip_all_reduce && ranks < 2)
    refuse(fault.text, "one rank alone has no all-reduce to skip; use --ranks 2 or more");
  if (strikes_on_resume(fault.kind) && !resume)
    refuse(fault.text, "state is lost on a resume; add --resume and --checkpoint-dir");
}

bool FaultPlan::strikes(FaultKind kind, std::string_view layer_path) const {
  for (const Fault& fault : faults_) {
    if (fault.kind != kind || (fault.rank != -1 && fault.rank != rank_)) continue;
    if (fault.step != -1 && fault.step != step_) continue;
    if (is_unordered(fault) && (is_workspace_fixed() || !by_chance())) continue;
    if (belongs_to_a_module(kind) && fault.layer_path() != layer_path) continue;
    if (fault.rank == rank_ || rank_ == 0) fmt::print(stderr, "minigpt: rank {}: fault {}\n", rank_, fault.text);
    return true;
  }
  return false;
}

}  // namespace minigpt
