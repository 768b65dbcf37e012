// forkpoint show: what a run holds.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/show.h"
#include "cli/show_anomalies.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

enum class Detail { overview, steps, records, launches, anomalies };

struct ShowRequest {
  std::string directory;
  RecordFilter filter;
  Detail detail = Detail::overview;
};

Phase phase_of(const std::string& text) {
  if (const auto phase = phase_from_name(text)) return *phase;
  std::string names;
  for (int i = 0; i < kPhaseCount; ++i) names += fmt::format("{}{}", i ? ", " : "", name(static_cast<Phase>(i)));
  throw UsageError(fmt::format("show: --phase `{}` is no phase.", text), fmt::format("Phases are {}.", names));
}

int64_t launches_step(const std::string& text) {
  if (text == "-1") return kPrologueStep;
  const bool is_number = !text.empty() && text.size() < 19 && text.find_first_not_of("0123456789") == text.npos;
  if (is_number) return std::stoll(text);
  const size_t colon = text.find(':');
  throw UsageError(fmt::format("show: --launches `{}` is not the number of a step, such as 7 (-1: before the first step).", text),
                   colon == text.npos || colon == 0
                       ? "Without --launches, `forkpoint show RUN` says which steps there are."
                       : fmt::format("The launches of one step are listed at a time, each with its index: --launches {}.",
                                     text.substr(0, colon)));
}

ShowRequest request_from(const Arguments& arguments) {
  ShowRequest request;
  request.directory = arguments.positional().front();
  if (const auto text = arguments.value("steps")) request.filter.steps = parse_steps(*text);
  if (const auto text = arguments.value("ranks")) request.filter.ranks = parse_ranks(*text);
  if (const auto text = arguments.value("phase")) request.filter.phase = phase_of(*text);
  request.filter.layer_glob = arguments.value("layer");
  request.filter.tensor_glob = arguments.value("tensor");
  if (request.filter.any() || arguments.has("records")) request.detail = Detail::records;
  if (arguments.has("summary")) request.detail = Detail::steps;
  if (const auto text = arguments.value("launches")) {
    for (const char* other : {"steps", "records", "summary"}) {
      if (!arguments.has(other)) continue;
      throw UsageError(
          fmt::format("show: --launches STEP lists the launches of one step; it goes without --{}.", other));
    }
    const int64_t step = launches_step(*text);
    request.filter.steps = {step, step};
    request.detail = Detail::launches;
  }
  if (arguments.has("anomalies")) {
    for (const char* other : {"records", "summary", "launches", "layer", "phase", "tensor"}) {
      if (arguments.has(other)) throw UsageError(fmt::format("show: --anomalies looks at every tensor; it goes without --{}.", other));
    }
    request.detail = Detail::anomalies;
  }
  return request;
}

// Step lines do not look at records, so a filter on names means nothing to them.
void check(const ShowRequest& request) {
  const RecordFilter& filter = request.filter;
  if (request.detail == Detail::steps && (filter.layer_glob || filter.tensor_glob || filter.phase)) {
    throw UsageError("show: --summary sums up whole steps, it cannot be filtered by --layer, --tensor or --phase.",
                     "Leave --summary out to list the records.");
  }
}

bool wants(const ShowRequest& request, const StepRows& step) {
  return request.detail == Detail::steps || !step.rows.empty();
}

void note_problems(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems) print_warning(problem);
}

// "0-9, 12", and of many pieces the first.
std::string short_list(const std::vector<int64_t>& numbers) {
  constexpr size_t kMost = 60;
  std::string text = number_list(numbers);
  if (text.size() <= kMost) return text;
  text.resize(text.rfind(',', kMost));
  return fmt::format("{}, ... and {}", text, numbers.back());
}

// Which steps of those ranks have launches, as a sentence.
std::string steps_with_launches(const std::set<int64_t>& steps) {
  std::vector<int64_t> numbers;
  for (const int64_t step : steps) {
    if (step != kPrologueStep) numbers.push_back(step);
  }
  const std::string before = steps.contains(kPrologueStep) ? "before the first step (-1)" : "";
  if (numbers.empty()) return before.empty() ? "No step of it holds launches" : fmt::format("All of its launches stand {}", before);
  std::string text = fmt::format("There are launches in step{} {}", numbers.size() == 1 ? "" : "s", short_list(numbers));
  return before.empty() ? text : text + " and " + before;
}

// Why there is nothing to list.
std::string no_launches(const Run& run, const ShowRequest& request) {
  const int64_t step = *request.filter.steps.first;
  bool is_there = false, any_rank = false;
  std::set<int64_t> with_launches;
  for (const auto& stream : run.streams()) {
    if (!request.filter.wants_rank(stream->header().rank)) continue;
    any_rank = true;
    for (const StepSummary& summary : stream->steps()) {
      is_there |= summary.step == step;
      if (summary.launches != 0) with_launches.insert(summary.step);
    }
  }
  const std::string& run_name = request.directory;
  if (!any_rank) return fmt::format("{}: it has no rank that --ranks asks for.", run_name);
  const std::string what = fmt::format("step {}", step);
  if (!is_there && step != kPrologueStep) {
    return fmt::format("{}: there is no {} in it. {}.", run_name, what, steps_with_launches(with_launches));
  }
  if (with_launches.contains(step)) {
    return fmt::format("{}: no launch {} matches.", run_name, step == kPrologueStep ? "before the first step" : "of " + what);
  }
  const std::string none = step == kPrologueStep ? "it holds no launches before the first step" : what + " holds no launches";
  if (with_launches.empty() && run.manifest().level != Level::launch) {
    return fmt::format("{}: {}: the run was recorded at level {}, not launch.", run_name, none, name(run.manifest().level));
  }
  return fmt::format("{}: {}. {}.", run_name, none, steps_with_launches(with_launches));
}

// What `record` had to say of a launch that it was to repeat.
void print_notes(const Run& run) {
  for (const std::string& note : run.manifest().notes) print_note(note);
}

void show_launches(const Run& run, const ShowRequest& request, const Style& style) {
  std::vector<std::string> problems = run.problems();
  bool any = false;
  visit_launches(run, request.filter, &problems, [&](const StepLaunches& step) {
    const std::string text = launch_text(step, request.filter, style);
    any |= !text.empty();
    print_answer(text);
    return !std::ferror(stdout);
  });
  flush_answer();
  if (!any && problems.size() == run.problems().size()) print_note(no_launches(run, request));
  print_notes(run);
  note_problems(problems);
}

void show_text(const Run& run, const ShowRequest& request) {
  const Style style(stdout);
  if (request.detail == Detail::overview) {
    print_answer(overview_text(overview_of(run), style, terminal_width(stdout)));
    return;
  }
  if (request.detail == Detail::launches) return show_launches(run, request, style);
  std::vector<std::string> problems = run.problems();
  bool any = false;
  visit_steps(run, request.filter, request.detail == Detail::records, &problems, [&](const StepRows& step) {
    if (!wants(request, step)) return true;
    any = true;
    print_answer(request.detail == Detail::records ? record_text(step, style) : step_text(step));
    return !std::ferror(stdout);
  });
  flush_answer();
  if (!any) print_note(fmt::format("{}: nothing in it matches.", request.directory));
  note_problems(problems);
}

// One array element a line: a program can stream it, a person can grep it.
class JsonArray {
 public:
  explicit JsonArray(std::string_view key) { print_answer(fmt::format(",\n\"{}\":[", key)); }
  void add(const std::string& element) {
    print_answer((first_ ? "\n" : ",\n") + element);
    first_ = false;
  }
  void end() { print_answer("]"); }

 private:
  bool first_ = true;
};

// The lists that were not asked for.
void print_null_lists(Detail detail) {
  if (detail != Detail::steps) print_answer(",\n\"steps\":null");
  if (detail != Detail::records) print_answer(",\n\"records\":null");
  if (detail != Detail::launches) print_answer(",\n\"launches\":null");
}

void show_json_launches(const Run& run, const ShowRequest& request, std::vector<std::string>* problems) {
  JsonArray array("launches");
  bool any = false;
  visit_launches(run, request.filter, problems, [&](const StepLaunches& step) {
    for (const std::string& launch : launch_json(step, request.filter)) array.add(launch), any = true;
    return !std::ferror(stdout);
  });
  array.end();
  if (!any && problems->size() == run.problems().size()) print_note(no_launches(run, request));
  print_notes(run);
}

void show_json_details(const Run& run, const ShowRequest& request, std::vector<std::string>* problems) {
  const bool records = request.detail == Detail::records;
  JsonArray array(records ? "records" : "steps");
  visit_steps(run, request.filter, records, problems, [&](const StepRows& step) {
    if (!records) array.add(step_json(step));
    for (const Record& record : step.rows) array.add(record_json(step, record));
    return !std::ferror(stdout);
  });
  array.end();
}

void end_json(const std::vector<std::string>& problems) {
  using Json = nlohmann::ordered_json;
  print_answer(",\n\"problems\":" + Json(problems).dump(-1, ' ', false, Json::error_handler_t::replace) + "}\n");
}

void show_json(const Run& run, const ShowRequest& request) {
  print_answer(overview_json(overview_of(run)));
  std::vector<std::string> problems = run.problems();
  print_null_lists(request.detail);
  if (request.detail == Detail::launches) {
    show_json_launches(run, request, &problems);
  } else if (request.detail != Detail::overview) {
    show_json_details(run, request, &problems);
  }
  end_json(problems);
}

// The streams are lost, but the manifest still says what the run was.
int show_manifest_only(const ShowRequest& request, bool json, const Error& problem) {
  Manifest manifest;
  try {
    manifest = read_manifest(request.directory);
  } catch (const Error&) {
    throw problem;
  }
  const Overview overview = overview_of(request.directory, manifest, problem.what());
  if (json) {
    print_answer(overview_json(overview));
    print_null_lists(Detail::overview);
    end_json(overview.problems);
  } else {
    print_answer(overview_text(overview, Style(stdout), terminal_width(stdout)));
  }
  return 2;
}

int show(const Arguments& arguments) {
  const ShowRequest request = request_from(arguments);
  check(request);
  const bool json = arguments.has("json");
  std::optional<Run> run;
  try {
    run = Run::open(request.directory);
  } catch (const Error& error) {
    if (request.detail == Detail::anomalies) throw;
    return show_manifest_only(request, json, error);
  }
  if (request.detail == Detail::anomalies) return show_anomalies(*run, request.filter, json);
  json ? show_json(*run, request) : show_text(*run, request);
  return 0;
}

}  // namespace

const Verb& show_verb() {
  static const Verb verb{
      .name = "show",
      .summary = "what a run holds: manifest, ranks, steps, layers, records, launches",
      .usage = "show [options] RUN",
      .about =
          "Without filters: the run's manifest, state, ranks, steps, layers and what is wrong with it, on one\n"
          "screen. With a filter (or --records): every record that matches, with shape, digest, largest magnitude\n"
          "and non-finite count; scalars with their value. GLOB is a shell pattern whose `*` also matches dots.\n"
          "With --launches, of a run of level launch: every kernel launch, copy and set of one step with the buffers\n"
          "it was handed, each as allocation+offset; --tensor then means the kernel (as it is mangled) or the call.\n"
          "With --anomalies: the first value that became non-finite, the first whose magnitude left its own history, and\n"
          "what followed up to the loss. Exit status then: 0 nothing, 1 found, 2 trouble, or nothing found but a part\n"
          "of the run is lost.",
      .options = {kStepsOption,
                  kRanksOption,
                  {"layer", 0, "GLOB", "only layers whose dotted name matches, as in 'blocks.3.*'"},
                  {"phase", 0, "PHASE", "only load, data, forward, backward, collective, optimizer or state"},
                  {"tensor", 0, "GLOB", "only tensors whose name matches, as in '*.grad'"},
                  {"records", 0, "", "list records also when no filter is given"},
                  {"summary", 0, "", "a line a step and rank (records, bytes, digest of the step) instead"},
                  {"launches", 0, "STEP", "list the launches of this step instead (-1: before the first)"},
                  {"anomalies", 0, "", "find the first NaN and the first spike, and what followed, instead"},
                  kJsonOption},
      .examples = {{"forkpoint show runs/good --steps 7 --ranks 2 --phase backward", "the gradients of one step"},
                   {"forkpoint show runs/good --launches 7 --ranks 2", "what rank 2 asked of its GPU in step 7"},
                   {"forkpoint show runs/bad --anomalies", "where did the NaN or the spike come from?"},
                   {"forkpoint show runs/good --steps 0:9 --json | jq '.records[].digest'", "for a program"}},
      .min_positional = 1,
      .max_positional = 1,
      .run = show};
  return verb;
}

}  // namespace forkpoint
