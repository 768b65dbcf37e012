#include "tests/support/stream_exercise.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "lib/error.h"

namespace forkpoint {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void check_names(const HashStreamReader& reader) {
  require(reader.sites().size() == reader.site_keys().size(), "a site without key");
  require(reader.layouts().size() == reader.layout_keys().size(), "a layout without key");
  for (const Site& site : reader.sites()) require(name(site.phase) != "unknown", "an unknown phase");
  for (const Layout& layout : reader.layouts()) {
    require(layout.strides.empty() || layout.strides.size() == layout.shape.size(),
            "strides that do not fit the shape");
    require(layout.global_shape.size() == layout.global_offset.size(), "a shard without a place");
  }
}

void check_rows(const HashStreamReader& reader, const StepColumns& rows) {
  const size_t size = rows.size();
  require(rows.layout.size() == size && rows.micro_step.size() == size && rows.call.size() == size &&
              rows.digest.size() == size && rows.absmax.size() == size && rows.nonfinite.size() == size &&
              rows.word_sum.size() == size && rows.flags.size() == size,
          "columns of different lengths");
  for (size_t i = 0; i < size; ++i) {
    require(rows.site[i] < reader.sites().size(), "a site that does not exist");
    require(rows.layout[i] < reader.layouts().size(), "a layout that does not exist");
  }
}

// The tree of a step that could be read, against its records.
void check_tree(const HashStreamReader& reader, size_t index, const ReadStep& step) {
  Digest root, from_phases;
  uint64_t records = 0, layer_sum = 0, layer_records = 0;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    if (step.rows.flags[i] & kRecordEval) continue;
    root +=
        tree_leaf(reader.site_keys()[step.rows.site[i]], reader.layout_keys()[step.rows.layout[i]], step.rows.row(i));
    ++records;
  }
  for (const PhaseSummary& phase : reader.phases(index)) from_phases += phase.digest;
  for (const LayerSummary& layer : reader.layers(index)) {
    layer_sum += layer.digest;
    layer_records += layer.records;
  }
  require(root == step.summary.digest, "a root that is not the sum of its leaves");
  require(from_phases == root, "phases that do not add up to the root");
  require(layer_sum == root.a && layer_records == records, "layers that do not add up to the root");
  require(records == step.summary.records, "a wrong number of records");
  require(step.rows.size() == step.summary.records + step.summary.eval_records, "a wrong number of evaluation records");
}

void check_launches(const HashStreamReader& reader, const ReadStep& step) {
  const LaunchColumns& launches = step.launches;
  uint64_t buffers = 0, index = 0;
  for (const LaunchRow& row : launches.rows) {
    require(row.site < reader.sites().size(), "a launch at a site that does not exist");
    require(name(row.kind) != "unknown", "a launch of an unknown kind");
    require(row.kind != LaunchKind::record || row.object < step.rows.size() || !step.error.empty(),
            "a launch for a record that does not exist");
    require(row.kind != LaunchKind::retry || row.retry_of < index, "a retry of what did not come before it");
    buffers += row.buffers;
    ++index;
  }
  require(buffers == launches.buffers.size(), "buffers of no launch");
  require(index == step.summary.launches, "a wrong number of launches");
}

void check_launch_sum(const HashStreamReader& reader, const StepSummary& summary, const LaunchColumns& launches) {
  Digest sum;
  const BufferRow* buffers = launches.buffers.data();
  for (size_t i = 0; i < launches.rows.size(); ++i) {
    const LaunchRow& row = launches.rows[i];
    sum += launch_leaf(reader.site_keys()[row.site], i, row, buffers);
    buffers += row.buffers;
  }
  require(sum == summary.launch_sum, "a sum that is not that of its launches");
}

ReadStep read_one(const HashStreamReader& reader, size_t index, bool forged) {
  ReadStep step;
  step.summary = reader.steps()[index];
  try {
    reader.read_step(index, &step.rows);
    check_rows(reader, step.rows);
    if (!forged) check_tree(reader, index, step);
    reader.phases(index);
    reader.layers(index);
  } catch (const Error& error) {
    step.error = error.what();
    require(step.error.find(reader.path()) != std::string::npos, "an error that does not name the file");
  }
  try {
    reader.read_launches(index, &step.launches);
    check_launches(reader, step);
    if (!forged) check_launch_sum(reader, step.summary, step.launches);
  } catch (const Error& error) {
    step.launches.clear();
    step.launch_error = error.what();
    require(step.launch_error.find(reader.path()) != std::string::npos, "an error that does not name the file");
  }
  return step;
}

}  // namespace

MemoryFile::MemoryFile(std::span<const uint8_t> bytes) : fd_(memfd_create("stream", MFD_CLOEXEC)) {
  path_ = fmt::format("/proc/self/fd/{}", fd_);
  if (fd_ < 0 || write(fd_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("no file in memory could be made");
  }
}

MemoryFile::~MemoryFile() { close(fd_); }

uint64_t Exercise::rows() const {
  uint64_t sum = 0;
  for (const ReadStep& step : steps) sum += step.rows.size();
  return sum;
}

uint64_t Exercise::launches() const {
  uint64_t sum = 0;
  for (const ReadStep& step : steps) sum += step.launches.rows.size();
  return sum;
}

size_t Exercise::complete_steps() const {
  size_t count = 0;
  for (const ReadStep& step : steps) count += step.summary.complete;
  return count;
}

Exercise exercise_stream(const std::string& path, bool forged) {
  Exercise result;
  try {
    const auto reader = HashStreamReader::open(path);
    check_names(*reader);
    result.state = reader->state();
    result.damage = reader->verify();
    require(result.damage.empty() || result.damage.find(path) != std::string::npos, "damage without a file name");
    result.gaps.assign(reader->gaps().begin(), reader->gaps().end());
    result.limits.assign(reader->coverage_limits().begin(), reader->coverage_limits().end());
    for (size_t i = 0; i < reader->steps().size(); ++i) {
      result.steps.push_back(read_one(*reader, i, forged));
      const ReadStep& step = result.steps.back();
      const bool is_read = step.error.empty() && step.launch_error.empty();
      require(forged || is_read || !result.damage.empty(), "a step that verifies but cannot be read");
    }
  } catch (const Error& error) {
    result = {};
    result.error = error.what();
    require(result.error.find(path) != std::string::npos, "an error that does not name the file");
  }
  return result;
}

bool equal_rows(const StepColumns& a, const StepColumns& b) {
  return a.site == b.site && a.layout == b.layout && a.micro_step == b.micro_step && a.call == b.call &&
         a.digest == b.digest && same_bits(a.absmax, b.absmax) && a.nonfinite == b.nonfinite &&
         a.word_sum == b.word_sum && a.flags == b.flags;
}

bool equal_rows(const LaunchColumns& a, const LaunchColumns& b) {
  return a.rows.size() == b.rows.size() && is_prefix(a, b) && is_prefix(b, a);
}

bool is_prefix(const LaunchColumns& a, const LaunchColumns& b) {
  return a.rows.size() <= b.rows.size() && a.buffers.size() <= b.buffers.size() &&
         std::equal(a.rows.begin(), a.rows.end(), b.rows.begin()) &&
         std::equal(a.buffers.begin(), a.buffers.end(), b.buffers.begin());
}

std::vector<Frame> frames_of(const std::string& path, FrameType type) {
  const InputFile file(path);
  FrameSource source(file, file.size_bytes(), 4096);
  std::vector<Frame> frames;
  std::string fault;
  for (uint64_t offset = kPrefixBytes; offset < file.size_bytes();) {
    const Frame frame = *source.frame_at(offset, &fault);
    if (frame.header.type == type) frames.push_back(frame);
    offset = frame.end();
  }
  return frames;
}

std::vector<uint8_t> read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_bytes(const std::string& path, std::span<const uint8_t> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace forkpoint
