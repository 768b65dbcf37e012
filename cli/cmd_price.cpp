// forkpoint price: what determinism costs this job here, knob by knob, and which knobs it needs.
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "cli/knob_options.h"
#include "cli/price.h"
#include "cli/recording_options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/step_times.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

void read_steps(const Arguments& arguments, PriceRequest* request) {
  constexpr int64_t kMost = contract::TimedStopBoard::kTimes - 2;  // a board has room for so many
  if (const auto text = arguments.value("steps")) {
    const StepRange range = parse_steps(*text);
    if (!range.first || !range.last) throw UsageError("price: --steps needs both ends, as in 5:25.");
    request->first = *range.first, request->last = *range.last;
  }
  if (request->last - request->first < 1) {
    throw UsageError("price: --steps leaves nothing to be timed.", "Steps A to B-1 are timed, and step B is compared: A must be less than B.");
  }
  if (request->last - request->first > kMost) {
    throw UsageError(fmt::format("price: --steps {}:{} are too many: at most {} are timed.", request->first, request->last, kMost));
  }
}

PriceRequest request_from(const Arguments& arguments) {
  PriceRequest request;
  request.command = arguments.command();
  request.knobs = read_knobs(arguments, "price").value_or(default_knobs());
  if (request.knobs.empty()) throw UsageError("price: --deterministic names no knob.");
  read_steps(arguments, &request);
  if (const auto text = arguments.value("rounds")) request.rounds = parse_count(*text, "--rounds", 2);
  request.alone = !arguments.has("skip-alone");
  request.step_on = arguments.value("step-on");
  if (request.step_on) check_step_on(*request.step_on, "price");
  if (const auto text = arguments.value("timeout")) request.patience = std::chrono::seconds(parse_count(*text, "--timeout", 0));
  request.show_output = arguments.has("show-output");
  request.folder = arguments.value("output").value_or("");
  if (request.folder.empty()) request.folder = default_run_directory("price");
  return request;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error(fmt::format("{}: cannot be made: {}.", folder, error.message()));
  if (!fs::is_empty(folder)) throw Error(fmt::format("{}: expected a new or empty folder.", folder), "Name another one with -o.");
}

// Opened before an hour is spent.
std::ofstream open_page(const std::optional<std::string>& path) {
  std::ofstream page;
  if (!path) return page;
  page.open(*path, std::ios::binary);
  if (!page) throw Error(fmt::format("{}: cannot be written: {}.", *path, std::strerror(errno)), "Name another file with --html.");
  return page;
}

void write_page(const PriceRequest& request, const PriceResult& result, const std::string& path, std::ofstream* page) {
  *page << price_html(request, result);
  page->close();
  if (!*page) throw Error(fmt::format("{}: cannot be written: {}.", path, std::strerror(errno)));
  print_note(fmt::format("{}: written", path));
}

int price(const Arguments& arguments) {
  const PriceRequest request = request_from(arguments);
  const auto path = arguments.value("html");
  std::ofstream page = open_page(path);
  make_folder(request.folder);
  const PriceResult result = run_price(request);
  if (path) write_page(request, result, *path, &page);
  print_answer(arguments.has("json") ? price_json(request, result) : price_text(request, result));
  flush_answer();
  return price_status(result);
}

}  // namespace

const Verb& price_verb() {
  static const Verb verb{
      .name = "price",
      .summary = "what determinism costs this job, knob by knob, and which knobs it needs",
      .usage = "price [options] -- CMD [ARG...]",
      .about =
          "Runs CMD again and again, up to step B each time (it must begin anew each time): without any knob of deterministic mode (fast), with all of\n"
          "them, and with each alone: so each knob's own cost shows, and which one suffices by itself. (What one costs on\n"
          "top of the others would hide behind a costlier one for the same op.) The arms take turns in --rounds rounds, so\n"
          "that a slow hour is everybody's. A step's time is from its begin to that of the next, by the probe's marks, of\n"
          "steps A to B-1, which are not hashed; step B is, and the runs of an arm are compared there. Where fast does not\n"
          "repeat and all knobs do, the cheapest set that still does is looked for, by halves, cheap knobs kept first; each\n"
          "set is run twice, and one that does not repeat once is out. Exit status: 0 it repeats with some set (or with\n"
          "none), 1 not even with all, 2 trouble, or nobody can tell.",
      .options = {{"deterministic", 0, "[=KNOBS]", "the knobs that are priced (default: those of plain --deterministic)"},
                  {"steps", 0, "A:B", "steps A to B-1 are timed, B is compared (default: 5:25); those before A are warm-up"},
                  {"rounds", 0, "N", "runs of each arm (default: 3; with 2 no difference of time is believed)"},
                  {"skip-alone", 0, "", "no arms of one knob each: fast, all, and the cheapest set"},
                  {"output", 'o', "RUNS", "folder to make (default: runs/price-YYYYmmdd-HHMMSS)"},
                  {"html", 0, "FILE", "also write a page with a plot"},
                  {"step-on", 0, "REGEX", "a step begins with each kernel or NVTX range whose name matches"},
                  {"timeout", 0, "SECONDS", "how long no step may begin before a job is ended (1800; 0: for ever)"},
                  {"show-output", 0, "", "the jobs' output to stderr instead of job.log of each run"},
                  kJsonOption},
      .examples = {{"forkpoint price -- torchrun --nproc-per-node 8 train.py", "all knobs of the default set"},
                   {"forkpoint price --deterministic=cublas,nccl,torch-algorithms,torch-fill --html price.html -- python train.py",
                    "some of them, with a plot"}},
      .takes_command = true,
      .run = price};
  return verb;
}

}  // namespace forkpoint
