// Values of options: step ranges, rank lists, counts and sizes.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <regex>

#include "cli/arguments.h"

namespace forkpoint {
namespace {

constexpr int kMaxRank = (1 << 20) - 1;

std::optional<int64_t> number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

UsageError bad(std::string_view option, std::string_view text, std::string_view expected) {
  return UsageError(fmt::format("{} `{}` is not {}.", option, text, expected));
}

}  // namespace

StepRange parse_steps(std::string_view text, std::string_view option) {
  constexpr std::string_view kExpected = "a range of steps such as 100:200, 100:, :200 or 100";
  const size_t colon = text.find(':');
  const std::string_view left = text.substr(0, colon);
  const std::string_view right = colon == text.npos ? left : text.substr(colon + 1);
  StepRange range{number(left), number(right)};
  if ((!left.empty() && !range.first) || (!right.empty() && !range.last)) throw bad(option, text, kExpected);
  if (left.empty() && right.empty()) throw bad(option, text, kExpected);
  if (range.first && range.last && *range.first > *range.last) {
    throw UsageError(fmt::format("{} `{}` is empty: the first step is after the last.", option, text));
  }
  return range;
}

std::vector<int> parse_ranks(std::string_view text, std::string_view option) {
  std::vector<int> ranks;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string_view part = text.substr(start, end - start);
    const size_t dash = part.find('-');
    const auto first = number(part.substr(0, dash));
    const auto last = dash == part.npos ? first : number(part.substr(dash + 1));
    if (!first || !last || *last < *first || *last > kMaxRank) {
      throw bad(option, text, "a list of ranks such as 0,2,4-7");
    }
    for (int64_t rank = *first; rank <= *last; ++rank) ranks.push_back(static_cast<int>(rank));
    start = end + 1;
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::string parse_launch(std::string_view text) {
  const size_t colon = std::min(text.find(':'), text.size());
  const bool before_the_first = text.substr(0, colon) == "-1";
  if ((!before_the_first && !number(text.substr(0, colon))) || colon == text.size() || !number(text.substr(colon + 1))) {
    throw bad("--launch", text, "a step (-1: before the first) and the index of a launch in it, such as 7:1234");
  }
  return std::string(text);
}

std::string parse_operands(std::string_view text, std::string_view option) {
  static const std::regex form("step=[0-9]{1,18}(;launch=[0-9]{1,18}|(;phase=(load|data|forward|backward|collective|optimizer|state)|;layer=[^;]+|;op=[^;]+)+)");
  if (!std::regex_match(text.begin(), text.end(), form)) {
    throw bad(option, text, "'step=N;launch=INDEX' or 'step=N;phase=P;layer=L;op=O', of which one of P, L and O is enough");
  }
  return std::string(text);
}

int64_t parse_count(std::string_view text, std::string_view option, int64_t least) {
  const auto value = number(text);
  if (!value || *value < least) throw bad(option, text, fmt::format("a whole number of at least {}", least));
  return *value;
}

uint64_t parse_size_bytes(std::string_view text, std::string_view option) {
  constexpr std::string_view kExpected = "a size such as 500M, 2GiB or 1000000";
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto value = number(text.substr(0, digits));
  std::string unit(text.substr(digits));
  if (unit.ends_with("iB")) {
    unit.resize(unit.size() - 2);
  } else if (unit.ends_with('B')) {
    unit.pop_back();
  }
  const size_t power = unit.empty() ? 0 : std::string_view("KMGT").find(std::toupper(unit.front())) + 1;
  if (!value || *value == 0 || unit.size() > 1 || (!unit.empty() && power == 0)) throw bad(option, text, kExpected);
  const uint64_t scale = uint64_t{1} << (10 * power);
  if (static_cast<uint64_t>(*value) > std::numeric_limits<int64_t>::max() / scale) throw bad(option, text, kExpected);
  return static_cast<uint64_t>(*value) * scale;
}

}  // namespace forkpoint
