#include "lib/launch.h"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

constexpr std::array<std::string_view, kLaunchKindCount> kKindNames = {
    "kernel",  "copy",         "set",        "graph",       "host_function", "allocate",
    "release", "event_record", "event_wait", "synchronize", "record",        "retry"};

// A hash of words in their order, two lanes. Each lane is a bijection of every single word, so a change of one word can
// never be missed; for changes of several the lanes are independent.
class WordMixer {
 public:
  void add(uint64_t word) {
    lanes_.a = mix64(lanes_.a ^ word);
    lanes_.b = mix64(lanes_.b + word);
  }
  void add(const Digest& digest) {
    add(digest.a);
    add(digest.b);
  }
  void add(uint32_t low, uint32_t high) { add(static_cast<uint64_t>(high) << 32 | low); }
  Digest lanes() const { return lanes_; }

 private:
  Digest lanes_{0x452821E638D01377ull, 0xBE5466CF34E90C6Cull};
};

// Where a group ("<...>", "(...)") that opens at `at` is over; the end of the text where it never is.
size_t skip_group(std::string_view text, size_t at) {
  constexpr std::string_view kOpeners = "<({[", kClosers = ">)}]";
  std::string expected;
  for (; at < text.size(); ++at) {
    const size_t opener = kOpeners.find(text[at]);
    if (opener != std::string_view::npos) {
      expected += kClosers[opener];
    } else if (text[at] == expected.back() && text.substr(at - 1, 2) != "->") {
      expected.pop_back();
      if (expected.empty()) return at + 1;
    }
  }
  return text.size();
}

bool ends_with_operator(std::string_view text) {
  constexpr std::string_view kWord = "operator";
  if (!text.ends_with(kWord)) return false;
  text.remove_suffix(kWord.size());
  return text.empty() || text.back() == ':' || text.back() == ' ';  // not "my_operator"
}

// Where the symbol of an operator ("()", "<<") that begins at `at` is over: its brackets open no group.
size_t skip_symbol(std::string_view text, size_t at) {
  if (text.substr(at, 2) == "()" || text.substr(at, 2) == "[]") return at + 2;
  return std::min(text.find_first_not_of("+-*/%^&|~!=<>,", at), text.size());
}

// The qualified name and its return type, without template arguments and parameters.
std::string without_groups(std::string_view text) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)";
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    bool keep = true;
    if (ends_with_operator(kept))
      end = std::max(end, skip_symbol(text, at));
    else if (text[at] == '{')
      end = skip_group(text, at);  // "{lambda(int)#1}"
    else if (text.substr(at, kAnonymous.size()) == kAnonymous)
      end = at + kAnonymous.size();
    else if (text[at] == '<' || text[at] == '[' || text[at] == '(')
      end = skip_group(text, at), keep = false;
    // Parameters end the name, except those of a function within which something is declared.
    if (!keep && text[at] == '(' && text.substr(end, 2) != "::" && !kept.ends_with("decltype ")) break;
    if (keep) kept += text.substr(at, end - at);
    at = end;
  }
  while (kept.ends_with(' ')) kept.pop_back();  // "operator< <int>"
  return kept;
}

// The last part of a qualified name. Braces and parentheses may hold anything, colons and spaces too.
std::string last_name(const std::string& qualified) {
  size_t begin = 0;
  for (size_t at = 0; at < qualified.size(); ++at) {
    if (qualified[at] == '{' || qualified[at] == '(')
      at = skip_group(qualified, at) - 1;
    else if (qualified.compare(at, 9, "operator ") == 0)
      break;
    else if (qualified[at] == ':' || qualified[at] == ' ')
      begin = at + 1;
  }
  return qualified.substr(begin);
}

}  // namespace

std::string_view name(LaunchKind kind) {
  const auto number = static_cast<size_t>(kind);
  return number < kKindNames.size() ? kKindNames[number] : std::string_view("unknown");
}

Digest launch_leaf(const Digest& site, uint64_t index, const LaunchRow& row, const BufferRow* buffers) {
  WordMixer mixer;
  mixer.add(index);
  mixer.add(site);
  mixer.add(static_cast<uint32_t>(row.kind) | static_cast<uint32_t>(row.flags) << 8,
            static_cast<uint32_t>(row.micro_step));
  mixer.add(row.stream, row.shared_bytes);
  mixer.add(row.grid[0], row.grid[1]);
  mixer.add(row.grid[2], row.block[0]);
  mixer.add(row.block[1], row.block[2]);
  mixer.add(row.param_bytes, row.retry_of);
  mixer.add(row.params);
  mixer.add(row.object);
  mixer.add(row.bytes);
  mixer.add(row.buffers);
  for (uint32_t i = 0; i < row.buffers; ++i) {
    const BufferRow& buffer = buffers[i];
    mixer.add(buffer.place, buffer.flags);
    mixer.add(buffer.allocation);
    mixer.add(buffer.offset);
    mixer.add(buffer.start);
    mixer.add(buffer.bytes);
    // A digest over addresses is an address in disguise: equal runs have others.
    if (!(buffer.flags & kBufferAddresses)) mixer.add(buffer.digest);
  }
  return mixer.lanes();
}

std::string demangled(std::string_view mangled) {
  std::string text(mangled);
  if (!text.starts_with("_Z")) return text;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(text.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 && readable ? std::string(readable.get()) : text;
}

std::string short_kernel_name(std::string_view mangled) {
  const std::string readable = demangled(mangled);
  if (readable == mangled) return readable;
  const std::string name = last_name(without_groups(readable));
  return name.empty() ? readable : name;
}

}  // namespace forkpoint
