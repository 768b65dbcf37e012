// --watch, --on-trigger, --deepen-steps.
#include <fmt/format.h>

#include <algorithm>

#include "cli/recording.h"

namespace forkpoint {
namespace {

constexpr int64_t kMostDeepSteps = 10'000;

void read_names(const std::string& text, WatchRequest* watch) {
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string word = text.substr(start, end - start);
    if (word == "nan")
      watch->nan = true;
    else if (word == "replicas")
      watch->replicas = true;
    else
      throw UsageError(fmt::format("record: --watch `{}` is not nan, replicas or both (nan,replicas).", text));
    start = end + 1;
  }
}

OnTrigger on_trigger_of(const std::string& text) {
  for (const OnTrigger value : {OnTrigger::warn, OnTrigger::stop, OnTrigger::deepen}) {
    if (text == name(value)) return value;
  }
  throw UsageError(fmt::format("record: --on-trigger `{}` is none of warn, stop and deepen.", text));
}

// What would be ignored, or could not work, is refused.
void check(const Arguments& arguments, const RecordingRequest& request, const WatchRequest& watch) {
  if (watch.replicas && request.ranks.size() == 1) {
    throw UsageError("record: --watch replicas compares ranks with each other, and --ranks names one.",
                     "Record at least two ranks, or watch nan only.");
  }
  if (request.mask_names) {
    throw UsageError(
        "record: --watch goes by names (a GradScaler's `skipped`, `running_mean`, `all_reduce`), which "
        "--mask-names hides.",
        "Leave one of the two out; `forkpoint show --anomalies` and `diff --replicas` read a finished run.");
  }
  if (watch.on_trigger == OnTrigger::deepen && request.level != Level::step) {
    throw UsageError(
        fmt::format("record: --on-trigger deepen goes from level step to level layer, and the level is {}.",
                    name(request.level)),
        "Leave --level out, or choose warn or stop.");
  }
  if (arguments.value("deepen-steps") && watch.on_trigger != OnTrigger::deepen) {
    throw UsageError("record: --deepen-steps needs --on-trigger deepen.", "Add it, or leave it out.");
  }
}

}  // namespace

std::string_view name(OnTrigger on_trigger) {
  switch (on_trigger) {
    case OnTrigger::warn:
      return "warn";
    case OnTrigger::stop:
      return "stop";
    case OnTrigger::deepen:
      return "deepen";
  }
  return "unknown";
}

std::string WatchRequest::names() const { return nan && replicas ? "nan,replicas" : nan ? "nan" : "replicas"; }

WatchRequest read_watch(const Arguments& arguments, const RecordingRequest& request) {
  WatchRequest watch;
  const auto names = arguments.value("watch");
  if (!names) {
    for (const char* option : {"on-trigger", "deepen-steps"}) {
      if (!arguments.value(option)) continue;
      throw UsageError(fmt::format("record: --{} needs --watch: what is a trigger?", option),
                       "Add --watch nan, --watch replicas or --watch nan,replicas.");
    }
    return watch;
  }
  read_names(*names, &watch);
  if (const auto text = arguments.value("on-trigger")) watch.on_trigger = on_trigger_of(*text);
  if (const auto text = arguments.value("deepen-steps")) watch.deepen_steps = parse_count(*text, "--deepen-steps", 1);
  if (watch.deepen_steps > kMostDeepSteps) {
    throw UsageError(fmt::format("record: --deepen-steps {} is more than {}.", watch.deepen_steps, kMostDeepSteps),
                     "`--level layer` records every step so.");
  }
  check(arguments, request, watch);
  return watch;
}

}  // namespace forkpoint
