#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/report.h"
#include "lib/verdict_text.h"

namespace forkpoint {

std::string describe(const Pointing& pointing) {
  std::string text = fmt::format("word {}", grouped(pointing.word));
  if (!pointing.tensor_index.empty()) {
    const std::string last = pointing.elements > 1 ? fmt::format(" (one of {} from there)", pointing.elements) : "";
    text += fmt::format(", element [{}]{}", fmt::join(pointing.tensor_index, ", "), last);
  }
  text += fmt::format(", changed by {:+}", pointing.delta);
  if (pointing.bit >= 0) {
    text +=
        fmt::format(" ({}2^{}): one word, consistent with a flipped bit", pointing.delta < 0 ? "-" : "+", pointing.bit);
  }
  return text;
}

std::string describe(const Coverage& coverage) {
  std::string launches;
  if (coverage.launches_compared > 0) {
    launches = fmt::format(" and {}{}", counted(coverage.launches_compared, "launch"),
                           coverage.buffers_compared == 0 ? "" : fmt::format(" ({})", counted(coverage.buffers_compared, "buffer")));
  }
  std::string text =
      fmt::format("{}{} compared on {} and {}, {} hashed, level {}", counted(coverage.records_compared, "record"), launches,
                  counted(static_cast<uint64_t>(std::max(0, coverage.ranks_compared)), "rank"),
                  counted(coverage.steps_compared, "step"), human_size(coverage.bytes_hashed),
                  coverage.level.empty() ? "unknown" : coverage.level);
  if (coverage.frames_verified)
    text += fmt::format(", checksums of {} verified", counted(coverage.frames_verified, "frame"));
  return text;
}

std::string remaining_reason(const Verdict& verdict) {
  std::string_view reason = verdict.reason;
  for (const std::string& said : {headline(verdict), verdict.first ? place_text(*verdict.first) : std::string()}) {
    if (!said.empty() && reason.starts_with(said)) reason.remove_prefix(said.size());
  }
  const std::string outcome = fmt::format("{}: ", name(verdict.outcome));
  if (headline(verdict) == outcome + verdict.reason) return {};
  reason.remove_prefix(std::min(reason.find_first_not_of(":;, "), reason.size()));
  return std::string(reason);
}

std::vector<std::string> remaining_notes(const Verdict& verdict) {
  std::vector<std::string> notes = verdict.notes;
  const std::vector<std::string>& said = verdict.cause.evidence;
  std::erase_if(notes, [&](const std::string& note) {
    const auto repeats = [&](const std::string& gap) { return note.find(gap) != note.npos; };
    return std::find(said.begin(), said.end(), note) != said.end() ||
           std::any_of(verdict.gaps.begin(), verdict.gaps.end(), repeats);
  });
  return notes;
}

std::pair<std::string, std::string> cause_parts(const Verdict& verdict) {
  const Cause& cause = verdict.cause;
  std::vector<std::string> others;
  for (const std::string& candidate : cause.class_candidates) {
    if (candidate != cause.cls) others.push_back(candidate);
  }
  const bool known = !cause.cls.empty() && cause.cls != "unknown";
  if (others.empty()) return {known ? cause.cls : "unknown", ""};
  if (!known) return {"not decided", fmt::format("{}", fmt::join(others, " or "))};
  return {cause.cls, fmt::format("not excluded: {}", fmt::join(others, ", "))};
}

std::string ranks_phrase(const Verdict& verdict) {
  const std::vector<int>& ranks = verdict.ranks_diverged;
  if (ranks.empty()) return "none";
  return fmt::format("{} of {} differ: {}", ranks.size(), verdict.coverage.ranks_compared, rank_list(ranks));
}

namespace {

// Blocks "  label      text", the label once, every entry on its own line.
class Blocks {
 public:
  Blocks(const Style& style, size_t width) : style_(style), width_(width) {}

  void add(std::string_view label, const std::string& text) {
    if (text.empty()) return;
    // Padded before it is painted: escape sequences have no width.
    const std::string padded = fmt::format("{:<{}}", label == last_ ? "" : label, kIndent - 2);
    out_ += "  " + style_.bold(padded) + wrapped(printable(text), kIndent, width_) + "\n";
    last_ = label;
  }

  void add_list(std::string_view label, const std::vector<std::string>& entries) {
    const size_t shown = entries.size() > kMostEntries ? kMostEntries - 1 : entries.size();
    for (size_t i = 0; i < shown; ++i) add(label, entries[i]);
    if (shown < entries.size()) add(label, fmt::format("and {} more (see --json)", entries.size() - shown));
  }

  std::string take() { return std::move(out_); }

 private:
  static constexpr size_t kIndent = 14;
  static constexpr size_t kMostEntries = 12;
  const Style& style_;
  size_t width_;
  std::string out_;
  std::string_view last_;
};

std::string painted_headline(const Verdict& verdict, const Style& style) {
  const std::string text = printable(headline(verdict));
  switch (verdict.outcome) {
    case Outcome::identical:
      return style.green(text);
    case Outcome::diverged:
      return style.red(text);
    case Outcome::incomparable:
      return style.yellow(text);
  }
  return text;
}

std::string later_phrase(const Verdict& verdict) {
  const bool one = verdict.propagated == 1, launches = verdict.coverage.launches_compared > 0;
  return fmt::format("{} {} as a consequence",
                     !launches ? counted(verdict.propagated, "later record")
                     : one     ? "one later record or launch"
                               : grouped(verdict.propagated) + " later records and launches",
                     one ? "differs" : "differ");
}

void add_divergence(const Verdict& verdict, Blocks* blocks) {
  const Divergence& first = *verdict.first;
  if (!verdict.cause.cls.empty() || !verdict.cause.class_candidates.empty()) {
    const auto [cls, others] = cause_parts(verdict);
    blocks->add("cause", others.empty() ? cls : fmt::format("{} ({})", cls, others));
  }
  blocks->add_list("evidence", verdict.cause.evidence);
  if (first.pointing) blocks->add("points at", describe(*first.pointing));
  blocks->add(!verdict.one_run ? "run A" : verdict.finding.empty() ? "one rank" : "first pass", first.before);
  blocks->add(!verdict.one_run ? "run B" : verdict.finding.empty() ? "another" : "recomputed", first.after);
  if (!first.kernel.empty()) blocks->add("kernel", first.kernel);
  std::vector<std::string> also;
  for (const Divergence& divergence : verdict.also_first) also.push_back(place_text(divergence));
  blocks->add_list("also first", also);
  blocks->add("ranks", ranks_phrase(verdict));
  blocks->add("propagated", verdict.propagated
                                ? later_phrase(verdict)
                                : "nothing else differs");
}

}  // namespace

std::string text_report(const Verdict& verdict, const Style& style, size_t width) {
  std::string out = painted_headline(verdict, style) + "\n\n";
  Blocks blocks(style, width);
  blocks.add("reason", remaining_reason(verdict));
  if (verdict.first) add_divergence(verdict, &blocks);
  blocks.add_list("note", remaining_notes(verdict));
  blocks.add_list("gap", verdict.gaps);
  blocks.add("coverage", describe(verdict.coverage));
  blocks.add_list("not seen", verdict.coverage.limits);
  blocks.add("next", verdict.cause.next);
  return out + blocks.take();
}

}  // namespace forkpoint
