#include "lib/python_json.h"

#include <fmt/format.h>

namespace forkpoint {
namespace {

constexpr std::string_view kWords[] = {"NaN", "Infinity", "-Infinity"};

// Such a word outside of texts, as a text; all else as it was.
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
  bool too_deep = false;
  const auto bounded = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return !too_deep;
  };
  const auto parse = [&](std::string_view json) { return nlohmann::json::parse(json, bounded, false); };
  nlohmann::json value = parse(text);
  if (value.is_discarded() && !too_deep) value = parse(as_json(text));
  return too_deep ? nlohmann::json(nlohmann::json::value_t::discarded) : value;
}

std::string not_finite(const nlohmann::json& value) {
  if (!value.is_string()) return {};
  const auto& text = value.get_ref<const std::string&>();
  return text.starts_with(kNotFinite) ? text.substr(1) : std::string();
}

}  // namespace forkpoint
