// Tensors that are recorded together: the same records as one by one, in a few launches, and what is lost is told.
#include <doctest/doctest.h>

#include <numeric>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

struct Recorded {
  Outcome outcome;
  std::unique_ptr<HashStreamReader> stream;
  std::vector<Row> rows;
};

Recorded record(std::vector<std::string> words, const Environment& more = {}) {
  const TempFolder folder;
  words.insert(words.begin(), {"python3", FORKPOINT_TEST_PYTHON_CUDA_CLIENT});
  Environment environment = more;
  environment["TEST_LIBCUDA"] = client_path("libcuda.so.1");
  Recorded recorded;
  recorded.outcome = run_program(words, under_probe(folder.run(), environment));
  INFO(recorded.outcome.err);
  REQUIRE(recorded.outcome.status == 0);
  recorded.stream = open_stream(folder.run());
  CHECK(recorded.stream->state() == StreamState::whole);
  recorded.rows = all_rows(*recorded.stream);
  return recorded;
}

// Of 0, 1, 2, ..., or of the transpose of [columns, rows] of them.
Digest digest_of(size_t count, size_t rows = 1) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % (count / rows) * rows + i / (count / rows));
  return digest_bytes(values.data(), values.size() * sizeof(float), DType::f32).digest;
}

void check_mixed(const Recorded& recorded) {
  CHECK(recorded.outcome.out.find("None\n") == 0);
  CHECK(recorded.stream->gaps().empty());
  REQUIRE(recorded.rows.size() == 200);
  for (size_t i = 0; i < 200; ++i) {
    CAPTURE(i);
    const Row& row = recorded.rows[i];
    CHECK(row.site.tensor == "t" + std::to_string(i));
    CHECK(row.site.layer == "layer." + std::to_string(i / 50));
    CHECK(row.site.role == (i % 2 ? Role::parameter : Role::other));
    const Digest expected = i % 3 == 0    ? digest_of(1 + i)
                            : i % 40 == 1 ? digest_of(12 * i, 12)
                                          : digest_of(1 + 50 * i);
    CHECK(row.record.digest == expected);
  }
}

std::vector<std::string> tensors_of(const Recorded& recorded) {
  std::vector<std::string> names;
  for (const Row& row : recorded.rows) names.push_back(row.site.tensor);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("tensors recorded together keep their order, names, scopes, roles and digests, and share launches") {
  const Recorded recorded = record({"mixed"});
  check_mixed(recorded);
  // 200 tensors: 67 on the host, 3 that lie apart (41, 121 and 161), 130 in batches of 96 tensors at most.
  CHECK(recorded.outcome.out.find("launches 6 3\n") != std::string::npos);
}

TEST_CASE("a small ring makes the batches small and loses nothing") {
  for (const char* slots : {"8", "64"}) check_mixed(record({"mixed"}, {{"FORKPOINT_RING_SLOTS", slots}}));
}

TEST_CASE("an address that CUDA does not know costs its own tensor only") {
  const Recorded recorded = record({"trouble", "bad address"});
  CHECK(has_gap(*recorded.stream, "not (wholly) known to CUDA"));
  CHECK(records_lost(*recorded.stream) == 1);
  CHECK(tensors_of(recorded) == Names{"before", "t0", "t1", "t2", "t4", "t5", "t6", "t7", "after"});
  for (size_t i = 0; i < 8; ++i) {
    const auto rows = rows_of(recorded.rows, "t" + std::to_string(i));
    if (i != 3) CHECK(rows[0].record.digest == digest_of(1000 + i));
  }
}

TEST_CASE("a launch that fails loses every tensor that shares it, and says so") {
  const Recorded recorded = record({"trouble", "launch error"});
  CHECK(has_gap(*recorded.stream, "could not be launched (CUDA error 701)"));
  CHECK(records_lost(*recorded.stream) == 7);
  CHECK(tensors_of(recorded) == Names{"before", "t5", "after"});
}

TEST_CASE("on a captured stream they are a coverage limit, and those of the host are recorded") {
  const Recorded recorded = record({"trouble", "captured"});
  CHECK(recorded.stream->gaps().empty());
  CHECK(has_limit(*recorded.stream, "inside CUDA graph capture"));
  CHECK(tensors_of(recorded) == Names{"before", "t5", "after"});
}

TEST_CASE("the place of one that cannot be read is told, and the others are recorded") {
  const Recorded recorded = record({"trouble", "unreadable"});
  CHECK(recorded.outcome.out == "[2]\n");
  CHECK(tensors_of(recorded) == Names{"before", "t0", "t1", "t3", "t4", "t5", "t6", "t7", "after"});
}

TEST_CASE("code of the host's that runs meanwhile and records too is served") {
  const Recorded recorded = record({"trouble", "reentrant"});
  CHECK(recorded.stream->gaps().empty());
  CHECK(tensors_of(recorded) == Names{"before", "inner", "t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "after"});
  CHECK(rows_of(recorded.rows, "inner")[0].record.digest == digest_of(77));
}
