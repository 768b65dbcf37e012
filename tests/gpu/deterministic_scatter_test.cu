// The scatter kernels on a GPU give, bit for bit, what the order of kernels/scatter_plan.h gives on the host.
#include "kernels/deterministic_scatter.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

using namespace forkpoint;

namespace {

template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    REQUIRE(cudaMalloc(&data_, (count_ + 8) * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    REQUIRE(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

struct Shape {
  std::vector<int64_t> lengths;  // of the segments; segment i goes to row 2 i
  int64_t columns;
  uint32_t flags = kScatterAdd;
  double alpha = 1;
  bool weights = false, wide_keys = false, rows = true;
  int64_t out_rows = -1;  // -1: as many as are needed
};

template <typename T>
struct Inputs {
  std::vector<int64_t> keys, rows;
  std::vector<T> src, weights, out;
  int64_t out_rows;

  explicit Inputs(const Shape& shape) {
    for (size_t i = 0; i < shape.lengths.size(); ++i)
      keys.insert(keys.end(), shape.lengths[i], static_cast<int64_t>(2 * i));
    rows.resize(keys.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::mt19937 random(static_cast<unsigned>(keys.size()));
    if (shape.rows) std::shuffle(rows.begin(), rows.end(), random);
    out_rows = shape.out_rows >= 0 ? shape.out_rows : static_cast<int64_t>(2 * shape.lengths.size());
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<T>* values, size_t count) {
      for (size_t i = 0; i < count; ++i) values->push_back(static_cast<T>(normal(random)));
    };
    fill(&src, keys.size() * shape.columns);
    fill(&weights, keys.size());
    fill(&out, out_rows * shape.columns);
    if (shape.flags & kScatterProduct)
      for (T& value : src) value = value < 0 ? T(-1) - value / 64 : T(1) + value / 64;
  }
};

// By the definition in the headers, not by the functions that the kernels use.
template <typename T>
T segment(const Shape& shape, const Inputs<T>& in, int64_t begin, int64_t end, int64_t column) {
  const bool product = shape.flags & kScatterProduct;
  const auto join = [&](T a, T b) { return product ? a * b : a + b; };
  std::vector<T> pieces;
  for (int64_t at = begin; at < end; at += 128) {
    T sum = product ? T(1) : T(-0.0);
    for (int64_t p = at; p < std::min(at + 128, end); ++p) {
      const T value = in.src[in.rows[p] * shape.columns + column];
      if (shape.weights && !product)
        sum = std::fma(in.weights[p], value, sum);
      else
        sum = join(sum, value);
    }
    pieces.push_back(sum);
  }
  const size_t each = (pieces.size() + 31) / 32;
  T total{};
  for (size_t at = 0; at < pieces.size(); at += each) {
    T group = pieces[at];
    for (size_t i = at + 1; i < std::min(at + each, pieces.size()); ++i) group = join(group, pieces[i]);
    total = at == 0 ? group : join(total, group);
  }
  return total;
}

template <typename T>
std::vector<T> on_host(const Shape& shape, const Inputs<T>& in) {
  std::vector<T> out = in.out;
  const int64_t count = static_cast<int64_t>(in.keys.size());
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin; end < count && in.keys[end] == in.keys[begin];) ++end;
    if (in.keys[begin] >= in.out_rows) continue;
    for (int64_t c = 0; c < shape.columns; ++c) {
      T& element = out[in.keys[begin] * shape.columns + c];
      const T sum = segment(shape, in, begin, end, c);
      const bool adds = shape.flags & kScatterAdd;
      if (shape.flags & kScatterProduct)
        element = adds ? element * sum : sum;
      else
        element = adds ? std::fma(static_cast<T>(shape.alpha), sum, element) : static_cast<T>(shape.alpha) * sum;
      if (shape.flags & kScatterMean) element /= static_cast<T>(end - begin + (adds ? 1 : 0));
    }
  }
  return out;
}

template <typename T>
std::vector<T> on_device(const Shape& shape, const Inputs<T>& in, ScatterType type) {
  const OnDevice<int64_t> wide(in.keys), rows(in.rows);
  const OnDevice<int32_t> narrow(std::vector<int32_t>(in.keys.begin(), in.keys.end()));
  const OnDevice<T> src(in.src), weights(in.weights), out(in.out);
  const int64_t count = static_cast<int64_t>(in.keys.size());
  const OnDevice<uint8_t> starts(std::vector<uint8_t>(scatter_starts_bytes(count), 0xa5));
  const OnDevice<uint8_t> partials(std::vector<uint8_t>(scatter_partials_bytes(type, count, shape.columns), 0xff));
  ScatterWork work{};
  work.src = src.data();
  work.out = out.data();
  work.rows = shape.rows ? rows.data() : nullptr;
  work.weights = shape.weights ? weights.data() : nullptr;
  work.starts = reinterpret_cast<uint32_t*>(starts.data());
  work.partials = partials.data();
  work.keys = {shape.wide_keys ? static_cast<const void*>(wide.data()) : narrow.data(), count, shape.wide_keys};
  work.out_rows = in.out_rows;
  work.columns = work.src_stride = work.out_stride = shape.columns;
  work.alpha = shape.alpha;
  work.flags = shape.flags;
  REQUIRE(scatter_on_device(type, work, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  return out.read();
}

template <typename T>
void check(const Shape& shape, ScatterType type) {
  const Inputs<T> in(shape);
  const std::vector<T> expected = on_host(shape, in), found = on_device(shape, in, type);
  size_t differ = 0;
  for (size_t i = 0; i < expected.size(); ++i) differ += memcmp(&expected[i], &found[i], sizeof(T)) != 0;
  CAPTURE(shape.columns);
  CAPTURE(shape.flags);
  CAPTURE(in.keys.size());
  CHECK(differ == 0);
}

void check(const Shape& shape) {
  check<float>(shape, ScatterType::float32);
  check<double>(shape, ScatterType::float64);
}

const std::vector<int64_t> kMixed = {1, 128, 129, 3, 500, 127, 1, 1, 40000, 256, 2, 0, 33};

}  // namespace

TEST_CASE("scatter on the device: bit for bit the order that is promised, for any number of columns") {
  for (const int64_t columns : {1, 2, 3, 4, 7, 16, 31, 33, 64, 100, 128, 257})
    check(Shape{.lengths = kMixed, .columns = columns});
  check(Shape{.lengths = {1, 2, 5, 300}, .columns = 1024});
  check(Shape{.lengths = {1, 2, 5, 300}, .columns = 2049});
}

TEST_CASE("scatter on the device: weights, factors, means, products, and rows in place") {
  for (const uint32_t flags : {0u, 1u, 2u, 3u}) {
    check(Shape{.lengths = kMixed, .columns = 12, .flags = flags, .alpha = -1.25, .weights = true});
    check(Shape{.lengths = kMixed, .columns = 5, .flags = flags, .wide_keys = true, .rows = false});
  }
  check(Shape{.lengths = kMixed, .columns = 9, .flags = kScatterProduct});
  check(Shape{.lengths = kMixed, .columns = 8, .flags = kScatterProduct | kScatterAdd});
}

TEST_CASE("scatter on the device: what has no row is left out, and rows without contributions stay") {
  check(Shape{.lengths = kMixed, .columns = 4, .out_rows = 9});
  check(Shape{.lengths = kMixed, .columns = 33, .flags = 0, .out_rows = 17});
}

void check_sort(std::vector<int64_t> index, int64_t rows, uint32_t flags, bool wide_places) {
  const OnDevice<int64_t> wide(index);
  const OnDevice<int32_t> narrow(std::vector<int32_t>(index.begin(), index.end()));
  const int64_t count = static_cast<int64_t>(index.size());
  const OnDevice<uint32_t> keys(std::vector<uint32_t>(index.size(), 77));
  const OnDevice<uint32_t> places(std::vector<uint32_t>(index.size(), 77));
  const OnDevice<int64_t> wider(std::vector<int64_t>(index.size(), 77));
  const OnDevice<uint8_t> scratch(std::vector<uint8_t>(sort_scratch_bytes(count), 0xa5));
  SortWork work{};
  const void* data = flags & scatter::kIndexWide ? static_cast<const void*>(wide.data()) : narrow.data();
  work.index = {data, {0, 1, 0}, 1, count, 1, rows, -1, flags};
  work.keys = keys.data();
  work.places = wide_places ? static_cast<void*>(wider.data()) : places.data();
  work.scratch = reinterpret_cast<uint32_t*>(scratch.data());
  work.wide_places = wide_places;
  REQUIRE(sort_on_device(work, nullptr) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  std::vector<uint32_t> order(index.size());
  std::iota(order.begin(), order.end(), 0);
  for (int64_t& i : index) i = i >= 0 && i < rows ? i : rows;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return index[a] < index[b]; });
  const std::vector<uint32_t> found = keys.read(), where = places.read();
  const std::vector<int64_t> where_wide = wider.read();
  size_t wrong = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    wrong += found[i] != index[order[i]] || (wide_places ? where_wide[i] : int64_t{where[i]}) != order[i];
  }
  CAPTURE(count);
  CAPTURE(rows);
  CHECK(wrong == 0);
}

TEST_CASE("scatter on the device: the sort is the stable one, whatever the index") {
  std::mt19937_64 random(9);
  for (const int64_t rows : {1, 2, 7, 1023, 1024, 50000, 1 << 20, 1 << 25, INT32_MAX}) {
    for (const size_t count : {1, 33, 511, 4096, 4097, 100000, 1 << 20, 3000017}) {
      if (count > 100000 && rows != 50000 && rows != 7 && rows != 1 << 25) continue;
      std::vector<int64_t> index(count);
      const int64_t high = std::min<int64_t>(rows + 2, INT32_MAX);  // some are no rows
      for (int64_t& i : index) i = std::uniform_int_distribution<int64_t>(-1, high)(random);
      check_sort(index, rows, scatter::kIndexWide, count % 2 == 0);
      check_sort(index, rows, 0, true);
      for (int64_t& i : index) i = std::abs(i) % rows;
      check_sort(index, rows, scatter::kIndexWide | scatter::kIndexCheck, false);
      check_sort(std::vector<int64_t>(count, rows - 1), rows, scatter::kIndexWide | scatter::kIndexCheck, false);
    }
  }
}

TEST_CASE("scatter on the device: many short segments, and one long one") {
  std::mt19937 random(5);
  std::vector<int64_t> lengths(30000);
  for (int64_t& length : lengths) length = std::poisson_distribution<int>(3)(random);
  check(Shape{.lengths = lengths, .columns = 20});
  check(Shape{.lengths = lengths, .columns = 1});
  check(Shape{.lengths = {300000}, .columns = 36});
}

TEST_CASE("scatter on the device: 16-bit sums are formed in float and rounded once") {
  const std::vector<float> values(1000, 1.0f / 3);
  std::vector<__nv_bfloat16> src(values.size());
  for (size_t i = 0; i < values.size(); ++i) src[i] = __float2bfloat16(values[i]);
  const OnDevice<__nv_bfloat16> source(src), out(std::vector<__nv_bfloat16>(1, __float2bfloat16(0.5f)));
  const OnDevice<int32_t> keys(std::vector<int32_t>(values.size(), 0));
  const OnDevice<uint8_t> starts(std::vector<uint8_t>(scatter_starts_bytes(1000)));
  const OnDevice<uint8_t> partials(std::vector<uint8_t>(scatter_partials_bytes(ScatterType::bfloat16, 1000, 1)));
  ScatterWork work{};
  work.src = source.data();
  work.out = out.data();
  work.starts = reinterpret_cast<uint32_t*>(starts.data());
  work.partials = partials.data();
  work.keys = {keys.data(), 1000, false};
  work.out_rows = work.columns = work.src_stride = work.out_stride = 1;
  work.alpha = 1;
  work.flags = kScatterAdd;
  REQUIRE(scatter_on_device(ScatterType::bfloat16, work, nullptr) == cudaSuccess);
  const float third = __bfloat162float(src[0]);  // 8 bits: sums of 1,000 of them are exact in float
  CHECK(__bfloat162float(out.read()[0]) == __bfloat162float(__float2bfloat16(0.5f + 1000 * third)));
}
