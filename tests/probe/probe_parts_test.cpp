// Parts of the probe, within this process.
#include <doctest/doctest.h>

#include <cstring>
#include <thread>

#include "probes/event_ring.h"
#include "probes/facts.h"
#include "probes/frames.h"
#include "probes/guard.h"
#include "probes/losses.h"
#include "probes/names.h"
#include "probes/scopes.h"
#include "probes/settings.h"
#include "probes/stream_appender.h"
#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

const char* (*get_variable(const char* name, const char* value))(const char*) {
  static const char* wanted;
  static const char* answer;
  wanted = name;
  answer = value;
  return [](const char* asked) -> const char* {
    if (strcmp(asked, "FORKPOINT_RUN") == 0) return "/run";
    return strcmp(asked, wanted) == 0 ? answer : nullptr;
  };
}

Settings with(const char* name, const char* value) {
  Settings settings;
  read_settings(get_variable(name, value), &settings);
  return settings;
}

}  // namespace

TEST_CASE("a loss whose step is not known makes the gap one of unknown place") {
  LossLog losses;
  LossLog::Taken taken;
  losses.add(Loss::ring_full, 7);
  losses.add(Loss::ring_full, 9);
  REQUIRE(losses.take(Loss::ring_full, &taken));
  CHECK(taken.gap.first_step == 7);
  CHECK(taken.gap.last_step == 9);
  losses.add(Loss::ring_full, 7);
  losses.add(Loss::ring_full, kPrologueStep);  // between two steps: it belongs to one that has not begun
  REQUIRE(losses.take(Loss::ring_full, &taken));
  CHECK(taken.gap.first_step == kPrologueStep);
  CHECK(taken.gap.last_step == kPrologueStep);
  CHECK(taken.gap.records_lost == 2);
}

TEST_CASE("settings: lists of ranks and windows of steps") {
  const Settings ranks = with("FORKPOINT_RANKS", "0,2,4-7");
  CHECK(ranks.state == Settings::State::ready);
  for (int rank = 0; rank < 10; ++rank) CHECK(ranks.wants_rank(rank) == (rank == 0 || rank == 2 || (rank >= 4 && rank <= 7)));
  const Settings steps = with("FORKPOINT_STEPS", "10:20");
  CHECK(steps.wants_step(10));
  CHECK(steps.wants_step(20));
  CHECK_FALSE(steps.wants_step(9));
  CHECK_FALSE(steps.wants_step(21));
  CHECK(with("FORKPOINT_STEPS", "0:9223372036854775807").wants_step(INT64_MAX));
  CHECK(with("FORKPOINT_STEPS", "0:9223372036854775808").state == Settings::State::malformed);
  CHECK(with("FORKPOINT_STEPS", "").state == Settings::State::ready);
  CHECK(with("FORKPOINT_RING_SLOTS", "4096").ring_slots == 4096);
  CHECK(with("FORKPOINT_RANKS", std::string(5000, '1').c_str()).state == Settings::State::malformed);
}

TEST_CASE("settings: a knob of deterministic mode is in force when it is named as a whole") {
  CHECK_FALSE(with("FORKPOINT_RANKS", "0").has_knob("collectives"));
  const Settings settings = with("FORKPOINT_DETERMINISTIC", "cublas,collectives");
  CHECK(settings.has_knob("collectives"));
  CHECK(settings.has_knob("cublas"));
  CHECK_FALSE(settings.has_knob("collective"));
  CHECK_FALSE(settings.has_knob("cub"));
  CHECK(with("FORKPOINT_DETERMINISTIC", std::string(2000, 'x').c_str()).state == Settings::State::malformed);
}

TEST_CASE("settings: what concerns PyTorch") {
  CHECK(with("FORKPOINT_RANKS", "0").torch);
  CHECK(with("FORKPOINT_TORCH", "1").torch);
  CHECK_FALSE(with("FORKPOINT_TORCH", "0").torch);
  CHECK(with("FORKPOINT_TORCH", "no").state == Settings::State::malformed);
  CHECK(std::string(with("FORKPOINT_OPS", "blocks.*,head").ops) == "blocks.*,head");
  CHECK(with("FORKPOINT_OPS", std::string(2000, 'x').c_str()).state == Settings::State::malformed);
  const Settings watch = with("FORKPOINT_WATCH", "replicas");
  CHECK(watch.watch_replicas);
  CHECK_FALSE(watch.watch_nan);
  CHECK(with("FORKPOINT_WATCH", "nan,replicas").watch_nan);
  for (const char* wrong : {"nans", "nan,", ",nan", "nan replicas"}) {
    CHECK(with("FORKPOINT_WATCH", wrong).state == Settings::State::malformed);
  }
  CHECK(with("FORKPOINT_ON_TRIGGER", "stop").on_trigger == OnTrigger::stop);
  CHECK(with("FORKPOINT_ON_TRIGGER", "deepen").on_trigger == OnTrigger::deepen);
  CHECK(with("FORKPOINT_ON_TRIGGER", "pause").state == Settings::State::malformed);
}

TEST_CASE("the guard lets a thread in once") {
  const Guard outer;
  CHECK(outer.entered());
  {
    const Guard inner;
    CHECK_FALSE(inner.entered());
  }
  CHECK(Guard::inside());
  std::thread([] { CHECK(Guard().entered()); }).join();
}

TEST_CASE("the ring keeps order, tells full, and hands out nothing unpublished") {
  EventRing<int> ring;
  REQUIRE(ring.create(4));
  EventRing<int>::Claim claim;
  for (int lap = 0; lap < 5; ++lap) {
    CHECK(ring.front() == nullptr);
    for (int i = 0; i < 4; ++i) {
      REQUIRE(ring.try_claim(&claim));
      CHECK(ring.front() == (i == 0 ? nullptr : ring.front()));
      *claim.event = lap * 4 + i;
      ring.publish(claim);
    }
    CHECK_FALSE(ring.try_claim(&claim));
    for (int i = 0; i < 4; ++i) {
      REQUIRE(ring.front() != nullptr);
      CHECK(*ring.front() == lap * 4 + i);
      ring.pop();
    }
  }
  EventRing<int>::Claim first, second;
  REQUIRE(ring.try_claim(&first));
  REQUIRE(ring.try_claim(&second));
  ring.publish(second);
  CHECK(ring.front() == nullptr);
  ring.publish(first);
  CHECK(ring.front() != nullptr);
  ring.destroy();
}

TEST_CASE("names have one address each, and long ones differ though they are cut") {
  NameTables tables;
  REQUIRE(tables.create());
  const Name* name = tables.name("blocks.0");
  CHECK(name == tables.name(std::string("blocks.0").c_str()));
  CHECK(name != tables.name("blocks.1"));
  CHECK(name->view() == "blocks.0");
  CHECK(tables.name(nullptr) == tables.name(""));
  const std::string long_name(5000, 'x'), other = long_name + "y";
  CHECK(tables.name(long_name.c_str()) == tables.name(long_name.c_str()));
  CHECK(tables.name(long_name.c_str()) != tables.name(other.c_str()));
  CHECK(tables.name(long_name.c_str())->view() != tables.name(other.c_str())->view());
  CHECK(tables.name(other.c_str())->length < 4100);
}

TEST_CASE("names: eight threads agree on every address") {
  NameTables tables;
  REQUIRE(tables.create());
  std::vector<std::vector<const Name*>> seen(8);
  std::vector<std::thread> threads;
  for (auto& mine : seen) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) mine.push_back(tables.name(("name" + std::to_string(i)).c_str()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : seen) CHECK(mine == seen[0]);
}

TEST_CASE("a full table says so instead of growing") {
  struct Number {
    uint64_t hash;
    bool equals(int key) const { return hash == static_cast<uint64_t>(key); }
    static Number* make(uint64_t hash, int) { return new Number{hash}; }
    static void discard(Number* number) { delete number; }
  };
  InternTable<Number> table;
  REQUIRE(table.create(16));
  std::vector<Number*> made;
  for (int i = 0; i < 100; ++i) {
    if (Number* number = table.intern(static_cast<uint64_t>(i), i)) made.push_back(number);
  }
  CHECK(made.size() >= 10);
  CHECK(made.size() < 16);
  for (size_t i = 0; i < made.size(); ++i) CHECK(table.intern(i, static_cast<int>(i)) == made[i]);
  for (Number* number : made) delete number;
}

TEST_CASE("losses carry their steps, their number and their detail, and are taken once") {
  LossLog log;
  log.add(Loss::ring_full, 5);
  log.add(Loss::ring_full, 3, 7);
  log.add(Loss::ring_full, 9, 1, 700);
  LossLog::Taken taken;
  REQUIRE(log.take(Loss::ring_full, &taken));
  CHECK(taken.gap.first_step == 3);
  CHECK(taken.gap.last_step == 9);
  CHECK(taken.gap.records_lost == 9);
  CHECK(taken.detail == 700);
  CHECK_FALSE(log.take(Loss::ring_full, &taken));
  CHECK_FALSE(log.take(Loss::bad_name, &taken));
  for (int i = 0; i < static_cast<int>(Loss::count_); ++i) CHECK(strlen(loss_reason(static_cast<Loss>(i))) > 5);
}

TEST_CASE("of two facts with one name the later one counts") {
  FactList facts;
  facts.add("a", "1");
  facts.add("b", "2");
  facts.add("a", "3");
  const void* known = nullptr;
  const auto all = facts.take_new(&known);
  facts.add("a", "3");
  CHECK(facts.take_new(&known).empty());  // nothing new
  facts.add("b", "4");
  CHECK(facts.take_new(&known) == std::vector<std::pair<std::string, std::string>>{{"b", "4"}});
  REQUIRE(all.size() == 2);
  CHECK(all[0] == std::pair<std::string, std::string>("a", "3"));
}

TEST_CASE("a program that tells another fact every step does not grow for ever") {
  FactList facts;
  for (uint32_t i = 0; i < FactList::kMost; ++i) CHECK(facts.add("step", std::to_string(i).c_str()));
  CHECK_FALSE(facts.add("step", "one more"));
  CHECK(facts.add("step", std::to_string(FactList::kMost - 1).c_str()));  // known
}

TEST_CASE("the appender numbers calls by site, step and micro-step, also when micro-steps interleave") {
  const TempFolder folder;
  const Settings settings;
  LossLog losses;
  LimitSet limits;
  NameTables names;
  REQUIRE(names.create());
  const auto writer = HashStreamWriter::create(folder.path() + "/stream", {});
  Notes notes;
  StreamAppender appender(settings, 1, *writer, losses, limits, notes);
  Event event;
  event.kind = EventKind::record;
  event.site = names.site({Phase::forward, Kind::scalar, Role::loss, nullptr, nullptr, names.name("x"), nullptr});
  event.layout = names.layout({});
  uint64_t serial = 0;
  for (int64_t step : {0, 1}) {
    appender.begin_step(step, true, ++serial);
    appender.begin_step(step, true, serial);  // told twice: passed over
    for (int micro : {1, 0, 1, 0, 0, 2}) {
      event.micro_step = micro;
      appender.add(event);
    }
    appender.end_step();
  }
  appender.begin_step(2, false, ++serial);
  appender.end_step();
  appender.add(event);
  appender.begin_step(3, false, ++serial);  // not wanted: what came before it goes too
  losses.add(Loss::ring_full, 3, 4);
  appender.finish(false);

  const auto stream = HashStreamReader::open(folder.path() + "/stream");
  CHECK(stream->state() == StreamState::whole);
  REQUIRE(stream->steps().size() == 2);
  std::vector<std::pair<int, uint32_t>> calls;
  for (const Row& row : all_rows(*stream)) calls.emplace_back(row.record.micro_step, row.record.call);
  const std::vector<std::pair<int, uint32_t>> one_step = {{1, 0}, {0, 0}, {1, 1}, {0, 1}, {0, 2}, {2, 0}};
  CHECK(std::vector(calls.begin(), calls.begin() + 6) == one_step);
  CHECK(std::vector(calls.begin() + 6, calls.end()) == one_step);
  CHECK(has_gap(*stream, "ring full"));
  CHECK(records_lost(*stream) == 4);
}

TEST_CASE("scopes nest, inherit and survive too many ends") {
  const Guard guard;
  ScopeStack* stack = ScopeStack::of_thread(guard.token());
  REQUIRE(stack != nullptr);
  CHECK(stack->top().phase == -1);
  for (int i = 0; i < 100; ++i) {
    ScopeFrame frame;
    frame.phase = static_cast<int8_t>(i % 7);
    CHECK(stack->push(frame) == (i < kMaxScopeDepth));
  }
  CHECK(stack->top().phase == 63 % 7);
  for (int i = 0; i < 100; ++i) CHECK(stack->pop());
  CHECK_FALSE(stack->pop());
  CHECK(stack->top().phase == -1);
}

TEST_CASE("launches stand under the open scope, else under the backward scope") {
  const Guard guard;
  ScopeStack* stack = ScopeStack::of_thread(guard.token());
  REQUIRE(stack != nullptr);
  ScopeFrame backward, forward;
  backward.phase = static_cast<int8_t>(Phase::backward);
  forward.phase = static_cast<int8_t>(Phase::forward);
  stack->set_backward(&backward);
  CHECK(stack->of_launches() == backward);
  CHECK(stack->top().phase == -1);  // records are not under it
  CHECK(stack->push(forward));
  CHECK(stack->of_launches() == forward);
  CHECK(stack->pop());
  CHECK(stack->of_launches() == backward);
  stack->set_backward(nullptr);
  CHECK(stack->of_launches().phase == -1);
}

TEST_CASE("a scope has one number, also when threads name it at once") {
  static constinit FrameTable table;
  NameTables names;
  REQUIRE(names.create());
  CHECK(table.find(1) == nullptr);
  REQUIRE(table.create());
  ScopeFrame frame;
  frame.layer = names.name("fc");
  const uint32_t number = table.add(frame);
  CHECK(number != 0);
  CHECK(table.add(frame) == number);
  REQUIRE(table.find(number) != nullptr);
  CHECK(*table.find(number) == frame);
  CHECK(table.find(0) == nullptr);
  CHECK(table.find(UINT32_MAX) == nullptr);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&names] {
      for (int i = 0; i < 1000; ++i) {
        ScopeFrame mine;
        mine.layer = names.name(std::to_string(i).c_str());
        const ScopeFrame* found = table.find(table.add(mine));
        if (!found || !(*found == mine)) abort();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  frame.flags = kRecordEval;
  CHECK(table.add(frame) != number);
  uint32_t last = 1;
  for (int i = 0; i < 200'000 && last != 0; ++i) {
    frame.op = names.name(std::to_string(i % 40'000).c_str());
    frame.phase = static_cast<int8_t>(i / 40'000);
    last = table.add(frame);
  }
  CHECK(last == 0);  // full, and says so
  CHECK(table.find(number)->layer->view() == "fc");
}

TEST_CASE("words are kept once, in order, and only so many") {
  NoteList list;
  CHECK(list.at(0) == nullptr);
  Note* first = list.add("what", "detail");
  REQUIRE(first != nullptr);
  CHECK(list.add("what", "detail") == first);
  CHECK(list.add("what", "other") != first);
  CHECK(list.add("wha", "detail") != first);
  CHECK(list.at(0) == first);
  CHECK(std::string(list.at(1)->detail) == "other");
  CHECK(std::string(list.add(std::string(5000, 'x').c_str(), nullptr)->what).size() == 1000);
  CHECK(list.add(std::string(5000, 'x').c_str(), nullptr) == list.at(3));
  for (uint32_t i = 4; i < NoteList::kMost; ++i) CHECK(list.add(std::to_string(i).c_str(), nullptr) != nullptr);
  CHECK(list.add("one more", nullptr) == nullptr);
  CHECK(list.add("what", "detail") == first);
  int64_t from = 0, to = 0;
  CHECK_FALSE(first->when.take(&from, &to));
  first->when.add(3);
  first->when.add(5);
  CHECK(first->when.take(&from, &to));
  CHECK(from == 3);
  CHECK(to == 5);
  CHECK_FALSE(first->when.take(&from, &to));
}
