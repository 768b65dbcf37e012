// The search by halves and the log of a bisect, on a simulated job whose truth is known.
#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "lib/bisect_log.h"
#include "lib/bisect_search.h"
#include "lib/error.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;
using Json = BisectLog::Json;

namespace {

// A job whose state differs from step `fork` on. Each window of it begins at the newest checkpoint up to which all is
// known to be the same: from there on it does what the other arm does, unless the fault lies in the window.
struct SimulatedJob {
  int64_t fork = 0, every = 8;
  std::set<int64_t> unknown = {};
  int64_t windows = 0;

  StepAnswer judge(int64_t step, int64_t same) {
    windows += 2;  // both arms
    const int64_t from = std::max<int64_t>(0, std::min(step, same + 1) / every * every);
    REQUIRE(from <= same + 1);  // else it would begin on one arm's way alone
    if (unknown.contains(step)) return StepAnswer::unknown;
    return fork >= from && fork <= step ? StepAnswer::differs : StepAnswer::same;
  }
  StepSearch search(int64_t first, int64_t last, int64_t enough) {
    return search_first_step(first, last, enough, [this](int64_t step, int64_t same) { return judge(step, same); });
  }
};

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

}  // namespace

TEST_CASE(
    "the step at which a fault first shows is found wherever it lies, and within the number of windows that was "
    "promised") {
  for (const int64_t steps : {1, 2, 3, 7, 64, 100}) {
    for (int64_t fork = 0; fork < steps; ++fork) {
      SimulatedJob job{fork};
      const StepSearch search = job.search(0, steps - 1, 1);
      CAPTURE(steps);
      CAPTURE(fork);
      CHECK(search.differs == fork);
      CHECK(search.same == fork - 1);
      CHECK(job.windows <= 2 * most_questions(steps, 1));
    }
  }
}

TEST_CASE("of 64 steps, the last of which is known to differ, six questions name the step and five leave two") {
  CHECK(most_questions(64, 1) == 6);
  CHECK(most_questions(64, 2) == 5);
  CHECK(most_questions(65, 1) == 7);
  CHECK(most_questions(1, 1) == 0);
  for (int64_t fork = 0; fork < 64; ++fork) {
    SimulatedJob job{fork};
    const StepSearch search = job.search(0, 63, 2);
    CHECK(search.same < fork);
    CHECK(search.differs >= fork);
    CHECK(search.differs - search.same <= 2);
    CHECK(job.windows <= 10);
  }
}

TEST_CASE("no step is asked about twice, nor the last one") {
  SimulatedJob job{41};
  const StepSearch search = job.search(0, 63, 1);
  std::set<int64_t> asked;
  for (const SearchedStep& answer : search.answers) CHECK(asked.insert(answer.step).second);
  CHECK_FALSE(asked.contains(63));
}

TEST_CASE("steps that cannot be told are passed over, and are within what is left open where they hide the first one") {
  SimulatedJob elsewhere{41};
  elsewhere.unknown = {31, 47, 10};
  CHECK(elsewhere.search(0, 63, 1).differs == 41);

  SimulatedJob hidden{41};
  hidden.unknown = {39, 40, 41};
  const StepSearch search = hidden.search(0, 63, 1);
  CHECK(search.same == 38);
  CHECK(search.differs == 42);

  SimulatedJob all{3};
  for (int64_t step = 0; step < 8; ++step) all.unknown.insert(step);
  const StepSearch open = all.search(0, 7, 1);
  CHECK(open.same == -1);
  CHECK(open.differs == 7);
  CHECK(open.answers.size() == 7);
}

TEST_CASE("what was noted in the log is there after it is opened again") {
  const TemporaryFolder folder;
  const std::string path = folder / "log";
  {
    BisectLog log = BisectLog::create(path, {{"good", "a b"}});
    log.note("step-41-good", {{"steps", 2}});
    CHECK_THROWS_AS(BisectLog::create(path, {}), Error);
    CHECK_THROWS_AS(BisectLog::resume(path), Error);  // it is open: two would work in one folder
  }
  BisectLog log = BisectLog::resume(path);
  CHECK(log.request() == Json({{"good", "a b"}}));
  REQUIRE(log.find("step-41-good"));
  CHECK(log.find("step-41-good")->at("steps") == 2);
  CHECK(log.find("step-41-bad") == nullptr);
}

TEST_CASE("a log that was cut anywhere gives its whole lines, and goes on behind them") {
  const TemporaryFolder folder;
  const std::string path = folder / "log", cut = folder / "cut";
  {
    BisectLog log = BisectLog::create(path, {{"good", "x"}});
    log.note("one", 1);
    log.note("two", 2);
  }
  const std::string content = content_of(path);
  const size_t first_line = content.find('\n') + 1, second_line = content.find('\n', first_line) + 1;
  for (size_t size = 0; size <= content.size(); ++size) {
    write(cut, content.substr(0, size));
    CAPTURE(size);
    if (size < first_line) {
      CHECK_THROWS_AS(BisectLog::resume(cut), Error);
      continue;
    }
    {
      BisectLog log = BisectLog::resume(cut);
      CHECK((log.find("one") != nullptr) == (size >= second_line));
      CHECK((log.find("two") != nullptr) == (size == content.size()));
      log.note("three", 3);
    }
    const BisectLog again = BisectLog::resume(cut);
    REQUIRE(again.find("three"));
    CHECK((again.find("one") != nullptr) == (size >= second_line));
  }
}

TEST_CASE("a log that is damaged in its midst, or is something else, is refused") {
  const TemporaryFolder folder;
  const std::string path = folder / "log";
  {
    BisectLog log = BisectLog::create(path, {{"good", "x"}});
    log.note("one", 1);
  }
  const std::string content = content_of(path);
  write(path, content + "{\"key\":\n" + "{\"key\":\"two\",\"entry\":2}\n");
  CHECK_THROWS_WITH_AS(BisectLog::resume(path), doctest::Contains("line 3"), Error);
  write(path, "{\"forkpoint_bisect\":99,\"request\":{}}\n");
  CHECK_THROWS_AS(BisectLog::resume(path), Error);
  write(path, "step 1\nstep 2\n");
  CHECK_THROWS_AS(BisectLog::resume(path), Error);
  CHECK_THROWS_AS(BisectLog::resume(folder / "none"), Error);
}
