// The table itself. A knob is here only if it can be set without a change to the user's program.
#include <algorithm>
#include <cctype>
#include <string>

#include "lib/knobs.h"

namespace forkpoint {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return std::tolower(c); });
  return result;
}

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
}

bool is_cublas_workspace(std::string_view value) { return value == ":4096:8" || value == ":16:8"; }

// NCCL reads "ring", "ring,tree", "^nvls,nvlstree" and, from 2.24 on, "allreduce:ring;allgather:...".
bool names_algorithm(std::string_view list, std::string_view algorithm) {
  for (size_t at = list.find(algorithm); at != std::string_view::npos; at = list.find(algorithm, at + 1)) {
    const size_t end = at + algorithm.size();
    const bool begins = at == 0 || std::string_view(",:^; ").find(list[at - 1]) != std::string_view::npos;
    const bool ends = end == list.size() || std::string_view(",; ").find(list[end]) != std::string_view::npos;
    if (begins && ends) return true;
  }
  return false;
}

// Ring or Tree, alone, for every collective. A list lets NCCL choose by size and topology; NVLS and CollNet add up in the
// switch; an exclusion ("^NVLS") leaves the choice open among the rest.
bool is_pinned_algorithm(std::string_view value) {
  const std::string list = lower(value);
  return list == "ring" || list == "tree";
}

// What keeps the switches out of it: nothing is said of the rest, which NCCL chooses by a fixed rule.
bool excludes_switches(std::string_view value) {
  const std::string list = lower(value);
  if (list.find('^') == std::string::npos || list.find(';') != std::string::npos) return false;
  return names_algorithm(list, "nvls");
}

bool is_fixed_algorithm(std::string_view value) { return is_pinned_algorithm(value) || excludes_switches(value); }

bool is_pinned_protocol(std::string_view value) {
  const std::string protocol = lower(value);
  return protocol == "simple" || protocol == "ll" || protocol == "ll128";
}

bool is_fixed_hash_seed(std::string_view value) { return is_number(value); }

bool is_yes(std::string_view value) {
  const std::string word = lower(value);
  return word == "1" || word == "true" || word == "on" || word == "yes" || word == "y";
}

std::vector<Knob> math_knobs() {
  return {
      {.name = "cublas",
       .area = "cuBLAS",
       .does = "gives each cuBLAS handle a workspace of fixed size",
       .why = "With several streams in use cuBLAS picks the workspace, and by it the split of a sum, at run time (cuBLAS manual, "
              "\"Results reproducibility\"). Without it PyTorch's deterministic mode warns at every matrix product.",
       .variables = {{.name = "CUBLAS_WORKSPACE_CONFIG", .value = ":4096:8", .is_as_good = is_cublas_workspace,
                      .as_good = ":4096:8 or :16:8"}}},
      {.name = "cudnn",
       .area = "cuDNN, in PyTorch",
       .does = "lets PyTorch choose deterministic cuDNN algorithms only, and none by timing",
       .why = "Several of cuDNN's backward convolutions add atomically, and benchmark mode keeps whichever algorithm was fastest "
              "on that day (PyTorch notes, \"Reproducibility\").",
       .in_process = true},
      {.name = "tf32",
       .area = "CUDA libraries",
       .does = "turns TF32 off everywhere, whatever the program says",
       .why = "TF32 repeats on one kind of GPU, so it is not needed for that; it is for comparing kinds, and changes results. "
              "What the program chose is written into the run without this knob.",
       .variables = {{.name = "NVIDIA_TF32_OVERRIDE", .value = "0"}},
       .by_default = false,
       .costly = true},
      {.name = "nvte",
       .area = "Transformer Engine",
       .does = "keeps Transformer Engine to its deterministic attention and normalisation",
       .why = "Its fused attention may use a backward pass that adds atomically unless told not to (Transformer Engine manual); "
              "Megatron's deterministic mode refuses to run without it.",
       .variables = {{.name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO", .value = "0"}},
       .costly = true},
      {.name = "flash-attention",
       .area = "flash-attn, Transformers, PyTorch's attention",
       .does = "asks for the deterministic backward pass of attention, where the program does not say itself",
       .why = "The backward pass adds the gradient of the queries atomically. PyTorch's own attention stays that way under "
              "warn_only, so that the bridge asks for it apart.",
       .variables = {{.name = "FLASH_ATTENTION_DETERMINISTIC", .value = "1"}},
       .in_process = true,
       .costly = true},
  };
}

std::vector<Knob> torch_knobs() {
  return {
      {.name = "torch-algorithms",
       .area = "PyTorch",
       .does = "turns PyTorch's deterministic algorithms on; an op that has none is named in the run and goes on",
       .why = "index_add, scatter_add, index_put and others add atomically otherwise. A program that calls "
              "use_deterministic_algorithms itself has the last word.",
       .in_process = true,
       .costly = true},
      {.name = "torch-fill",
       .area = "PyTorch",
       .does = "fills memory that PyTorch would hand out as it is (torch.empty, resize_)",
       .why = "It makes a read of memory nobody wrote repeat. It costs a write of every such tensor, most of the published cost of "
              "deterministic mode, and only a program with that bug needs it.",
       .in_process = true,
       .by_default = false,
       .costly = true,
       .needs = "torch-algorithms"},
      {.name = "torch-kernels",
       .area = "PyTorch",
       .does = "puts kernels of forkpoint's own, in fixed order, in the place of PyTorch's atomic ones",
       .why = "PyTorch has no deterministic implementation of these ops, or a slow one.",
       .in_process = true},
      {.name = "autotune",
       .area = "Inductor, Triton",
       .does = "keeps compiled kernels from being chosen by timing, or keeps the choice on disk",
       .why = "Two runs that time kernels choose different ones, and another tile is another order of addition. Triton's choice "
              "repeats where both runs see one cache folder (TRITON_CACHE_DIR).",
       .variables = {{.name = "TORCHINDUCTOR_DETERMINISTIC", .value = "1"},
                     {.name = "TRITON_CACHE_AUTOTUNING", .value = "1", .is_as_good = is_yes}}},
  };
}

std::vector<Knob> communication_knobs() {
  return {
      {.name = "nccl",
       .area = "NCCL",
       .does = "lets NCCL add up in rings only, never in the switch",
       .why = "NVLink SHARP adds in an order that changes from call to call (NVIDIA/nccl issue 1497). A ring's order is fixed by "
              "rank and topology, so this repeats on the same GPUs, not on another allocation.",
       .variables = {{.name = "NCCL_ALGO", .value = "Ring", .is_as_good = is_fixed_algorithm,
                      .as_good = "Ring, Tree or ^NVLS"},
                     {.name = "NCCL_NVLS_ENABLE", .value = "0"}},
       .costly = true},
      {.name = "nccl-layout",
       .area = "NCCL",
       .does = "fixes NCCL's protocol and number of channels",
       .why = "Both cut a buffer into chunks, and a chunk's ring starts at another rank. NCCL chooses them by a fixed rule from size "
              "and topology, so this matters only where topology or NCCL's tuner may differ.",
       .variables = {{.name = "NCCL_PROTO", .value = "Simple", .is_as_good = is_pinned_protocol,
                      .as_good = "Simple, LL or LL128"},
                     {.name = "NCCL_MIN_CTAS", .value = "16", .is_as_good = is_number, .as_good = "a number"},
                     {.name = "NCCL_MAX_CTAS", .value = "16", .is_as_good = is_number, .as_good = "a number"}},
       .by_default = false,
       .costly = true},
      {.name = "collectives",
       .area = "NCCL",
       .does = "puts reductions of forkpoint's own, in the order of ranks, in the place of NCCL's",
       .why = "Their result does not depend on algorithm, protocol, topology or allocation, which no setting of NCCL gives.",
       .in_process = true,
       .by_default = false},  // seen on NVLink between two GPUs only
      {.name = "collectives-wide",
       .area = "NCCL",
       .does = "has these reductions add 16- and 8-bit floats in fp32, rounded once",
       .why = "Rounded at each addition, a sum over many ranks loses digits.",
       .in_process = true,
       .by_default = false,
       .needs = "collectives"},
      {.name = "collectives-tree",
       .area = "NCCL",
       .does = "has these reductions add in a balanced tree over the ranks",
       .why = "Fewer ranks give the same bits where each has added the matching subtree itself; and only there.",
       .in_process = true,
       .by_default = false,
       .needs = "collectives"},
  };
}

std::vector<Knob> program_knobs() {
  return {
      {.name = "python-hash",
       .area = "Python",
       .does = "fixes the seed of Python's string hash",
       .why = "The order of a set of strings changes from process to process otherwise (Python manual, PYTHONHASHSEED): parameter "
              "groups, vocabularies and file lists built from one differ.",
       .variables = {{.name = "PYTHONHASHSEED", .value = "0", .is_as_good = is_fixed_hash_seed, .as_good = "a number"}}},
      {.name = "seeds",
       .area = "Python, NumPy, PyTorch",
       .does = "starts the global random generators, and by them data-loader workers, from a fixed seed of each rank's own",
       .why = "They start from the system's entropy otherwise. They are seeded before the program's first use, so that a program "
              "that seeds them itself gets exactly what it gets today.",
       .in_process = true},
      {.name = "xla",
       .area = "XLA: JAX, TensorFlow",
       .does = "asks XLA for deterministic ops and no choice of kernels by timing",
       .why = "XLA's scatter adds atomically, and its autotuner keeps what was fastest.",
       .variables = {{.name = "XLA_FLAGS", .value = "--xla_gpu_deterministic_ops=true", .is_flag = true},
                     {.name = "XLA_FLAGS", .value = "--xla_gpu_autotune_level=0", .is_flag = true}},
       .costly = true},
      {.name = "megatron",
       .area = "Megatron Core",
       .does = "asks mamba-ssm for its deterministic backward pass, and says which of the job's arguments Megatron's own "
               "deterministic mode would refuse",
       .why = "Megatron's --deterministic-mode also demands arguments (no fused cross entropy, no overlapped tensor-parallel "
              "communication), which only the command line can give.",
       .variables = {{.name = "MAMBA_DETERMINISTIC", .value = "1", .is_as_good = is_yes}},
       .in_process = true},
  };
}

std::vector<Knob> make_table() {
  std::vector<Knob> table;
  for (std::vector<Knob> part : {math_knobs(), torch_knobs(), communication_knobs(), program_knobs()}) {
    table.insert(table.end(), std::make_move_iterator(part.begin()), std::make_move_iterator(part.end()));
  }
  return table;
}

}  // namespace

const std::vector<Knob>& knob_table() {
  static const std::vector<Knob> table = make_table();
  return table;
}

}  // namespace forkpoint
