#include "lib/certificate.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/diff.h"
#include "lib/verdict_text.h"

namespace forkpoint {
namespace {

constexpr size_t kMostDifferences = 5;

// The calls of one rank that do something, over all its steps: where the steps' borders lie is compared by the records.
struct Observed {
  const HashStreamReader& stream;
  LaunchColumns columns;
  std::vector<int64_t> step;          // by row
  std::vector<uint32_t> first_buffer;
};

Observed observe(const HashStreamReader& stream) {
  Observed seen{stream, {}, {}, {}};
  for (size_t i = 0; i < stream.steps().size(); ++i) {
    LaunchColumns launches;
    stream.read_launches(i, &launches);
    uint32_t buffer = 0;
    for (const LaunchRow& row : launches.rows) {
      if (is_work(row.kind) || row.kind == LaunchKind::graph) {
        seen.columns.rows.push_back(row);
        seen.step.push_back(stream.steps()[i].step);
        seen.first_buffer.push_back(static_cast<uint32_t>(seen.columns.buffers.size()));
        const auto from = launches.buffers.begin() + buffer;
        seen.columns.buffers.insert(seen.columns.buffers.end(), from, from + row.buffers);
      }
      buffer += row.buffers;
    }
  }
  return seen;
}

std::string describe(const Observed& seen, size_t i) {
  const LaunchRow& row = seen.columns.rows[i];
  const std::string_view call = seen.stream.sites()[row.site].tensor;
  return fmt::format("{} ({}x{}x{} blocks of {}x{}x{})", short_kernel_name(call), row.grid[0], row.grid[1], row.grid[2],
                     row.block[0], row.block[1], row.block[2]);
}

bool same_call(const Observed& a, size_t i, const Observed& b, size_t j) {
  const LaunchRow& left = a.columns.rows[i];
  const LaunchRow& right = b.columns.rows[j];
  return left.kind == right.kind && std::equal(left.grid, left.grid + 3, right.grid) &&
         std::equal(left.block, left.block + 3, right.block) && left.shared_bytes == right.shared_bytes &&
         left.stream == right.stream && left.bytes == right.bytes &&
         a.stream.sites()[left.site].tensor == b.stream.sites()[right.site].tensor;
}

const BufferRow* to_host_buffer(const Observed& seen, size_t i) {
  const LaunchRow& row = seen.columns.rows[i];
  if ((row.flags & kLaunchToHost) == 0) return nullptr;
  for (uint32_t n = 0; n < row.buffers; ++n) {
    const BufferRow& buffer = seen.columns.buffers[seen.first_buffer[i] + n];
    if (buffer.place == kPlaceSource && (buffer.flags & kBufferNoDigest) == 0) return &buffer;
  }
  return nullptr;
}

void add(Certificate* certificate, std::string difference) {
  if (certificate->differences.size() < kMostDifferences) certificate->differences.push_back(std::move(difference));
}

void compare_calls(const Observed& plain, const Observed& full, Certificate* certificate) {
  const int rank = plain.stream.header().rank;
  const size_t common = std::min(plain.columns.rows.size(), full.columns.rows.size());
  for (size_t i = 0; i < common; ++i) {
    if (!same_call(plain, i, full, i)) {
      return add(certificate, fmt::format("rank {}, call {}: {} unrecorded, {} recorded", rank, i, describe(plain, i), describe(full, i)));
    }
    const LaunchRow& row = plain.columns.rows[i];
    ++(row.kind == LaunchKind::kernel || row.kind == LaunchKind::graph ? certificate->kernels : certificate->transfers);
    if ((row.flags & kLaunchToHost) == 0) continue;
    const BufferRow* left = to_host_buffer(plain, i);
    const BufferRow* right = to_host_buffer(full, i);
    if (!left || !right) {
      add(certificate, fmt::format("rank {}, call {}: of what was copied to the host no digest was taken", rank, i));
      continue;
    }
    ++certificate->to_host;
    if (left->digest != right->digest) {
      add(certificate, fmt::format("rank {}, call {}: what was copied to the host ({}) has other bits when recorded", rank, i,
                                   counted(right->bytes, "byte")));
    }
  }
  if (plain.columns.rows.size() != full.columns.rows.size()) {
    add(certificate, fmt::format("rank {}: {} calls unrecorded, {} recorded", rank, plain.columns.rows.size(), full.columns.rows.size()));
  }
}

}  // namespace

Certificate certify_observer(const Run& plain, const Run& full) {
  Certificate certificate;
  for (const auto& stream : full.streams()) {
    const HashStreamReader* other = plain.stream_of(stream->header().rank);
    if (!other) {
      add(&certificate, fmt::format("rank {} left no stream when nothing was hashed", stream->header().rank));
      continue;
    }
    compare_calls(observe(*other), observe(*stream), &certificate);
    for (const auto* reader : {other, static_cast<const HashStreamReader*>(stream.get())}) {
      if (!reader->gaps().empty()) add(&certificate, fmt::format("rank {}: {}", reader->header().rank, reader->gaps()[0].reason));
    }
    for (const StepSummary& step : stream->steps()) certificate.records += step.records;
  }
  if (certificate.records > 0) {
    DiffOptions only_records;
    only_records.launches = false;
    only_records.limits_alike = false;  // what is hashed of launches, and not of records, has limits of its own
    const Verdict records = diff(plain, full, only_records);
    if (records.outcome != Outcome::identical) add(&certificate, fmt::format("the records: {}", headline(records)));
  }
  if (certificate.kernels + certificate.transfers + certificate.records == 0) add(&certificate, "nothing was recorded at all");
  certificate.granted = certificate.differences.empty();
  return certificate;
}

std::string to_string(const Certificate& certificate) {
  if (certificate.granted) {
    return fmt::format(
        "certified: recording changed nothing ({} and {} in the same order, {} to the host and {} with the same bits as "
        "without digests)",
        counted(certificate.kernels, "kernel launch"),
        counted(certificate.transfers, certificate.transfers == 1 ? "copy or set" : "copies and set"),
        counted(certificate.to_host, "copy"), counted(certificate.records, "record"));
  }
  std::string text = "not certified: the command did something else when it was recorded";
  for (const std::string& difference : certificate.differences) text += "\n  " + difference;
  return text;
}

}  // namespace forkpoint
