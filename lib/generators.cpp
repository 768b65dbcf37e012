#include "lib/generators.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace forkpoint {
namespace {

struct Generator {
  std::string_view tensor, whose;
  std::string unknown() const { return fmt::format("whether {} generator was seeded before the recording began", whose); }
  std::string unseen() const { return fmt::format("the state of {} generator, which was not seen to be seeded", whose); }
};
constexpr std::array<Generator, 2> kGenerators = {{{"python.rng", "Python's"}, {"numpy.rng", "NumPy's"}}};

bool says(const HashStreamReader& stream, const std::string& begin) {
  return std::ranges::any_of(stream.coverage_limits(), [&](const CoverageLimit& limit) { return limit.what.starts_with(begin); });
}

}  // namespace

bool is_telling_generator(const HashStreamReader& a, const HashStreamReader& b, std::string_view tensor) {
  for (const Generator& generator : kGenerators) {
    if (tensor != generator.tensor) continue;
    const auto was_seeded = [&](const HashStreamReader& stream) {
      return !says(stream, generator.unknown()) && !says(stream, generator.unseen());
    };
    return was_seeded(a) || was_seeded(b);
  }
  return true;
}

bool says_seeding_unknown(std::string_view limit) {
  return std::ranges::any_of(kGenerators, [&](const Generator& generator) { return limit.starts_with(generator.unknown()); });
}

std::string seeding_unknown_for(std::string_view limit) {
  for (const Generator& generator : kGenerators) {
    if (limit.starts_with(generator.unseen())) return generator.unknown();
  }
  return {};
}

}  // namespace forkpoint
