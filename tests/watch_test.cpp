#include "lib/watch.h"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <thread>

#include "tests/support/run_builder.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint {
namespace {

constexpr WatchOptions kNan{true, false, false};
constexpr WatchOptions kReplicas{false, true, false};

// A run that is being written: what is appended is on disk with the step's end, or with flush().
class LiveRun {
 public:
  explicit LiveRun(int ranks) : directory_(folder_ / "run") {
    Manifest manifest;
    manifest.world_size = ranks;
    create_run(directory_, manifest);
    manifest_ = read_manifest(directory_);
    for (int rank = 0; rank < ranks; ++rank) {
      StreamHeader header;
      header.rank = rank, header.world_size = ranks, header.step_base = "step(n)";
      writers_.push_back(HashStreamWriter::create(directory_ + "/" + stream_file_name(rank), header));
    }
  }

  HashStreamWriter& writer(int rank) { return *writers_[static_cast<size_t>(rank)]; }
  int ranks() const { return static_cast<int>(writers_.size()); }
  void begin(int64_t step) {
    for (const auto& writer : writers_) writer->begin_step(step);
  }
  void end() {
    for (const auto& writer : writers_) writer->end_step();
  }
  void put(int rank, Phase phase, Role role, const std::string& layer, const std::string& tensor, const Value& value,
           uint8_t flags = 0) {
    append(rank, {phase, Kind::tensor, role, layer, "", tensor, ""}, value, flags);
  }
  void put_scalar(int rank, const std::string& tensor, double number) {
    Value value;
    value.layout.dtype = DType::f64, value.digest = scalar_digest(number);
    append(rank, {Phase::optimizer, Kind::scalar, Role::scalar, "", "", tensor, ""}, value, 0);
  }
  void put_reduced(int rank, Role role, const Value& value) {
    std::vector<int> members;
    for (int member = 0; member < ranks(); ++member) members.push_back(member);
    writer(rank).add_communicator({"world", members});
    append(rank, {Phase::collective, Kind::collective, role, "fc", "all_reduce", "weight.grad", "world"}, value, 0);
  }
  Watch watch(WatchOptions options) const { return Watch(directory_, manifest_, options); }
  std::string path(int rank) const { return directory_ + "/" + stream_file_name(rank); }

 private:
  void append(int rank, const Site& site, const Value& value, uint8_t flags) {
    Record record;
    record.site = writer(rank).site_id(site), record.layout = writer(rank).layout_id(value.layout);
    record.digest = value.digest, record.stats = value.stats, record.flags = flags;
    writer(rank).append(record, 128);
  }

  TemporaryFolder folder_;
  std::string directory_;
  Manifest manifest_;
  std::vector<std::unique_ptr<HashStreamWriter>> writers_;
};

Value broken(uint64_t seed, DType dtype = DType::f32) {
  Value out = value(seed, {{4, 8}, dtype});
  out.stats.nonfinite = 3;
  return out;
}

// A step of one rank in good order, but for what is given.
struct StepOf {
  Value loss = value(1), gradient = value(2), weight = value(3);
  double skipped = -1;  // of a GradScaler; -1: there is none
};
void put_step(LiveRun* run, int rank, int64_t step, const StepOf& what = {}) {
  run->writer(rank).begin_step(step);
  run->put(rank, Phase::forward, Role::loss, "loss", "loss", what.loss);
  run->put(rank, Phase::optimizer, Role::gradient, "fc", "weight.grad", what.gradient);
  if (what.skipped >= 0) run->put_scalar(rank, "skipped", what.skipped);
  run->put(rank, Phase::optimizer, Role::parameter, "fc", "weight", what.weight);
  run->writer(rank).end_step();
}

std::vector<std::string> sentences(const std::vector<WatchFinding>& findings) {
  std::vector<std::string> out;
  for (const WatchFinding& finding : findings) out.push_back(finding.sentence());
  return out;
}
using Sentences = std::vector<std::string>;

}  // namespace

TEST_CASE("nothing is found in a training in order, however long it is and however often it is looked at") {
  LiveRun run(4);
  Watch watch = run.watch({true, true, true});
  for (int64_t step = 0; step < 200; ++step) {
    for (int rank = 0; rank < 4; ++rank) {
      StepOf what;
      what.loss = value(1000 + static_cast<uint64_t>(step * 4 + rank));  // of each rank's own batch
      what.gradient = value(2000 + static_cast<uint64_t>(step)),
      what.weight = value(3000 + static_cast<uint64_t>(step));
      put_step(&run, rank, step, what);
      if (step % 3 == 0) CHECK(watch.look().empty());
    }
  }
  CHECK(watch.finish().empty());
  CHECK(watch.take_problems().empty());
  CHECK(watch.summary().empty());
  CHECK(watch.newest_step() == 199);
}

TEST_CASE("a loss that is not finite is said before its step has ended") {
  LiveRun run(2);
  Watch watch = run.watch(kNan);
  for (int64_t step = 0; step < 7; ++step) {
    for (int rank = 0; rank < 2; ++rank) put_step(&run, rank, step);
  }
  CHECK(watch.look().empty());
  run.begin(7);
  run.put(1, Phase::forward, Role::loss, "loss", "loss", broken(1));
  CHECK(watch.look().empty());  // it is not on disk
  run.writer(1).flush();
  CHECK(sentences(watch.look()) == Sentences{"step 7, rank 1, forward, loss: loss: 3 of 32 elements are not finite"});
  CHECK(watch.look().empty());  // once
}

TEST_CASE("what was never finite and reaches nothing is as it is meant to be") {
  LiveRun run(1);
  Watch watch = run.watch(kNan);
  for (int64_t step = 0; step < 5; ++step) {
    run.begin(step);
    run.put(0, Phase::data, Role::batch, "", "attention_bias", broken(1));
    run.put(0, Phase::forward, Role::output, "blocks.0.attn", "scores", broken(2));
    run.put(0, Phase::forward, Role::output, "blocks.0", "mask", step < 2 ? value(5) : broken(5));
    run.put(0, Phase::forward, Role::output, "blocks.0", "output", broken(7), kRecordEval);
    run.put(0, Phase::forward, Role::loss, "loss", "loss", broken(8), kRecordEval);  // of an evaluation
    run.put(0, Phase::forward, Role::loss, "loss", "loss", value(3));
    run.end();
    CHECK(sentences(watch.look()) == Sentences{});
  }
  // The same output was finite before: that is another matter.
  for (int64_t step = 5; step < 7; ++step) {
    run.begin(step);
    run.put(0, Phase::forward, Role::output, "blocks.1", "output", step == 5 ? value(9) : broken(9));
    run.end();
  }
  CHECK(sentences(watch.look()) ==
        Sentences{"step 6, rank 0, forward, blocks.1: output: 3 of 32 elements are not finite"});
}

TEST_CASE("gradients that are not finite in a step that a gradient scaler skips are expected") {
  LiveRun run(1);
  Watch watch = run.watch(kNan);
  StepOf good, overflown;
  good.skipped = 0;
  overflown.skipped = 1, overflown.gradient = broken(2), overflown.loss = broken(1, DType::f16);
  for (int64_t step = 0; step < 6; ++step) put_step(&run, 0, step, step < 3 ? overflown : good);
  CHECK(sentences(watch.look()) == Sentences{});
  CHECK(watch.summary() == Sentences{"3 steps with gradients that are not finite, skipped by a gradient scaler"});

  SUBCASE("but not one that it did not skip") {
    StepOf let_through = overflown;
    let_through.skipped = 0;
    put_step(&run, 0, 6, let_through);
    CHECK(watch.look().size() == 1);
  }
  SUBCASE("nor where the loss was not finite in a precision that the scale cannot overflow") {
    StepOf bad_forward = overflown;
    bad_forward.loss = broken(1, DType::f32);
    put_step(&run, 0, 6, bad_forward);
    CHECK(sentences(watch.look()) == Sentences{"step 6, rank 0, forward, loss: loss: 3 of 32 elements are not finite"});
  }
  SUBCASE("nor when it goes on so until no scale can be the reason") {
    for (int64_t step = 6; step < 6 + 24; ++step) {
      CHECK(watch.look().empty());
      put_step(&run, 0, step, overflown);
    }
    CHECK(watch.look().size() == 1);
  }
  SUBCASE("also where a fused optimizer skips by itself") {
    for (int64_t step = 6; step < 9; ++step) {
      run.begin(step);
      Value found_inf = value(8, {{1}, DType::f32});
      found_inf.stats.absmax = step == 7 ? 1.0f : 0.0f;
      run.put(0, Phase::optimizer, Role::scalar, "", "found_inf", found_inf);
      run.put(0, Phase::optimizer, Role::gradient, "fc", "weight.grad", step == 7 ? broken(2) : value(2));
      run.put_scalar(0, "skipped", 0);
      run.end();
    }
    CHECK(watch.look().empty());
  }
}

TEST_CASE("the rank that a value came from is named, not those that a reduction carried it to") {
  LiveRun run(4);
  Watch watch = run.watch(kNan);
  const auto put_all = [&](int rank, int64_t step, int bad_rank) {
    run.writer(rank).begin_step(step);
    run.put_reduced(rank, Role::input, rank == bad_rank ? broken(1) : value(1));
    run.put_reduced(rank, Role::output, bad_rank >= 0 ? broken(2) : value(2));
    run.put(rank, Phase::optimizer, Role::parameter, "fc", "weight", bad_rank >= 0 ? broken(3) : value(3));
    run.writer(rank).end_step();
  };
  for (int64_t step = 0; step < 3; ++step) {
    for (int rank = 0; rank < 4; ++rank) put_all(rank, step, -1);
  }
  // The others are on disk, and read, before the rank that it came from.
  for (const int rank : {0, 1, 3}) put_all(rank, 3, 2);
  CHECK(watch.look().empty());
  put_all(2, 3, 2);
  CHECK(sentences(watch.look()) ==
        Sentences{"step 3, rank 2, collective, fc (all_reduce): weight.grad: 3 of 32 elements are not finite"});
  for (int rank = 0; rank < 4; ++rank) put_all(rank, 4, 2);
  CHECK(watch.look().empty());  // what follows is counted
  REQUIRE(watch.summary().size() == 1);
  CHECK(watch.summary()[0].find("also on ranks 0, 1, 3") != std::string::npos);

  // All are finite again, and then one is not: that is another finding.
  for (int rank = 0; rank < 4; ++rank) put_all(rank, 5, -1);
  CHECK(watch.look().empty());
  for (int rank = 0; rank < 4; ++rank) put_all(rank, 6, 1);
  CHECK(sentences(watch.look()).size() == 1);
}

TEST_CASE("a rank that is never heard of again does not keep what others have found from being said") {
  LiveRun run(2);
  Watch watch = run.watch(kNan);
  for (int rank = 0; rank < 2; ++rank) put_step(&run, rank, 0);
  StepOf bad;
  bad.weight = broken(3);
  put_step(&run, 0, 1, bad);
  CHECK(watch.look().empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(350));
  CHECK(sentences(watch.look()) == Sentences{"step 1, rank 0, optimizer, fc: weight: 3 of 32 elements are not finite"});
}

TEST_CASE("the rank that no longer holds what its replicas do is named once, as soon as all have ended the step") {
  LiveRun run(4);
  Watch watch = run.watch(kReplicas);
  const auto put_at = [&](int rank, int64_t step) {
    StepOf what;
    const bool apart = rank == 2 && step >= 5;
    what.gradient = value(100 + static_cast<uint64_t>(step) + (apart ? 50 : 0));
    what.weight = value(200 + static_cast<uint64_t>(step) + (apart ? 50 : 0));
    put_step(&run, rank, step, what);
  };
  for (int64_t step = 0; step < 5; ++step) {
    for (int rank = 0; rank < 4; ++rank) put_at(rank, step);
    CHECK(watch.look().empty());
  }
  for (const int rank : {0, 2, 3}) put_at(rank, 5);
  CHECK(watch.look().empty());
  put_at(1, 5);
  const Sentences found = sentences(watch.look());
  REQUIRE(found.size() == 1);
  CHECK(found[0].starts_with("step 5, rank 2, optimizer, fc: weight.grad: not what ranks 0, 1, 3 hold"));
  for (int64_t step = 6; step < 9; ++step) {
    for (int rank = 0; rank < 4; ++rank) put_at(rank, step);
  }
  CHECK(watch.look().empty());
}

TEST_CASE("steps are compared in one look as in many") {
  for (const bool often : {false, true}) {
    LiveRun run(2);
    Watch watch = run.watch(kReplicas);
    Sentences found;
    for (int64_t step = 0; step < 20; ++step) {
      for (int rank = 0; rank < 2; ++rank) {
        StepOf what;
        what.weight = value(static_cast<uint64_t>(step) + (rank == 1 && step >= 11 ? 500 : 0));
        put_step(&run, rank, step, what);
      }
      if (!often) continue;
      for (const std::string& sentence : sentences(watch.look())) found.push_back(sentence);
    }
    for (const std::string& sentence : sentences(watch.finish())) found.push_back(sentence);
    REQUIRE(found.size() == 1);
    CHECK(found[0].starts_with("step 11, optimizer, fc: weight: ranks 0, 1 do not hold the same"));
  }
}

TEST_CASE("what was never known to be replicated is not found, and said at the end") {
  LiveRun run(2);
  Watch watch = run.watch(kReplicas);
  for (int64_t step = 0; step < 3; ++step) {
    for (int rank = 0; rank < 2; ++rank) {
      StepOf what;
      what.gradient = value(10 + static_cast<uint64_t>(rank)), what.weight = value(20 + static_cast<uint64_t>(rank));
      put_step(&run, rank, step, what);
    }
  }
  CHECK(watch.finish().empty());
  REQUIRE_FALSE(watch.summary().empty());
  CHECK(watch.summary()[0].find("nothing was compared") != std::string::npos);
}

TEST_CASE("one rank has no replica, and that is said") {
  LiveRun run(1);
  Watch watch = run.watch(kReplicas);
  for (int64_t step = 0; step < 3; ++step) put_step(&run, 0, step);
  CHECK(watch.finish().empty());
  CHECK(watch.summary() == Sentences{"there was one rank, which has no replica: nothing was compared"});
}

TEST_CASE("a step that is not on every rank is left out after a while, and that is said at once") {
  LiveRun run(2);
  Watch watch = run.watch(kReplicas);
  for (int64_t step = 0; step < 100; ++step) put_step(&run, 0, step);
  put_step(&run, 1, 0);
  CHECK(watch.look().empty());
  CHECK(watch.take_problems().size() == 1);
  CHECK(watch.take_problems().empty());
}

TEST_CASE("a stream is followed byte by byte: no frame is read before it is whole, and all are read") {
  const TemporaryFolder folder;
  LiveRun run(1);
  for (int64_t step = 0; step < 4; ++step) put_step(&run, 0, step);
  run.writer(0).finish();
  std::ifstream file(run.path(0), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string grown = folder / stream_file_name(0);
  std::ofstream out(grown, std::ios::binary);
  std::unique_ptr<StreamTail> tail;
  uint64_t rows = 0, ends = 0;
  for (const char byte : bytes) {
    out.put(byte).flush();
    if (!tail) tail = StreamTail::open(grown);
    if (!tail) continue;
    for (const auto& event : tail->advance()) {
      rows += event.end_row - event.first_row;
      ends += event.kind == StreamTail::Advance::Kind::step_end ? 1 : 0;
    }
    CHECK(tail->damage().empty());
  }
  CHECK(rows == 12);
  CHECK(ends == 4);
  CHECK(tail->ended());
  CHECK(tail->size_bytes() == bytes.size());
  const auto whole = HashStreamReader::open(grown);
  REQUIRE(tail->steps().size() == whole->steps().size());
  for (size_t i = 0; i < whole->steps().size(); ++i) {
    StepColumns columns;
    whole->read_step(i, &columns);
    CHECK(tail->columns(i).digest == columns.digest);
    CHECK(tail->steps()[i].digest == whole->steps()[i].digest);
  }
}

TEST_CASE("a rank that begins late is waited for") {
  LiveRun run(3);
  const std::string hidden = run.path(2) + ".later";
  std::filesystem::rename(run.path(2), hidden);
  Watch watch = run.watch(kReplicas);
  const auto put_at = [&](int rank, int64_t step) {
    StepOf what;
    what.weight = value(static_cast<uint64_t>(step) + (rank == 2 && step >= 3 ? 500 : 0));
    put_step(&run, rank, step, what);
  };
  for (int64_t step = 0; step < 6; ++step) {
    for (const int rank : {0, 1}) put_at(rank, step);
  }
  CHECK(watch.look().empty());
  for (int64_t step = 0; step < 6; ++step) put_at(2, step);
  std::filesystem::rename(hidden, run.path(2));
  const Sentences found = sentences(watch.finish());
  REQUIRE(found.size() == 1);
  CHECK(found[0].starts_with("step 3, rank 2, optimizer, fc: weight: not what ranks 0, 1 hold"));
}

TEST_CASE("a step that one rank is ahead by is compared once the other has ended it") {
  LiveRun run(2);
  Watch watch = run.watch(kReplicas);
  const auto put_at = [&](int rank, int64_t step, uint64_t apart) {
    StepOf what;
    what.weight = value(static_cast<uint64_t>(step) + apart);
    put_step(&run, rank, step, what);
  };
  for (int64_t step = 0; step < 3; ++step) put_at(0, step, 0);
  for (int64_t step = 0; step < 2; ++step) put_at(1, step, 0);
  CHECK(watch.look().empty());
  put_at(1, 2, 500);
  const Sentences found = sentences(watch.look());
  REQUIRE(found.size() == 1);
  CHECK(found[0].starts_with("step 2, optimizer, fc: weight: ranks 0, 1 do not hold the same"));
}

TEST_CASE("ranks that recorded other steps by layer are told apart") {
  LiveRun run(2);
  Watch watch = run.watch({true, false, true});
  for (int64_t step = 0; step < 4; ++step) {
    run.begin(step);
    for (int rank = 0; rank < 2; ++rank) {
      if (step >= 1 + rank) run.put(rank, Phase::forward, Role::output, "fc", "output", value(4));
      run.put(rank, Phase::forward, Role::loss, "loss", "loss", value(5));
    }
    run.end();
  }
  CHECK(watch.finish().empty());
  CHECK(watch.summary() ==
        Sentences{"not the same steps were recorded by layer on every rank: rank 0: 1-3; rank 1: 2, 3"});
}

TEST_CASE("a damaged frame ends the watch of its rank, and is said") {
  LiveRun run(1);
  put_step(&run, 0, 0);
  Watch watch = run.watch(kNan);
  CHECK(watch.look().empty());
  const auto size = std::filesystem::file_size(run.path(0));
  StepOf bad;
  bad.loss = broken(1);
  put_step(&run, 0, 1, bad);
  std::fstream file(run.path(0), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(size) + 80);
  file.put('\x7f').put('\x55');
  file.close();
  watch.look();
  REQUIRE(watch.take_problems().size() == 1);
}

}  // namespace forkpoint
