#include "lib/hash_stream_load.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/error.h"
#include "lib/hash_stream_index.h"

namespace forkpoint {
namespace {

constexpr size_t kIndexWindowBytes = 16384;

void check_prefix(const InputFile& file) {
  const std::string& path = file.path();
  uint8_t prefix[kPrefixBytes] = {};
  const size_t there = file.read_at(0, prefix, sizeof(prefix));
  if (there == 0) {
    throw Error(fmt::format("{}: the file is empty; expected a hash stream.", path),
                "The recording process ended before it wrote anything; record again.");
  }
  if (std::memcmp(prefix, kStreamMagic, std::min(there, sizeof(kStreamMagic))) != 0) {
    throw Error(fmt::format("{}: not a hash stream: it begins with bytes {:02x} {:02x} {:02x} {:02x}.", path, prefix[0],
                            prefix[1], prefix[2], prefix[3]),
                "Expected a file that forkpoint record has written.");
  }
  if (there < sizeof(prefix)) {
    throw Error(fmt::format("{}: the file ends at byte {}, within the first {}.", path, there, kPrefixBytes),
                "The recording process ended before it wrote anything; record again.");
  }
  ByteReader in(std::span<const uint8_t>(prefix).subspan(sizeof(kStreamMagic)));
  const uint32_t version = in.u32();
  const uint32_t extensions = in.u32();
  if (version != kFormatVersion || extensions != 0) {
    throw Error(fmt::format("{}: hash stream format {}{}; this forkpoint reads format {}.", path, version,
                            extensions == 0 ? "" : fmt::format(" with extensions {:#x}", extensions), kFormatVersion),
                "Read it with the forkpoint that recorded it, or a later one.");
  }
}

void read_header(const InputFile& file, StreamContents* contents) {
  FrameSource source(file, file.size_bytes(), kIndexWindowBytes);
  std::string fault;
  const auto frame = source.frame_at(kPrefixBytes, &fault);
  const auto payload = frame ? source.payload(*frame, &fault) : std::nullopt;
  if (payload && (frame->header.type != FrameType::header || !decode(ByteReader(*payload), &contents->header))) {
    fault = fmt::format("found a {} frame that says nothing of rank and host", name(frame->header.type));
  }
  if (!fault.empty()) {
    throw Error(fmt::format("{}: the stream has no readable header at byte {}: {}.", file.path(), kPrefixBytes, fault),
                "Nothing can be read from this file; record again, or restore it from a copy.");
  }
}

// More names than this are never skipped: a sparse file can claim any size.
constexpr uint64_t kMostSkippedIds = 1u << 20;

// Whether items that begin with id `first` may follow `size` known ones. More ids than bytes cannot have been lost.
bool may_follow(uint32_t first, size_t size, bool may_skip, uint64_t stream_bytes) {
  return first == size || (may_skip && first > size && first - size <= std::min(stream_bytes, kMostSkippedIds));
}

// Ids in between were lost.
template <typename Item>
void add_items(uint32_t first, std::vector<Item>* items, std::vector<Item>* all, std::vector<uint32_t>* lost) {
  for (; all->size() < first; all->emplace_back()) {
    if (lost != nullptr) lost->push_back(static_cast<uint32_t>(all->size()));
  }
  std::move(items->begin(), items->end(), std::back_inserter(*all));
}

// All of it or nothing.
bool add_dictionary(std::span<const uint8_t> payload, bool may_skip, StreamContents* contents) {
  DictionaryPart part;
  if (!decode(ByteReader(payload), &part)) return false;
  if (!may_follow(part.first_site, contents->sites.size(), may_skip, contents->end) ||
      !may_follow(part.first_layout, contents->layouts.size(), may_skip, contents->end) ||
      !may_follow(part.first_communicator, contents->communicators.size(), may_skip, contents->end)) {
    return false;
  }
  add_items(part.first_site, &part.sites, &contents->sites, &contents->lost_sites);
  add_items(part.first_layout, &part.layouts, &contents->layouts, &contents->lost_layouts);
  add_items<Communicator>(part.first_communicator, &part.communicators, &contents->communicators, nullptr);
  for (size_t i = contents->site_keys.size(); i < contents->sites.size(); ++i) {
    contents->site_keys.push_back(site_key(contents->sites[i]));
  }
  for (size_t i = contents->layout_keys.size(); i < contents->layouts.size(); ++i) {
    contents->layout_keys.push_back(layout_key(contents->layouts[i]));
  }
  return true;
}

bool add_index(std::span<const uint8_t> payload, StreamContents* contents, std::vector<uint64_t>* meta_frames) {
  IndexPart part;
  if (!decode(ByteReader(payload), &part)) return false;
  meta_frames->insert(meta_frames->end(), part.meta_frames.begin(), part.meta_frames.end());
  for (const IndexedStep& step : part.steps) {
    contents->steps.push_back(step.summary);
    contents->places.push_back({.ordinal = step.ordinal,
                                .step_frame = step.step_frame,
                                .first_frame = contents->record_frames.size(),
                                .frame_count = step.record_frames.size()});
    contents->record_frames.insert(contents->record_frames.end(), step.record_frames.begin(), step.record_frames.end());
  }
  return true;
}

// REQUIRES: the index frames before it were added.
bool add_launch_index(std::span<const uint8_t> payload, StreamContents* contents) {
  LaunchIndexPart part;
  if (!decode(ByteReader(payload), &part)) return false;
  for (const IndexedLaunches& launches : part) {
    const auto place = std::lower_bound(contents->places.begin(), contents->places.end(), launches.ordinal,
                                        [](const StepPlace& at, uint32_t ordinal) { return at.ordinal < ordinal; });
    if (place == contents->places.end() || place->ordinal != launches.ordinal) return false;
    StepSummary& summary = contents->steps[static_cast<size_t>(place - contents->places.begin())];
    summary.launches = launches.launches;
    summary.launch_sum = launches.launch_sum;
    place->first_launch_frame = contents->launch_frames.size();
    place->launch_frame_count = launches.frames.size();
    contents->launch_frames.insert(contents->launch_frames.end(), launches.frames.begin(), launches.frames.end());
  }
  return true;
}

void add_to(const HeaderAddition& addition, StreamHeader* header) {
  if (!addition.step_base.empty()) header->step_base = addition.step_base;
  for (const auto& [name, value] : addition.facts) {
    const auto known = std::ranges::find(header->facts, name, &HeaderFacts::value_type::first);
    if (known != header->facts.end()) known->second = value;
    else header->facts.emplace_back(name, value);
  }
}

}  // namespace

bool add_meta(const Frame& frame, std::span<const uint8_t> payload, bool may_skip_ids, StreamContents* contents,
              std::string* fault) {
  bool good = false;
  if (frame.header.type == FrameType::dictionary) {
    good = add_dictionary(payload, may_skip_ids, contents);
  } else if (frame.header.type == FrameType::gap) {
    good = decode(ByteReader(payload), &contents->gaps.emplace_back());
    if (!good) contents->gaps.pop_back();
  } else if (frame.header.type == FrameType::coverage_limit) {
    good = decode(ByteReader(payload), &contents->limits.emplace_back());
    if (!good) contents->limits.pop_back();
  } else if (frame.header.type == FrameType::header_addition) {
    HeaderAddition addition;
    good = decode(ByteReader(payload), &addition);
    if (good) add_to(addition, &contents->header);
  }
  if (!good) *fault = fmt::format("a {} frame does not hold what it should", name(frame.header.type));
  return good;
}

bool load_by_index(const InputFile& file, StreamContents* contents) {
  const uint64_t size = file.size_bytes();
  uint8_t trailer[kEndTrailerBytes];
  if (size < kPrefixBytes + kFrameHeaderBytes + sizeof(trailer) ||
      file.read_at(size - sizeof(trailer), trailer, sizeof(trailer)) != sizeof(trailer) ||
      std::memcmp(trailer + 8, kEndMagic, sizeof(kEndMagic)) != 0) {
    return false;
  }
  FrameSource source(file, size, kIndexWindowBytes);
  std::string fault;
  const auto part_at = [&](uint64_t offset, FrameType type) -> std::optional<std::span<const uint8_t>> {
    const auto frame = source.frame_at(offset, &fault);
    if (!frame || frame->header.type != type) return std::nullopt;
    return source.payload(*frame, &fault);
  };
  const uint64_t end_offset = ByteReader(trailer).u64();
  EndPart end;
  const auto end_payload = part_at(end_offset, FrameType::end);
  if (!end_payload || !decode(ByteReader(*end_payload), &end)) return false;
  const auto end_frame = source.frame_at(end_offset, &fault);
  if (!end_frame || end_frame->end() != size || end_frame->header.sequence + 1 != end.frames) return false;
  std::vector<uint64_t> meta_frames;
  for (uint64_t offset : end.index_frames) {
    auto payload = part_at(offset, FrameType::index);
    const bool is_of_launches = !payload;
    if (is_of_launches) payload = part_at(offset, FrameType::launch_index);
    if (!payload) return false;
    if (!(is_of_launches ? add_launch_index(*payload, contents) : add_index(*payload, contents, &meta_frames))) {
      return false;
    }
  }
  for (uint64_t offset : meta_frames) {
    const auto frame = source.frame_at(offset, &fault);
    const auto payload = frame ? source.payload(*frame, &fault) : std::nullopt;
    if (!payload || !add_meta(*frame, *payload, false, contents, &fault)) return false;
  }
  contents->state = StreamState::whole;
  return true;
}

std::unique_ptr<StreamContents> load_stream(const InputFile& file) {
  check_prefix(file);
  auto contents = std::make_unique<StreamContents>();
  read_header(file, contents.get());
  contents->end = file.size_bytes();
  if (load_by_index(file, contents.get())) return contents;
  auto scanned = std::make_unique<StreamContents>();
  scanned->header = contents->header;
  scanned->end = file.size_bytes();
  load_by_scan(file, scanned.get());
  return scanned;
}

}  // namespace forkpoint
