#include "cli/check_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr size_t kMostTensors = 8;

// Names come from files: what is no UTF-8 or no character of XML is replaced.
std::string valid_text(std::string_view text) {
  using Json = nlohmann::json;
  const std::string quoted = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string valid = Json::parse(quoted).get<std::string>();
  for (char& c : valid) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') c = '?';
  }
  return valid;
}

std::string xml(std::string_view text) {
  std::string out;
  for (const char c : valid_text(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\n':
        out += "&#10;";
        break;
      case '\t':
        out += "&#9;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// Within a line or a cell of a table.
std::string markdown(std::string_view text) {
  std::string out;
  for (const char c : valid_text(text)) {
    if (c == '\n' || c == '\t') {
      out += ' ';
      continue;
    }
    if (std::string_view("\\`*_{}[]<>#|~").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// What is to be said below the headline, one sentence each.
std::vector<std::string> details(const CheckReport& report) {
  std::vector<std::string> lines;
  if (!report.comparison) return report.changes;
  const auto& [verdict, groups, dependencies, tensors, compared] = *report.comparison;
  for (const Divergence& at : verdict.also_first) lines.push_back("also " + at_text(at));
  for (const std::string& text : verdict.cause.evidence) lines.push_back(text);
  if (!verdict.cause.class_candidates.empty()) {
    std::string classes;
    for (const std::string& cls : verdict.cause.class_candidates) classes += (classes.empty() ? "" : " or ") + cls;
    lines.push_back("cause: " + classes);
  }
  for (const std::string& text : dependencies) lines.push_back("another " + text);
  for (const std::string& gap : verdict.gaps) lines.push_back("lost: " + gap);
  for (const std::string& note : verdict.notes) lines.push_back(note);
  for (const std::string& limit : verdict.coverage.limits) lines.push_back("not seen: " + limit);
  if (!tensors.empty()) {
    lines.push_back(
        fmt::format("after the last step {} not as in the reference:",
                    tensors.size() == 1 ? "this tensor is" : fmt::format("{} tensors are", tensors.size())));
    for (size_t i = 0; i < std::min(tensors.size(), kMostTensors); ++i) lines.push_back("  " + tensors[i]);
    if (tensors.size() > kMostTensors) lines.push_back(fmt::format("  and {} more", tensors.size() - kMostTensors));
  }
  return lines;
}

std::string next_step(const CheckReport& report) {
  if (!report.comparison || report.comparison->verdict.outcome != Outcome::diverged) return {};
  return fmt::format(
      "which layer and op: run the same command with `forkpoint record --level layer` here and where {} is from, and "
      "`forkpoint diff` "
      "the two; if the change is meant, --update",
      report.reference);
}

enum class Mark { passed, failed, error, skipped };

Mark mark_of(const CheckReport& report, const GroupVerdict& group) {
  switch (group.state) {
    case GroupState::same:
      return Mark::passed;
    case GroupState::absent:
      return Mark::skipped;
    case GroupState::unknown:
      return Mark::error;
    case GroupState::differs:
      break;
  }
  return report.comparison->verdict.outcome == Outcome::diverged ? Mark::failed : Mark::error;
}

std::string sentence_of(const CheckReport& report, const GroupVerdict& group) {
  if (group.state == GroupState::absent) return group.sentence.empty() ? "nothing of it was recorded" : group.sentence;
  if (group.state != GroupState::differs) return group.sentence;
  return fmt::format("{} {} ({})", group.group, group.sentence, check_headline(report));
}

std::vector<GroupVerdict> groups_of(const CheckReport& report) {
  if (report.comparison) return report.comparison->groups;
  std::vector<GroupVerdict> groups;
  for (const char* name : kReferenceGroups) {
    if (std::string_view(name) == kRestingGroup) continue;  // nobody misses it
    groups.push_back({name, report.updated ? GroupState::absent : GroupState::unknown, 0, report.sentence});
  }
  return groups;
}

std::string test_case(const CheckReport& report, const GroupVerdict& group, double seconds) {
  const Mark mark = mark_of(report, group);
  std::string text = fmt::format("    <testcase classname=\"{}\" name=\"{}\" time=\"{:.3f}\"", xml(report.reference),
                                 xml(group.group), seconds);
  if (mark == Mark::passed) return text + "/>\n";
  const std::string sentence = sentence_of(report, group);
  if (mark == Mark::skipped)
    return text + fmt::format(">\n      <skipped message=\"{}\"/>\n    </testcase>\n", xml(sentence));
  const char* element = mark == Mark::failed ? "failure" : "error";
  std::string body;
  for (const std::string& line : details(report)) body += line + "\n";
  return text + fmt::format(">\n      <{} type=\"{}\" message=\"{}\">{}</{}>\n    </testcase>\n", element,
                            mark == Mark::failed ? "diverged" : "incomparable", xml(sentence), xml(body), element);
}

}  // namespace

std::string check_headline(const CheckReport& report) {
  return report.comparison ? headline(report.comparison->verdict) : report.sentence;
}

std::string check_text(const CheckReport& report, const Style& style) {
  const Outcome outcome = report.comparison ? report.comparison->verdict.outcome : Outcome::identical;
  const std::string first = printable(check_headline(report));
  std::string text = (outcome == Outcome::identical  ? style.green(first)
                      : outcome == Outcome::diverged ? style.red(first)
                                                     : style.yellow(first)) +
                     "\n";
  for (const std::string& line : details(report)) text += "  " + printable(line) + "\n";
  if (const std::string next = next_step(report); !next.empty()) text += "\n  " + printable(next) + "\n";
  return text;
}

std::string check_junit(const CheckReport& report) {
  const std::vector<GroupVerdict> groups = groups_of(report);
  size_t counts[4] = {};
  for (const GroupVerdict& group : groups) ++counts[static_cast<size_t>(mark_of(report, group))];
  const std::string numbers =
      fmt::format("tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3f}\"", groups.size(),
                  counts[static_cast<size_t>(Mark::failed)], counts[static_cast<size_t>(Mark::error)],
                  counts[static_cast<size_t>(Mark::skipped)], report.seconds);
  std::string text =
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"forkpoint check\" " + numbers + ">\n";
  text += "  <testsuite name=\"forkpoint check\" " + numbers + ">\n";
  // The whole time is the job's, of which the groups share nothing: the first one carries it, so that it adds up.
  for (size_t i = 0; i < groups.size(); ++i) text += test_case(report, groups[i], i == 0 ? report.seconds : 0);
  text += fmt::format("    <system-out>{}</system-out>\n", xml(check_headline(report)));
  return text + "  </testsuite>\n</testsuites>\n";
}

std::string check_markdown(const CheckReport& report) {
  std::string text = fmt::format("### forkpoint check: {}\n\n", markdown(check_headline(report)));
  if (report.comparison) {
    text += "| group | records | verdict |\n| --- | ---: | --- |\n";
    for (const GroupVerdict& group : report.comparison->groups) {
      if (group.state == GroupState::absent) continue;
      const std::string verdict = group.state == GroupState::same      ? "as in the reference"
                                  : group.state == GroupState::differs ? "**" + markdown(group.sentence) + "**"
                                                                       : "cannot be told";
      text += fmt::format("| {} | {} | {} |\n", group.group, grouped(group.records), verdict);
    }
    text += "\n";
  }
  for (const std::string& line : details(report)) {
    text += fmt::format("{}- {}\n", line.starts_with("  ") ? "  " : "",
                        markdown(std::string_view(line).substr(line.starts_with("  ") ? 2 : 0)));
  }
  if (const std::string next = next_step(report); !next.empty()) text += fmt::format("\nNext: {}\n", markdown(next));
  if (!report.run.empty())
    text += fmt::format("\nReference {}, run {}, {:.1f} s.\n", markdown(report.reference), markdown(report.run),
                        report.seconds);
  return text + "\n";
}

}  // namespace forkpoint
