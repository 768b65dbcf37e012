// forkpoint checkpoints: lists the checkpoints of a folder, or compares two of them bit by bit.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/terminal.h"
#include "cli/verbs.h"
#include "lib/checkpoint_compare.h"
#include "lib/checkpoints.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kShown = 20;  // of differing tensors, of values, in text

std::string dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }
std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

CheckpointContent digested(const std::string& path) {
  CheckpointContent content = read_content(path);
  Progress progress(fmt::format("reading {}:", printable(path)));
  digest_content(&content, [&](uint64_t done, uint64_t total) { progress.update(done, total); });
  return content;
}

size_t unread_count(const CheckpointContent& content) {
  return content.unread.size() + static_cast<size_t>(std::count_if(content.tensors.begin(), content.tensors.end(),
                                                                   [](const auto& t) { return !t.second.unread.empty(); }));
}

Json content_json(const CheckpointContent& content) {
  Json unread = Json::array();
  for (const auto& [file, why] : content.unread) unread.push_back(fmt::format("{}: {}", file, why));
  for (const auto& [name, tensor] : content.tensors) {
    if (!tensor.unread.empty()) unread.push_back(fmt::format("{}: {}", to_string(name), tensor.unread));
  }
  const Json digest = unread.empty() && !content.tensors.empty() ? Json(hex(content_digest(content))) : Json();
  return {{"digest", digest}, {"tensors", content.tensors.size()}, {"values", content.values.size()},
          {"tensor_bytes", content.tensor_bytes}, {"unread", unread}};
}

std::string content_text(const CheckpointContent& content) {
  if (const size_t unread = unread_count(content)) return fmt::format("{} could not be read: no digest", counted(unread, "part"));
  if (content.tensors.empty()) return "no tensors";
  return fmt::format("{}, {}, {}", hex(content_digest(content)), counted(content.tensors.size(), "tensor"), human_size(content.tensor_bytes));
}

std::string row(const Checkpoint& checkpoint, const std::string& content) {
  std::string text = fmt::format("{:>9}  {:<10} {:>10}  {:<9}  {}\n", checkpoint.step, checkpoint.kind, human_size(checkpoint.size_bytes),
                                 checkpoint.whole ? "whole" : "not whole", printable(checkpoint.path));
  if (!checkpoint.whole) text += fmt::format("{:11}{}\n", "", printable(checkpoint.why_not));
  if (!content.empty()) text += fmt::format("{:11}{}\n", "", printable(content));
  return text;
}

std::vector<Checkpoint> found_in(const std::string& directory, const Arguments& arguments) {
  std::vector<Checkpoint> found = find_checkpoints(directory, arguments.value("pattern").value_or(""));
  if (!found.empty()) return found;
  throw Error(fmt::format("there is no checkpoint in {}.", directory),
              arguments.has("pattern") ? "No name in it matches the pattern."
                                       : "Known are iter_N, global_stepN, checkpoint-N, step-N and *-step=N.ckpt; name others with "
                                         "--pattern, as in 'ckpt_{step}.pt'.");
}

int list(const Arguments& arguments) {
  if (arguments.has("tensors")) throw UsageError("checkpoints: --tensors goes with two checkpoints.", "Name the second one.");
  const std::string& directory = arguments.positional()[0];
  const std::vector<Checkpoint> found = found_in(directory, arguments);
  if (arguments.has("content")) {
    uint64_t bytes = 0;
    for (const Checkpoint& checkpoint : found) bytes += checkpoint.size_bytes;
    print_note(fmt::format("--content reads all tensors: up to {}", human_size(bytes)));
  }
  Json rows = Json::array();
  std::string text = fmt::format("{:>9}  {:<10} {:>10}\n", "step", "kind", "size");
  for (const Checkpoint& checkpoint : found) {
    Json content;
    std::string shown;
    if (arguments.has("content") && checkpoint.whole) {
      const CheckpointContent read = digested(checkpoint.path);
      content = content_json(read);
      shown = content_text(read);
    }
    text += row(checkpoint, shown);
    rows.push_back({{"step", checkpoint.step}, {"kind", checkpoint.kind}, {"path", checkpoint.path}, {"size_bytes", checkpoint.size_bytes},
                    {"whole", checkpoint.whole}, {"why_not", checkpoint.whole ? Json() : Json(checkpoint.why_not)}, {"content", content}});
  }
  print_answer(arguments.has("json") ? dump({{"checkpoints", rows}}) : text);
  return 0;
}

// PATH, or DIR@STEP.
std::string checkpoint_path(const std::string& text, const Arguments& arguments) {
  std::error_code error;
  const size_t at = text.rfind('@');
  if (fs::exists(text, error) || at == text.npos) return text;
  const int64_t step = parse_count(text.substr(at + 1), fmt::format("{}: the step", text), 0);
  std::string path;
  for (const Checkpoint& checkpoint : found_in(text.substr(0, at), arguments)) {
    if (checkpoint.step != step) continue;
    if (!path.empty()) throw Error(fmt::format("{} and {} are both of step {}.", path, checkpoint.path, step), "Name one of them by its path.");
    path = checkpoint.path;
    if (!checkpoint.whole) print_warning(fmt::format("{} is not whole: {}", checkpoint.path, checkpoint.why_not));
  }
  if (path.empty()) throw Error(fmt::format("there is no checkpoint of step {} in {}.", step, text.substr(0, at)), "`forkpoint checkpoints DIR` lists them.");
  return path;
}

std::string answer(const CheckpointComparison& c, bool tensors_only) {
  if (c.outcome != Outcome::identical) return fmt::format("{}: {}", name(c.outcome), c.reason);
  return fmt::format("identical: {}, {}{}", counted(c.tensors_compared, "tensor"), human_size(c.bytes_compared),
                     tensors_only ? "; other values were not compared" : fmt::format("; {}", counted(c.values_compared, "other value")));
}

template <typename List, typename Line>
void add_lines(std::string* text, std::string_view title, const List& list, const Line& line) {
  if (list.empty()) return;
  *text += fmt::format("\n{}:\n", title);
  for (size_t i = 0; i < std::min(list.size(), kShown); ++i) *text += fmt::format("  {}\n", printable(line(list[i])));
  if (list.size() > kShown) *text += fmt::format("  and {} more (--json lists all)\n", grouped(list.size() - kShown));
}

std::string compared_text(const CheckpointComparison& c, bool tensors_only) {
  const auto as_is = [](const std::string& line) { return line; };
  const auto or_missing = [](const std::string& value) { return value.empty() ? std::string("(missing)") : value; };
  std::string text = printable(answer(c, tensors_only)) + "\n";
  add_lines(&text, "tensors that differ", c.tensors, [](const TensorDifference& d) {
    return fmt::format("{}: {} against {}{}{}", d.name, d.a, d.b, d.where.empty() ? "" : "; ", d.where);
  });
  add_lines(&text, "tensors in A only", c.only_a, as_is);
  add_lines(&text, "tensors in B only", c.only_b, as_is);
  add_lines(&text, "other values that differ", c.values,
            [&](const ValueDifference& d) { return fmt::format("{}: {} against {}", d.name, or_missing(d.a), or_missing(d.b)); });
  add_lines(&text, "not compared", c.unread, as_is);
  add_lines(&text, "notes", c.notes, as_is);
  return text;
}

Json compared_json(const CheckpointComparison& c, bool tensors_only) {
  Json tensors = Json::array(), values = Json::array();
  for (const TensorDifference& d : c.tensors) {
    Json pointing;
    if (d.pointing) pointing = {{"word", d.pointing->word}, {"element", d.pointing->tensor_index}, {"delta", d.pointing->delta}};
    tensors.push_back({{"name", d.name}, {"a", d.a}, {"b", d.b}, {"pointing", pointing}});
  }
  for (const ValueDifference& d : c.values) {
    values.push_back({{"name", d.name}, {"a", d.a.empty() ? Json() : Json(d.a)}, {"b", d.b.empty() ? Json() : Json(d.b)}});
  }
  return {{"verdict", name(c.outcome)}, {"reason", c.reason}, {"tensors_compared", c.tensors_compared}, {"bytes_compared", c.bytes_compared},
          {"values_compared", tensors_only ? Json() : Json(c.values_compared)}, {"tensors", tensors}, {"only_a", c.only_a}, {"only_b", c.only_b},
          {"values", values}, {"unread", c.unread}, {"notes", c.notes}};
}

int compare(const Arguments& arguments) {
  if (arguments.has("content")) throw UsageError("checkpoints: two checkpoints are compared by their content always.", "Leave out --content.");
  const bool tensors_only = arguments.has("tensors");
  const std::string path_a = checkpoint_path(arguments.positional()[0], arguments);
  const std::string path_b = checkpoint_path(arguments.positional()[1], arguments);
  std::error_code ignored;
  if (fs::equivalent(path_a, path_b, ignored)) print_warning("both are one and the same checkpoint.");
  const CheckpointContent a = digested(path_a), b = digested(path_b);
  const CheckpointComparison compared = compare_checkpoints(a, b, tensors_only);
  print_answer(arguments.has("json") ? dump(compared_json(compared, tensors_only)) : compared_text(compared, tensors_only));
  return exit_code(compared.outcome);
}

int checkpoints(const Arguments& arguments) { return arguments.positional().size() == 1 ? list(arguments) : compare(arguments); }

}  // namespace

const Verb& checkpoints_verb() {
  static const Verb verb{
      .name = "checkpoints",
      .summary = "list the checkpoints of a folder, or compare two of them bit by bit",
      .usage = "checkpoints [options] DIR | A B",
      .about =
          "Lists the checkpoints in DIR (Megatron, DeepSpeed, HF Trainer, DCP and torchtitan, Lightning, minigpt; others with\n"
          "--pattern): step, size, and whether each is whole: what the framework writes last is there, every file ends as\n"
          "its format says. With two checkpoints, paths or DIR@STEP: compares them tensor by tensor, also if they are\n"
          "sharded differently. Files are read, nothing in them is executed, nothing is written.\n"
          "Exit status of a comparison: 0 identical, 1 diverged, 2 trouble or incomparable.",
      .options = {{"pattern", 0, "P", "names of checkpoints, with one {step} and any *, as in 'ckpt_{step}.pt'"},
                  {"content", 0, "", "with DIR: also a digest of all tensors of each (reads them all)"},
                  {"tensors", 0, "", "with A B: compare tensors alone, not steps, rates, generators and other values"},
                  kJsonOption},
      .examples = {{"forkpoint checkpoints ckpts", "what is there, and what can be resumed from"},
                   {"forkpoint checkpoints ckpts@100 other/ckpts@100", "the same step of two runs"},
                   {"forkpoint checkpoints --pattern 'ckpt_{step}.pt' --content out", "a layout of your own"}},
      .min_positional = 1,
      .max_positional = 2,
      .run = checkpoints};
  return verb;
}

}  // namespace forkpoint
