#include "tests/support/sample_stream.h"

#include <fmt/format.h>

#include <limits>

#include "lib/digest_mix.h"

namespace forkpoint {
namespace {

uint64_t draw(int64_t step, int number, int salt) {
  return mix64(mix64(static_cast<uint64_t>(step)) ^
               mix64(static_cast<uint64_t>(number) << 8 | static_cast<uint64_t>(salt)));
}

}  // namespace

// A process that cannot exist any more: the sample reads alike everywhere.
StreamHeader sample_header() {
  StreamHeader header;
  header.rank = 3;
  header.world_size = 8;
  header.host = "node7";
  header.pid = 4711;
  header.boot_id = "00000000-1111-2222-3333-444444444444";
  header.pid_start_ticks = 123456;
  header.pid_namespace = 4026531836;
  header.level = Level::layer;
  header.step_base = "step(n)";
  header.every = 2;
  header.device = "cpu";
  header.facts = {{"tp_rank", "1"}, {"torch", "2.11"}};
  return header;
}

Site sample_site(int number) {
  Site site;
  site.phase = static_cast<Phase>(number % kPhaseCount);
  site.kind = static_cast<Kind>(number % kKindCount);
  site.role = static_cast<Role>(number % kRoleCount);
  site.layer = number % 5 == 0 ? "" : fmt::format("blocks.{}.mlp", number % 5);
  site.op = number % 3 == 0 ? "" : "op";
  site.tensor = fmt::format("tensor_{}", number);
  if (site.kind == Kind::collective) site.communicator = "dp";
  return site;
}

Layout sample_layout(int number) {
  switch (number % 5) {
    case 0:
      return {DType::f64, {}, {}, {}, {}};
    case 1:
      return {DType::bf16, {8, 16}, {}, {}, {}};
    case 2:
      return {DType::f32, {8, 16}, {-1, 8}, {}, {}};
    case 3:
      return {DType::f8e4m3, {4, 64}, {}, {16, 64}, {4, 0}};
    default:
      return {DType::c128, {3, 0, int64_t{1} << 40}, {}, {}, {}};
  }
}

Record sample_record(HashStreamWriter* writer, int64_t step, int number) {
  Record record;
  record.site = writer->site_id(sample_site(number));
  record.layout = writer->layout_id(sample_layout(number));
  record.micro_step = number % 4 - 1;
  record.call = number % 6 == 5 ? std::numeric_limits<uint32_t>::max() : static_cast<uint32_t>(number / 10);
  record.digest = {draw(step, number, 1), draw(step, number, 2)};
  record.stats.absmax =
      number % 7 == 6 ? std::numeric_limits<float>::max() : static_cast<float>(draw(step, number, 3)) * 1e-20f;
  record.stats.nonfinite = number % 9 == 8 ? uint64_t{1} << 60 : 0;
  record.stats.word_sum = fold_word_sum(draw(step, number, 4));
  record.flags = number % 8 == 7 ? kRecordEval : number % 8 == 6 ? kRecordRecompute : 0;
  return record;
}

void write_sample(HashStreamWriter* writer) {
  writer->add_communicator({"dp", {0, 2, 3, 7}});
  writer->add_coverage_limit({"cuda graph captured before attach", "2 graphs"});
  const auto append = [&](int64_t step, int number) { writer->append(sample_record(writer, step, number), 100); };
  writer->begin_step(kPrologueStep);
  for (int i = 0; i < 3; ++i) append(kPrologueStep, i);
  writer->end_step();
  for (int64_t step : {0, 2, 4}) {
    writer->begin_step(step);
    for (int i = 0; i < 24; ++i) {
      append(step, i + static_cast<int>(step));
      if (step == 2 && i % 8 == 7 && i < 20) writer->flush();
    }
    writer->end_step();
  }
  writer->add_gap({2, 4, 17, "ring full for 10000 ms"});
  writer->begin_step(6);  // a step without a record
  writer->end_step();
}

void make_sample(const std::string& path) {
  const auto writer = HashStreamWriter::create(path, sample_header());
  write_sample(writer.get());
  writer->finish();
}

}  // namespace forkpoint
