#include "lib/python_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace forkpoint {
namespace {

constexpr std::string_view kWords[] = {"NaN", "Infinity", "-Infinity"};

// The whole number at the front, if it may have over 64 bits; else empty.
std::string_view long_integer(std::string_view text) {
  constexpr size_t kFits = 18;  // digits
  const size_t first = text.starts_with('-') ? 1 : 0;
  const size_t end = std::min(text.find_first_not_of("0123456789", first), text.size());
  if (end - first <= kFits || text[first] == '0') return {};
  return end < text.size() && std::string_view(".eE").find(text[end]) != std::string_view::npos ? std::string_view()
                                                                                                : text.substr(0, end);
}

// Such a word or number outside of texts, as a text; all else as it was.
std::string as_json(std::string_view text) {
  std::string result;
  result.reserve(text.size() + 64);
  bool in_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_text = !in_text;
    if (in_text && c == '\\' && i + 1 < text.size()) result += text[i++];
    std::string_view found;
    for (const std::string_view word : kWords) {
      if (!in_text && c != '"' && text.substr(i).starts_with(word)) found = word;
    }
    const bool in_number = i > 0 && std::string_view("0123456789.eE+-").find(text[i - 1]) != std::string_view::npos;
    if (!in_text && found.empty() && !in_number) found = long_integer(text.substr(i));
    if (found.empty()) {
      result += text[i];
    } else {
      result += fmt::format("\"\\u{:04x}{}\"", static_cast<int>(kNotFinite), found);
      i += found.size() - 1;
    }
  }
  return result;
}

}  // namespace

nlohmann::json parse_python_json(std::string_view text) {
  // What is nested deeper is no file of a framework's, and reading, copying and freeing it recurse.
  constexpr int kMaxDepth = 200;
  bool too_deep = false, rounded = false;
  const auto bounded = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json& value) {
    too_deep = too_deep || depth > kMaxDepth;
    // What has no room in 64 bits is read as a floating point number.
    rounded = rounded || (value.is_number_float() && std::abs(value.get<double>()) >= 0x1p63);
    return !too_deep;
  };
  const auto parse = [&](std::string_view json) { return nlohmann::json::parse(json, bounded, false); };
  nlohmann::json value = parse(text);
  if ((value.is_discarded() || rounded) && !too_deep) value = parse(as_json(text));
  return too_deep ? nlohmann::json(nlohmann::json::value_t::discarded) : value;
}

std::string not_finite(const nlohmann::json& value) {
  if (!value.is_string()) return {};
  const auto& text = value.get_ref<const std::string&>();
  return text.starts_with(kNotFinite) ? text.substr(1) : std::string();
}

}  // namespace forkpoint
