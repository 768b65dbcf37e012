// The kernels of the deterministic collectives against the rule on the host: 2 to 8 ranks in this process, on one GPU
// or over all that reach each other.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "tests/gpu/collective_ranks.h"

namespace forkpoint::collective {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i8,     DType::u8,
                            DType::i32, DType::u32,  DType::i64, DType::u64, DType::f8e4m3, DType::f8e5m2};
constexpr Op kOps[] = {Op::sum, Op::product, Op::maximum, Op::minimum, Op::average, Op::scaled_sum};
constexpr Kind kKinds[] = {Kind::all_reduce, Kind::reduce_scatter, Kind::reduce};

// Ranks on one device wait for each other: no two of their streams may share a queue of the device. Before CUDA starts.
[[maybe_unused]] const int kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

// All kernels of several ranks must fit on one device at once: 8 ranks of 4 blocks.
constexpr StagingShape small_shape(uint32_t ranks) { return {ranks, 4, 4, 16 << 10}; }

const Kernels& kernels() {
  static const Kernels all(connect_devices());
  return all;
}
int devices() {
  static const int count = connect_devices();
  return count;
}

// Memory of one rank on its device, with a margin that must stay as it is.
class Memory {
 public:
  static constexpr size_t kMargin = 256;
  Memory(const Ranks& ranks, uint32_t rank, size_t bytes, size_t misplaced)
      : begin_(kMargin + misplaced), bytes_(bytes) {
    ranks.use(rank);
    host_.resize(bytes + 2 * kMargin + 16);
    MUST(cudaMalloc(&device_, host_.size()));
  }
  ~Memory() { MUST(cudaFree(device_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return device_ + begin_; }
  char* host() { return host_.data() + begin_; }
  void fill(std::mt19937_64& random) {
    size_t i = 0;
    for (; i + 8 <= host_.size(); i += 8) {
      const uint64_t word = random();
      memcpy(&host_[i], &word, 8);
    }
    upload();
  }
  void upload() {
    MUST(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize());
  }
  // Does the device hold what host() holds, but for `wanted` from byte `at` on, and nothing else?
  bool holds(size_t at, const std::vector<char>& wanted) {
    std::vector<char> now(host_.size());
    MUST(cudaMemcpy(now.data(), device_, now.size(), cudaMemcpyDeviceToHost));
    std::vector<char> expected = host_;
    std::copy(wanted.begin(), wanted.end(), expected.begin() + static_cast<long>(begin_ + at));
    return now == expected;
  }

 private:
  char* device_ = nullptr;
  size_t begin_, bytes_;
  std::vector<char> host_;
};

struct Case {
  CollectiveSpec spec;
  bool in_place;
  size_t part;
  std::vector<std::unique_ptr<Memory>> in, out;
  std::vector<std::vector<char>> expected;

  Case(const Ranks& ranks, const CollectiveSpec& spec, bool in_place, size_t misplaced_in, size_t misplaced_out,
       std::mt19937_64& random)
      : spec(spec), in_place(in_place), part(spec.count * static_cast<size_t>(size_bytes(spec.dtype))) {
    for (uint32_t rank = 0; rank < ranks.count(); ++rank) {
      const size_t in_bytes = spec.kind == Kind::reduce_scatter ? part * ranks.count() : part;
      in.push_back(std::make_unique<Memory>(ranks, rank, in_bytes, misplaced_in));
      out.push_back(std::make_unique<Memory>(ranks, rank, part, misplaced_out));
    }
    refill(ranks, random);
  }
  void refill(const Ranks& ranks, std::mt19937_64& random) {
    std::vector<const void*> inputs;
    expected.clear();
    for (uint32_t rank = 0; rank < ranks.count(); ++rank) {
      ranks.use(rank);
      in[rank]->fill(random);
      out[rank]->fill(random);
      inputs.push_back(in[rank]->host());
    }
    for (uint32_t rank = 0; rank < ranks.count(); ++rank) {
      const bool none = spec.kind == Kind::reduce && rank != spec.root;
      expected.emplace_back(none ? 0 : part);
      if (!none) collect_on_host(spec, inputs.data(), ranks.count(), rank, expected.back().data());
    }
  }
  size_t place(uint32_t rank) const { return in_place && spec.kind == Kind::reduce_scatter ? rank * part : 0; }
  void call(const Ranks& ranks, uint32_t rank) const {
    char* to = in_place ? in[rank]->data() + place(rank) : out[rank]->data();
    ranks.call(spec, rank, in[rank]->data(), spec.kind == Kind::reduce && rank != spec.root ? nullptr : to);
  }
  bool is_right(const Ranks& ranks, uint32_t rank) {
    ranks.use(rank);
    const std::vector<char> nothing;
    return in[rank]->holds(place(rank), in_place ? expected[rank] : nothing) &&
           out[rank]->holds(0, in_place ? nothing : expected[rank]);
  }
};

void check(const Ranks& ranks, Case& one) {
  for (uint32_t rank = 0; rank < ranks.count(); ++rank) one.call(ranks, rank);
  REQUIRE(ranks.finish());
  for (uint32_t rank = 0; rank < ranks.count(); ++rank) {
    CAPTURE(ranks.count());
    CAPTURE(rank);
    CAPTURE(static_cast<int>(one.spec.kind));
    CAPTURE(std::string(name(one.spec.dtype)));
    CAPTURE(static_cast<int>(one.spec.op));
    CAPTURE(one.spec.wide);
    CAPTURE(one.spec.tree);
    CAPTURE(one.spec.count);
    CAPTURE(one.in_place);
    CHECK(one.is_right(ranks, rank));
  }
}

CollectiveSpec random_spec(std::mt19937_64& random, uint32_t ranks, uint64_t most) {
  CollectiveSpec spec;
  spec.kind = kKinds[random() % 3];
  spec.dtype = kTypes[random() % 12];
  spec.op = kOps[random() % 6];
  spec.wide = random() % 3 == 0;
  spec.tree = random() % 4 == 0 && has_collective(spec.dtype, true);
  spec.count = random() % (random() % 2 ? most : 100);
  spec.root = static_cast<uint32_t>(random() % ranks);
  spec.factor = spec.op == Op::scaled_sum ? random() : 0;
  return spec;
}

// Local sums of arrays in which every pair of codes meets.
void check_pairs(DType dtype, bool wide, Op op, const std::vector<char>& left, const std::vector<char>& right) {
  const size_t bytes = left.size();
  MUST(cudaSetDevice(0));
  char* memory = nullptr;
  MUST(cudaMalloc(&memory, 3 * bytes));
  MUST(cudaMemcpy(memory, left.data(), bytes, cudaMemcpyHostToDevice));
  MUST(cudaMemcpy(memory + bytes, right.data(), bytes, cudaMemcpyHostToDevice));
  CollectiveSpec spec{
      .op = op, .dtype = dtype, .wide = wide, .count = bytes / static_cast<size_t>(size_bytes(dtype)), .factor = 0x39};
  const void* inputs[] = {memory, memory + bytes};
  CollectiveLaunch launch;
  REQUIRE(plan_local_sum(spec, inputs, 2, memory + 2 * bytes, 132, &launch));
  kernels().launch(launch, nullptr);
  std::vector<char> result(bytes), expected(bytes);
  MUST(cudaMemcpy(result.data(), memory + 2 * bytes, bytes, cudaMemcpyDeviceToHost));
  MUST(cudaFree(memory));
  const void* on_host[] = {left.data(), right.data()};
  collect_on_host(spec, on_host, 2, 0, expected.data());
  CAPTURE(std::string(name(dtype)));
  CAPTURE(wide);
  CAPTURE(static_cast<int>(op));
  CHECK(memcmp(result.data(), expected.data(), bytes) == 0);
}

}  // namespace

TEST_CASE("every pair of 8-bit floats, and every 16-bit float with many others, comes to what the host says") {
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::f16, DType::bf16}) {
    std::vector<char> left, right;
    for (uint32_t i = 0; i < 1 << 20; ++i) {
      if (size_bytes(dtype) == 1) {
        left.push_back(static_cast<char>(i)), right.push_back(static_cast<char>(i >> 8));
      } else {
        const uint16_t code = static_cast<uint16_t>(i), other = static_cast<uint16_t>(i < 1 << 16 ? code : random());
        left.insert(left.end(), {static_cast<char>(code), static_cast<char>(code >> 8)});
        right.insert(right.end(), {static_cast<char>(other), static_cast<char>(other >> 8)});
      }
    }
    for (const bool wide : {false, true}) {
      for (const Op op : kOps) check_pairs(dtype, wide, op, left, right);
    }
  }
}

TEST_CASE("random words of the other types come to what the host says") {
  std::mt19937_64 random(2);
  for (const DType dtype : kTypes) {
    std::vector<char> left(1 << 20), right(1 << 20);
    for (auto* side : {&left, &right}) {
      for (char& byte : *side) byte = static_cast<char>(random());
    }
    for (const Op op : kOps) check_pairs(dtype, false, op, left, right);
  }
}

TEST_CASE("calls of every kind, type, op, place and length, in both protocols, give every rank what the rule says") {
  std::mt19937_64 random(3);
  for (const uint32_t count : {2u, 3u, 4u, 8u}) {
    Ranks ranks(kernels(), small_shape(count), devices());
    for (int round = 0; round < 150; ++round) {
      if (round % 50 == 0) {
        ranks.tune({.low_latency_bytes = round == 0 ? 0u : 512u << 10, .chunks = 2, .least_chunk_bytes = 512});
      }
      const CollectiveSpec spec = random_spec(random, count, round % 10 ? 3000 : 200'000);
      const auto element = static_cast<size_t>(size_bytes(spec.dtype));
      const size_t misplaced[] = {0, 0, element, 8};
      Case one(ranks, spec, random() % 3 == 0, misplaced[random() % 4], misplaced[random() % 4], random);
      check(ranks, one);
    }
  }
}

TEST_CASE("calls that follow each other without a pause are kept apart") {
  std::mt19937_64 random(4);
  for (const uint32_t count : {2u, 5u}) {
    Ranks ranks(kernels(), small_shape(count), devices());
    std::vector<std::unique_ptr<Case>> cases;
    for (int i = 0; i < 60; ++i)
      cases.push_back(std::make_unique<Case>(ranks, random_spec(random, count, 60'000), false, 0, 0, random));
    for (const auto& one : cases) {
      for (uint32_t rank = 0; rank < count; ++rank) one->call(ranks, rank);
    }
    REQUIRE(ranks.finish());
    for (const auto& one : cases) {
      for (uint32_t rank = 0; rank < count; ++rank) CHECK(one->is_right(ranks, rank));
    }
  }
}

TEST_CASE("captured calls may be replayed, and mixed with others") {
  std::mt19937_64 random(5);
  for (const uint32_t count : {2u, 4u}) {
    Ranks ranks(kernels(), small_shape(count), devices());
    Case small(ranks, {.dtype = DType::bf16, .count = 1000}, false, 0, 0, random);
    Case large(ranks, {.op = Op::average, .dtype = DType::f32, .count = 90'001}, false, 0, 0, random);
    Case scattered(ranks, {.kind = Kind::reduce_scatter, .dtype = DType::f16, .count = 30'003}, false, 0, 0, random);
    std::vector<cudaGraphExec_t> graphs(count);
    for (uint32_t rank = 0; rank < count; ++rank) {
      ranks.use(rank);
      MUST(cudaStreamBeginCapture(ranks.stream(rank), cudaStreamCaptureModeThreadLocal));
      for (const Case* one : {&small, &large, &scattered}) one->call(ranks, rank);
      cudaGraph_t graph;
      MUST(cudaStreamEndCapture(ranks.stream(rank), &graph));
      MUST(cudaGraphInstantiate(&graphs[rank], graph, 0));
      MUST(cudaGraphDestroy(graph));
    }
    for (int round = 0; round < 12; ++round) {
      for (Case* one : {&small, &large, &scattered}) one->refill(ranks, random);
      for (uint32_t rank = 0; rank < count; ++rank) {
        ranks.use(rank);
        for (int replay = 0; replay <= round % 3; ++replay) MUST(cudaGraphLaunch(graphs[rank], ranks.stream(rank)));
        small.call(ranks, rank);
      }
      REQUIRE(ranks.finish());
      for (Case* one : {&small, &large, &scattered}) {
        for (uint32_t rank = 0; rank < count; ++rank) CHECK(one->is_right(ranks, rank));
      }
    }
    for (cudaGraphExec_t graph : graphs) MUST(cudaGraphExecDestroy(graph));
  }
}

TEST_CASE("the same inputs give the same bits whatever the cut of the work") {
  std::mt19937_64 random(6);
  const CollectiveSpec spec{.dtype = DType::bf16, .count = 777'777};
  std::vector<char> first;
  for (const StagingShape& shape :
       {StagingShape{3, 4, 4, 12 << 10}, StagingShape{3, 7, 8, 48 << 10}, StagingShape{3, 1, 4, 3 << 10}}) {
    std::mt19937_64 same(7);
    Ranks ranks(kernels(), shape, devices());
    Case one(ranks, spec, false, 0, 2, same);
    check(ranks, one);
    if (first.empty()) first = one.expected[0];
    CHECK(one.expected[0] == first);
  }
}

TEST_CASE("a factor may lie on the device") {
  std::mt19937_64 random(8);
  Ranks ranks(kernels(), small_shape(2), devices());
  Case one(ranks, {.op = Op::scaled_sum, .dtype = DType::f32, .count = 5000, .factor = 0x3e800000}, false, 0, 0,
           random);
  std::vector<float*> factors(2);
  const float quarter = 0.25f;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ranks.use(rank);
    MUST(cudaMalloc(&factors[rank], sizeof(float)));
    MUST(cudaMemcpy(factors[rank], &quarter, sizeof(float), cudaMemcpyHostToDevice));
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    CollectiveSpec spec = one.spec;
    spec.factor = 0, spec.factor_at = factors[rank];
    ranks.call(spec, rank, one.in[rank]->data(), one.out[rank]->data());
  }
  REQUIRE(ranks.finish());
  for (uint32_t rank = 0; rank < 2; ++rank) CHECK(one.is_right(ranks, rank));
  for (float* factor : factors) MUST(cudaFree(factor));
}

TEST_CASE("a rank whose peer does not come ends when it is told to, in both protocols") {
  std::mt19937_64 random(9);
  for (const uint64_t count : {100u, 1'000'000u}) {
    Ranks ranks(kernels(), small_shape(2), devices());
    Case one(ranks, {.count = count}, false, 0, 0, random);
    one.call(ranks, 0);
    CHECK_FALSE(ranks.finish(1));
  }
}

}  // namespace forkpoint::collective
