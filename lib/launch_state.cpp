#include "lib/launch_state.h"

#include <algorithm>

#include "lib/error.h"

namespace forkpoint {
namespace {

using Part = BufferStates::Part;

bool same_range(const Part& part, const BufferRow& buffer) {
  return part.start == buffer.start && part.bytes == buffer.bytes;
}
bool overlaps(const Part& part, const BufferRow& buffer) {
  return part.start < buffer.start + buffer.bytes && buffer.start < part.start + part.bytes;
}
bool within(const Part& part, const BufferRow& buffer) {
  return part.start >= buffer.start && part.start + part.bytes <= buffer.start + buffer.bytes;
}

// The digest right before the launch that belongs to the digest after it: the n-th of that place.
uint32_t before_of(std::span<const BufferRow> buffers, uint32_t after) {
  if (!is_before(buffers[0])) return kNoBuffer;  // they come first, if there are any
  uint32_t nth = 0;
  for (uint32_t k = 0; k < after; ++k)
    nth += buffers[k].place == buffers[after].place && !is_before(buffers[k]) ? 1 : 0;
  for (uint32_t k = 0; k < buffers.size(); ++k) {
    if (!is_before(buffers[k]) || buffers[k].place != buffers[after].place || nth-- != 0) continue;
    return has_digest(buffers[k]) ? k : kNoBuffer;
  }
  return kNoBuffer;
}

// Every byte of a buffer lies in some part.
bool is_covered(const std::vector<Part>& parts, const BufferRow& buffer) {
  uint64_t end = buffer.start;
  for (bool grew = true; grew && end < buffer.start + buffer.bytes;) {
    grew = false;
    for (const Part& part : parts) {
      if (part.start <= end && part.start + part.bytes > end) end = part.start + part.bytes, grew = true;
    }
  }
  return end >= buffer.start + buffer.bytes;
}

// Is a buffer row of the launch's own, and of device memory whose content means something in both runs?
bool is_tracked(const BufferRow& buffer) { return buffer.allocation != 0 && (buffer.flags & kBufferAddresses) == 0; }

}  // namespace

const std::vector<Part>* BufferStates::parts(uint64_t allocation) const {
  const auto at = allocations_.find(allocation);
  return at == allocations_.end() ? nullptr : &at->second.parts;
}

BufferStates::Allocation& BufferStates::allocation(uint64_t ordinal) {
  const auto [at, fresh] = allocations_.try_emplace(ordinal);
  if (fresh && lookup_) {
    at->second.parts = lookup_(ordinal);
    for (Part& part : at->second.parts) part.age = ++age_;
    at->second.written = !at->second.parts.empty();
  }
  return at->second;
}

Access BufferStates::look(const BufferRow& buffer) {
  Access access;
  Allocation& at = allocation(buffer.allocation);
  at.from_birth |= (buffer.flags & kBufferFresh) != 0 && at.parts.empty();
  const Part* exact = nullptr;
  for (const Part& part : at.parts) {
    if (same_range(part, buffer)) exact = &part;
  }
  for (const Part& part : at.parts) {
    const bool newer = exact == nullptr || part.age > exact->age;
    if (&part != exact && newer && overlaps(part, buffer)) access.others.push_back(part.writer);
  }
  access.fresh = (buffer.flags & kBufferFresh) != 0 || (at.from_birth && !at.written);
  access.unwritten = (at.from_birth || access.fresh) && !is_covered(at.parts, buffer);
  if (exact == nullptr) return access;
  access.writer = exact->writer;
  access.tracked = exact->known && access.others.empty();
  access.held = exact->digest;
  return access;
}

void BufferStates::store(const BufferRow& buffer, const LaunchRef& at, bool known, bool replaces, bool found) {
  Allocation& memory = allocation(buffer.allocation);
  memory.written = true;
  if (replaces) {
    std::erase_if(memory.parts, [&](const Part& part) { return within(part, buffer); });
  } else {
    std::erase_if(memory.parts, [&](const Part& part) { return same_range(part, buffer); });
  }
  memory.parts.push_back({buffer.start, buffer.bytes, known, buffer.digest, at, ++age_, found});
}

void BufferStates::apply(const BufferRow& buffer, const LaunchRef& at, Access* access) {
  if (access->reads_only) {
    access->changed = Changed::no;
    const bool news = !access->tracked && !access->writer.known() && access->others.empty() && has_digest(buffer);
    if (news) store(buffer, at, true, false);
    return;
  }
  if (!has_digest(buffer)) return store(buffer, at, false, false);
  if (access->overwritten) {
    access->changed = Changed::yes;
    return store(buffer, at, true, true);
  }
  const bool first = (buffer.flags & kBufferFresh) != 0 && !access->tracked && access->others.empty();
  if (!access->content_known()) return store(buffer, at, true, false, first);
  access->changed = access->held == buffer.digest ? Changed::no : Changed::yes;
  // Also where only an unobserved writer has changed it: the digest right before is what is known now.
  if (access->changed == Changed::yes || access->unobserved || !access->tracked)
    store(buffer, at, true, access->changed == Changed::yes, first && access->changed == Changed::no);
}

void BufferStates::trace(const LaunchStep& step, size_t step_index,
                         const std::function<bool(size_t row)>& written_by_record, std::vector<Access>* accesses) {
  std::vector<Access> own;
  touched_.clear(), released_.clear();
  for (size_t i = 0; i < step.size(); ++i) {
    const LaunchRow& row = step.row(i);
    if (row.kind == LaunchKind::allocate) {
      Allocation& at = allocations_[row.object];
      at = {};
      at.from_birth = true;
    } else if (row.kind == LaunchKind::release) {
      allocations_.erase(row.object);
      released_.push_back(row.object);
    }
    if (!is_work(row.kind) && row.kind != LaunchKind::record) continue;
    const bool record = row.kind == LaunchKind::record, written = record && written_by_record(i);
    own.clear();
    const auto buffers = step.buffers(i);
    for (uint32_t k = 0; k < buffers.size(); ++k) {
      const BufferRow& buffer = buffers[k];
      if (is_before(buffer)) continue;
      Access access = is_tracked(buffer) ? look(buffer) : Access{};
      access.row = static_cast<uint32_t>(i);
      access.buffer = step.first_buffer[i] + k;
      access.reads_only = (buffer.flags & kBufferRead) != 0 || (record && !written);
      // Of a copy to a part of what the digest covers, the rest stays.
      access.overwritten = ((buffer.flags & kBufferWritten) != 0 && row.bytes >= buffer.bytes) || written;
      const uint32_t before = before_of(buffers, k);
      if (before != kNoBuffer) {
        access.before = step.first_buffer[i] + before;
        access.unobserved = access.tracked && !(buffers[before].digest == access.held);
        access.held = buffers[before].digest;
      }
      own.push_back(std::move(access));
    }
    // All of them were looked up first: a launch may be handed one buffer twice.
    for (Access& access : own) {
      const BufferRow& buffer = step.launches.buffers[access.buffer];
      if (!is_tracked(buffer)) {
        access.changed = access.reads_only ? Changed::no : Changed::unknown;
      } else if (record && !written) {
        access.changed = Changed::no;  // the digest is of a tensor's elements, not of the bytes
      } else {
        apply(buffer, {step_index, static_cast<uint32_t>(i)}, &access);
      }
      if (is_tracked(buffer)) touched_.push_back(buffer.allocation);
    }
    if (accesses != nullptr) accesses->insert(accesses->end(), own.begin(), own.end());
  }
}

void StateHistory::start(size_t step_index) {
  next_ = step_index;
  found_.clear();
  const auto steps = join_.stream(in_b_).steps();
  number_ = step_index < steps.size() ? steps[step_index].step : 0;
}

// A step that ran unrecorded in between may have written anything.
bool StateHistory::read_one() {
  if (next_ == 0) return false;
  const HashStreamReader& stream = join_.stream(in_b_);
  const StepSummary& before = stream.steps()[next_ - 1];
  const bool adjacent =
      before.complete && (before.step + 1 == number_ || (before.step == kPrologueStep && number_ == 0));
  if (!adjacent) return false;
  try {
    step_.read(stream, next_ - 1);
  } catch (const Error&) {
    return next_ = 0, false;
  }
  --next_;
  number_ = before.step;
  BufferStates states;
  states.trace(
      step_, next_, [&](size_t row) { return is_collective_output(join_, in_b_, step_, row); }, nullptr);
  for (const auto& [allocation, memory] : states.all()) {
    if (!memory.parts.empty()) found_.try_emplace(allocation, memory.parts);
  }
  return true;
}

std::vector<Part> StateHistory::find(uint64_t allocation) {
  for (;;) {
    const auto at = found_.find(allocation);
    if (at != found_.end()) return at->second;
    if (!read_one()) return {};
  }
}

bool is_collective_output(const LaunchJoin& join, bool in_b, const LaunchStep& step, size_t row) {
  const Site* site = join.record_site(in_b, step, row);
  return site != nullptr && site->kind == Kind::collective && site->role == Role::output;
}

}  // namespace forkpoint
