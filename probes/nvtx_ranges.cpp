#include "probes/nvtx_ranges.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "probes/intern.h"
#include "probes/per_thread.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr uint32_t kNameCells = 1u << 14;  // three quarters are used
constexpr uint32_t kNumbersApart = 64;      // "iter 7"
constexpr uint32_t kNumbersWithin = 1024;   // "layer7", "blocks.7"
constexpr size_t kMostPathBytes = 8192;
constexpr size_t kMostNameBytes = 1000;

struct OpenRange {
  const NvtxDomain* domain;
  bool has_scope;
  bool begins_step;
  bool left;
};

struct Ranges {
  int depth = 0;
  int too_deep = 0;
  int marks = 0;  // of the open ones, those that begin a step
  OpenRange open[kMaxScopeDepth];
  char path[kMostPathBytes];
};
constinit InternTable<RangeName> names;
constinit InternTable<RangeStem> stems;
// Of a name that is not kept: only that a step begins is needed.
constinit RangeName step_mark = {0, true, 0, {'\0'}};

// PyTorch's ranges of ops end in numbers of the call: "aten::mul, seq = 12, op_id = 34".
size_t constant_part(std::string_view text) {
  size_t end = std::min(text.size(), kMostNameBytes);
  for (const std::string_view part : {", seq = ", ", op_id = ", ", sizes = "}) end = std::min(end, text.find(part));
  return end;
}

uint64_t hash_of(std::string_view text) { return hash_bytes(text.data(), text.size(), 3); }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number at the end of a name: [begin, end). Empty: there is none.
struct Number {
  size_t begin = 0, end = 0;
  bool apart = false;  // no part of a word or of a path
};

Number number_of(std::string_view text) {
  Number number;
  const size_t last = text.find_last_not_of(")]}");
  if (last == std::string_view::npos || !is_digit(text[last])) return {};
  number.begin = number.end = last + 1;
  while (number.begin > 0 && (is_digit(text[number.begin - 1]) || text[number.begin - 1] == '/')) --number.begin;
  while (!is_digit(text[number.begin])) ++number.begin;  // "shard/7": the separator is of the word
  const char* bracket = "([{";
  size_t before = number.begin;
  while (before > 0 && strchr(bracket, text[before - 1])) --before;
  const char behind = before > 0 ? text[before - 1] : ' ';
  number.apart = strchr(" \t=#:,(", behind) != nullptr;
  return number;
}

// The stem of a name that ends in a number; nullptr: it does not, or there are too many stems.
RangeStem* stem_of(std::string_view text, const Number& number) {
  if (number.begin == number.end || !stems.create(kNameCells)) return nullptr;
  char stem[kMostNameBytes + 1];
  const size_t behind = text.size() - number.end;
  memcpy(stem, text.data(), number.begin);
  stem[number.begin] = '#';
  memcpy(stem + number.begin + 1, text.data() + number.end, behind);
  const std::string_view key(stem, number.begin + 1 + behind);
  return stems.intern(hash_of(key), key);
}

const char* path_below(const ScopeFrame& outer, const RangeName& name, char* path) {
  const char* parent = outer.layer && outer.layer->length > 0 ? outer.layer->text : nullptr;
  if (!parent) return name.text;
  snprintf(path, kMostPathBytes, "%s.%s", parent, name.text);
  return path;
}

}  // namespace

RangeName* RangeName::make(uint64_t hash, std::string_view key) {
  auto* name = static_cast<RangeName*>(malloc(sizeof(RangeName) + key.size()));
  if (!name) return nullptr;
  name->hash = hash;
  name->length = static_cast<uint32_t>(key.size());
  memcpy(name->text, key.data(), key.size());
  name->text[key.size()] = '\0';
  name->begins_step = is_step_mark(name->text);
  return name;
}

void RangeName::discard(RangeName* name) { free(name); }

RangeStem* RangeStem::make(uint64_t hash, std::string_view key) {
  void* memory = malloc(sizeof(RangeStem) + key.size());
  RangeName* name = memory ? RangeName::make(hash, key) : nullptr;
  if (!name) return free(memory), nullptr;
  name->begins_step = false;  // whether a step begins is asked of the whole name
  auto* stem = new (memory) RangeStem{hash, 0, name, static_cast<uint32_t>(key.size()), {'\0'}};
  memcpy(stem->text, key.data(), key.size());
  return stem;
}

void RangeStem::discard(RangeStem* stem) {
  free(const_cast<RangeName*>(stem->name));
  free(stem);
}

namespace {

// Of a name whose stem was seen with too many numbers.
const RangeName* collapsed(std::string_view text, const RangeStem& stem) {
  if (!has_step_mark()) return stem.name;
  char whole[kMostNameBytes + 1];
  memcpy(whole, text.data(), text.size());
  whole[text.size()] = '\0';
  return is_step_mark(whole) ? &step_mark : stem.name;
}

}  // namespace

const RangeName* range_name(const Token&, std::string_view text) {
  if (!names.create(kNameCells)) return nullptr;
  text = text.substr(0, constant_part(text));
  if (const RangeName* known = names.find(hash_of(text), text)) return known;
  const Number number = number_of(text);
  RangeStem* stem = stem_of(text, number);
  const uint32_t most = number.apart ? kNumbersApart : kNumbersWithin;
  if (stem && stem->numbers.load(std::memory_order_relaxed) >= most) return collapsed(text, *stem);
  if (stem) stem->numbers.fetch_add(1, std::memory_order_relaxed);
  const RangeName* name = names.intern(hash_of(text), text);
  if (!name) recorder.limit(Limit::nvtx_names);
  return name;
}

void push_range(const Token& token, const NvtxDomain* domain, const RangeName* name) {
  Ranges* ranges = PerThread<Ranges>::get();
  if (!ranges) return;
  if (ranges->depth == kMaxScopeDepth) {
    ++ranges->too_deep;
    return recorder.limit(Limit::scope_depth);
  }
  OpenRange& range = ranges->open[ranges->depth++];
  range = {domain, false, name && name->begins_step, false};
  if (!name) return;
  if (range.begins_step) return ++ranges->marks, begin_marked_step(token);  // no layer: its name may tell the step's number
  range.has_scope = true;
  const ScopeStack* scopes = ScopeStack::of_thread_if_any(token);
  const char* path = path_below(scopes ? scopes->top() : ScopeFrame{}, *name, ranges->path);
  recorder.begin_scope(token, -1, name->length > 0 ? path : nullptr, nullptr);
}

void pop_range(const Token& token, const NvtxDomain* domain) {
  Ranges* ranges = PerThread<Ranges>::if_any();
  if (!ranges) return;
  if (ranges->too_deep > 0) {
    --ranges->too_deep;
    return;
  }
  int at = ranges->depth - 1;
  while (at >= 0 && (ranges->open[at].left || ranges->open[at].domain != domain)) --at;
  if (at < 0) return;  // opened before we came
  ranges->open[at].left = true;
  if (ranges->open[at].begins_step) --ranges->marks;
  for (; ranges->depth > 0 && ranges->open[ranges->depth - 1].left; --ranges->depth) {
    if (ranges->open[ranges->depth - 1].has_scope) recorder.end_scope(token);
  }
}

bool inside_marked_range() {
  const Ranges* ranges = PerThread<Ranges>::if_any();
  return ranges && ranges->marks > 0;
}

void mark_range(const Token& token, const RangeName* name) {
  if (name && name->begins_step) begin_marked_step(token);
}

}  // namespace forkpoint
