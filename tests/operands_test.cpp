// Saved operands: what a file says of itself, and what the comparison of two says of their values.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "lib/error.h"
#include "lib/operand_compare.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

template <typename Type>
std::vector<std::byte> bytes_of(const std::vector<Type>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(Type));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename Type>
ElementReport compare(DType dtype, const std::vector<Type>& a, const std::vector<Type>& b) {
  return compare_elements(dtype, bytes_of(a), bytes_of(b));
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

OperandKey some_key(int rank = 2) { return {rank, 7, 0, Phase::backward, Role::input, "blocks.3.fc1", "aten::mm", "grad_output"}; }

template <typename Type>
void save(const std::filesystem::path& run, uint64_t number, const OperandKey& key, DType dtype, const std::vector<int64_t>& shape,
          const std::vector<Type>& values) {
  std::filesystem::create_directories(run / kOperandFolder);
  std::ofstream out(run / kOperandFolder / operand_file_name(key.rank, number), std::ios::binary);
  out << operand_header(key, Layout{dtype, shape, {}, {}, {}}, values.size() * sizeof(Type));
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(Type)));
}

}  // namespace

TEST_CASE("equal elements are said to be equal, with their range") {
  const auto report = compare<float>(DType::f32, {1, -2, 3}, {1, -2, 3});
  CHECK(report.differing == 0);
  CHECK(sentence(report, {3}) == "all 3 elements are equal; values -2 to 3");
}

TEST_CASE("elements that differ are counted, placed and measured in ulp") {
  std::vector<float> a(12, 1.0f), b = a;
  b[5] = std::nextafter(1.0f, 2.0f);
  b[7] = std::nextafter(std::nextafter(1.0f, 2.0f), 2.0f);
  const auto report = compare(DType::f32, a, b);
  CHECK(report.differing == 2);
  CHECK(report.first == 5);
  CHECK(report.last == 7);
  CHECK(report.runs == 2);
  CHECK(report.ulp == std::array<uint64_t, 5>{1, 1, 0, 0, 0});
  CHECK(report.most_ulp == 2);
  CHECK(sentence(report, {3, 4}).starts_with("2 of 12 elements differ, from [1, 1] to [1, 3]: 1 by 1 ulp, 1 by 2 to 3; values 1 to 1"));
}

TEST_CASE("ulp count through zero, and the sign of zero is a difference of its own") {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const auto report = compare<float>(DType::f32, {tiny, 0.0f}, {-tiny, -0.0f});
  CHECK(report.most_ulp == 2);
  CHECK(report.sign_of_zero_only == 1);
  CHECK(sentence(report, {2}).find("1 in the sign of zero") != std::string::npos);
}

TEST_CASE("NaN that one run alone has is told from NaN of other bits") {
  const float other_nan = std::bit_cast<float>(std::bit_cast<uint32_t>(kNan) | 1u);
  const auto report = compare<float>(DType::f32, {kNan, kNan, 1}, {other_nan, 1, 1});
  CHECK(report.payload_only == 1);
  CHECK(report.nan_moved == 1);
  CHECK(report.a.nan == 2);
  CHECK(report.b.nan == 1);
  CHECK(sentence(report, {3}).find("values 1 to 1, 2 NaN in run A, 1 to 1, 1 NaN in run B") != std::string::npos);
}

TEST_CASE("the same values in another order are recognised, and one changed value is not") {
  CHECK(compare<float>(DType::f32, {1, 2, 3}, {3, 1, 2}).same_values_other_order);
  CHECK(!compare<float>(DType::f32, {1, 2, 3}, {3, 1, 4}).same_values_other_order);
}

TEST_CASE("16-bit and 8-bit floats are read as their formats have them") {
  CHECK(compare<uint16_t>(DType::bf16, {0x3F80}, {0x3F81}).most_ulp == 1);
  CHECK(compare<uint16_t>(DType::bf16, {0x3F80}, {0x3F81}).b.greatest == 1.0078125);
  CHECK(compare<uint16_t>(DType::f16, {0x3C00}, {0xC000}).b.least == -2);
  CHECK(compare<uint16_t>(DType::f16, {0x7C00, 0x7E00}, {0x7C00, 0x7E00}).a.infinite == 1);
  CHECK(compare<uint16_t>(DType::f16, {0x0001}, {0x0001}).a.greatest == std::ldexp(1.0, -24));
  CHECK(compare<uint8_t>(DType::f8e4m3, {0x7E}, {0x7F}).a.greatest == 448);
  CHECK(compare<uint8_t>(DType::f8e4m3, {0x7E}, {0x7F}).b.nan == 1);
  CHECK(compare<uint8_t>(DType::f8e5m2, {0x7B}, {0x7C}).a.greatest == 57344);
  CHECK(compare<uint8_t>(DType::f8e5m2, {0x7B}, {0x7C}).b.infinite == 1);
}

TEST_CASE("integers differ by their difference, also the widest") {
  CHECK(compare<int32_t>(DType::i32, {-5}, {7}).most_ulp == 12);
  CHECK(compare<uint64_t>(DType::u64, {0}, {UINT64_MAX}).most_ulp == UINT64_MAX);
  CHECK(compare<int64_t>(DType::i64, {INT64_MIN}, {INT64_MAX}).most_ulp == UINT64_MAX);
}

TEST_CASE("a complex number is compared part by part and placed as one") {
  const auto report = compare<float>(DType::c64, {1, 2, 3, 4}, {1, 2, 3, 5});
  CHECK(report.elements == 4);
  CHECK(sentence(report, {2}).starts_with("1 of 4 parts of complex numbers differ, at [1]"));
}

TEST_CASE("what is saved is read back with its place, its form and its values") {
  const TemporaryFolder folder;
  save<float>(folder.path(), 0, some_key(), DType::f32, {2, 2}, {1, 2, 3, 4});
  const auto operands = list_operands(folder.path());
  REQUIRE(operands.size() == 1);
  CHECK(operands[0].key == some_key());
  CHECK(operands[0].shape == std::vector<int64_t>{2, 2});
  CHECK(load_operand(operands[0]) == bytes_of(std::vector<float>{1, 2, 3, 4}));
}

TEST_CASE("operands of two runs are paired by what they are and by how often it came, not by their files' numbers") {
  const TemporaryFolder folder;
  const std::filesystem::path a = folder / "a", b = folder / "b";
  OperandKey other = some_key();
  other.tensor = "grad_input";
  save<float>(a, 0, some_key(), DType::f32, {1}, {1});
  save<float>(a, 1, some_key(), DType::f32, {1}, {2});
  save<float>(a, 2, other, DType::f32, {1}, {3});
  save<float>(b, 0, other, DType::f32, {1}, {4});
  save<float>(b, 1, some_key(), DType::f32, {1}, {1});
  save<float>(b, 2, some_key(), DType::f32, {1}, {2});
  const auto pairs = compare_operands(a, b);
  REQUIRE(pairs.size() == 3);
  CHECK(!pairs[0].differs());
  CHECK(!pairs[1].differs());
  CHECK(pairs[2].key.tensor == "grad_input");
  CHECK(pairs[2].differs());
}

TEST_CASE("an operand of one run alone, or of another form, is no equal one") {
  const TemporaryFolder folder;
  const std::filesystem::path a = folder / "a", b = folder / "b";
  save<float>(a, 0, some_key(), DType::f32, {2}, {1, 2});
  save<float>(b, 0, some_key(), DType::f32, {1, 2}, {1, 2});
  save<float>(b, 1, some_key(), DType::f32, {2}, {1, 2});
  const auto pairs = compare_operands(a, b);
  REQUIRE(pairs.size() == 2);
  CHECK(pairs[0].differs());
  CHECK(pairs[0].why_not == "it is f32[2] in run A and f32[1, 2] in run B");
  CHECK(pairs[1].why_not == "only run B saved it");
}

TEST_CASE("bytes without a type are compared as the type that is asked for") {
  const TemporaryFolder folder;
  const std::filesystem::path a = folder / "a", b = folder / "b";
  save<float>(a, 0, some_key(), DType::raw, {8}, {1, 2});
  save<float>(b, 0, some_key(), DType::raw, {8}, {1, std::nextafter(2.0f, 3.0f)});
  CHECK(compare_operands(a, b)[0].report->elements == 8);
  const auto pairs = compare_operands(a, b, DType::f32);
  CHECK(pairs[0].report->elements == 2);
  CHECK(pairs[0].report->most_ulp == 1);
}

TEST_CASE("a file cut at any byte is refused, and never taken for a shorter operand") {
  const TemporaryFolder folder;
  save<float>(folder.path(), 0, some_key(), DType::f32, {2}, {1, 2});
  const auto file = std::filesystem::path(folder.path()) / kOperandFolder / operand_file_name(2, 0);
  for (uint64_t size = std::filesystem::file_size(file); size-- > 0;) {
    std::filesystem::resize_file(file, size);
    CHECK_THROWS_AS(list_operands(folder.path()), Error);
  }
}
