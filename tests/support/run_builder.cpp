#include "tests/support/run_builder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

std::vector<uint8_t> content(uint64_t seed, const ValueShape& form) {
  Layout layout{form.dtype, form.shape, {}, {}, {}};
  const size_t bytes = static_cast<size_t>(element_count(layout)) * static_cast<size_t>(size_bytes(form.dtype));
  std::vector<uint8_t> data((bytes + 3) / 4 * 4);
  for (size_t word = 0; word < data.size() / 4; ++word) {
    const float number = 0.25f + static_cast<float>(mix64(seed * 1000003 + word) % 100000) / 3e5f;
    std::memcpy(&data[word * 4], &number, 4);
  }
  data.resize(bytes);
  return data;
}

Value digested(const std::vector<uint8_t>& data, const ValueShape& form) {
  const DigestResult result = digest_bytes(data.data(), data.size(), form.dtype);
  return {{form.dtype, form.shape, {}, {}, {}}, result.digest, result.stats};
}

}  // namespace

Value value(uint64_t seed, const ValueShape& form) { return digested(content(seed, form), form); }

Value flipped(uint64_t seed, size_t word, int bit, const ValueShape& form) {
  auto data = content(seed, form);
  data[word * 4 + static_cast<size_t>(bit) / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  return digested(data, form);
}

Value permuted(uint64_t seed, const ValueShape& form) {
  auto data = content(seed, form);
  std::swap_ranges(data.begin() + 4, data.begin() + 8, data.begin() + 12);
  return digested(data, form);
}

Value through_bf16(uint64_t seed) {
  auto data = content(seed, {});
  for (size_t at = 0; at < data.size(); at += 4) {
    uint32_t bits = 0;
    std::memcpy(&bits, &data[at], 4);
    const uint32_t below = bits & 0xFFFF, half = 0x8000;
    bits &= 0xFFFF0000;
    if (below > half || (below == half && (bits & 0x10000) != 0)) bits += 0x10000;
    std::memcpy(&data[at], &bits, 4);
  }
  return digested(data, {});
}

Value with_nan(uint64_t seed, const ValueShape& form) {
  auto data = content(seed, form);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&data[4], &nan, 4);
  return digested(data, form);
}

Value zeros(const ValueShape& form) { return digested(std::vector<uint8_t>(content(0, form).size()), form); }

Value shard(uint64_t seed, const std::vector<int64_t>& global_shape, const std::vector<int64_t>& offset,
            const std::vector<int64_t>& shape) {
  const auto data = content(seed, {global_shape, DType::f32});
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d-- > 0;) strides[d] = strides[d + 1] * global_shape[d + 1];
  int64_t first = 0;
  for (size_t d = 0; d < shape.size(); ++d) first += offset[d] * strides[d];
  const DigestResult result =
      digest_view(data.data() + first * 4, shard_view(DType::f32, shape, strides, global_shape, offset));
  return {{DType::f32, shape, {}, global_shape, offset}, result.digest, result.stats};
}

RankBuilder& RankBuilder::step(int64_t number) {
  steps_.push_back(number);
  micro_ = 0;
  begins_ = true;
  return *this;
}

RankBuilder& RankBuilder::prologue() { return step(kPrologueStep).at(Phase::load); }

RankBuilder& RankBuilder::micro(int32_t index) {
  micro_ = index;
  return *this;
}

RankBuilder& RankBuilder::at(Phase phase, const std::string& layer, const std::string& op) {
  phase_ = phase, kind_ = Kind::tensor, layer_ = layer, op_ = op, communicator_.clear();
  return *this;
}

RankBuilder& RankBuilder::collective(const std::string& op, const std::string& layer, const std::string& communicator,
                                     const std::vector<int>& members) {
  return collective(op, Communicator{communicator, members}, layer);
}

RankBuilder& RankBuilder::collective(const std::string& op, const Communicator& communicator, const std::string& layer) {
  at(Phase::collective, layer, op);
  kind_ = Kind::collective, communicator_ = communicator.name;
  if (std::find(communicators_.begin(), communicators_.end(), communicator) == communicators_.end())
    communicators_.push_back(communicator);
  return *this;
}

RankBuilder& RankBuilder::flags(uint8_t flags) {
  flags_ = flags;
  return *this;
}

RankBuilder& RankBuilder::add(Role role, const std::string& tensor, const Value& value) {
  Row row{
      steps_.empty() ? 0 : steps_.back(), {phase_, kind_, role, layer_, op_, tensor, communicator_}, value.layout, {}};
  if (steps_.empty()) steps_.push_back(0);
  row.record.micro_step = micro_, row.record.digest = value.digest, row.record.stats = value.stats,
  row.record.flags = flags_;
  row.begins = begins_;
  begins_ = false;
  rows_.push_back(row);
  return *this;
}

RankBuilder& RankBuilder::scalar(const std::string& name, double number, Role role) {
  Value value;
  value.layout.dtype = DType::f64;
  value.digest = scalar_digest(number);
  const Kind kind = kind_;
  kind_ = Kind::scalar;
  add(role, name, value);
  kind_ = kind;
  return *this;
}

RankBuilder& RankBuilder::state(const std::string& name, Role role, uint64_t seed) {
  const Kind kind = kind_;
  kind_ = Kind::state;
  add(role, name, value(seed, {{16}, DType::raw}));
  kind_ = kind;
  return *this;
}

RankBuilder& RankBuilder::gap(int64_t first_step, int64_t last_step, const std::string& reason) {
  gaps_.push_back({first_step, last_step, 0, reason});
  return *this;
}

RankBuilder& RankBuilder::limit(const std::string& what) {
  limits_.push_back({what, ""});
  return *this;
}

void RankBuilder::write(const std::string& path, const StreamHeader& header) const {
  const auto writer = HashStreamWriter::create(path, header);
  for (const Communicator& communicator : communicators_) writer->add_communicator(communicator);
  for (const Gap& gap : gaps_) writer->add_gap(gap);
  for (const CoverageLimit& limit : limits_) writer->add_coverage_limit(limit);
  size_t at = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    writer->begin_step(steps_[s]);
    std::map<std::tuple<uint32_t, int32_t, bool>, uint32_t> calls;
    for (const size_t first = at; at < rows_.size() && rows_[at].step == steps_[s]; ++at) {
      if (at > first && rows_[at].begins) break;
      Record record = rows_[at].record;
      record.site = writer->site_id(rows_[at].site);
      record.layout = writer->layout_id(rows_[at].layout);
      record.call = calls[{record.site, record.micro_step, (record.flags & kRecordEval) != 0}]++;
      const auto bytes = element_count(rows_[at].layout) * size_bytes(rows_[at].layout.dtype);
      writer->append(record, static_cast<uint64_t>(bytes));
    }
    const bool last = s + 1 == steps_.size();
    if (!last || finish_) writer->end_step();
    else writer->flush();
  }
  if (finish_) writer->finish();
}

RunBuilder::RunBuilder(int world_size, Level level)
    : ranks_(static_cast<size_t>(world_size)), left_out_(static_cast<size_t>(world_size), 0),
      levels_(static_cast<size_t>(world_size), level) {
  manifest_.state = RunState::whole;
  manifest_.world_size = header_.world_size = world_size;
  manifest_.level = header_.level = level;
  manifest_.command = {"train", "--seed", "1"};
  manifest_.exit_status = 0;
  manifest_.end_reason = "exited with status 0";
  header_.device = "cpu";
  step_base("step(n)");
}

RunBuilder& RunBuilder::step_base(const std::string& base) {
  manifest_.step_base = header_.step_base = base;
  return *this;
}

RunBuilder& RunBuilder::every(int64_t n) {
  manifest_.every = header_.every = n;
  return *this;
}

RunBuilder& RunBuilder::keep_steps(const std::vector<int64_t>& steps) {
  const auto dropped = [&](int64_t step) {
    return step != kPrologueStep && std::find(steps.begin(), steps.end(), step) == steps.end();
  };
  for (RankBuilder& rank : ranks_) {
    std::erase_if(rank.rows_, [&](const RankBuilder::Row& row) { return dropped(row.step); });
    std::erase_if(rank.steps_, dropped);
  }
  return *this;
}

RunBuilder& RunBuilder::drop(int64_t step, const std::string& tensor) {
  for (RankBuilder& rank : ranks_) {
    std::erase_if(rank.rows_,
                  [&](const RankBuilder::Row& row) { return row.step == step && row.site.tensor == tensor; });
  }
  return *this;
}

RunBuilder& RunBuilder::collectives_under(const std::string& layer) {
  for (RankBuilder& rank : ranks_) {
    for (RankBuilder::Row& row : rank.rows_) {
      if (row.site.kind == Kind::collective) row.site.layer = layer + "." + row.site.layer;
    }
  }
  return *this;
}

RunBuilder& RunBuilder::leave_out(int rank) {
  left_out_[static_cast<size_t>(rank)] = 1;
  return *this;
}

RunBuilder& RunBuilder::level(int rank, Level level) {
  levels_[static_cast<size_t>(rank)] = level;
  return *this;
}

std::string RunBuilder::write(const std::string& directory) const {
  create_run(directory, manifest_);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (left_out_[rank] != 0) continue;
    StreamHeader header = header_;
    header.rank = static_cast<int>(rank);
    header.level = levels_[rank];
    ranks_[rank].write(directory + "/" + stream_file_name(static_cast<int>(rank)), header);
  }
  write_manifest(directory, manifest_);
  return directory;
}

}  // namespace forkpoint
