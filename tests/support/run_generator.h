// Makes runs without training anything: a data-parallel training of a stack of layers, as the recorder would write it.
// The data flow is real (a layer's input is the output of the one before, reduced gradients are equal on all ranks,
// weights follow from them), values are drawn from a seeded generator: random digests and word sums, magnitudes of
// Gaussian-like tensors with random mantissas. Equal options give equal runs, byte for byte but for host and process.
//
// A step of one rank, in order: batch; per layer forward input and output; loss; per layer (last first) grad_output,
// grad_input and weight.grad; per layer all_reduce input and output; learning rate; per layer weight, exp_avg,
// exp_avg_sq; RNG state. kRecordsPerLayer records a layer, the rest without one; records_per_step is met exactly by
// extra scalars.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lib/hash_stream.h"
#include "lib/run.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {

inline constexpr int kRecordsPerLayer = 10;
inline constexpr int kRecordsWithoutLayer = 4;  // batch, loss, learning rate, RNG

struct GeneratedFault {
  int64_t step = 0;
  int rank = 0;
  int record = 0;             // in the order above (see find_generated)
  bool propagates = true;     // what is computed from it differs too, on every rank after a collective
  bool one_word = false;      // its digest changes as if bit 5 of 32-bit word 7 had been flipped from 0 to 1
};

struct GeneratorOptions {
  int ranks = 2;
  int64_t steps = 10;
  int64_t first_step = 0;
  int records_per_step = 2000;
  bool prologue = true;        // initial weights, in kPrologueStep
  bool shuffle_arrival = false;  // within each phase, in an order that differs by seed_of_arrival and step
  uint64_t seed_of_arrival = 1;
  bool finish = true;            // else the streams read as died
  uint64_t seed = 1;
  std::optional<GeneratedFault> fault;
};

// Index in the step of the first record with this phase, layer and tensor name; -1: there is none.
int find_generated(const GeneratorOptions& options, Phase phase, const std::string& layer, const std::string& tensor);
int generated_layers(const GeneratorOptions& options);
std::string generated_layer_name(int layer);  // "model.blocks.12.mlp.fc1", ...

// REQUIRES: records_per_step >= kRecordsWithoutLayer; else throws Error.
void generate_stream(const std::string& path, int rank, const GeneratorOptions& options);
// A whole run folder, ranks in parallel on as many threads as there are cores.
void generate_run(const std::string& directory, const GeneratorOptions& options);

}  // namespace forkpoint
