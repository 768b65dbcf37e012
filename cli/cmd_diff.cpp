// forkpoint diff: compares two runs and prints the verdict.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/diff.h"
#include "lib/replicas.h"

namespace forkpoint {
namespace {

DiffOptions options_from(const Arguments& arguments) {
  DiffOptions options;
  if (const auto text = arguments.value("steps")) {
    const StepRange range = parse_steps(*text);
    options.first_step = range.first;
    options.last_step = range.last;
  }
  if (const auto text = arguments.value("ranks")) options.ranks = parse_ranks(*text);
  options.full_scan = arguments.has("full-scan");
  options.verify_checksums = !arguments.has("no-verify");
  options.want_map = arguments.has("html");
  return options;
}

// A report replaces a report: never a device, a pipe, a link, or a file of the runs that were compared.
void check_report_path(const std::string& path, const std::string& run_a, const std::string& run_b) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error(fmt::format("the report `{}` was not written: something that is not a regular file is there.", path),
                "Name a new file.");
  }
  fs::path folder = fs::absolute(path, error).parent_path();
  for (; !folder.empty(); folder = folder.parent_path()) {
    for (const std::string* run : {&run_a, &run_b}) {
      if (fs::equivalent(folder, *run, error)) {
        throw Error(fmt::format("the report `{}` was not written: it would lie within the run {}.", path, *run),
                    "Name a file outside the run folders.");
      }
    }
    if (folder == folder.parent_path()) break;
  }
}

// Under a temporary name first, so that nobody opens half a page.
void write_whole(const std::string& path, const std::string& content) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, getpid());
  errno = 0;
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return;
  const int error = errno;
  unlink(temporary.c_str());
  throw Error(fmt::format("cannot write the report `{}`: {}.", path, std::strerror(error ? error : EIO)),
              "Is the folder there and writable, and is there space?");
}

std::string as_json(const Verdict& verdict) {
  using Json = nlohmann::ordered_json;
  // Names come from files and need not be UTF-8.
  return to_json(verdict).dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// One run against itself.
int compare_replicas(const Arguments& arguments) {
  for (const char* other : {"html", "full-scan"}) {
    if (arguments.has(other)) throw UsageError(fmt::format("diff: --replicas goes without --{}.", other));
  }
  if (arguments.positional().size() != 1) {
    throw UsageError("diff: --replicas compares the ranks of one run with each other.", "Name one run: forkpoint diff --replicas RUN");
  }
  DiffOptions options = options_from(arguments);
  const std::string& path = arguments.positional()[0];
  const Run run = Run::open(path);
  Progress progress(fmt::format("comparing the ranks of {}:", printable(path)));
  options.progress = [&](uint64_t done, uint64_t total) { progress.update(done, total); };
  const Verdict verdict = diff_replicas(run, options);
  progress.clear();
  print_answer(arguments.has("json") ? as_json(verdict) : text_report(verdict, Style(stdout), terminal_width(stdout)));
  flush_answer();
  return exit_code(verdict.outcome);
}

int diff_runs(const Arguments& arguments) {
  if (arguments.has("replicas")) return compare_replicas(arguments);
  if (arguments.positional().size() != 2) {
    throw UsageError("diff: it compares two runs.", "Name run A and run B; one run against itself: forkpoint diff --replicas RUN");
  }
  DiffOptions options = options_from(arguments);
  const std::string& path_a = arguments.positional()[0];
  const std::string& path_b = arguments.positional()[1];
  const auto html = arguments.value("html");
  if (html && html->empty()) throw UsageError("diff: --html is empty.", "Give it the file to write.");
  const Run a = Run::open(path_a), b = Run::open(path_b);
  std::error_code ignored;
  if (std::filesystem::equivalent(path_a, path_b, ignored)) print_warning("both are one and the same folder.");
  Progress progress(fmt::format("comparing {} and {}:", printable(path_a), printable(path_b)));
  options.progress = [&](uint64_t done, uint64_t total) { progress.update(done, total); };
  const Verdict verdict = diff(a, b, options);
  progress.clear();
  // The verdict first: it must reach the user whatever happens to the page.
  print_answer(arguments.has("json") ? as_json(verdict) : text_report(verdict, Style(stdout), terminal_width(stdout)));
  flush_answer();
  if (html) {
    check_report_path(*html, path_a, path_b);
    write_whole(*html, html_report(a, b, verdict));
    print_note(fmt::format("report: {}", *html));
  }
  return exit_code(verdict.outcome);
}

}  // namespace

const Verb& diff_verb() {
  static const Verb verb{
      .name = "diff",
      .summary = "compare two runs: the first step, rank, layer and tensor that differ, and why",
      .usage = "diff [options] A B | --replicas RUN",
      .about =
          "Compares run A (the reference) with run B, bit by bit, and names the first divergence: the earliest\n"
          "record whose inputs agree and whose output differs. Runs that do not line up (cut short, other ranks, a\n"
          "layer more) are compared in what they share. With --replicas, one run against itself: parameters, optimizer\n"
          "state and reduced gradients must be equal on all ranks that hold them, and what activation checkpointing\n"
          "recomputes must be what was computed. Exit status: 0 identical, 1 diverged, 2 trouble or incomparable.",
      .options = {kStepsOption,
                  kRanksOption,
                  kJsonOption,
                  {"replicas", 0, "", "compare the ranks of one run with each other"},
                  {"html", 0, "FILE", "also write a self-contained page: map, losses, records around the fork"},
                  {"full-scan", 0, "", "compare every record, also where the digest trees agree"},
                  {"no-verify", 0, "", "do not check the checksum of every frame (faster, weaker)"}},
      .examples = {{"forkpoint diff runs/good runs/bad", "the verdict as text"},
                   {"forkpoint diff --html fork.html runs/good runs/bad", "and a page to look at or to send"},
                   {"forkpoint diff --replicas runs/good", "did its ranks stay in sync?"},
                   {"forkpoint diff --json runs/good runs/bad | jq .first", "for a program"}},
      .min_positional = 1,
      .max_positional = 2,
      .run = diff_runs};
  return verb;
}

}  // namespace forkpoint
