#include "probes/watch_control.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>

#include "lib/probe_contract.h"
#include "probes/settings.h"

namespace forkpoint {
namespace {

constexpr int64_t kPeriodNs = 50'000'000;

// The range is two words: a thread that sees one of them new finds no step in it, as if it had come a little later.
constinit std::atomic<int64_t> first_deep{0}, last_deep{-1};
constinit std::atomic<bool> deep{false};  // the step that began last is
constinit std::atomic<int64_t> looked_ns{0};

// False: it makes no sense, or is not there.
bool read_file(const Settings& settings, char* text, size_t size) {
  char path[sizeof(settings.run_directory) + sizeof(contract::kControlFile) + 1];
  snprintf(path, sizeof(path), "%s/%s", settings.run_directory, contract::kControlFile);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t got = read(file, text, size - 1);
  close(file);
  if (got <= 0) return false;
  text[got] = '\0';
  return true;
}

}  // namespace

bool is_watched(const Settings& settings) { return settings.watch_nan || settings.watch_replicas; }

void look_at_control(const Settings& settings, int64_t now_ns) {
  if (!is_watched(settings) || settings.on_trigger != OnTrigger::deepen) return;
  if (now_ns - looked_ns.load(std::memory_order_relaxed) < kPeriodNs) return;
  looked_ns.store(now_ns, std::memory_order_relaxed);
  char text[128];
  if (!read_file(settings, text, sizeof(text))) return;
  int64_t first = 0, last = 0;
  if (settings.level != Level::step || sscanf(text, "deepen %" SCNd64 " %" SCNd64, &first, &last) != 2) return;
  first_deep.store(first);
  last_deep.store(last);
}

Level begin_step_level(const Settings& settings, int64_t step) {
  // The last one first: whoever sees a new one sees the first step that goes with it.
  deep.store(step <= last_deep.load() && step >= first_deep.load());
  return level_now(settings);
}

Level level_now(const Settings& settings) {
  return deep.load(std::memory_order_relaxed) ? Level::layer : settings.level;
}

void forget_control_in_child() {
  last_deep.store(-1);
  deep.store(false);
}

}  // namespace forkpoint
