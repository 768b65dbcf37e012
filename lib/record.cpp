#include "lib/record.h"

#include <fmt/format.h>

#include <array>
#include <bit>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr std::array<std::string_view, kPhaseCount> kPhaseNames = {"load",       "data",      "forward", "backward",
                                                                   "collective", "optimizer", "state"};
constexpr std::array<std::string_view, 3> kLevelNames = {"step", "layer", "launch"};
constexpr std::array<std::string_view, kKindCount> kKindNames = {"tensor", "launch", "collective",
                                                                 "scalar", "state",  "structure"};
constexpr std::array<std::string_view, kRoleCount> kRoleNames = {
    "input",  "output", "parameter", "gradient", "optimizer_state", "batch", "loss",
    "scalar", "rng",    "sampler",   "other"};

template <size_t kCount>
std::string_view name_in(const std::array<std::string_view, kCount>& names, uint8_t number) {
  return number < kCount ? names[number] : std::string_view("unknown");
}

template <typename Enum, size_t kCount>
std::optional<Enum> number_in(const std::array<std::string_view, kCount>& names, std::string_view text) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

// Each part goes in with its length, so that ("ab", "c") and ("a", "bc") differ.
class KeyBytes {
 public:
  void add(std::string_view text) {
    add(static_cast<uint64_t>(text.size()));
    bytes_.append(text);
  }
  void add(uint64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

  // The plain digest is linear in the bytes; mixing makes keys safe to add and to combine.
  Digest key(uint64_t seed) const {
    const Digest plain = digest_only(bytes_.data(), bytes_.size());
    const Digest mixed{mix64(plain.a ^ mix64(seed)), mix64(plain.b + mix64(~seed))};
    return {mixed.a == 0 ? 1 : mixed.a, mixed.b};
  }

 private:
  static_assert(std::endian::native == std::endian::little);
  std::string bytes_;
};

std::string bracketed(const std::vector<int64_t>& numbers) { return fmt::format("[{}]", fmt::join(numbers, ", ")); }

}  // namespace

std::string_view name(Phase phase) { return name_in(kPhaseNames, static_cast<uint8_t>(phase)); }
std::string_view name(Level level) { return name_in(kLevelNames, static_cast<uint8_t>(level)); }
std::string_view name(Kind kind) { return name_in(kKindNames, static_cast<uint8_t>(kind)); }
std::string_view name(Role role) { return name_in(kRoleNames, static_cast<uint8_t>(role)); }
std::optional<Phase> phase_from_name(std::string_view text) { return number_in<Phase>(kPhaseNames, text); }
std::optional<Level> level_from_name(std::string_view text) { return number_in<Level>(kLevelNames, text); }

Digest site_key(const Site& site) {
  KeyBytes bytes;
  bytes.add(static_cast<uint64_t>(site.phase) | static_cast<uint64_t>(site.kind) << 8 |
            static_cast<uint64_t>(site.role) << 16);
  bytes.add(site.layer);
  bytes.add(site.op);
  bytes.add(site.tensor);
  bytes.add(site.communicator);
  return bytes.key(1);
}

uint64_t op_key(const Site& site) {
  KeyBytes bytes;
  bytes.add(static_cast<uint64_t>(site.phase));
  bytes.add(site.layer);
  bytes.add(site.op);
  bytes.add(site.communicator);
  return bytes.key(2).a;
}

uint64_t layout_key(const Layout& layout) {
  KeyBytes bytes;
  bytes.add(static_cast<uint64_t>(layout.dtype));
  for (const auto* numbers : {&layout.shape, &layout.global_shape, &layout.global_offset}) {
    bytes.add(static_cast<uint64_t>(numbers->size()));
    for (int64_t number : *numbers) bytes.add(static_cast<uint64_t>(number));
  }
  return bytes.key(3).a;
}

int64_t element_count(const Layout& layout) {
  uint64_t count = 1;  // unsigned: a damaged shape may overflow, which must not be undefined
  for (int64_t extent : layout.shape) count *= static_cast<uint64_t>(extent);
  return static_cast<int64_t>(count);
}

std::string to_string(const Layout& layout) {
  std::string text = fmt::format("{}{}", name(layout.dtype), bracketed(layout.shape));
  if (layout.is_shard()) {
    text += fmt::format(" of {} at {}", bracketed(layout.global_shape), bracketed(layout.global_offset));
  }
  return text;
}

Digest scalar_digest(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  return {bits, mix64(bits)};
}

double scalar_value(const Digest& digest) { return std::bit_cast<double>(digest.a); }

// Each lane is a bijection of digest.a alone, of digest.b alone, of the place alone and of the identity alone, so a
// change in one of them can never be missed; for changes in several the lanes are independent.
Digest tree_leaf(const Digest& site_key, uint64_t layout_key, const Record& record) {
  const uint64_t place = static_cast<uint64_t>(static_cast<uint32_t>(record.micro_step)) << 32 | record.call;
  const uint64_t flags = (record.flags & ~uint64_t{kRecordAhead}) * 0x9E3779B97F4A7C15ull;
  const uint64_t identity = mix64(site_key.a ^ mix64(layout_key));
  const uint64_t where = mix64((site_key.b ^ flags) + mix64(place));
  return {mix64(mix64(record.digest.a + identity) ^ (record.digest.b + where)),
          mix64(mix64((record.digest.b ^ identity) + 0xD1B54A32D192ED03ull) + (record.digest.a ^ where))};
}

}  // namespace forkpoint
