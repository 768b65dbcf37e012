#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "samples/minigpt/fault.h"

namespace minigpt {

enum class Device { cpu, cuda };

struct ModelConfig {
  int layers = 4;
  int dim = 64;
  int heads = 4;
  int seq = 64;
  int batch = 4;  // sequences a rank
  float dropout = 0.1f;
  int vocabulary = 256;  // bytes
};

struct Options {
  bool help = false;
  bool check_gradients = false;
  Device device = Device::cpu;
  int ranks = 0;        // 0: not given
  int64_t steps = 100;  // in all, also after a resume
  uint64_t seed = 1;
  std::string checkpoint_dir;
  int64_t checkpoint_every = 0;  // 0: after the last step only
  bool resume = false;
  std::vector<Fault> faults;
  ModelConfig model;
  float lr = 3e-3f;
  int64_t warmup_steps = 20;
  int64_t decay_steps = 1000;  // not bound to `steps`: what a step computes must not depend on how many follow
  std::string data_file;
  std::string rendezvous_dir;
  int timeout_s = 60;  // how long ranks wait for each other at the start
  int threads = 1;     // CPU only, a rank; the result does not depend on it
};

// arguments: without the program's name. Throws UsageError.
Options parse_options(const std::vector<std::string>& arguments);
std::string help_text();

}  // namespace minigpt
