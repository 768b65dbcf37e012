#include "probes/nvtx_ranges.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "probes/intern.h"
#include "probes/per_thread.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr uint32_t kNameCells = 1u << 14;  // three quarters are used
constexpr size_t kMostPathBytes = 8192;
constexpr size_t kMostNameBytes = 1000;

struct OpenRange {
  const NvtxDomain* domain;
  bool has_scope;
  bool left;
};

struct Ranges {
  int depth = 0;
  int too_deep = 0;
  OpenRange open[kMaxScopeDepth];
  char path[kMostPathBytes];
};
constinit InternTable<RangeName> names;

// PyTorch's ranges of ops end in numbers of the call: "aten::mul, seq = 12, op_id = 34".
size_t constant_part(std::string_view text) {
  size_t end = std::min(text.size(), kMostNameBytes);
  for (const std::string_view part : {", seq = ", ", op_id = ", ", sizes = "}) end = std::min(end, text.find(part));
  return end;
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

const RangeName* range_name(const Token&, std::string_view text) {
  if (!names.create(kNameCells)) return nullptr;
  text = text.substr(0, constant_part(text));
  const RangeName* name = names.intern(hash_bytes(text.data(), text.size(), 3), text);
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
  range = {domain, false, false};
  if (!name) return;
  if (name->begins_step) return begin_marked_step(token);  // no layer: its name may tell the step's number
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
  for (; ranges->depth > 0 && ranges->open[ranges->depth - 1].left; --ranges->depth) {
    if (ranges->open[ranges->depth - 1].has_scope) recorder.end_scope(token);
  }
}

void mark_range(const Token& token, const RangeName* name) {
  if (name && name->begins_step) begin_marked_step(token);
}

}  // namespace forkpoint
