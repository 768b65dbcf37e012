#include "probes/operands.h"

#include <fmt/format.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <vector>

#include "lib/error.h"
#include "lib/operand_file.h"
#include "probes/launch_packet.h"
#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

constinit std::atomic<uint64_t> saved_files{0};
constinit std::atomic<uint64_t> saved_bytes{0};
constinit std::atomic<bool> over_limit_said{false};
constinit std::atomic<bool> is_child{false};

bool is_wanted(const Name* name, const char* wanted) { return !wanted[0] || (name && name->view() == wanted); }

bool is_wanted(const SaveRequest& request, const SiteKey& site) {
  return !request.is_launch && (request.phase < 0 || site.phase == static_cast<Phase>(request.phase)) &&
         is_wanted(site.layer, request.layer) && is_wanted(site.op, request.op);
}

bool may_save(const SaveRequest& request, int64_t step, uint64_t size_bytes) {
  if (!request.wanted || step != request.step || is_child.load(std::memory_order_relaxed)) return false;
  if (saved_bytes.fetch_add(size_bytes) + size_bytes <= request.most_bytes) return true;
  saved_bytes.fetch_sub(size_bytes);
  if (!over_limit_said.exchange(true)) {
    recorder.note_limit("operands beyond the limit were not saved", fmt::format("{} bytes a process", request.most_bytes).c_str());
  }
  return false;
}

// Calls that signals interrupt are made again.
void write_all(int descriptor, const void* data, size_t size_bytes, const std::string& path) {
  const auto* at = static_cast<const std::byte*>(data);
  while (size_bytes > 0) {
    const ssize_t written = write(descriptor, at, size_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw Error(fmt::format("{} cannot be written: {}", path, std::strerror(written == 0 ? ENOSPC : errno)));
    at += written;
    size_bytes -= static_cast<size_t>(written);
  }
}

// Under its own name only when it is complete: a reader never meets a part.
void write_file(const OperandKey& key, const Layout& layout, const void* data, size_t size_bytes) {
  const std::string folder = fmt::format("{}/{}", recorder.settings().run_directory, kOperandFolder);
  if (mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
    throw Error(fmt::format("{} cannot be made: {}", folder, std::strerror(errno)));
  }
  const std::string path = folder + "/" + operand_file_name(key.rank, saved_files.fetch_add(1));
  const std::string part = fmt::format("{}.{}.part", path, getpid());
  const std::string header = operand_header(key, layout, size_bytes);
  const int descriptor = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) throw Error(fmt::format("{} cannot be made: {}", part, std::strerror(errno)));
  try {
    write_all(descriptor, header.data(), header.size(), part);
    write_all(descriptor, data, size_bytes, part);
  } catch (...) {
    close(descriptor);
    unlink(part.c_str());
    throw;
  }
  if (close(descriptor) != 0 || rename(part.c_str(), path.c_str()) != 0) {
    throw Error(fmt::format("{} cannot be completed: {}", path, std::strerror(errno)));
  }
}

// Elements in logical order. base: of element (0, 0, ...).
std::vector<std::byte> gather(const std::byte* base, const TensorView& view) {
  const auto element = static_cast<size_t>(size_bytes(view.dtype));
  size_t count = 1;
  for (int d = 0; d < view.dims; ++d) count *= static_cast<size_t>(view.shape[d]);
  std::vector<std::byte> values(count * element);
  int64_t index[kMaxDims] = {};
  int64_t offset = 0;  // of the index, in elements
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(values.data() + i * element, base + offset * static_cast<int64_t>(element), element);
    for (int d = view.dims - 1; d >= 0; --d) {
      offset += view.strides[d];
      if (++index[d] < view.shape[d]) break;
      offset -= view.strides[d] * view.shape[d];
      index[d] = 0;
    }
  }
  return values;
}

// The tensor's values, from wherever it lies.
std::vector<std::byte> values_of(const Token& token, const CheckedTensor& tensor) {
  if (tensor.elements == 0) return {};
  if (!tensor.on_device) return gather(static_cast<const std::byte*>(tensor.data), tensor.view());
  std::vector<std::byte> span(static_cast<size_t>(tensor.end_offset - tensor.lowest_offset));
  int error = 0;
  const auto* lowest = static_cast<const std::byte*>(tensor.data) + tensor.lowest_offset;
  if (!copy_from_device(token, lowest, span.size(), static_cast<CUstream_st*>(tensor.stream), span.data(), &error)) {
    throw Error(fmt::format("it could not be copied from the device (CUDA error {})", error));
  }
  return gather(span.data() - tensor.lowest_offset, tensor.view());
}

Layout layout_of(const LayoutKey& key) {
  Layout layout;
  const auto take = [&](const int64_t* values) {
    return values ? std::vector<int64_t>(values, values + key.dims) : std::vector<int64_t>();
  };
  layout.dtype = key.dtype;
  layout.shape = take(key.shape);
  layout.global_shape = take(key.global_shape);
  layout.global_offset = take(key.global_offset);
  return layout;
}

std::string text_of(const Name* name) { return name ? std::string(name->view()) : std::string(); }

OperandKey key_of(const SiteKey& site) {
  OperandKey key;
  key.rank = recorder.own_rank();
  key.step = recorder.settings().save.step;
  key.micro_step = recorder.micro_step();
  key.phase = site.phase;
  key.role = site.role;
  key.layer = text_of(site.layer);
  key.op = text_of(site.op);
  key.tensor = text_of(site.tensor);
  return key;
}

template <typename Body>
void saving(const std::string& what, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    const std::string detail = fmt::format("{}: {}", what, error.what());
    say("an operand was not saved: %s", detail.c_str());
    recorder.note_limit("an operand was not saved", detail.c_str());
  }
}

// The same bytes as an earlier buffer of the launch?
bool is_handed_before(const LaunchPacket& packet, uint32_t first, uint32_t index) {
  const BufferRow& row = packet.buffers[index].row;
  for (uint32_t i = first; i < index; ++i) {
    const BufferRow& other = packet.buffers[i].row;
    if (other.allocation == row.allocation && other.start == row.start && other.bytes == row.bytes) return true;
  }
  return false;
}

void save_buffer(const Token& token, const BufferRow& row, OperandKey key, CUstream_st* stream, bool before) {
  const uint64_t start = row.address - row.offset + row.start;
  key.tensor = fmt::format("parameter byte {} (allocation {}), {}", row.place, row.allocation, before ? "before" : "after");
  saving(key.tensor, [&] {
    std::vector<std::byte> values(row.bytes);
    int error = 0;
    if (!copy_from_device(token, reinterpret_cast<const void*>(start), values.size(), stream, values.data(), &error)) {
      throw Error(fmt::format("it could not be copied from the device (CUDA error {})", error));
    }
    Layout layout;
    layout.shape = {static_cast<int64_t>(row.bytes)};
    write_file(key, layout, values.data(), values.size());
  });
}

}  // namespace

void save_operand(const Token& token, const SiteKey& site, const CheckedTensor& tensor) {
  const SaveRequest& request = recorder.settings().save;
  if (!is_wanted(request, site)) return;
  if (!may_save(request, recorder.current_step(), static_cast<uint64_t>(tensor.size_bytes))) return;
  saving(text_of(site.tensor), [&] {
    const std::vector<std::byte> values = values_of(token, tensor);
    write_file(key_of(site), layout_of(tensor.layout), values.data(), values.size());
  });
}

bool is_launch_to_save() {
  const SaveRequest& request = recorder.settings().save;
  return request.is_launch && recorder.current_step() == request.step && recorder.next_row() == request.launch;
}

void save_launch_operands(const Token& token, const LaunchPacket& packet, uint32_t first, const Name* kernel, CUstream_st* stream,
                          bool before) {
  const SaveRequest& request = recorder.settings().save;
  for (uint32_t i = first; i < packet.row.buffers; ++i) {
    const BufferRow& row = packet.buffers[i].row;
    if (is_handed_before(packet, first, i) || row.allocation == 0 || !may_save(request, request.step, row.bytes)) continue;
    SiteKey site = packet.site ? packet.site->key : SiteKey{};
    site.role = before ? Role::input : Role::output;
    OperandKey key = key_of(site);
    key.op = text_of(kernel);
    save_buffer(token, row, key, stream, before);
  }
}

void save_nothing_in_child() { is_child.store(true); }

}  // namespace forkpoint
