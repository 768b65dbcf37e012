// JSON as Python's json module writes it: with NaN, Infinity and -Infinity, which JSON itself has not, and with whole
// numbers of any length. The log of a training whose loss blew up holds the first, the state of numpy's generators the
// second. Pure functions.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace forkpoint {

// Numbers of these kinds (whole ones: of over 64 bits) become text that begins with kNotFinite ("NaN" behind it).
// is_discarded(): it is no JSON.
inline constexpr char kNotFinite = '\x01';
nlohmann::json parse_python_json(std::string_view text);

// "NaN" of such a text, or the digits; empty for any other value.
std::string not_finite(const nlohmann::json& value);

}  // namespace forkpoint
