// FORMAT.md's worked example, the file in tests/golden and what the writer writes are one and the same.
#include <doctest/doctest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/stream_exercise.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

void write_example(const std::string& path) {
  StreamHeader header;
  header.rank = 1;
  header.world_size = 2;
  header.host = "n1";
  header.pid = 7;
  header.boot_id = "b0";
  header.pid_start_ticks = 9;
  header.pid_namespace = 3;
  header.level = Level::step;
  header.step_base = "step(n)";
  header.device = "cpu";
  header.facts = {{"tp", "0"}};
  const auto writer = HashStreamWriter::create(path, header);
  Record record;
  record.site = writer->site_id({Phase::backward, Kind::tensor, Role::gradient, "fc", "", "w.grad", ""});
  record.layout = writer->layout_id({DType::f32, {2, 3}, {}, {}, {}});
  const float values[6] = {1, 2, 3, 4, 5, -6};
  const DigestResult result = digest_bytes(values, sizeof(values), DType::f32);
  record.digest = result.digest;
  record.stats = result.stats;
  writer->begin_step(5);
  writer->append(record, sizeof(values));
  writer->end_step();
  writer->finish();
}

// The bytes of all lines "offset  byte byte ...  what they are".
std::vector<uint8_t> bytes_in_document(const std::string& path) {
  std::ifstream file(path);
  std::vector<uint8_t> bytes;
  for (std::string line; std::getline(file, line);) {
    if (line.size() < 8 || line.find_first_not_of("0123456789abcdef") != 4 || line.substr(4, 2) != "  ") continue;
    CAPTURE(line);
    CHECK(std::stoul(line.substr(0, 4), nullptr, 16) == bytes.size());
    std::istringstream in(line.substr(6, 24));
    for (std::string byte; in >> byte;) bytes.push_back(static_cast<uint8_t>(std::stoul(byte, nullptr, 16)));
  }
  return bytes;
}

const std::string kGolden = FORKPOINT_SOURCE "/tests/golden/";

}  // namespace

TEST_CASE("the writer still writes the example of FORMAT.md, byte by byte") {
  const TemporaryFolder folder;
  write_example(folder / "tiny.fkp");
  const std::vector<uint8_t> golden = read_bytes(kGolden + "tiny.fkp");
  CHECK(golden.size() == 607);
  CHECK(read_bytes(folder / "tiny.fkp") == golden);
  CHECK(bytes_in_document(FORKPOINT_SOURCE "/lib/FORMAT.md") == golden);
}

TEST_CASE("a stream that format 1 wrote in the past is read as it was meant") {
  const auto reader = HashStreamReader::open(kGolden + "sample.fkp");
  CHECK(reader->state() == StreamState::whole);
  CHECK(reader->verify() == "");
  CHECK(reader->sites().size() == 28);
  Digest sum;
  uint64_t records = 0;
  for (const StepSummary& step : reader->steps()) {
    sum += step.digest;
    records += step.records + step.eval_records;
  }
  CHECK(records == 75);
  CHECK(sum == Digest{0x3C5350737D7BC06Aull, 0x9D3BEEA91E972860ull});
  CHECK(exercise_stream(kGolden + "sample.fkp").rows() == 75);
}
