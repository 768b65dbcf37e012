// tiny_trainer STEPS [--begin-at STEP] [--different-at STEP] [--pause MS] [--die-at STEP] [--repeats-with VARIABLE,...]
// [--undone-by VARIABLE]
// [--slowed-by VARIABLE]: reports a few values a step to forkpoint.h. --repeats-with: unless all of these are set, a
// weight is another one in each process; --undone-by: also where this one is set. --slowed-by: where it is set a step
// takes 40 ms more.
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "probes/forkpoint.h"

bool all_set(const std::string& variables) {
  std::istringstream list(variables);
  for (std::string name; std::getline(list, name, ',');) {
    if (!std::getenv(name.c_str())) return false;
  }
  return true;
}

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto option = [&](const std::string& name, long otherwise) {
    for (size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == name) return std::stol(words[i + 1]);
    }
    return otherwise;
  };
  const auto text = [&](const std::string& name) {
    for (size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == name) return words[i + 1];
    }
    return std::string();
  };
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  const std::string undone_by = text("--undone-by");
  const bool repeats = all_set(text("--repeats-with")) && (undone_by.empty() || !all_set(undone_by));
  const bool slow = !text("--slowed-by").empty() && all_set(text("--slowed-by"));
  const long steps = words.empty() ? 3 : std::stol(words[0]);
  std::vector<float> weights(64, 1.0f);
  for (long step = option("--begin-at", 0); step < steps; ++step) {
    forkpoint_step_begin(step);
    if (step == option("--different-at", -1)) weights[7] = 2.0f;
    if (!repeats) weights[3] = static_cast<float>(now.tv_nsec);
    if (slow) usleep(40'000);
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
