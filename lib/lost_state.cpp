#include "lib/lost_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <map>
#include <optional>
#include <set>
#include <tuple>

namespace forkpoint {
namespace {

constexpr size_t kNoIndex = SIZE_MAX;

struct Step {
  const HashStreamReader* stream = nullptr;
  StepColumns columns;
  bool complete = false;
  size_t size() const { return columns.size(); }
  const Site& site(size_t row) const { return stream->sites()[columns.site[row]]; }
  const Layout& layout(size_t row) const { return stream->layouts()[columns.layout[row]]; }
  bool counts(size_t row) const { return (columns.flags[row] & kRecordEval) == 0; }
};

// The last one of that number: a run that was resumed within itself has several.
size_t index_of(const HashStreamReader& stream, int64_t step) {
  size_t found = kNoIndex;
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    if (stream.steps()[i].step == step) found = i;
  }
  return found;
}

std::optional<Step> read(const HashStreamReader* stream, int64_t step) {
  const size_t index = stream ? index_of(*stream, step) : kNoIndex;
  if (index == kNoIndex) return {};
  Step result{stream, {}, stream->steps()[index].complete};
  stream->read_step(index, &result.columns);
  return result;
}

std::string last_word(const std::string& name) {
  std::string word = name.substr(name.rfind('.') + 1);
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return word;
}

// By the keys of the optimizers of torch.optim, apex and Megatron.
std::string kind_of_state(const Site& site) {
  if (site.role == Role::parameter) return "weights";
  if (site.role == Role::other) return "buffers";
  const std::string word = last_word(site.tensor);
  if (word == "exp_avg" || word == "momentum_buffer" || word == "mu_product") return "momentum";
  for (const char* second : {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"}) {
    if (word == second) return "second moments";
  }
  if (word == "step") return "step count of the optimizer";
  return word.find("master") == word.npos ? "state of the optimizer" : "master weights";
}

// Empty: a scalar that is no state. The whole last word, as "scale" is a part of many a layer's name.
std::string kind_of_scalar(const Site& site) {
  const std::string word = last_word(site.tensor);
  if (word == "lr" || word == "learning_rate") return "schedule (learning rate)";
  if (word == "scale" || word == "loss_scale" || word == "growth_tracker") return "loss scale";
  // One of "betas" is called by its number.
  const std::string whole = "." + site.tensor + ".";
  for (const char* key : {".betas.", ".eps.", ".weight_decay.", ".momentum.", ".dampening.", ".alpha.", ".nesterov."}) {
    if (whole.find(key) != whole.npos) return "settings of the optimizer";
  }
  return {};
}

std::string place(const Site& site) { return site.layer.empty() ? site.tensor : fmt::format("{} of {}", site.tensor, site.layer); }

// The largest magnitude of a tensor whose elements were rounded to a type of that many bits of mantissa (to nearest, ties to
// even): rounding keeps the order, so it is the rounded largest magnitude.
float rounded(float value, int mantissa_bits) {
  const int dropped = 23 - mantissa_bits;
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1u);
  return std::bit_cast<float>(bits & ~((1u << dropped) - 1));
}

// What one kind of state was turned into, if all of its values that differ agree on it.
class Rounding {
 public:
  void add(const Layout& layout, float before, float after) {
    for (Type& type : types_) {
      const float expected = rounded(before, type.mantissa_bits);
      type.fits &= layout.dtype == DType::f32 && after == expected;
      type.shows |= expected != before;
    }
  }
  std::string name() const {
    for (const Type& type : types_) {
      if (type.fits && type.shows) return type.name;
    }
    return {};
  }

 private:
  struct Type {
    const char* name;
    int mantissa_bits;
    bool fits = true, shows = false;
  };
  Type types_[2] = {{"bf16", 7}, {"f16", 10}};
};

class Finder {
 public:
  explicit Finder(const ResumedRuns& runs) : runs_(runs) {}

  std::vector<std::string> find() {
    for (const auto& stream : runs_.stopped->streams()) add_buffers(read(stream.get(), runs_.first_step - 1));
    for (const auto& stream : runs_.resumed->streams()) look_for_broadcasts(read(stream.get(), runs_.first_step));
    for (const auto& stream : runs_.resumed->streams()) {
      const int rank = stream->header().rank;
      compare_load(read(stream.get(), kPrologueStep), read(runs_.stopped->stream_of(rank), runs_.first_step - 1));
      if (runs_.straight) compare_steps(runs_.straight->stream_of(rank), stream.get());
    }
    std::vector<std::string> found;
    for (const auto& [kind, where] : rounded_) found_.insert_or_assign(kind, Found{"dtype", where});
    for (const char* kind : kOrder) {
      if (const auto at = found_.find(kind); at != found_.end()) found.push_back(fmt::format("{} ({})", at->second.name, at->second.where));
    }
    return found;
  }

 private:
  struct Found {
    std::string name, where;
  };
  static constexpr const char* kOrder[] = {"dtype",
                                           "weights",
                                           "master weights",
                                           "buffers",
                                           "weights that no step trains",
                                           "momentum",
                                           "second moments",
                                           "step count of the optimizer",
                                           "state of the optimizer",
                                           "loss scale",
                                           "schedule (learning rate)",
                                           "settings of the optimizer",
                                           "random-number generator",
                                           "position in the data",
                                           "data"};
  using StateKey = std::tuple<Role, std::string, std::string>;

  void add(const std::string& kind, const std::string& where) { found_.try_emplace(kind, Found{kind, where}); }

  static bool is_state(const Site& site) {
    return site.role == Role::parameter || site.role == Role::optimizer_state || site.role == Role::other;
  }

  // One rank's may have been saved, loaded by all and broadcast before each use.
  void add_buffers(const std::optional<Step>& before) {
    for (size_t row = 0; before && row < before->size(); ++row) {
      const Site& site = before->site(row);
      const Digest& digest = before->columns.digest[row];
      if (site.phase == Phase::optimizer && site.role == Role::other)
        buffers_[{site.role, site.layer, site.tensor}].insert({digest.a, digest.b});
    }
  }

  void look_for_broadcasts(const std::optional<Step>& first) {
    for (size_t row = 0; first && row < first->size(); ++row) {
      const Site& site = first->site(row);
      broadcasts_ |=
          site.kind == Kind::collective && site.op.find("broadcast") != std::string::npos && first->counts(row);
    }
  }

  bool is_some_rank_s(const Step& load, size_t row) const {
    const Site& site = load.site(row);
    if (!broadcasts_) return false;
    const auto known = buffers_.find({site.role, site.layer, site.tensor});
    return known != buffers_.end() && known->second.contains({load.columns.digest[row].a, load.columns.digest[row].b});
  }

  void compare_load(const std::optional<Step>& load, const std::optional<Step>& before) {
    if (!load || !before) return;
    std::map<StateKey, size_t> saved;
    for (size_t row = 0; row < before->size(); ++row) {
      const Site& site = before->site(row);
      if (site.phase == Phase::optimizer && is_state(site) && before->counts(row)) saved[{site.role, site.layer, site.tensor}] = row;
    }
    std::map<std::string, std::pair<Rounding, std::string>> roundings;
    std::set<StateKey> loaded;
    bool has_weights = false;
    for (size_t row = 0; row < load->size(); ++row) {
      const Site& site = load->site(row);
      const StateKey key{site.role, site.layer, site.tensor};
      has_weights |= site.role == Role::parameter;
      const auto found = saved.find(key);
      if (!is_state(site) || !loaded.insert(key).second || found == saved.end()) continue;
      compare_value(*load, row, *before, found->second, &roundings);
    }
    for (const auto& [kind, rounding] : roundings) {
      if (const std::string type = rounding.first.name(); !type.empty()) {
        rounded_.try_emplace(kind, fmt::format("{}: rounded to {}", rounding.second, type));
      }
    }
    if (!load->complete || !before->complete || !has_weights) return;
    for (const auto& [key, row] : saved) {
      if (std::get<Role>(key) == Role::optimizer_state && !loaded.contains(key)) {
        add(kind_of_state(before->site(row)), place(before->site(row)) + ": not restored");
      }
    }
  }

  void compare_value(const Step& load, size_t row, const Step& before, size_t saved,
                     std::map<std::string, std::pair<Rounding, std::string>>* roundings) {
    const Site& site = load.site(row);
    const Layout &now = load.layout(row), &was = before.layout(saved);
    if (now.shape != was.shape || now.global_shape != was.global_shape || now.global_offset != was.global_offset) return;
    if (now.dtype != was.dtype) {
      return add("dtype", fmt::format("{}: {} became {}", place(site), name(was.dtype), name(now.dtype)));
    }
    if (load.columns.digest[row] == before.columns.digest[saved]) return;
    if (is_some_rank_s(load, row)) return;
    const std::string kind = kind_of_state(site);
    add(kind, place(site));
    if (last_word(site.tensor) == "step") return;  // a count that is off by one may be a rounded one as well
    const auto at = roundings->try_emplace(kind, Rounding(), place(site)).first;
    at->second.first.add(now, before.columns.absmax[saved], load.columns.absmax[row]);
  }

  // What a step began with shows a state as long as all steps before it agree.
  void compare_steps(const HashStreamReader* straight, const HashStreamReader* resumed) {
    if (!straight) return;
    for (int64_t step = runs_.first_step;; ++step) {
      const auto a = read(straight, step), b = read(resumed, step);
      if (!a || !b) return;
      if (step == runs_.first_step) compare_kept(*a, *b);  // not in a step's digest
      const bool agree = straight->steps()[index_of(*straight, step)].digest == resumed->steps()[index_of(*resumed, step)].digest;
      if (agree) continue;
      compare_begin(*a, *b, step == runs_.first_step, straight);
      // A schedule that was not restored shows a step later where the optimizer's own copy of the rate was.
      const auto next_a = read(straight, step + 1), next_b = read(resumed, step + 1);
      if (step == runs_.first_step && next_a && next_b) compare_scalars(*next_a, *next_b, "schedule (learning rate)");
      return;
    }
  }

  using ValueKey = std::tuple<Role, std::string, std::string, int, uint32_t>;
  template <typename Wanted>
  static std::map<ValueKey, size_t> values(const Step& step, const Wanted& wanted) {
    std::map<ValueKey, size_t> found;
    for (size_t row = 0; row < step.size(); ++row) {
      const Site& site = step.site(row);
      if (wanted(site)) found.emplace(ValueKey{site.role, site.layer, site.tensor, step.columns.micro_step[row], step.columns.call[row]}, row);
    }
    return found;
  }

  // The first value of b that a has too and that differs; kNoIndex: none.
  template <typename Wanted>
  static size_t first_different(const Step& a, const Step& b, const Wanted& wanted) {
    const auto in_a = values(a, wanted);
    size_t first = kNoIndex;
    for (const auto& [key, row] : values(b, wanted)) {
      const auto other = in_a.find(key);
      if (other != in_a.end() && !(a.columns.digest[other->second] == b.columns.digest[row])) first = std::min(first, row);
    }
    return first;
  }

  void compare_scalars(const Step& a, const Step& b, const std::string& only) {
    for (const char* kind : {"loss scale", "schedule (learning rate)", "settings of the optimizer"}) {
      if (!only.empty() && only != kind) continue;
      const auto wanted = [&](const Site& site) {
        return site.role == Role::scalar && site.phase == Phase::optimizer && site.layer.empty() && kind_of_scalar(site) == kind;
      };
      if (const size_t row = first_different(a, b, wanted); row != kNoIndex) add(kind, place(b.site(row)));
    }
  }

  // Averages of the weights, teachers and the like are not in a load: what they are behind the first step shows it,
  // where that has trained the same weights in both.
  void compare_kept(const Step& a, const Step& b) {
    const auto is_weight = [](const Site& site) {
      return site.phase == Phase::optimizer && (site.role == Role::parameter || site.role == Role::other);
    };
    const auto in_a = values(a, is_weight);
    size_t kept = kNoIndex;
    for (const auto& [key, row] : values(b, is_weight)) {
      const auto other = in_a.find(key);
      if (other == in_a.end() || a.columns.digest[other->second] == b.columns.digest[row]) continue;
      if (b.counts(row)) return;
      kept = std::min(kept, row);
    }
    if (kept != kNoIndex) add("weights that no step trains", place(b.site(kept)));
  }

  void compare_begin(const Step& a, const Step& b, bool at_resume, const HashStreamReader* straight) {
    compare_scalars(a, b, "");
    const size_t generator = first_different(a, b, [](const Site& site) { return site.role == Role::rng; });
    const size_t sampler = first_different(a, b, [](const Site& site) { return site.role == Role::sampler; });
    const size_t batch = first_different(a, b, [](const Site& site) { return site.role == Role::batch; });
    if (generator != kNoIndex && at_resume) add("random-number generator", place(b.site(generator)));
    if (sampler != kNoIndex) return add("position in the data", place(b.site(sampler)));
    if (batch == kNoIndex) return;
    // A generator that was not restored may have drawn another batch; one that is not recorded, too.
    if (is_in(b, batch, straight)) return add("position in the data", place(b.site(batch)));
    if (generator == kNoIndex) add("data", place(b.site(batch)) + ": none that the straight run was seen to have");
  }

  static bool is_in(const Step& b, size_t row, const HashStreamReader* straight) {
    for (size_t i = 0; i < straight->steps().size(); ++i) {
      Step step{straight, {}, true};
      straight->read_step(i, &step.columns);
      for (size_t other = 0; other < step.size(); ++other) {
        const bool same = step.columns.digest[other] == b.columns.digest[row];
        if (same && step.site(other).role == Role::batch && step.site(other).tensor == b.site(row).tensor) return true;
      }
    }
    return false;
  }

  const ResumedRuns& runs_;
  std::map<std::string, Found> found_;
  std::map<StateKey, std::set<std::pair<uint64_t, uint64_t>>> buffers_;  // on any rank at the stop
  bool broadcasts_ = false;                                              // in the first step of the resumed run
  std::map<std::string, std::string> rounded_;  // by the kind of state
};

}  // namespace

std::vector<std::string> lost_states(const ResumedRuns& runs) { return Finder(runs).find(); }

}  // namespace forkpoint
