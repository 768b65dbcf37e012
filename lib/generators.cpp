#include "lib/generators.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace forkpoint {
namespace {

struct Generator {
  std::string_view tensor, whose;
  std::string unknown() const {
    return fmt::format("whether {} generator was seeded before the recording began", whose);
  }
  std::string unseen() const {
    return fmt::format("the state of {} generator, which was not seen to be seeded", whose);
  }
};
constexpr std::array<Generator, 2> kGenerators = {{{"python.rng", "Python's"}, {"numpy.rng", "NumPy's"}}};

bool says(const HashStreamReader& stream, const std::string& begin) {
  return std::ranges::any_of(stream.coverage_limits(),
                             [&](const CoverageLimit& limit) { return limit.what.starts_with(begin); });
}

// What was recorded was seeded, be it behind the first step, unless the stream says that it cannot know.
bool was_seeded(const HashStreamReader& stream, const Generator& generator) {
  const auto is_it = [&](const Site& site) { return site.role == Role::rng && site.tensor == generator.tensor; };
  return std::ranges::any_of(stream.sites(), is_it) && !says(stream, generator.unknown());
}

}  // namespace

bool is_telling(const HashStreamReader& a, const HashStreamReader& b, const Site& site) {
  if (site.role != Role::rng) return true;
  // Which one a masked name is cannot be told; those of PyTorch are tensors.
  if (site.tensor.starts_with("~")) {
    const auto unknown = [](const HashStreamReader& stream) {
      return std::ranges::any_of(kGenerators,
                                 [&](const Generator& generator) { return says(stream, generator.unknown()); });
    };
    return site.kind == Kind::tensor || !(unknown(a) || unknown(b));
  }
  for (const Generator& generator : kGenerators) {
    if (site.tensor == generator.tensor) return was_seeded(a, generator) || was_seeded(b, generator);
  }
  return true;
}

bool says_seeding_unknown(std::string_view limit) {
  return std::ranges::any_of(kGenerators,
                             [&](const Generator& generator) { return limit.starts_with(generator.unknown()); });
}

std::string seeding_unknown_for(std::string_view limit) {
  for (const Generator& generator : kGenerators) {
    if (limit.starts_with(generator.unseen())) return generator.unknown();
  }
  return {};
}

}  // namespace forkpoint
