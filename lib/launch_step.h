// One run's launches of one step, as diff reads them, and the names of two runs' kernels in one numbering. Internal to
// diff.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lib/diff_match.h"
#include "lib/hash_stream.h"

namespace forkpoint {

inline constexpr uint32_t kNoBuffer = 0xFFFFFFFFu;

// Reused between steps to avoid allocation.
struct LaunchStep {
  LaunchColumns launches;
  StepColumns records;                 // empty where no row stands for a record
  std::vector<uint32_t> first_buffer;  // by row, in launches.buffers; one more at the end

  // Throws Error as HashStreamReader::read_step.
  void read(const HashStreamReader& stream, size_t step_index);
  // After launches and records were filled in by hand.
  void index();

  size_t size() const { return launches.rows.size(); }
  const LaunchRow& row(size_t i) const { return launches.rows[i]; }
  std::span<const BufferRow> buffers(size_t i) const {
    return {launches.buffers.data() + first_buffer[i], first_buffer[i + 1] - first_buffer[i]};
  }
  // Row of `records` that launch row i stands for. kNoRow: none, or it is damaged.
  uint32_t record_of(size_t i) const;
  // The launch row that stands for a record; kNoRow: its bytes were not on a device.
  uint32_t row_of_record(uint32_t record) const;
};

// Takes part in the alignment of two runs; other rows say what memory there is and what is ordered.
constexpr bool is_aligned(LaunchKind kind) {
  return is_work(kind) || kind == LaunchKind::graph || kind == LaunchKind::host_function || kind == LaunchKind::record;
}
constexpr bool has_digest(const BufferRow& buffer) {
  return (buffer.flags & (kBufferNoDigest | kBufferAddresses)) == 0;
}
constexpr bool is_before(const BufferRow& buffer) { return (buffer.flags & kBufferBefore) != 0; }

// Immutable, so any thread may use it. REQUIRES: the streams outlive it.
class LaunchNames {
 public:
  LaunchNames(const HashStreamReader& a, const HashStreamReader& b);
  uint32_t of(bool in_b, uint32_t site) const { return (in_b ? of_b_ : of_a_)[site]; }
  const std::string& name(uint32_t id) const { return *names_[id]; }  // as it was recorded: mangled

 private:
  void add(std::span<const Site> sites, std::vector<uint32_t>* ids);
  std::unordered_map<std::string_view, uint32_t> by_name_;
  std::vector<const std::string*> names_;
  std::vector<uint32_t> of_a_, of_b_;
};

// A pair of streams that are compared: their sites in one numbering, their kernels in another.
struct LaunchJoin {
  const StreamJoin& sites;
  LaunchNames names;
  explicit LaunchJoin(const StreamJoin& join) : sites(join), names(join.a(), join.b()) {}

  const HashStreamReader& stream(bool in_b) const { return in_b ? sites.b() : sites.a(); }
  uint32_t site(bool in_b, uint32_t id) const { return in_b ? sites.site_of_b(id) : id; }
  const Site& site_of(bool in_b, const LaunchRow& row) const { return stream(in_b).sites()[row.site]; }
  uint32_t kernel(bool in_b, const LaunchRow& row) const { return names.of(in_b, row.site); }
  // Of what a record row stands for; nullptr: of nothing that is known.
  const Site* record_site(bool in_b, const LaunchStep& step, size_t row) const;
};

}  // namespace forkpoint
