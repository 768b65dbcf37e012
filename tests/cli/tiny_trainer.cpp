// tiny_trainer STEPS [--different-at STEP] [--pause MS] [--die-at STEP]: reports a few values a step to forkpoint.h.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "probes/forkpoint.h"

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto option = [&](const std::string& name, long otherwise) {
    for (size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == name) return std::stol(words[i + 1]);
    }
    return otherwise;
  };
  const long steps = words.empty() ? 3 : std::stol(words[0]);
  std::vector<float> weights(64, 1.0f);
  for (long step = 0; step < steps; ++step) {
    forkpoint_step_begin(step);
    if (step == option("--different-at", -1)) weights[7] = 2.0f;
    if (step == option("--die-at", -1)) {
      usleep(200'000);
      kill(getpid(), SIGKILL);
    }
    {
      const forkpoint::Layer scope(FORKPOINT_OPTIMIZER, "layer.0");
      forkpoint::tensor("weight", FORKPOINT_ROLE_PARAMETER, weights.data(), {8, 8});
    }
    forkpoint_scalar("loss", FORKPOINT_ROLE_LOSS, 1.0 / static_cast<double>(step + 1));
    forkpoint_step_end();
    usleep(static_cast<useconds_t>(option("--pause", 0) * 1000));
  }
  return 0;
}
