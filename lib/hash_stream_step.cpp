// Reading the rows of one step: its records frames and its launches frames.
#include <fmt/format.h>

#include <algorithm>

#include "lib/hash_stream_load.h"

namespace forkpoint {

std::string StepReader::read(const StepPlace& place, int64_t step, StepColumns* columns) {
  resize(columns, 0);
  for (size_t i = 0; i < place.frame_count; ++i) {
    const uint64_t offset = contents_.record_frames[place.first_frame + i];
    std::string fault = append_frame(offset, frame_after(offset, place), place, step, columns);
    if (!fault.empty()) return fault;
  }
  return {};
}

std::string StepReader::read_launches(const StepPlace& place, const StepSummary& summary, LaunchColumns* launches) {
  launches->clear();
  uint64_t offset = place.step_frame;
  for (size_t i = 0; i < place.launch_frame_count; ++i) {
    offset = contents_.launch_frames[place.first_launch_frame + i];
    std::string fault =
        append_launches(offset, frame_after(offset, place), place, summary.step, launches->rows.size(), launches);
    if (!fault.empty()) return fault;
  }
  std::string fault;
  if (!summary.complete && summary.launches < launches->rows.size()) truncate(launches, summary.launches);
  if (launches->rows.size() != summary.launches) {
    fault = fmt::format("expected {} launches in the step's frames, found {}", summary.launches, launches->rows.size());
  }
  const uint64_t records = count_records(place);
  const size_t good = rows_before_lost_record(launches->rows, records);
  if (good < launches->rows.size()) {
    fault = fmt::format("launch {} stands for record {} of {}", good, launches->rows[good].object, records);
    truncate(launches, good);
  }
  return fault.empty() ? fault : fmt::format("byte {}: {}", offset, fault);
}

// As their frames say: read_step gives so many, or fails. (A summary that lies would let a caller read past the end.)
uint64_t StepReader::count_records(const StepPlace& place) const {
  uint64_t records = 0;
  for (size_t i = 0; i < place.frame_count; ++i) {
    uint8_t bytes[kFrameHeaderBytes];
    const uint64_t offset = contents_.record_frames[place.first_frame + i];
    if (file_.read_at(offset, bytes, sizeof(bytes)) != sizeof(bytes)) break;
    const auto header = decode_frame_header(bytes);
    if (!header || header->type != FrameType::records) break;
    records += header->records;
  }
  return records;
}

// The next frame of the step mostly follows at once: then one read gets header and payload.
uint64_t StepReader::frame_after(uint64_t offset, const StepPlace& place) const {
  uint64_t next = place.step_frame > offset ? place.step_frame : UINT64_MAX;
  const auto look_in = [&](const std::vector<uint64_t>& frames, size_t first, size_t count) {
    const auto begin = frames.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(count);
    const auto found = std::upper_bound(begin, end, offset);
    if (found != end) next = std::min(next, *found);
  };
  look_in(contents_.record_frames, place.first_frame, place.frame_count);
  look_in(contents_.launch_frames, place.first_launch_frame, place.launch_frame_count);
  return next == UINT64_MAX ? 0 : next;
}

std::optional<std::span<const uint8_t>> StepReader::payload_at(uint64_t offset, FrameType type, uint64_t next,
                                                               const StepPlace& place, int64_t step,
                                                               FrameHeader* header, std::string* fault) {
  const auto fail = [&](std::string_view what) {
    *fault = fmt::format("byte {}: {}", offset, what);
    return std::nullopt;
  };
  const std::string_view kind = name(type);
  size_t wanted = kFrameHeaderBytes;
  if (next > offset + wanted) wanted = std::min<uint64_t>(next - offset, kMaxPayloadBytes);
  wanted = std::min<uint64_t>(wanted, contents_.end - std::min(offset, contents_.end));
  if (buffer_.size() < wanted) buffer_.resize(wanted);
  size_t there = file_.read_at(offset, buffer_.data(), wanted);
  if (there < kFrameHeaderBytes) return fail(fmt::format("expected a {} frame, found the end of the file", kind));
  const auto found = decode_frame_header(buffer_.data());
  if (!found || found->type != type) return fail(fmt::format("expected a {} frame, found something else", kind));
  if (found->step != step || found->step_ordinal != place.ordinal) {
    return fail(fmt::format("expected a {} frame of step {}, found one of step {}", kind, step, found->step));
  }
  *header = *found;
  const uint64_t size = found->stored_bytes;
  if (size > kMaxPayloadBytes) return fail(fmt::format("a {} frame with an impossible length", kind));
  if (there < kFrameHeaderBytes + size) {
    if (offset + kFrameHeaderBytes + size > contents_.end)
      return fail(fmt::format("a {} frame that reaches past the end of the file", kind));
    buffer_.resize(std::max<size_t>(buffer_.size(), kFrameHeaderBytes + size));
    there += file_.read_at(offset + there, buffer_.data() + there, kFrameHeaderBytes + size - there);
    if (there < kFrameHeaderBytes + size)
      return fail(fmt::format("a {} frame could not be read to its end: the file was cut or failed", kind));
  }
  const std::span<const uint8_t> payload(buffer_.data() + kFrameHeaderBytes, size);
  if (digest_only(payload.data(), payload.size()) != found->checksum) {
    return fail(fmt::format("a {} frame of {} bytes does not have its checksum", kind, size));
  }
  return payload;
}

std::string StepReader::append_frame(uint64_t offset, uint64_t next, const StepPlace& place, int64_t step,
                                     StepColumns* columns) {
  FrameHeader header;
  std::string fault;
  const auto payload = payload_at(offset, FrameType::records, next, place, step, &header, &fault);
  if (!payload) return fault;
  if (header.records > payload->size() / sizeof(Digest))
    return fmt::format("byte {}: a records frame with an impossible length", offset);
  const size_t first = columns->size();
  resize(columns, first + header.records);
  fault = "a records frame that cannot be decoded";
  if (decoder_.decode(*payload, first, header.records, columns)) fault = check_ids(*columns, first);
  if (fault.empty()) return {};
  resize(columns, first);
  return fmt::format("byte {}: {}", offset, fault);
}

std::string StepReader::append_launches(uint64_t offset, uint64_t next, const StepPlace& place, int64_t step,
                                        uint64_t index, LaunchColumns* launches) {
  FrameHeader header;
  std::string fault;
  const auto payload = payload_at(offset, FrameType::launches, next, place, step, &header, &fault);
  if (!payload) return fault;
  const size_t rows_before = launches->rows.size();
  uint64_t first = 0;
  if (!launch_decoder_.decode(*payload, header.records, &first, launches)) {
    return fmt::format("byte {}: a launches frame that cannot be decoded", offset);
  }
  fault = first == index ? check_launches(std::span(launches->rows).subspan(rows_before), index)
                         : fmt::format("expected launch {} of the step, found launch {}", index, first);
  if (fault.empty()) return {};
  truncate(launches, rows_before);
  return fmt::format("byte {}: {}", offset, fault);
}

std::string StepReader::check_ids(const StepColumns& columns, size_t first) const {
  uint32_t site = 0, layout = 0;
  for (size_t i = first; i < columns.size(); ++i) {
    site = std::max(site, columns.site[i]);
    layout = std::max(layout, columns.layout[i]);
  }
  if (first < columns.size() && (site >= contents_.sites.size() || layout >= contents_.layouts.size())) {
    return fmt::format("a records frame names site {} of {} and layout {} of {}", site, contents_.sites.size(), layout,
                       contents_.layouts.size());
  }
  const auto& lost_sites = contents_.lost_sites;
  const auto& lost_layouts = contents_.lost_layouts;
  if (lost_sites.empty() && lost_layouts.empty()) return {};
  for (size_t i = first; i < columns.size(); ++i) {
    if (std::binary_search(lost_sites.begin(), lost_sites.end(), columns.site[i]) ||
        std::binary_search(lost_layouts.begin(), lost_layouts.end(), columns.layout[i])) {
      return "a records frame whose names were lost with a damaged dictionary frame";
    }
  }
  return {};
}

std::string StepReader::check_launches(std::span<const LaunchRow> rows, uint64_t index) const {
  const auto& lost_sites = contents_.lost_sites;
  for (const LaunchRow& row : rows) {
    if (row.site >= contents_.sites.size()) {
      return fmt::format("a launches frame names site {} of {}", row.site, contents_.sites.size());
    }
    if (!lost_sites.empty() && std::binary_search(lost_sites.begin(), lost_sites.end(), row.site)) {
      return "a launches frame whose names were lost with a damaged dictionary frame";
    }
    if (row.kind == LaunchKind::retry && row.retry_of >= index) {
      return fmt::format("launch {} repeats launch {}, which is not before it", index, row.retry_of);
    }
    ++index;
  }
  return {};
}

void add_to_sums(const StreamContents& contents, const StepColumns& columns, size_t first, StepSums* sums) {
  for (size_t i = first; i < columns.size(); ++i) {
    if (columns.flags[i] & kRecordEval) {
      ++sums->eval_records;
      continue;
    }
    const uint32_t site = columns.site[i];
    sums->add(contents.sites[site].phase,
              tree_leaf(contents.site_keys[site], contents.layout_keys[columns.layout[i]], columns.row(i)));
  }
}

void add_to_sums(const StreamContents& contents, const LaunchColumns& launches, StepSums* sums) {
  const BufferRow* buffers = launches.buffers.data();
  for (const LaunchRow& row : launches.rows) {
    sums->launch_sum += launch_leaf(contents.site_keys[row.site], sums->launches++, row, buffers);
    buffers += row.buffers;
  }
}

size_t rows_before_lost_record(std::span<const LaunchRow> rows, uint64_t records) {
  const auto is_lost = [&](const LaunchRow& row) { return row.kind == LaunchKind::record && row.object >= records; };
  return static_cast<size_t>(std::find_if(rows.begin(), rows.end(), is_lost) - rows.begin());
}

void truncate(LaunchColumns* launches, size_t rows) {
  size_t buffers = 0;
  for (size_t i = 0; i < rows; ++i) buffers += launches->rows[i].buffers;
  launches->rows.resize(rows);
  launches->buffers.resize(buffers);
}

}  // namespace forkpoint
