#include "lib/checkpoint_compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <optional>

#include "lib/pointing.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Numbers within names by their value: layers.2 before layers.10.
bool natural_less(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const size_t from_a = std::min(a.find_first_not_of('0', i), a.size()), from_b = std::min(b.find_first_not_of('0', j), b.size());
      size_t end_a = from_a, end_b = from_b;
      while (end_a < a.size() && is_digit(a[end_a])) ++end_a;
      while (end_b < b.size() && is_digit(b[end_b])) ++end_b;
      if (end_a - from_a != end_b - from_b) return end_a - from_a < end_b - from_b;
      const int order = a.compare(from_a, end_a - from_a, b, from_b, end_b - from_b);
      if (order != 0) return order < 0;
      i = end_a, j = end_b;
    } else if (a[i] != b[j]) {
      return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
    } else {
      ++i, ++j;
    }
  }
  return a.size() - i != b.size() - j ? a.size() - i < b.size() - j : a < b;
}

Layout layout_of(const CheckpointTensor& tensor) { return {tensor.dtype, tensor.shape, {}, {}, {}}; }
std::string form(const CheckpointTensor& tensor) {
  Layout layout = layout_of(tensor);
  const std::string shape = to_string(layout);
  return tensor.dtype_name + shape.substr(shape.find('['));
}
std::string hex(const Digest& digest) { return fmt::format("{:016x}{:016x}", digest.a, digest.b); }

uint64_t bytes_of(const CheckpointTensor& tensor) {
  return static_cast<uint64_t>(element_count(layout_of(tensor))) * static_cast<uint64_t>(size_bytes(tensor.dtype));
}

void compare_pair(const LeafName& name, const CheckpointTensor& a, const CheckpointTensor& b, CheckpointComparison* out) {
  for (const auto& [side, tensor] : {std::pair{"A", &a}, {"B", &b}}) {
    if (!tensor->unread.empty()) out->unread.push_back(fmt::format("{} of {}: {}", to_string(name), side, tensor->unread));
  }
  TensorDifference difference{to_string(name), form(a), form(b), {}, {}};
  if (keys_differ(a.keys, b.keys)) {
    difference.a = a.keys;
    difference.b = b.keys;
    ++out->tensors_compared;
  } else if (difference.a == difference.b) {
    if (!a.unread.empty() || !b.unread.empty()) return;
    ++out->tensors_compared;
    out->bytes_compared += bytes_of(a);
    if (a.digest == b.digest) return;
    difference.a = hex(a.digest);
    difference.b = hex(b.digest);
    difference.pointing = Pointing{};  // to be found for the first ones
  } else {
    ++out->tensors_compared;
  }
  out->tensors.push_back(std::move(difference));
}

void compare_tensors(const CheckpointContent& a, const CheckpointContent& b, CheckpointComparison* out) {
  for (const auto& [name, tensor] : a.tensors) {
    const auto other = b.tensors.find(name);
    if (other == b.tensors.end()) {
      out->only_a.push_back(to_string(name));
    } else {
      compare_pair(name, tensor, other->second, out);
    }
  }
  for (const auto& [name, tensor] : b.tensors) {
    if (!a.tensors.contains(name)) out->only_b.push_back(to_string(name));
  }
  std::sort(out->tensors.begin(), out->tensors.end(), [](const auto& x, const auto& y) { return natural_less(x.name, y.name); });
  std::sort(out->only_a.begin(), out->only_a.end(), natural_less);
  std::sort(out->only_b.begin(), out->only_b.end(), natural_less);
}

// About 2 ns a word and tensor, so not for all of them.
void point_at_first(const CheckpointContent& a, const CheckpointContent& b, CheckpointComparison* out) {
  constexpr size_t kPointed = 10;
  std::map<std::string, const LeafName*> names;
  if (!out->tensors.empty()) {
    for (const auto& [name, tensor] : a.tensors) names[to_string(name)] = &name;
  }
  for (size_t i = 0; i < out->tensors.size(); ++i) {
    TensorDifference& difference = out->tensors[i];
    if (!difference.pointing) continue;
    difference.pointing.reset();
    if (i >= kPointed) continue;
    const LeafName& name = *names.at(difference.name);
    const CheckpointTensor& tensor = a.tensors.at(name);
    difference.pointing = point(tensor.digest, b.tensors.at(name).digest, layout_of(tensor));
    if (difference.pointing) difference.where = to_sentence(*difference.pointing, layout_of(tensor));
  }
}

// What says where a job saves. Other paths, to its data above all, are a part of what it does.
bool is_place_to_save(const LeafName& name) {
  const std::string key = name.second.substr(name.second.rfind('.') + 1);
  constexpr std::string_view kWords[] = {"output_dir", "save", "checkpoint", "ckpt", "dirpath", "model_path", "logging_dir", "log_dir"};
  return std::any_of(std::begin(kWords), std::end(kWords), [&](std::string_view word) { return key.find(word) != key.npos; });
}

// The folder that a checkpoint is saved to is named in it by most trainers, and is no state of the training. What follows the
// folder in a path that leads into it; nothing: it is no such path. A relative one is the folder's own last names.
std::optional<std::string> within_own_folder(const LeafName& name, const std::string& text, const CheckpointContent& content) {
  if (text.size() < 3 || text.front() != '"' || text.back() != '"' || !is_place_to_save(name)) return {};
  const std::filesystem::path path = std::filesystem::path(text.substr(1, text.size() - 2)).lexically_normal();
  const std::string word = path.string();
  std::error_code ignored;
  const auto own = std::filesystem::absolute(content.path).lexically_normal();
  for (const auto& folder : {own.parent_path(), std::filesystem::canonical(own, ignored).parent_path()}) {
    const std::string here = folder.string();
    if (path.is_absolute() && (word == here || word.starts_with(here + "/"))) return word.substr(here.size());
    for (size_t end = word.size(); !path.is_absolute() && end > 0 && end != word.npos; end = word.rfind('/', end - 1)) {
      if (here.ends_with("/" + word.substr(0, end))) return word.substr(end);
      if (end == 0) break;
    }
  }
  return {};
}

// How long an evaluation took, in the log of Hugging Face's Trainer.
bool is_timing(const LeafName& name) {
  if (name.first != "trainer_state" || !name.second.starts_with("log_history.")) return false;
  return name.second.ends_with("_runtime") || name.second.ends_with("_per_second");
}

// Of values that differ: neither says anything about the training.
bool are_circumstances(const LeafName& name, const std::string& text_a, const std::string& text_b, const CheckpointContent& a,
                       const CheckpointContent& b) {
  if (is_timing(name)) return true;
  const auto rest = within_own_folder(name, text_a, a);
  return rest && rest == within_own_folder(name, text_b, b);
}

void compare_values(const CheckpointContent& a, const CheckpointContent& b, CheckpointComparison* out) {
  std::vector<std::string> circumstances;
  for (const auto& [name, value] : a.values) {
    const auto other = b.values.find(name);
    if (other != b.values.end()) ++out->values_compared;
    if (other != b.values.end() && keys_differ(value.keys, other->second.keys)) {
      out->values.push_back({to_string(name), value.keys, other->second.keys});
      continue;
    }
    if (other != b.values.end() && other->second.text == value.text) continue;
    if (other != b.values.end() && are_circumstances(name, value.text, other->second.text, a, b)) {
      circumstances.push_back(to_string(name));
      continue;
    }
    out->values.push_back({to_string(name), value.text, other == b.values.end() ? "" : other->second.text});
  }
  for (const auto& [name, value] : b.values) {
    if (!a.values.contains(name)) out->values.push_back({to_string(name), "", value.text});
  }
  std::sort(out->values.begin(), out->values.end(), [](const auto& x, const auto& y) { return natural_less(x.name, y.name); });
  if (circumstances.empty()) return;
  out->notes.push_back(fmt::format("{} differ{} that only name the folder of the checkpoint itself or say how long an evaluation took, "
                                   "first {}: not counted",
                                   counted(circumstances.size(), "value"), circumstances.size() == 1 ? "s" : "", circumstances[0]));
}

// A frozen tensor of the same values trains differently, but most formats do not say whether one is.
void note_requires_grad(const CheckpointContent& a, const CheckpointContent& b, CheckpointComparison* out) {
  uint64_t count = 0;
  const LeafName* first = nullptr;
  for (const auto& [name, tensor] : a.tensors) {
    const auto other = b.tensors.find(name);
    if (other == b.tensors.end() || !tensor.requires_grad || !other->second.requires_grad) continue;
    if (*tensor.requires_grad == *other->second.requires_grad) continue;
    if (count++ == 0) first = &name;
  }
  if (count == 0) return;
  out->notes.push_back(fmt::format("{} differ{} in requires_grad, first {}: not counted", counted(count, "tensor"),
                                   count == 1 ? "s" : "", to_string(*first)));
}

// Prefixes that wrappers put before every name: DistributedDataParallel, torch.compile, FSDP, Lightning.
void note_prefixes(const CheckpointContent& a, const CheckpointContent& b, CheckpointComparison* out) {
  for (const auto& [longer, shorter, side] : {std::tuple{&a, &b, "A"}, {&b, &a, "B"}}) {
    for (const std::string prefix : {"module.", "_orig_mod.", "_fsdp_wrapped_module.", "model."}) {
      const auto alone = std::count_if(longer->tensors.begin(), longer->tensors.end(), [&](const auto& entry) {
        const auto& [group, name] = entry.first;
        return name.starts_with(prefix) && !shorter->tensors.contains(entry.first) &&
               shorter->tensors.contains({group, name.substr(prefix.size())});
      });
      if (alone == 0) continue;
      out->notes.push_back(fmt::format("{} of {} would have the names of the other without the prefix `{}`: they were not compared",
                                       counted(static_cast<uint64_t>(alone), "tensor"), side, prefix));
    }
  }
}

std::string in_words(const CheckpointComparison& c, bool tensors_only) {
  std::string text;
  const auto add = [&](const std::string& part) { text += fmt::format("{}{}", text.empty() ? "" : "; ", part); };
  if (!c.tensors.empty()) {
    add(fmt::format("{} of {} differ{}, first {}", grouped(c.tensors.size()), counted(c.tensors_compared, "tensor"),
                    c.tensors.size() == 1 ? "s" : "", c.tensors[0].name));
  } else if (c.tensors_compared > 0) {
    add(c.tensors_compared == 1 ? "the one tensor in both agrees" : fmt::format("all {} in both agree", counted(c.tensors_compared, "tensor")));
  }
  if (!c.only_a.empty()) add(fmt::format("{} in A only, first {}", counted(c.only_a.size(), "tensor"), c.only_a[0]));
  if (!c.only_b.empty()) add(fmt::format("{} in B only, first {}", counted(c.only_b.size(), "tensor"), c.only_b[0]));
  if (!c.values.empty() && !tensors_only) {
    add(fmt::format("{} differ{}, first {}", counted(c.values.size(), "other value"), c.values.size() == 1 ? "s" : "", c.values[0].name));
  }
  return text;
}

void decide(const CheckpointContent& a, const CheckpointContent& b, bool tensors_only, CheckpointComparison* out) {
  // What one side has alone proves nothing where the other side was not read in full.
  const bool differ = !out->tensors.empty() || (!out->only_a.empty() && b.unread.empty()) ||
                      (!out->only_b.empty() && a.unread.empty()) ||
                      (!tensors_only && a.unread.empty() && b.unread.empty() && !out->values.empty());
  if (a.tensors.empty() && b.tensors.empty()) {
    out->reason = "neither holds a tensor that could be read";
  } else if (out->tensors_compared == 0 && out->unread.empty()) {
    out->reason = fmt::format("no tensor has the same name in both ({} in A, {} in B)", counted(a.tensors.size(), "tensor"),
                              counted(b.tensors.size(), "tensor"));
  } else if (differ) {
    out->outcome = Outcome::diverged;
    out->reason = in_words(*out, tensors_only);
    return;
  } else if (out->unread.empty()) {
    out->outcome = Outcome::identical;
    out->reason = fmt::format("{} and {}", counted(out->tensors_compared, "tensor"),
                              tensors_only ? "nothing else was compared" : counted(out->values_compared, "other value"));
    return;
  }
  if (!out->unread.empty()) {
    const std::string found = in_words(*out, tensors_only);
    out->reason = fmt::format("{}{}{} could not be read, first {}", out->reason.empty() ? found : out->reason,
                              out->reason.empty() && found.empty() ? "" : ", but ", counted(out->unread.size(), "part"), out->unread[0]);
  }
}

}  // namespace

CheckpointComparison compare_checkpoints(const CheckpointContent& a, const CheckpointContent& b, bool tensors_only) {
  CheckpointComparison out;
  for (const auto& [side, content] : {std::pair{"A", &a}, {"B", &b}}) {
    for (const auto& [file, why] : content->unread) out.unread.push_back(fmt::format("{} of {}: {}", file, side, why));
  }
  compare_tensors(a, b, &out);
  // A tensor without a counterpart whose bytes could not be found.
  for (const auto& [side, content, other] : {std::tuple{"A", &a, &b}, {"B", &b, &a}}) {
    for (const auto& [name, tensor] : content->tensors) {
      if (!tensor.unread.empty() && !other->tensors.contains(name)) {
        out.unread.push_back(fmt::format("{} of {}: {}", to_string(name), side, tensor.unread));
      }
    }
  }
  point_at_first(a, b, &out);
  if (!tensors_only) compare_values(a, b, &out);
  note_prefixes(a, b, &out);
  note_requires_grad(a, b, &out);
  decide(a, b, tensors_only, &out);
  return out;
}

}  // namespace forkpoint
