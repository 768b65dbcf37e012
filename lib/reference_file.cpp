#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "lib/error.h"
#include "lib/hash_stream_file.h"
#include "lib/reference.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMostBytes = 256u << 20;
constexpr size_t kMostValues = 20'000'000;
constexpr int kMostRanks = 1 << 20;
constexpr const char* kRestore = "Restore it from the repository, or make it anew with --update.";

std::string one_line(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

// "[", a line an entry, "]".
std::string lines(const std::vector<std::string>& entries, char open, char close) {
  std::string text(1, open);
  for (size_t i = 0; i < entries.size(); ++i) text += fmt::format("{}\n    {}", i == 0 ? "" : ",", entries[i]);
  return text + (entries.empty() ? "" : "\n  ") + close;
}

std::vector<std::string> dependency_lines(const Reference& reference) {
  std::vector<std::string> out;
  for (const auto& [name, value] : reference.depends_on) out.push_back(one_line(name) + ": " + one_line(value));
  return out;
}

// Fields in the order of a step, whatever the order of their names.
std::vector<std::string> field_order() {
  std::vector<std::string> order = {kReferenceLossValue};
  for (const char* group : kReferenceGroups) order.push_back(group);
  order.push_back(kReferenceAll), order.push_back(kReferenceForm);
  return order;
}

// The ranks that agree in a field share an entry; fields of the same ranks stand in one line.
void add_step_lines(int64_t step, const std::vector<std::pair<int, const ReferenceFields*>>& ranks,
                    std::vector<std::string>* out) {
  std::map<std::vector<int>, Json> entries;
  for (const std::string& field : field_order()) {
    std::map<std::string, std::vector<int>> by_value;
    for (const auto& [rank, fields] : ranks) {
      if (const auto found = fields->find(field); found != fields->end()) by_value[found->second].push_back(rank);
    }
    for (const auto& [value, agreeing] : by_value) {
      Json& entry = entries[agreeing];
      if (entry.is_null()) {
        entry = {{"step", step}, {"ranks", number_list({agreeing.begin(), agreeing.end()})}};
      }
      entry[field] = value;
    }
  }
  for (const auto& [agreeing, entry] : entries) out->push_back(one_line(entry));
}

std::vector<std::string> step_lines(const Reference& reference) {
  std::vector<std::string> out;
  std::vector<std::pair<int, const ReferenceFields*>> ranks;
  for (auto at = reference.steps.begin(); at != reference.steps.end();) {
    const int64_t step = at->first.first;
    ranks.clear();
    for (; at != reference.steps.end() && at->first.first == step; ++at)
      ranks.emplace_back(at->first.second, &at->second);
    add_step_lines(step, ranks, &out);
  }
  return out;
}

std::vector<std::string> tensor_lines(const Reference& reference) {
  using Key = std::tuple<std::string, std::string, std::string, std::string>;
  std::map<Key, std::map<std::pair<std::string, std::string>, std::vector<int64_t>>> tensors;
  for (const ReferenceTensor& tensor : reference.tensors) {
    tensors[{tensor.group, tensor.layer, tensor.tensor, tensor.call}][{tensor.form, tensor.digest}].push_back(
        tensor.rank);
  }
  std::vector<std::string> out;
  for (const auto& [key, values] : tensors) {
    const auto& [group, layer, tensor, call] = key;
    std::map<std::vector<int64_t>, std::pair<std::string, std::string>> by_ranks;
    for (const auto& [value, ranks] : values) by_ranks.emplace(ranks, value);
    for (const auto& [ranks, value] : by_ranks) {
      Json entry = {{"group", group}, {"layer", layer}, {"tensor", tensor}};
      if (!call.empty()) entry["call"] = call;
      entry["ranks"] = number_list(ranks), entry["form"] = value.first, entry["digest"] = value.second;
      out.push_back(one_line(entry));
    }
  }
  return out;
}

// Without a checksum: what the checksum is of.
std::string render(const Reference& reference, const std::string& checksum) {
  std::string text = fmt::format("{{\n  \"forkpoint_reference\": {},\n", kReferenceSchema);
  if (!checksum.empty()) text += fmt::format("  \"checksum\": {},\n", one_line(checksum));
  text += fmt::format("  \"command\": {},\n", one_line(reference.command));
  text += fmt::format("  \"first_step\": {},\n  \"last_step\": {},\n", reference.first_step, reference.last_step);
  std::vector<std::string> not_seen;
  for (const std::string& limit : reference.not_seen) not_seen.push_back(one_line(limit));
  text += fmt::format("  \"depends_on\": {},\n", lines(dependency_lines(reference), '{', '}'));
  text += fmt::format("  \"not_seen\": {},\n", lines(not_seen, '[', ']'));
  text += fmt::format("  \"steps\": {},\n", lines(step_lines(reference), '[', ']'));
  text += fmt::format("  \"tensors\": {}\n}}\n", lines(tensor_lines(reference), '[', ']'));
  return text;
}

std::string checksum_of(const Reference& reference) {
  const std::string text = render(reference, "");
  const Digest digest = digest_only(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", digest.a, digest.b);
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(fmt::format("{}: {}.", path, why), kRestore);
}

// "0, 2-4"; what is none gives an empty list.
std::vector<int> ranks_from(const std::string& text) {
  std::vector<int> ranks;
  const char *at = text.data(), *end = at + text.size();
  while (at < end) {
    int first = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc()) return {};
    int last = first;
    if (read.ptr < end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc()) return {};
    if (first < 0 || last < first || last >= kMostRanks) return {};
    for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
    at = read.ptr;
    if (at < end && *at != ',') return {};
    while (at < end && (*at == ',' || *at == ' ')) ++at;
  }
  return ranks;
}

std::vector<int> ranks_of(const Json& entry, size_t* values) {
  std::vector<int> ranks = ranks_from(entry.at("ranks").get<std::string>());
  *values += ranks.size() * entry.size();
  if (ranks.empty() || *values > kMostValues) throw Error("an entry of no rank");
  return ranks;
}

void read_entries(const Json& object, Reference* out) {
  size_t values = 0;
  for (const Json& entry : object.at("steps")) {
    for (const int rank : ranks_of(entry, &values)) {
      ReferenceFields& fields = out->steps[{entry.at("step").get<int64_t>(), rank}];
      for (const auto& [name, value] : entry.items()) {
        if (name != "step" && name != "ranks") fields[name] = value.get<std::string>();
      }
    }
  }
  for (const Json& entry : object.at("tensors")) {
    const auto text = [&](const char* name) { return entry.value(name, std::string()); };
    for (const int rank : ranks_of(entry, &values)) {
      out->tensors.push_back(
          {text("group"), text("layer"), text("tensor"), text("call"), rank, text("form"), text("digest")});
    }
  }
}

// A digest that is not there cannot differ: every step of every rank has one, and of a record at least.
void check_complete(const std::string& path, const Reference& reference) {
  const int world = reference.world_size();
  const auto named = reference.depends_on.find("world_size");
  if (world == 0 || reference.last_step < reference.first_step) refuse(path, "there is no digest in it");
  if (named == reference.depends_on.end() || named->second != std::to_string(world)) {
    refuse(path, "it does not hold the ranks that it names");
  }
  const uint64_t expected =
      (static_cast<uint64_t>(reference.last_step) - static_cast<uint64_t>(reference.first_step) + 1) *
      static_cast<uint64_t>(world);
  uint64_t found = 0, records = 0;
  for (const auto& [place, fields] : reference.steps) {
    const auto all = fields.find(kReferenceAll);
    if (all == fields.end() || !fields.contains(kReferenceForm)) refuse(path, "a step in it has no digest");
    found += place.first >= reference.first_step && place.first <= reference.last_step;
    records += std::strtoull(all->second.c_str(), nullptr, 10);
  }
  if (found != expected)
    refuse(path, fmt::format("it holds {} of the {} steps of ranks that it should", found, expected));
  if (records == 0) refuse(path, "there is no digest in it");
}

}  // namespace

std::string reference_text(const Reference& reference) { return render(reference, checksum_of(reference)); }

Reference parse_reference(const std::string& path, const std::string& text) {
  Reference out;
  try {
    const Json object = Json::parse(text);
    if (!object.is_object() || !object.contains("forkpoint_reference"))
      refuse(path, "not a reference of forkpoint check");
    const int64_t schema = object.at("forkpoint_reference").get<int64_t>();
    if (schema != kReferenceSchema) {
      throw Error(
          fmt::format("{}: a reference of schema {}; this forkpoint reads schema {}.", path, schema, kReferenceSchema),
          "Use the forkpoint that made it, or make it anew with --update.");
    }
    out.command = object.at("command").get<std::string>();
    out.first_step = object.at("first_step").get<int64_t>();
    out.last_step = object.at("last_step").get<int64_t>();
    out.depends_on = object.at("depends_on").get<std::map<std::string, std::string>>();
    out.not_seen = object.at("not_seen").get<std::vector<std::string>>();
    try {
      read_entries(object, &out);
    } catch (const Error& error) {
      refuse(path, error.what());
    }
    if (object.at("checksum").get<std::string>() != checksum_of(out)) {
      refuse(path, "edited or damaged: its checksum is not that of its content");
    }
  } catch (const nlohmann::json::parse_error& error) {
    refuse(path,
           fmt::format("not valid JSON at byte {} of {} (a merge that was left half done?)", error.byte, text.size()));
  } catch (const nlohmann::json::exception&) {
    refuse(path, "damaged: a field is missing or of another type");
  }
  check_complete(path, out);
  return out;
}

Reference read_reference(const std::string& path) {
  const InputFile file(path);
  if (file.size_bytes() > kMostBytes)
    refuse(path, fmt::format("{} bytes; expected at most {}", file.size_bytes(), kMostBytes));
  std::string text(file.size_bytes(), '\0');
  text.resize(file.read_at(0, text.data(), text.size()));
  return parse_reference(path, text);
}

void write_reference(const std::string& path, const Reference& reference) {
  const std::string text = reference_text(reference), temporary = fmt::format("{}.{}.tmp", path, getpid());
  const auto fail = [&] {
    const std::string why = std::strerror(errno);
    unlink(temporary.c_str());
    throw Error(fmt::format("{}: cannot be written: {}.", path, why), "The file is as it was.");
  };
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) fail();
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      close(file);
      fail();
    }
    done += static_cast<size_t>(count);
  }
  const bool synced = fsync(file) == 0;
  if (close(file) != 0 || !synced || rename(temporary.c_str(), path.c_str()) != 0) fail();
}

}  // namespace forkpoint
