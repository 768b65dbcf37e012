#include "lib/hash_stream_columns.h"

#include <cstring>

namespace forkpoint {

void resize(StepColumns* columns, size_t count) {
  columns->site.resize(count);
  columns->layout.resize(count);
  columns->micro_step.resize(count);
  columns->call.resize(count);
  columns->digest.resize(count);
  columns->absmax.resize(count);
  columns->nonfinite.resize(count);
  columns->word_sum.resize(count);
  columns->flags.resize(count);
}

void append(const Record& record, StepColumns* columns) {
  columns->site.push_back(record.site);
  columns->layout.push_back(record.layout);
  columns->micro_step.push_back(record.micro_step);
  columns->call.push_back(record.call);
  columns->digest.push_back(record.digest);
  columns->absmax.push_back(record.stats.absmax);
  columns->nonfinite.push_back(record.stats.nonfinite);
  columns->word_sum.push_back(record.stats.word_sum);
  columns->flags.push_back(record.flags);
}

Record StepColumns::row(size_t i) const {
  Record record;
  record.site = site[i];
  record.layout = layout[i];
  record.micro_step = micro_step[i];
  record.call = call[i];
  record.digest = digest[i];
  record.stats = {absmax[i], nonfinite[i], word_sum[i]};
  record.flags = flags[i];
  return record;
}

void ColumnEncoder::encode(const StepColumns& columns, std::vector<uint8_t>* out) {
  const size_t count = columns.size();
  append_bytes(columns.digest.data(), count * sizeof(Digest), out);
  append_bytes(columns.word_sum.data(), count * sizeof(uint32_t), out);
  // Steps repeat and ids count up in order of first use, so the difference to "the next id" is mostly zero.
  numbers_.resize(count);
  uint32_t expected = 0;
  for (size_t i = 0; i < count; ++i) {
    numbers_[i] = zigzag(columns.site[i] - expected);
    expected = columns.site[i] + 1;
  }
  planes_.put(numbers_.data(), count, out);
  planes_.put(columns.layout.data(), count, out);
  planes_.put(reinterpret_cast<const uint32_t*>(columns.micro_step.data()), count, out);
  planes_.put(columns.call.data(), count, out);
  planes_.put(columns.nonfinite.data(), count, out);
  planes_.put(columns.flags.data(), count, out);
  static_assert(sizeof(float) == sizeof(uint32_t));
  if (count != 0) std::memcpy(numbers_.data(), columns.absmax.data(), count * sizeof(float));
  planes_.put(numbers_.data(), count, out);
}

bool ColumnDecoder::decode(std::span<const uint8_t> payload, size_t first, size_t count, StepColumns* columns) {
  planes_.open(payload);
  const uint8_t* bytes = nullptr;
  if (!planes_.take(count * sizeof(Digest), &bytes)) return false;
  if (count != 0) std::memcpy(columns->digest.data() + first, bytes, count * sizeof(Digest));
  if (!planes_.take(count * sizeof(uint32_t), &bytes)) return false;
  if (count != 0) std::memcpy(columns->word_sum.data() + first, bytes, count * sizeof(uint32_t));
  uint32_t* site = columns->site.data() + first;
  auto* micro_step = reinterpret_cast<uint32_t*>(columns->micro_step.data() + first);
  absmax_.resize(count);
  if (!planes_.get(count, site) || !planes_.get(count, columns->layout.data() + first) ||
      !planes_.get(count, micro_step) || !planes_.get(count, columns->call.data() + first) ||
      !planes_.get(count, columns->nonfinite.data() + first) || !planes_.get(count, columns->flags.data() + first) ||
      !planes_.get(count, absmax_.data()) || planes_.left() != 0) {
    return false;
  }
  if (count != 0) std::memcpy(columns->absmax.data() + first, absmax_.data(), count * sizeof(float));
  uint32_t expected = 0;
  for (size_t i = 0; i < count; ++i) {
    site[i] = expected + unzigzag(site[i]);
    expected = site[i] + 1;
  }
  return true;
}

}  // namespace forkpoint
