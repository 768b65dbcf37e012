#include "lib/hash_stream_launches.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "lib/digest_mix.h"
#include "lib/hash_stream_format.h"

namespace forkpoint {
namespace {

template <size_t kBytes>
using NumberOf = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>;

// Puts or gets columns; `field` names one: it returns a reference into a row.
class ColumnPutter {
 public:
  ColumnPutter(PlaneEncoder* planes, ColumnScratch* scratch, std::vector<uint8_t>* out)
      : planes_(*planes), scratch_(*scratch), out_(*out) {}

  template <typename Row, typename Field>
  bool plain(std::span<const Row> rows, Field field) {
    return put(rows, field, [](size_t, auto value) { return value; });
  }

  // zigzag(value - (value of the row before + 1))
  template <typename Row, typename Field>
  bool counting(std::span<const Row> rows, Field field) {
    return put(rows, field, [&](size_t i, auto value) {
      return zigzag(static_cast<decltype(value)>(value - (i == 0 ? 0 : field(rows[i - 1]) + 1)));
    });
  }

  // zigzag(value - value of the model)
  template <typename Row, typename Field>
  bool modelled(std::span<const Row> rows, const RowModels& models, Field field) {
    return put(rows, field, [&](size_t i, auto value) {
      const uint32_t base = models.base(i);
      return zigzag(static_cast<decltype(value)>(value - (base == RowModels::kNone ? 0 : field(rows[base]))));
    });
  }

 private:
  template <typename Row, typename Field, typename Change>
  bool put(std::span<const Row> rows, Field field, Change change) {
    using Number = NumberOf<sizeof(field(rows[0]))>;
    auto& column = std::get<std::vector<Number>>(scratch_);
    column.resize(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) column[i] = change(i, static_cast<Number>(field(rows[i])));
    planes_.put(column.data(), column.size(), &out_);
    return true;
  }

  PlaneEncoder& planes_;
  ColumnScratch& scratch_;
  std::vector<uint8_t>& out_;
};

class ColumnGetter {
 public:
  ColumnGetter(PlaneDecoder* planes, ColumnScratch* scratch) : planes_(*planes), scratch_(*scratch) {}

  template <typename Row, typename Field>
  bool plain(std::span<Row> rows, Field field) {
    return get(rows, field, [](size_t, auto value) { return value; });
  }

  template <typename Row, typename Field>
  bool counting(std::span<Row> rows, Field field) {
    return get(rows, field, [&](size_t i, auto value) {
      return static_cast<decltype(value)>(unzigzag(value) + (i == 0 ? 0 : field(rows[i - 1]) + 1));
    });
  }

  template <typename Row, typename Field>
  bool modelled(std::span<Row> rows, const RowModels& models, Field field) {
    return get(rows, field, [&](size_t i, auto value) {
      const uint32_t base = models.base(i);
      return static_cast<decltype(value)>(unzigzag(value) + (base == RowModels::kNone ? 0 : field(rows[base])));
    });
  }

 private:
  template <typename Row, typename Field, typename Change>
  bool get(std::span<Row> rows, Field field, Change change) {
    using Value = std::remove_reference_t<decltype(field(rows[0]))>;
    using Number = NumberOf<sizeof(Value)>;
    auto& column = std::get<std::vector<Number>>(scratch_);
    column.resize(rows.size());
    if (!planes_.get(column.size(), column.data())) return false;
    for (size_t i = 0; i < rows.size(); ++i) field(rows[i]) = static_cast<Value>(change(i, column[i]));
    return true;
  }

  PlaneDecoder& planes_;
  ColumnScratch& scratch_;
};

// The columns of both tables but the digests, in the order of the payload.
template <typename Codec, typename Row>
bool code_rows(Codec codec, std::span<Row> rows, const RowModels& models) {
  const auto modelled = [&](auto field) { return codec.modelled(rows, models, field); };
  return codec.plain(
             rows, [](auto& row) -> auto& { return row.kind; }) &&
         codec.plain(
             rows, [](auto& row) -> auto& { return row.flags; }) &&
         codec.counting(
             rows, [](auto& row) -> auto& { return row.site; }) &&
         codec.plain(
             rows, [](auto& row) -> auto& { return row.micro_step; }) &&
         codec.plain(
             rows, [](auto& row) -> auto& { return row.stream; }) &&
         modelled([](auto& row) -> auto& { return row.grid[0]; }) &&
         modelled([](auto& row) -> auto& { return row.grid[1]; }) &&
         modelled([](auto& row) -> auto& { return row.grid[2]; }) &&
         modelled([](auto& row) -> auto& { return row.block[0]; }) &&
         modelled([](auto& row) -> auto& { return row.block[1]; }) &&
         modelled([](auto& row) -> auto& { return row.block[2]; }) &&
         modelled([](auto& row) -> auto& { return row.shared_bytes; }) &&
         modelled([](auto& row) -> auto& { return row.param_bytes; }) &&
         modelled([](auto& row) -> auto& { return row.object; }) &&
         modelled([](auto& row) -> auto& { return row.bytes; }) &&
         codec.plain(
             rows, [](auto& row) -> auto& { return row.retry_of; }) &&
         modelled([](auto& row) -> auto& { return row.buffers; });
}

template <typename Codec, typename Buffer>
bool code_buffers(Codec codec, std::span<Buffer> buffers, const RowModels& models) {
  const auto modelled = [&](auto field) { return codec.modelled(buffers, models, field); };
  return codec.plain(
             buffers, [](auto& buffer) -> auto& { return buffer.place; }) &&
         codec.plain(
             buffers, [](auto& buffer) -> auto& { return buffer.flags; }) &&
         modelled([](auto& buffer) -> auto& { return buffer.allocation; }) &&
         modelled([](auto& buffer) -> auto& { return buffer.offset; }) &&
         modelled([](auto& buffer) -> auto& { return buffer.address; }) &&
         modelled([](auto& buffer) -> auto& { return buffer.start; }) &&
         modelled([](auto& buffer) -> auto& { return buffer.bytes; });
}

uint64_t raw_bytes_of(size_t rows, size_t buffers) {
  return uint64_t{rows} * kRawLaunchBytes + uint64_t{buffers} * kRawBufferBytes;
}

}  // namespace

void RowModels::start(size_t count) {
  distances_.clear();
  bases_.clear();
  distances_.reserve(count);
  bases_.reserve(count);
  slots_.assign(std::bit_ceil(2 * count + 1), 0);
  last_without_ = kNone;
}

template <typename Same>
void RowModels::find(uint64_t hash, Same same) {
  const auto row = static_cast<uint32_t>(distances_.size());
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  while (slots_[slot] != 0 && !same(slots_[slot] - 1)) slot = (slot + 1) & mask;
  const uint32_t model = slots_[slot] == 0 ? kNone : slots_[slot] - 1;
  slots_[slot] = row + 1;
  distances_.push_back(model == kNone ? 0 : row - model);
  bases_.push_back(model == kNone ? last_without_ : model);
  if (model == kNone) last_without_ = row;
}

bool RowModels::follow(size_t count) {
  bases_.resize(count);
  last_without_ = kNone;
  for (uint32_t row = 0; row < count; ++row) {
    const uint32_t distance = distances_[row];
    if (distance > row) return false;
    bases_[row] = distance == 0 ? last_without_ : row - distance;
    if (distance == 0) last_without_ = row;
  }
  return true;
}

void LaunchEncoder::encode(const LaunchColumns& launches, uint64_t first, std::vector<uint8_t>* out) {
  const size_t begin = out->size();
  const auto buffer_count = static_cast<uint32_t>(launches.buffers.size());
  append_bytes(&first, sizeof(first), out);
  append_bytes(&buffer_count, sizeof(buffer_count), out);
  find_models(launches);
  planes_.put(row_models_.distances().data(), launches.rows.size(), out);
  planes_.put(buffer_models_.distances().data(), launches.buffers.size(), out);
  put_digests(launches, out);
  ColumnPutter putter(&planes_, &scratch_, out);
  code_rows(putter, std::span(launches.rows), row_models_);
  code_buffers(putter, std::span(launches.buffers), buffer_models_);
  out->resize(std::max(out->size(), begin + raw_bytes_of(launches.rows.size(), buffer_count) / kMaxExpansion));
}

void LaunchEncoder::find_models(const LaunchColumns& launches) {
  const std::vector<LaunchRow>& rows = launches.rows;
  row_models_.start(rows.size());
  for (const LaunchRow& row : rows) {
    row_models_.find(mix64(row.params.a ^ static_cast<uint64_t>(row.kind)),
                     [&](uint32_t i) { return rows[i].kind == row.kind && rows[i].params == row.params; });
  }
  const std::vector<BufferRow>& buffers = launches.buffers;
  buffer_models_.start(buffers.size());
  for (const BufferRow& buffer : buffers) {
    buffer_models_.find(mix64(buffer.allocation),
                        [&](uint32_t i) { return buffers[i].allocation == buffer.allocation; });
  }
}

void LaunchEncoder::put_digests(const LaunchColumns& launches, std::vector<uint8_t>* out) {
  for (size_t i = 0; i < launches.rows.size(); ++i) {
    if (!row_models_.has_model(i)) append_bytes(&launches.rows[i].params, sizeof(Digest), out);
  }
  const std::vector<BufferRow>& buffers = launches.buffers;
  repeats_.assign(buffers.size(), 0);
  for (size_t i = 0; i < buffers.size(); ++i) {
    repeats_[i] = buffer_models_.has_model(i) && buffers[i].digest == buffers[buffer_models_.base(i)].digest;
  }
  planes_.put(repeats_.data(), repeats_.size(), out);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!repeats_[i]) append_bytes(&buffers[i].digest, sizeof(Digest), out);
  }
}

bool LaunchDecoder::decode(std::span<const uint8_t> payload, size_t count, uint64_t* first, LaunchColumns* launches) {
  planes_.open(payload);
  const uint8_t* bytes = nullptr;
  uint32_t buffer_count = 0;
  if (!planes_.take(sizeof(*first) + sizeof(buffer_count), &bytes)) return false;
  std::memcpy(first, bytes, sizeof(*first));
  std::memcpy(&buffer_count, bytes + sizeof(*first), sizeof(buffer_count));
  // Rows that are all alike need next to no bytes: without a bound, a small file could ask for any amount of memory.
  if (count > kLaunchesPerFrame || buffer_count > kBuffersPerFrame ||
      raw_bytes_of(count, buffer_count) / kMaxExpansion > payload.size()) {
    return false;
  }
  const size_t rows_before = launches->rows.size(), buffers_before = launches->buffers.size();
  launches->rows.resize(rows_before + count);
  launches->buffers.resize(buffers_before + buffer_count);
  const std::span<LaunchRow> rows = std::span(launches->rows).subspan(rows_before);
  const std::span<BufferRow> buffers = std::span(launches->buffers).subspan(buffers_before);
  const ColumnGetter getter(&planes_, &scratch_);
  bool good = get_models(count, buffer_count) && get_digests(rows, buffers) && code_rows(getter, rows, row_models_) &&
              code_buffers(getter, buffers, buffer_models_);
  uint64_t named = 0;
  for (const LaunchRow& row : rows) {
    good = good && static_cast<int>(row.kind) < kLaunchKindCount;
    named += row.buffers;
  }
  if (good && named == buffer_count) return true;
  launches->rows.resize(rows_before);
  launches->buffers.resize(buffers_before);
  return false;
}

bool LaunchDecoder::get_models(size_t rows, size_t buffers) {
  row_models_.distances().resize(rows);
  buffer_models_.distances().resize(buffers);
  return planes_.get(rows, row_models_.distances().data()) && row_models_.follow(rows) &&
         planes_.get(buffers, buffer_models_.distances().data()) && buffer_models_.follow(buffers);
}

bool LaunchDecoder::get_digests(std::span<LaunchRow> rows, std::span<BufferRow> buffers) {
  const uint8_t* bytes = nullptr;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (row_models_.has_model(i)) {
      rows[i].params = rows[row_models_.base(i)].params;
    } else if (planes_.take(sizeof(Digest), &bytes)) {
      std::memcpy(&rows[i].params, bytes, sizeof(Digest));
    } else {
      return false;
    }
  }
  repeats_.resize(buffers.size());
  if (!planes_.get(repeats_.size(), repeats_.data())) return false;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (repeats_[i] && !buffer_models_.has_model(i)) return false;
    if (repeats_[i]) {
      buffers[i].digest = buffers[buffer_models_.base(i)].digest;
    } else if (planes_.take(sizeof(Digest), &bytes)) {
      std::memcpy(&buffers[i].digest, bytes, sizeof(Digest));
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace forkpoint
