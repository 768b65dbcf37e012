#include "tests/support/launch_program.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

Digest digest_of(const Words& words, uint64_t start, uint64_t bytes) {
  return digest_only(reinterpret_cast<const uint8_t*>(words.data()) + start, bytes);
}

// The parameter block as the driver gets it.
std::vector<uint8_t> block_of(const std::vector<Parameter>& parameters, const std::vector<uint64_t>& values) {
  std::vector<uint8_t> block;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t size = parameters[i].kind == Parameter::word ? 4 : 8;
    while (block.size() % size != 0) block.push_back(0);
    block.resize(block.size() + size);
    std::memcpy(block.data() + block.size() - size, &values[i], size);
  }
  while (block.size() % 8 != 0) block.push_back(0);
  return block;
}

}  // namespace

Words words_of(uint64_t seed, uint64_t count) {
  Words words(count);
  for (uint64_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>(mix64(seed * 1000003 + i));
  return words;
}

LaunchProgram::LaunchProgram(const Machine& machine, int rank)
    : machine_(machine),
      rank_(rank),
      next_allocation_(machine.first_allocation),
      next_address_(machine.base_address),
      next_stream_(machine.first_stream) {}

LaunchProgram& LaunchProgram::step(int64_t number) {
  run_all();
  step_ = number;
  steps_.push_back(number);
  rows_in_step_ = records_in_step_ = 0;
  return *this;
}

LaunchProgram& LaunchProgram::scope(Phase phase, const std::string& layer, const std::string& op) {
  phase_ = phase, layer_ = layer, op_ = op;
  return *this;
}

// Runs after what the stream, the default stream and waited events say.
void LaunchProgram::queue(std::function<void()> run, int64_t delay) {
  Task task;
  task.run = std::move(run);
  task.priority = static_cast<int64_t>(tasks_.size()) + delay;
  if (const auto last = last_on_stream_.find(stream_); last != last_on_stream_.end())
    task.after.push_back(last->second);
  auto& waits = waits_[stream_];
  task.after.insert(task.after.end(), waits.begin(), waits.end());
  waits.clear();
  if (stream_ == 0) {
    for (const auto& [stream, last] : last_on_stream_) {
      if (!non_blocking_[stream]) task.after.push_back(last);
    }
  } else if (!non_blocking_[stream_] && last_on_stream_.count(0) != 0) {
    task.after.push_back(last_on_stream_[0]);
  }
  task.after.insert(task.after.end(), barrier_.begin(), barrier_.end());
  last_on_stream_[stream_] = tasks_.size();
  tasks_.push_back(std::move(task));
}

void LaunchProgram::run_until(size_t wanted) {
  while (!tasks_[wanted].done) {
    size_t next = tasks_.size();
    for (size_t t = first_open_; t < tasks_.size(); ++t) {
      const Task& task = tasks_[t];
      const bool ready = !task.done && std::all_of(task.after.begin(), task.after.end(),
                                                   [&](size_t other) { return tasks_[other].done; });
      if (ready && (next == tasks_.size() || task.priority < tasks_[next].priority)) next = t;
    }
    tasks_[next].run();
    tasks_[next].done = true;
    tasks_[next].run = nullptr;
    while (first_open_ < tasks_.size() && tasks_[first_open_].done) ++first_open_;
  }
}

void LaunchProgram::run_all() {
  while (first_open_ < tasks_.size()) run_until(first_open_);
}

size_t LaunchProgram::add_row(LaunchKind kind, const std::string& call, uint64_t object) {
  if (steps_.empty()) steps_.push_back(step_);
  Entry entry;
  entry.step = step_;
  if (!call.empty()) entry.site = {phase_, Kind::launch, Role::other, layer_, op_, call, ""};
  entry.row.kind = kind;
  entry.row.object = object;
  entry.row.stream = stream_ == 0 ? 0 : stream_;
  entry.row.flags = static_cast<uint8_t>((in_graph_ ? kLaunchInGraph : 0) | (stream_ == 0 ? kLaunchLegacyStream : 0) |
                                         (non_blocking_[stream_] ? kLaunchNonBlocking : 0));
  ++rows_in_step_;
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

DeviceBuffer LaunchProgram::allocate(uint64_t words) {
  const uint64_t ordinal = next_allocation_++;
  Memory& memory = memory_[ordinal];
  memory.address = next_address_;
  memory.words = words_of(mix64(machine_.garbage * 31 + ordinal), words);
  next_address_ += (words * 4 + 511) / 512 * 512;
  entries_[add_row(LaunchKind::allocate, "", ordinal)].row.bytes = words * 4;
  return {ordinal, words};
}

void LaunchProgram::release(const DeviceBuffer& buffer) {
  run_all();
  add_row(LaunchKind::release, "", buffer.allocation);
  memory_.erase(buffer.allocation);
}

uint32_t LaunchProgram::stream(bool non_blocking) {
  non_blocking_[next_stream_] = non_blocking;
  return next_stream_++;
}

uint64_t LaunchProgram::record_event() {
  const uint64_t event = next_event_++;
  add_row(LaunchKind::event_record, "", event);
  if (const auto last = last_on_stream_.find(stream_); last != last_on_stream_.end()) events_[event] = {last->second};
  return event;
}

void LaunchProgram::wait_event(uint64_t event) {
  add_row(LaunchKind::event_wait, "", event);
  auto& waits = waits_[stream_];
  waits.insert(waits.end(), events_[event].begin(), events_[event].end());
}

void LaunchProgram::synchronize() {
  entries_[add_row(LaunchKind::synchronize, "")].row.stream = kEveryStream;
  run_all();
}

BufferRow LaunchProgram::row_of(const DeviceBuffer& buffer, uint32_t place, uint8_t flags, uint64_t bytes) {
  BufferRow row;
  row.place = place, row.flags = flags;
  row.allocation = buffer.allocation;
  row.address = memory_.at(buffer.allocation).address;
  row.bytes = bytes == 0 ? buffer.words * 4 : bytes;
  return row;
}

void LaunchProgram::take(size_t entry, size_t buffer) {
  BufferRow& row = entries_[entry].buffers[buffer];
  row.digest = digest_of(memory_.at(row.allocation).words, row.start, row.bytes);
}

uint64_t LaunchProgram::address(const DeviceBuffer& buffer) const { return memory_.at(buffer.allocation).address; }

// As the probe does it: every 8-byte word of the block that lies in an allocation is taken for a pointer, and zeroed.
void LaunchProgram::take_pointers(std::vector<uint8_t>* block, const LaunchOptions& options, Entry* entry) {
  for (uint32_t place = 0; place + 8 <= block->size(); place += 8) {
    uint64_t value = 0;
    std::memcpy(&value, block->data() + place, 8);
    for (auto& [ordinal, memory] : memory_) {
      const uint64_t size = memory.words.size() * 4;
      if (value < memory.address || value >= memory.address + size) continue;
      BufferRow after = row_of({ordinal, memory.words.size()}, place, memory.used ? 0 : kBufferFresh);
      after.offset = value - memory.address, after.address = value;
      if (options.window_bytes != 0) {
        after.start = after.offset, after.bytes = std::min(options.window_bytes, size - after.offset);
        after.flags |= kBufferWindow;
      }
      if (options.no_digest) after.flags |= kBufferNoDigest;
      entry->buffers.push_back(after);
      std::memset(block->data() + place, 0, 8);
      break;
    }
  }
  if (!machine_.inputs || options.no_digest) return;
  std::vector<BufferRow> before = entry->buffers;  // all of them come first
  for (BufferRow& buffer : before) buffer.flags |= kBufferBefore;
  entry->buffers.insert(entry->buffers.begin(), before.begin(), before.end());
}

uint32_t LaunchProgram::kernel(const std::string& name, const std::vector<Parameter>& parameters,
                               const KernelBody& body, const LaunchOptions& options) {
  const uint32_t row = rows_in_step_;
  const size_t e = add_row(LaunchKind::kernel, name);
  std::vector<uint64_t> values, numbers, handed;
  for (const Parameter& parameter : parameters) {
    const bool pointer = parameter.kind == Parameter::pointer;
    values.push_back(pointer ? address(parameter.buffer) + parameter.value : parameter.value);
    if (pointer)
      handed.push_back(parameter.buffer.allocation);
    else
      numbers.push_back(parameter.value);
  }
  std::vector<uint8_t> block = block_of(parameters, values);
  LaunchRow& described = entries_[e].row;
  described.grid[0] = options.grid, described.grid[1] = described.grid[2] = 1;
  described.block[0] = options.block, described.block[1] = described.block[2] = 1;
  described.flags |= options.flags;
  described.param_bytes = static_cast<uint32_t>(block.size());
  if ((options.flags & kLaunchParamsUnread) == 0) {
    take_pointers(&block, options, &entries_[e]);
    described.params = digest_only(block.data(), block.size());
  }
  for (const uint64_t ordinal : handed) memory_.at(ordinal).used = true;
  std::vector<size_t> repetitions;
  for (int k = 0; k < options.retries; ++k) {
    const size_t r = add_row(LaunchKind::retry, "");
    entries_[r].row.retry_of = row;
    for (const BufferRow& buffer : entries_[e].buffers) {
      if ((buffer.flags & kBufferBefore) == 0) entries_[r].buffers.push_back(buffer);
    }
    repetitions.push_back(r);
  }
  queue([=, this] { run_kernel(e, body, handed, numbers, repetitions); }, options.delay);
  return row;
}

void LaunchProgram::take_all(size_t entry, bool before) {
  for (size_t k = 0; k < entries_[entry].buffers.size(); ++k) {
    const uint8_t flags = entries_[entry].buffers[k].flags;
    if ((flags & kBufferNoDigest) == 0 && ((flags & kBufferBefore) != 0) == before) take(entry, k);
  }
}

// The launch, then its repetitions from the same inputs; the program goes on with what the launch itself gave.
void LaunchProgram::run_kernel(size_t entry, const KernelBody& body, const std::vector<uint64_t>& handed,
                               const std::vector<uint64_t>& numbers, const std::vector<size_t>& repetitions) {
  const auto run = [&](int attempt) {
    KernelCall call;
    for (const uint64_t ordinal : handed) call.buffers.push_back(memory_.at(ordinal).words);
    call.numbers = numbers;
    call.attempt = attempt;
    body(call);
  };
  const auto copies = [&] {
    std::map<uint64_t, Words> out;
    for (const uint64_t ordinal : handed) out[ordinal] = memory_.at(ordinal).words;
    return out;
  };
  const auto put_back = [&](const std::map<uint64_t, Words>& saved) {
    for (const auto& [ordinal, words] : saved) memory_.at(ordinal).words = words;
  };
  const auto saved = copies();
  take_all(entry, true);
  run(0);
  take_all(entry, false);
  const auto result = copies();
  for (size_t k = 0; k < repetitions.size(); ++k) {
    put_back(saved);
    run(static_cast<int>(k) + 1);
    take_all(repetitions[k], false);
  }
  put_back(result);
}

void LaunchProgram::graph(uint64_t object) {
  add_row(LaunchKind::graph, "", object);
  in_graph_ = true;
}

void LaunchProgram::copy_from_host(const DeviceBuffer& target, const Words& words) {
  const size_t e = add_row(LaunchKind::copy, "cuMemcpyHtoDAsync_v2");
  entries_[e].row.flags |= kLaunchFromHost;
  entries_[e].row.bytes = words.size() * 4;
  entries_[e].buffers = {row_of(target, kPlaceTarget, kBufferWritten)};
  memory_.at(target.allocation).used = true;
  queue([this, e, target, words] {
    std::copy(words.begin(), words.end(), memory_.at(target.allocation).words.begin());
    take(e, 0);
  });
}

Words LaunchProgram::copy_to_host(const DeviceBuffer& source, uint64_t words, bool digested) {
  const uint64_t count = words == 0 ? source.words : words;
  const size_t e = add_row(LaunchKind::copy, "cuMemcpyDtoHAsync_v2");
  entries_[e].row.flags |= kLaunchToHost;
  entries_[e].row.bytes = count * 4;
  entries_[e].buffers = {row_of(source, kPlaceSource, kBufferRead, count * 4)};
  Words out;
  if (!digested) entries_[e].buffers[0].flags |= kBufferNoDigest;
  queue([this, e, source, count, digested, &out] {
    const Words& from = memory_.at(source.allocation).words;
    out.assign(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
    if (digested) take(e, 0);
  });
  run_until(last_on_stream_[stream_]);
  add_row(LaunchKind::synchronize, "");
  return out;
}

void LaunchProgram::copy(const DeviceBuffer& target, const DeviceBuffer& source) {
  const size_t e = add_row(LaunchKind::copy, "cuMemcpyDtoDAsync_v2");
  const uint64_t bytes = std::min(source.words, target.words) * 4;
  entries_[e].row.bytes = bytes;
  entries_[e].buffers = {row_of(source, kPlaceSource, kBufferRead), row_of(target, kPlaceTarget, kBufferWritten)};
  memory_.at(target.allocation).used = true;
  queue([this, e, source, target, bytes] {
    const Words& from = memory_.at(source.allocation).words;
    std::copy_n(from.begin(), bytes / 4, memory_.at(target.allocation).words.begin());
    take(e, 0), take(e, 1);
  });
}

void LaunchProgram::copy_part(const DeviceBuffer& target, uint64_t first_word, const DeviceBuffer& source,
                              uint64_t words) {
  const size_t e = add_row(LaunchKind::copy, "cuMemcpyDtoDAsync_v2");
  entries_[e].row.bytes = words * 4;
  const uint8_t fresh = memory_.at(target.allocation).used ? 0 : kBufferFresh;
  entries_[e].buffers = {row_of(source, kPlaceSource, kBufferRead, words * 4),
                         row_of(target, kPlaceTarget, static_cast<uint8_t>(kBufferWritten | fresh), words * 4)};
  BufferRow& part = entries_[e].buffers[1];
  part.offset = part.start = first_word * 4, part.address += part.start;
  memory_.at(target.allocation).used = true;
  queue([this, e, source, target, first_word, words] {
    const Words& from = memory_.at(source.allocation).words;
    std::copy_n(from.begin(), words,
                memory_.at(target.allocation).words.begin() + static_cast<std::ptrdiff_t>(first_word));
    take(e, 0), take(e, 1);
  });
}

void LaunchProgram::set(const DeviceBuffer& target, uint32_t value) {
  const size_t e = add_row(LaunchKind::set, "cuMemsetD32Async");
  entries_[e].row.bytes = target.words * 4;
  entries_[e].row.params = digest_only(&value, sizeof value);
  entries_[e].buffers = {row_of(target, kPlaceTarget, kBufferWritten)};
  memory_.at(target.allocation).used = true;
  queue([this, e, target, value] {
    auto& words = memory_.at(target.allocation).words;
    std::fill(words.begin(), words.end(), value);
    take(e, 0);
  });
}

void LaunchProgram::write_unobserved(const DeviceBuffer& target, uint64_t word, uint32_t value) {
  run_all();
  memory_.at(target.allocation).words[word] = value;
}

Words LaunchProgram::read(const DeviceBuffer& buffer) {
  run_all();
  return memory_.at(buffer.allocation).words;
}

}  // namespace forkpoint
