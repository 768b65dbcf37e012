#include "lib/verdict.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/verdict_text.h"

namespace forkpoint {

std::string_view name(Outcome outcome) {
  switch (outcome) {
    case Outcome::identical: return "identical";
    case Outcome::diverged: return "diverged";
    case Outcome::incomparable: break;
  }
  return "incomparable";
}

int exit_code(Outcome outcome) {
  switch (outcome) {
    case Outcome::identical: return 0;
    case Outcome::diverged: return 1;
    case Outcome::incomparable: break;
  }
  return 2;
}

std::string grouped(uint64_t number) {
  std::string digits = std::to_string(number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string counted(uint64_t number, std::string_view noun) {
  if (number == 1) return fmt::format("1 {}", noun);
  const std::string_view last = noun.substr(noun.size() - std::min<size_t>(noun.size(), 2));
  const auto one_of = [&](std::string_view letters) { return !last.empty() && letters.find(last.back()) != letters.npos; };
  if (last.size() == 2 && one_of("y") && std::string_view("aeiou").find(last[0]) == std::string_view::npos) {
    return fmt::format("{} {}ies", grouped(number), noun.substr(0, noun.size() - 1));
  }
  const bool hisses = last == "ch" || last == "sh" || one_of("sx");
  return fmt::format("{} {}{}", grouped(number), noun, hisses ? "es" : "s");
}

std::string number_list(const std::vector<int64_t>& sorted_numbers) {
  std::string text;
  for (size_t i = 0; i < sorted_numbers.size();) {
    size_t end = i + 1;
    while (end < sorted_numbers.size() && sorted_numbers[end] == sorted_numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(sorted_numbers[i]);
    if (end - i > 1) text += fmt::format("{}{}", end - i == 2 ? ", " : "-", sorted_numbers[end - 1]);
    i = end;
  }
  return text;
}

std::string rank_list(const std::vector<int>& sorted_ranks) {
  return fmt::format("rank{} {}", sorted_ranks.size() == 1 ? "" : "s",
                     number_list(std::vector<int64_t>(sorted_ranks.begin(), sorted_ranks.end())));
}

std::string place_text(std::string_view phase, std::string_view layer, std::string_view op, std::string_view tensor) {
  std::string text(phase);
  if (!layer.empty()) text += fmt::format("{}{}", text.empty() ? "" : ", ", layer);
  if (!op.empty()) text += layer.empty() ? fmt::format("{}{}", text.empty() ? "" : ", ", op) : fmt::format(" ({})", op);
  if (!tensor.empty()) text += fmt::format("{}{}", text.empty() ? "" : ": ", tensor);
  return text;
}

std::string place_text(const Site& site) {
  return place_text(name(site.phase), site.layer, site.op, site.tensor);
}

std::string when_text(const Divergence& at) {
  if (!at.in_prologue) return fmt::format("step {}", at.step);
  // Runs that begin later may have steps before it in the other run.
  return at.step > 0 ? fmt::format("before step {}", at.step) : "before the first step";
}

std::string place_text(const Divergence& at) {
  std::string text = fmt::format("{}, {}", when_text(at), at.rank < 0 ? "all ranks" : fmt::format("rank {}", at.rank));
  if (at.micro_step > 0) text += fmt::format(", micro-step {}", at.micro_step);
  std::string tensor = at.tensor.empty() ? at.kernel : at.tensor;
  if (at.kind == Kind::launch && !at.kernel.empty()) {
    const std::string& kernel = at.short_kernel.empty() ? at.kernel : at.short_kernel;
    tensor = at.tensor.empty() ? kernel : fmt::format("{}, {}", kernel, at.tensor);
  }
  const std::string site = place_text(at.phase ? name(*at.phase) : std::string_view(), at.layer, at.op, tensor);
  return site.empty() ? text : text + ", " + site;
}

std::string at_text(const Divergence& at) { return fmt::format("{}{}", at.in_prologue ? "" : "at ", place_text(at)); }

std::string headline(const Verdict& verdict) {
  switch (verdict.outcome) {
    case Outcome::identical:
      return fmt::format(
          "identical{}{}: {}{} in {} on {} agree (level {}{})", verdict.until.empty() ? "" : " ", verdict.until,
          counted(verdict.coverage.records_compared, "record"),
          verdict.coverage.launches_compared == 0
              ? ""
              : fmt::format(" and {}", counted(verdict.coverage.launches_compared, "launch")),
          counted(verdict.coverage.steps_compared, "step"),
          counted(static_cast<uint64_t>(verdict.coverage.ranks_compared), "rank"), verdict.coverage.level,
          verdict.coverage.frames_verified == 0 ? "; the files were not verified" : "");
    case Outcome::diverged:
      if (!verdict.first) return "diverged at an unknown place";
      return fmt::format("{} {}", verdict.finding.empty() ? "diverged" : verdict.finding, at_text(*verdict.first));
    case Outcome::incomparable: break;
  }
  return "incomparable: " + verdict.reason;
}

}  // namespace forkpoint
