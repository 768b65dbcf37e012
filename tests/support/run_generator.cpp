#include "tests/support/run_generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "lib/digest_mix.h"
#include "lib/error.h"

namespace forkpoint {
namespace {

constexpr std::array<const char*, 6> kModules = {"ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc1", "mlp.fc2"};
constexpr int64_t kBatch = 8, kWidth = 1024, kTokens = 128, kRngBytes = 5056;

enum class What {
  batch,
  input,
  output,
  loss,
  grad_output,
  grad_input,
  gradient,
  reduce_input,
  reduce_output,
  rate,
  weight,
  exp_avg,
  exp_avg_sq,
  rng,
  extra,
  initial_weight
};
enum class Form { activation, weight, tokens, scalar, bytes };

// One record that every step repeats. Records of one value id hold the same value: a layer's input is the output before
// it.
struct Planned {
  Site site;
  What what = What::extra;
  Form form = Form::scalar;
  int layer = -1;
  uint64_t value = 0;
  bool same_on_all_ranks = false;
  double scale = 1;
};

class PlanMaker {
 public:
  explicit PlanMaker(const GeneratorOptions& options) : layers_(generated_layers(options)) {
    if (options.records_per_step < kRecordsWithoutLayer) {
      throw Error(
          fmt::format("records_per_step is {}; expected at least {}.", options.records_per_step, kRecordsWithoutLayer));
    }
    const int n = layers_;
    add(What::batch, Form::tokens, -1, {Phase::data, Kind::tensor, Role::batch, "", "", "tokens", ""},
        id(What::batch, 0));
    for (int i = 0; i < n; ++i) {
      add(What::input, Form::activation, i, tensor(Phase::forward, Role::input, i, "input"), id(What::output, i), 1);
      add(What::output, Form::activation, i, tensor(Phase::forward, Role::output, i, "output"), id(What::output, i + 1),
          1);
    }
    add(What::loss, Form::scalar, -1, {Phase::forward, Kind::scalar, Role::loss, "", "", "loss", ""},
        id(What::loss, 0));
    for (int i = n - 1; i >= 0; --i) {
      add(What::grad_output, Form::activation, i, tensor(Phase::backward, Role::input, i, "grad_output"),
          id(What::grad_input, i + 1), 1e-3);
      add(What::grad_input, Form::activation, i, tensor(Phase::backward, Role::output, i, "grad_input"),
          id(What::grad_input, i), 1e-3);
      add(What::gradient, Form::weight, i, tensor(Phase::backward, Role::gradient, i, "weight.grad"),
          id(What::gradient, i), 1e-4);
    }
    for (int i = 0; i < n; ++i) {
      add(What::reduce_input, Form::weight, i, reduction(Role::input, i), id(What::gradient, i), 1e-4);
      add(What::reduce_output, Form::weight, i, reduction(Role::output, i), id(What::reduce_output, i), 1e-4, true);
    }
    add(What::rate, Form::scalar, -1, {Phase::optimizer, Kind::scalar, Role::scalar, "", "", "lr", ""},
        id(What::rate, 0), 1, true);
    for (int i = 0; i < n; ++i) {
      add(What::weight, Form::weight, i, tensor(Phase::optimizer, Role::parameter, i, "weight"), id(What::weight, i),
          0.02, true);
      add(What::exp_avg, Form::weight, i, tensor(Phase::optimizer, Role::optimizer_state, i, "weight.exp_avg"),
          id(What::exp_avg, i), 1e-4, true);
      add(What::exp_avg_sq, Form::weight, i, tensor(Phase::optimizer, Role::optimizer_state, i, "weight.exp_avg_sq"),
          id(What::exp_avg_sq, i), 1e-8, true);
    }
    add(What::rng, Form::bytes, -1, {Phase::state, Kind::state, Role::rng, "", "", "cpu_rng", ""}, id(What::rng, 0));
    for (int i = static_cast<int>(plan_.size()); i < options.records_per_step; ++i) {
      add(What::extra, Form::scalar, -1,
          {Phase::state, Kind::scalar, Role::scalar, "", "", fmt::format("metric_{}", i), ""}, id(What::extra, i));
    }
  }

  std::vector<Planned> step() && { return std::move(plan_); }
  static std::vector<Planned> prologue(const GeneratorOptions& options) {
    std::vector<Planned> plan;
    for (int i = 0; i < generated_layers(options); ++i) {
      plan.push_back({tensor(Phase::load, Role::parameter, i, "weight"), What::initial_weight, Form::weight, i,
                      id(What::weight, i), true, 0.02});
    }
    return plan;
  }

 private:
  static uint64_t id(What what, int number) {
    return static_cast<uint64_t>(what) << 32 | static_cast<uint32_t>(number);
  }
  static Site tensor(Phase phase, Role role, int layer, const char* name) {
    return {phase, Kind::tensor, role, generated_layer_name(layer), "", name, ""};
  }
  static Site reduction(Role role, int layer) {
    return {Phase::collective,
            Kind::collective,
            role,
            generated_layer_name(layer),
            "all_reduce",
            role == Role::input ? "input" : "output",
            "world"};
  }
  void add(What what, Form form, int layer, Site site, uint64_t value, double scale = 1,
           bool same_on_all_ranks = false) {
    plan_.push_back({std::move(site), what, form, layer, value, same_on_all_ranks, scale});
  }

  int layers_;
  std::vector<Planned> plan_;
};

// Follows, for one rank, which values differ from a run without the fault.
class Taint {
 public:
  explicit Taint(int layers)
      : gradient(static_cast<size_t>(layers)), reduced(gradient), weight(gradient), moment(gradient) {}

  // Whether the record differs. reduced_elsewhere: layers into whose reduction another rank put a differing gradient.
  bool take(const Planned& record, bool is_faulty, bool propagates, const std::vector<char>& reduced_elsewhere) {
    const auto i = static_cast<size_t>(std::max(record.layer, 0));
    const bool spreads = is_faulty && propagates;
    // The record differs if what it is computed from does, and what goes on differs too.
    const auto set = [&](auto* state, bool computed) {
      *state = computed || spreads;
      return computed || is_faulty;
    };
    switch (record.what) {
      case What::batch:
        activation = rng || spreads;  // dropout of this step; the batch itself is drawn elsewhere
        return is_faulty;
      case What::input:
      case What::loss:
      case What::grad_output:
        return set(&activation, activation);
      case What::output:
      case What::grad_input:
        return set(&activation, activation || weight[i]);
      case What::gradient:
        return set(&gradient[i], activation);
      case What::reduce_input:
        return set(&gradient[i], gradient[i]);
      case What::reduce_output:
        return set(&reduced[i], gradient[i] || (!reduced_elsewhere.empty() && reduced_elsewhere[i]));
      case What::rate:
        rate = spreads;
        return is_faulty;
      case What::weight:
        return set(&weight[i], weight[i] || reduced[i] || moment[i] || rate);
      case What::exp_avg:
      case What::exp_avg_sq:
        return set(&moment[i], moment[i] || reduced[i]);
      case What::rng:
        rng = spreads;
        return is_faulty;
      case What::initial_weight:
        return set(&weight[i], false);
      case What::extra:
        break;
    }
    return is_faulty;
  }

  std::vector<char> gradient, reduced, weight, moment;
  bool activation = false, rate = false, rng = false;
};

class StreamGenerator {
 public:
  StreamGenerator(const std::string& path, int rank, const GeneratorOptions& options)
      : options_(options),
        rank_(rank),
        plan_(PlanMaker(options).step()),
        prologue_(PlanMaker::prologue(options)),
        own_(generated_layers(options)),
        faulty_rank_(own_) {
    StreamHeader header;
    header.rank = rank;
    header.world_size = options.ranks;
    header.level = Level::layer;
    header.step_base = "step(n)";
    header.device = "generated";
    writer_ = HashStreamWriter::create(path, header);
    Communicator world{"world", std::vector<int>(static_cast<size_t>(options.ranks))};
    std::iota(world.members.begin(), world.members.end(), 0);
    writer_->add_communicator(world);
    layouts_ = {writer_->layout_id({DType::bf16, {kBatch, kWidth}, {}, {}, {}}),
                writer_->layout_id({DType::f32, {kWidth, kWidth}, {}, {}, {}}),
                writer_->layout_id({DType::i64, {kBatch, kTokens}, {}, {}, {}}),
                writer_->layout_id({DType::f64, {}, {}, {}, {}}),
                writer_->layout_id({DType::raw, {kRngBytes}, {}, {}, {}})};
  }

  void run() {
    if (options_.prologue) one_step(kPrologueStep, prologue_, &prologue_sites_);
    for (int64_t i = 0; i < options_.steps; ++i) one_step(options_.first_step + i, plan_, &sites_);
    if (options_.finish) writer_->finish();
  }

 private:
  void one_step(int64_t step, const std::vector<Planned>& plan, std::vector<uint32_t>* sites) {
    for (size_t i = sites->size(); i < plan.size(); ++i) sites->push_back(writer_->site_id(plan[i].site));
    find_differing(step, plan);
    std::vector<size_t> order(plan.size());
    std::iota(order.begin(), order.end(), 0);
    if (options_.shuffle_arrival) shuffle(step, plan, &order);
    writer_->begin_step(step);
    for (size_t i : order) writer_->append(make_record(step, plan[i], (*sites)[i], i), bytes_of(plan[i].form));
    writer_->end_step();
  }

  void find_differing(int64_t step, const std::vector<Planned>& plan) {
    differs_.assign(plan.size(), 0);
    fault_at_ = SIZE_MAX;
    if (!options_.fault || step < options_.fault->step) return;
    const GeneratedFault& fault = *options_.fault;
    const size_t at = step == fault.step ? static_cast<size_t>(fault.record) : SIZE_MAX;
    // Gradients of the faulty rank first: others take them in at the collective, whose records come later.
    for (size_t i = 0; i < plan.size(); ++i) {
      faulty_rank_.take(plan[i], i == at, fault.propagates, {});
      if (plan[i].what == What::reduce_input) elsewhere_ = faulty_rank_.gradient;
    }
    if (rank_ == fault.rank) fault_at_ = at;
    for (size_t i = 0; i < plan.size(); ++i) {
      differs_[i] = own_.take(plan[i], i == fault_at_, fault.propagates, elsewhere_);
    }
  }

  // Within a phase only: autograd threads interleave, phases do not.
  void shuffle(int64_t step, const std::vector<Planned>& plan, std::vector<size_t>* order) const {
    const auto rank_of = [&](size_t i) {
      return mix64(options_.seed_of_arrival ^ mix64(static_cast<uint64_t>(step) ^ mix64(i)));
    };
    std::stable_sort(order->begin(), order->end(), [&](size_t a, size_t b) {
      const auto phase_a = plan[a].site.phase, phase_b = plan[b].site.phase;
      return phase_a != phase_b ? phase_a < phase_b : rank_of(a) < rank_of(b);
    });
  }

  Record make_record(int64_t step, const Planned& planned, uint32_t site, size_t index) const {
    uint64_t value = mix64(options_.seed ^ mix64(static_cast<uint64_t>(step) ^ mix64(planned.value)));
    if (!planned.same_on_all_ranks) value = mix64(value ^ static_cast<uint64_t>(rank_));
    const bool one_word = index == fault_at_ && options_.fault->one_word;
    if (differs_[index] && !one_word) value = mix64(value ^ 0xF0);
    Record record;
    record.site = site;
    record.layout = layouts_[static_cast<size_t>(planned.form)];
    if (planned.form == Form::scalar) {
      const double number = static_cast<double>(value >> 11) * 0x1p-53;
      record.digest = scalar_digest(number);
      record.stats.absmax = static_cast<float>(number);
    } else {
      record.digest = {mix64(value ^ 1), mix64(value ^ 2)};
      record.stats.word_sum = fold_word_sum(mix64(value ^ 3));
      if (planned.form == Form::activation || planned.form == Form::weight)
        record.stats.absmax = absmax(value, planned);
    }
    if (one_word) {
      record.digest += {key<1>(7) << 5, key<2>(7) << 5};
      record.stats.word_sum = fold_word_sum(static_cast<uint64_t>(record.stats.word_sum) + 32);
    }
    return record;
  }

  // Of some 10^6 Gaussian samples the largest lies about five sigma out, with a Gumbel spread; every mantissa bit is
  // random.
  static float absmax(uint64_t value, const Planned& planned) {
    const double uniform = static_cast<double>((mix64(value ^ 4) >> 11) | 1) * 0x1p-53;
    const auto largest = static_cast<float>(planned.scale * (4.9 - 0.2 * std::log(-std::log(uniform))));
    if (planned.form != Form::activation) return largest;
    uint32_t bits = 0;  // bf16 keeps 7 bits of the mantissa
    std::memcpy(&bits, &largest, sizeof(bits));
    bits &= 0xFFFF0000u;
    float rounded = 0;
    std::memcpy(&rounded, &bits, sizeof(bits));
    return rounded;
  }

  static uint64_t bytes_of(Form form) {
    switch (form) {
      case Form::activation:
        return kBatch * kWidth * 2;
      case Form::weight:
        return kWidth * kWidth * 4;
      case Form::tokens:
        return kBatch * kTokens * 8;
      case Form::scalar:
        return 8;
      case Form::bytes:
        return kRngBytes;
    }
    return 0;
  }

  GeneratorOptions options_;
  int rank_;
  std::vector<Planned> plan_, prologue_;
  std::unique_ptr<HashStreamWriter> writer_;
  std::vector<uint32_t> sites_, prologue_sites_, layouts_;
  std::vector<char> differs_, elsewhere_;
  size_t fault_at_ = SIZE_MAX;
  Taint own_, faulty_rank_;
};

}  // namespace

int generated_layers(const GeneratorOptions& options) {
  return std::max(0, options.records_per_step - kRecordsWithoutLayer) / kRecordsPerLayer;
}

std::string generated_layer_name(int layer) {
  const int modules = static_cast<int>(kModules.size());
  return fmt::format("model.blocks.{}.{}", layer / modules, kModules[static_cast<size_t>(layer % modules)]);
}

int find_generated(const GeneratorOptions& options, Phase phase, const std::string& layer, const std::string& tensor) {
  const std::vector<Planned> plan = PlanMaker(options).step();
  for (size_t i = 0; i < plan.size(); ++i) {
    const Site& site = plan[i].site;
    if (site.phase == phase && site.layer == layer && site.tensor == tensor) return static_cast<int>(i);
  }
  return -1;
}

void generate_stream(const std::string& path, int rank, const GeneratorOptions& options) {
  StreamGenerator(path, rank, options).run();
}

void generate_run(const std::string& directory, const GeneratorOptions& options) {
  Manifest manifest;
  manifest.forkpoint_version = "0.1.0";
  manifest.command = {"generated"};
  manifest.world_size = options.ranks;
  manifest.level = Level::layer;
  manifest.step_base = "step(n)";
  manifest.started_at = "2025-01-01T00:00:00Z";
  create_run(directory, manifest);
  std::atomic<int> next = 0;
  std::mutex mutex;
  std::string problem;
  const auto work = [&] {
    for (int rank = next++; rank < options.ranks; rank = next++) {
      try {
        generate_stream(directory + "/" + stream_file_name(rank), rank, options);
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        problem = error.what();
      }
    }
  };
  std::vector<std::thread> helpers;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (!problem.empty()) throw Error(problem);
  manifest.state = options.finish ? RunState::whole : RunState::died;
  manifest.ended_at = "2025-01-01T00:01:00Z";
  manifest.exit_status = options.finish ? 0 : 137;
  manifest.end_reason = options.finish ? "exited with status 0" : "killed by signal 9";
  write_manifest(directory, manifest);
}

}  // namespace forkpoint
