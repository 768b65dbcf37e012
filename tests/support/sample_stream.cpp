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

SampleLaunch sample_launch(HashStreamWriter* writer, int64_t step, int number) {
  const auto small = [&](int salt) { return static_cast<uint32_t>(draw(step, number, salt) % 1000); };
  SampleLaunch launch;
  LaunchRow& row = launch.row;
  row.kind = static_cast<LaunchKind>(number % kLaunchKindCount);
  row.flags = static_cast<uint8_t>(1u << number % 7);
  row.site = writer->site_id(sample_site(number % 24));
  row.micro_step = number % 4 - 1;
  row.stream = number % 5 == 4 ? kEveryStream : small(10);
  for (int i = 0; i < 3; ++i) {
    row.grid[i] = small(11 + i);
    row.block[i] = small(14 + i);
  }
  row.shared_bytes = small(17);
  row.param_bytes = small(18);
  if (number % 3 != 0) row.params = {draw(0, number % 4, 19), draw(0, number % 4, 20)};
  row.object = row.kind == LaunchKind::record ? static_cast<uint64_t>(number) : draw(step, number, 21);
  row.bytes = number % 2 == 0 ? draw(step, number, 22) : 4096;
  row.retry_of = row.kind == LaunchKind::retry ? static_cast<uint32_t>(number / 2) : 0;
  row.buffers = static_cast<uint32_t>(number % 3);
  for (uint32_t i = 0; i < row.buffers; ++i) {
    BufferRow buffer;
    buffer.place = i == 0 ? 8 * small(23) : kPlaceSpecial + small(24) % 3;
    buffer.flags = static_cast<uint8_t>(1u << (number + static_cast<int>(i)) % 7);
    buffer.allocation = number % 6 == 5 ? 0 : static_cast<uint64_t>(number % 4 + 1);
    buffer.offset = draw(step, number, 25 + static_cast<int>(i)) >> (number % 2 == 0 ? 0 : 50);
    buffer.address = draw(0, static_cast<int>(buffer.allocation), 27) + buffer.offset;
    buffer.start = i * 512;
    buffer.bytes = draw(0, number % 3, 28) >> 30;
    buffer.digest = {draw(0, number % 5, 29), draw(0, number % 5, 30)};
    launch.buffers.push_back(buffer);
  }
  return launch;
}

LaunchColumns random_launches(uint64_t seed, size_t count) {
  const auto draw = [&] { return seed = mix64(seed); };
  const auto any_size = [&] { return draw() >> draw() % 64; };
  LaunchColumns launches;
  for (size_t i = 0; i < count; ++i) {
    LaunchRow row;
    if (i != 0 && draw() % 4 == 0) row = launches.rows[draw() % i];
    if (draw() % 3 == 0) row.kind = static_cast<LaunchKind>(draw() % 10);
    row.flags = static_cast<uint8_t>(draw());
    row.site = static_cast<uint32_t>(draw() % 24);
    if (draw() % 3 == 0) row.micro_step = static_cast<int32_t>(any_size());
    if (draw() % 3 == 0) row.stream = static_cast<uint32_t>(any_size());
    for (uint32_t* number : {&row.grid[0], &row.grid[1], &row.grid[2], &row.block[0], &row.block[1], &row.block[2],
                             &row.shared_bytes, &row.param_bytes, &row.retry_of}) {
      if (draw() % 3 == 0) *number = static_cast<uint32_t>(any_size());
    }
    if (draw() % 3 == 0) row.params = {any_size(), draw() % 2 == 0 ? any_size() : row.params.b};
    if (draw() % 3 == 0) row.object = any_size();
    if (draw() % 3 == 0) row.bytes = any_size();
    row.buffers = static_cast<uint32_t>(draw() % 4);
    for (uint32_t k = 0; k < row.buffers; ++k) {
      const size_t before = launches.buffers.size();
      BufferRow buffer;
      if (before != 0 && draw() % 3 != 0) buffer = launches.buffers[draw() % before];
      if (draw() % 3 == 0) buffer.place = static_cast<uint32_t>(any_size());
      if (draw() % 3 == 0) buffer.flags = static_cast<uint8_t>(draw());
      for (uint64_t* number : {&buffer.allocation, &buffer.offset, &buffer.address, &buffer.start, &buffer.bytes,
                               &buffer.digest.a, &buffer.digest.b}) {
        if (draw() % 4 == 0) *number = any_size();
      }
      launches.buffers.push_back(buffer);
    }
    launches.rows.push_back(row);
  }
  return launches;
}

void append_all(const LaunchColumns& launches, HashStreamWriter* writer) {
  const BufferRow* buffers = launches.buffers.data();
  for (const LaunchRow& row : launches.rows) {
    writer->append_launch(row, buffers);
    buffers += row.buffers;
  }
}

std::unique_ptr<HashStreamWriter> writer_in_step(const std::string& path) {
  auto writer = HashStreamWriter::create(path, sample_header());
  for (int i = 0; i < 24; ++i) writer->site_id(sample_site(i));
  writer->begin_step(0);
  for (int i = 0; i < 100; ++i) writer->append(sample_record(writer.get(), 0, i % 20), 1);
  return writer;
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
      if (step != 0) {
        const SampleLaunch launch = sample_launch(writer, step, i);
        writer->append_launch(launch.row, launch.buffers.data());
      }
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
