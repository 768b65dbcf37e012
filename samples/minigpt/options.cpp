#include "samples/minigpt/options.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>

#include "samples/minigpt/error.h"

namespace minigpt {
namespace {

int64_t whole(const std::string& option, const std::string& text, int64_t lowest, int64_t highest) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest || value > highest)
    throw UsageError(fmt::format("{} {}: expected a whole number from {} to {}", option, text, lowest, highest));
  return value;
}

// lowest <= value < limit
float real(const std::string& option, const std::string& text, float lowest, float limit) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= lowest && value < limit))
    throw UsageError(fmt::format("{} {}: expected a number from {} to below {}", option, text, lowest, limit));
  return value;
}

using Handler = std::function<void(const std::string& option, const std::string& value)>;

template <typename T>
Handler whole_into(T& target, int64_t lowest, int64_t highest) {
  return [&target, lowest, highest](const std::string& option, const std::string& value) {
    target = static_cast<T>(whole(option, value, lowest, highest));
  };
}
Handler real_into(float& target, float lowest, float limit) {
  return [&target, lowest, limit](const std::string& option, const std::string& value) {
    target = real(option, value, lowest, limit);
  };
}
Handler text_into(std::string& target) {
  return [&target](const std::string& option, const std::string& value) {
    if (value.empty()) throw UsageError(fmt::format("{}: the value is empty", option));
    target = value;
  };
}

std::map<std::string, Handler> value_options(Options& o) {
  constexpr int64_t kMany = 1'000'000'000;
  return {
      {"--device",
       [&o](const std::string& option, const std::string& value) {
         if (value != "cpu" && value != "cuda")
           throw UsageError(fmt::format("{} {}: expected cpu or cuda", option, value));
         o.device = value == "cpu" ? Device::cpu : Device::cuda;
       }},
      {"--ranks", whole_into(o.ranks, 1, 256)},
      {"--steps", whole_into(o.steps, 1, kMany)},
      {"--seed", whole_into(o.seed, 0, INT64_MAX)},
      {"--checkpoint-dir", text_into(o.checkpoint_dir)},
      {"--checkpoint-every", whole_into(o.checkpoint_every, 1, kMany)},
      {"--fault", [&o](const std::string&, const std::string& value) { o.faults.push_back(parse_fault(value)); }},
      {"--layers", whole_into(o.model.layers, 1, 1000)},
      {"--dim", whole_into(o.model.dim, 1, 65536)},
      {"--heads", whole_into(o.model.heads, 1, 1024)},
      {"--seq", whole_into(o.model.seq, 1, 8192)},
      {"--batch", whole_into(o.model.batch, 1, 65536)},
      {"--dropout", real_into(o.model.dropout, 0, 1)},
      {"--lr", real_into(o.lr, 0, 1000)},
      {"--warmup-steps", whole_into(o.warmup_steps, 0, kMany)},
      {"--decay-steps", whole_into(o.decay_steps, 1, kMany)},
      {"--data", text_into(o.data_file)},
      {"--rendezvous", text_into(o.rendezvous_dir)},
      {"--timeout", whole_into(o.timeout_s, 1, 86400)},
      {"--threads", whole_into(o.threads, 1, 256)},
  };
}

std::map<std::string, bool*> flag_options(Options& o) {
  return {{"-h", &o.help}, {"--help", &o.help}, {"--resume", &o.resume}, {"--check-gradients", &o.check_gradients}};
}

void check_together(const Options& o) {
  if (o.model.dim % o.model.heads != 0)
    throw UsageError(fmt::format("--dim {} is not a multiple of --heads {}", o.model.dim, o.model.heads));
  if (o.resume && o.checkpoint_dir.empty()) throw UsageError("--resume: from where? Add --checkpoint-dir DIR");
  if (o.checkpoint_every > 0 && o.checkpoint_dir.empty())
    throw UsageError("--checkpoint-every: where to? Add --checkpoint-dir DIR");
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  const auto values = value_options(options);
  const auto flags = flag_options(options);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const size_t equals = arguments[i].starts_with("--") ? arguments[i].find('=') : std::string::npos;
    const std::string name = arguments[i].substr(0, equals);
    if (const auto flag = flags.find(name); flag != flags.end() && equals == std::string::npos) {
      *flag->second = true;
    } else if (const auto option = values.find(name); option != values.end()) {
      if (equals == std::string::npos && i + 1 == arguments.size()) throw UsageError(name + ": a value is missing");
      option->second(name, equals == std::string::npos ? arguments[++i] : arguments[i].substr(equals + 1));
    } else {
      throw UsageError(fmt::format("unknown option {}; minigpt -h lists them", arguments[i]));
    }
  }
  if (!options.help) check_together(options);
  return options;
}

std::string help_text() {
  return R"(usage: minigpt [OPTION]...

Trains a small GPT on bytes, data-parallel, bit by bit reproducible.

  --device cpu|cuda        where to compute (cpu); cuda: one rank a GPU
  --ranks N                ranks to start (1); under torchrun, srun or mpirun their number is taken
  --steps N                steps in all, also after a resume (100)
  --seed N                 of weights, order of data, dropout (1)
  --data FILE              text to learn (a built-in one)
  --checkpoint-dir D       write D/step-NNNNNN after the last step
  --checkpoint-every K     and after every K steps
  --resume                 go on from the newest complete checkpoint in D

  --layers N --dim N --heads N --seq N --batch N --dropout P       (4, 64, 4, 64, 4 a rank, 0.1)
  --lr X --warmup-steps N --decay-steps N                          (0.003, 20, 1000)
  --threads N              CPU threads a rank (1); does not change a bit
  --rendezvous DIR         where ranks find one another (/dev/shm or /tmp; several hosts: a shared folder)
  --timeout SECONDS        how long they wait for one another at the start (60)
  --check-gradients        compare every backward pass with finite differences, then end

  --fault KIND@step=S,rank=R,layer=L[,target=T][,module=M]
                           plant a fault; may be given several times. Not given: rank 0, layer 0, module mlp.fc1.
    bitflip                one bit; target=weight, activation or grad (grad)
    reorder                a sum in another order: with rank, in its forward pass; without, the average over ranks
    unordered              a forward sum in an order chosen anew each step; not with CUBLAS_WORKSPACE_CONFIG=:4096:8 (no step)
    data                   another batch
    dropout-seed           another dropout seed from this step on
    lr                     learning rate times 1.0001, on all ranks or on one
    skip-allreduce         a rank keeps its own gradient
    lost-momentum          exp_avg is zero after --resume, on all ranks or on one (no step)
    lost-sampler           the sampler begins anew after --resume, on all ranks or on one (no step)
    nan                    one element of an output becomes NaN

Examples:
  minigpt --ranks 4 --steps 20
  minigpt --ranks 4 --steps 20 --fault bitflip@step=7,rank=2,layer=3,target=grad
  minigpt --steps 100 --checkpoint-dir ckpt --checkpoint-every 50
  minigpt --steps 200 --checkpoint-dir ckpt --resume
  torchrun --nproc-per-node 2 --no-python minigpt --device cuda --dim 1024 --heads 16 --seq 512

Exit status: 0 trained, 1 trouble, 2 a mistake on the command line, 128 + N a rank was killed by signal N.
)";
}

}  // namespace minigpt
