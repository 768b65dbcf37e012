// The host digest against a loop that only reads the same memory, on one thread, in turn; medians of processor time.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "lib/digest.h"
#include "lib/digest_kernels.h"
#include "lib/digest_mix.h"

namespace {

using namespace forkpoint;

constexpr size_t kBytes = size_t{256} << 20;

// Processor time, so that other programs on the machine take no part.
double seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

uint64_t sink = 0;

// As wide as the digest's own loads, four at a time.
__attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3"))) uint64_t read_all(const uint64_t* data,
                                                                                               size_t count) {
  uint64_t sum[32] = {};
  for (size_t i = 0; i < count; i += 32) {
    for (size_t k = 0; k < 32; ++k) sum[k] ^= data[i + k];
  }
  uint64_t total = 0;
  for (const uint64_t part : sum) total ^= part;
  return total;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void report(const std::string& name, double value, double goal, bool ok) {
  std::printf("bench %s %.3f %.2f %s\n", name.c_str(), value, goal, ok ? "ok" : "miss");
  std::fflush(stdout);
}

struct Contest {
  std::string name;
  std::function<void()> run;
};

void bench_reading(const std::vector<unsigned char>& data) {
  std::vector<Contest> contests = {{"digest_only", [&] { sink += digest_only(data.data(), kBytes).a; }}};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i8, DType::i64, DType::raw}) {
    contests.push_back({"digest_" + std::string(name(dtype)),
                        [&data, dtype] { sink += digest_bytes(data.data(), kBytes, dtype).digest.a; }});
  }
  // Half of the rows' bytes: what is read is the same memory.
  const int64_t shape[] = {kBytes / 8192, 1024}, strides[] = {2048, 1};
  const TensorView rows = whole_view(DType::f32, shape, strides);
  std::vector<double> read_times;
  std::vector<std::vector<double>> times(contests.size());
  for (int sample = -1; sample < 9; ++sample) {
    for (size_t i = 0; i < contests.size(); ++i) {
      const double begin = seconds();
      sink += read_all(reinterpret_cast<const uint64_t*>(data.data()), kBytes / 8);
      const double middle = seconds();
      contests[i].run();
      const double end = seconds();
      if (sample < 0) continue;
      read_times.push_back(middle - begin);
      times[i].push_back(end - middle);
    }
  }
  const double read = median(read_times);
  std::printf("rate digest_host: read %.1f GB/s, kernels %s\n", kBytes / read / 1e9, digest_kernels::best().name);
  for (size_t i = 0; i < contests.size(); ++i) {
    const double time = median(times[i]);
    std::printf("rate %s: %.1f GB/s\n", contests[i].name.c_str(), kBytes / time / 1e9);
    report(contests[i].name + "_host", read / time, 0.8, read / time >= 0.8);
  }
  std::vector<double> row_times;
  for (int sample = 0; sample < 5; ++sample) {
    const double begin = seconds();
    sink += digest_view(data.data(), rows).digest.a;
    row_times.push_back(seconds() - begin);
  }
  std::printf("rate digest_view_rows_of_4KiB: %.1f GB/s\n", kBytes / 2 / median(row_times) / 1e9);
}

void bench_pointing() {
  constexpr uint64_t kWords = uint64_t{1} << 28;
  const uint64_t word = kWords - 3;
  const Digest first = {1, 2}, second = {1 + key<1>(word) * 5, 2 + key<2>(word) * 5};
  std::vector<double> times;
  for (int sample = 0; sample < 5; ++sample) {
    WordChange change;
    const double begin = seconds();
    const bool found = find_single_word_change(first, second, kWords, &change);
    times.push_back(seconds() - begin);
    if (!found || change.word != word || change.delta != 5) std::printf("find_single_word_change is wrong\n");
  }
  const double ns_a_word = 1e9 * median(times) / kWords;
  report("find_single_word_change_ns_a_word", ns_a_word, 2, ns_a_word <= 2);
}

}  // namespace

int main() {
  std::vector<unsigned char> data(kBytes);
  for (size_t i = 0; i < kBytes; i += 8) {
    const uint64_t value = mix64(i) & 0xBFBFBFBFBFBFBFBF;  // no non-finite element, whatever the dtype
    std::memcpy(&data[i], &value, 8);
  }
  bench_reading(data);
  bench_pointing();
  return sink == 1 ? 3 : 0;
}
