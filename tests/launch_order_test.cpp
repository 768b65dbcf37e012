// Which launches are ordered: streams, events, the default stream, waits of the host.
#include <doctest/doctest.h>

#include "lib/launch_order.h"

using namespace forkpoint;

namespace {

struct Steps {
  LaunchStep step;
  uint32_t add(LaunchKind kind, uint32_t stream, uint64_t object = 0, uint8_t flags = kLaunchNonBlocking) {
    LaunchRow row;
    row.kind = kind, row.stream = stream, row.object = object, row.flags = flags;
    step.launches.rows.push_back(row);
    step.index();
    return static_cast<uint32_t>(step.size() - 1);
  }
  uint32_t kernel(uint32_t stream, uint8_t flags = kLaunchNonBlocking) {
    return add(LaunchKind::kernel, stream, 0, flags);
  }
  LaunchOrder order() const { return LaunchOrder({&step}); }
};

bool ordered(const LaunchOrder& order, uint32_t first, uint32_t second) {
  return order.ordered({0, first}, {0, second});
}

}  // namespace

TEST_CASE("launches of one stream are ordered, those of two are not") {
  Steps s;
  const uint32_t a = s.kernel(1), b = s.kernel(1), c = s.kernel(2);
  const LaunchOrder order = s.order();
  CHECK(ordered(order, a, b));
  CHECK_FALSE(ordered(order, b, a));
  CHECK(order.unordered({0, b}, {0, c}));
}

TEST_CASE("an event orders what was before it with what waits for it, also by a third stream") {
  Steps s;
  const uint32_t a = s.kernel(1);
  const uint32_t recorded = s.add(LaunchKind::event_record, 1, 7);
  const uint32_t late = s.kernel(1);
  const uint32_t waited = s.add(LaunchKind::event_wait, 2, 7);
  const uint32_t b = s.kernel(2);
  s.add(LaunchKind::event_record, 2, 8);
  s.add(LaunchKind::event_wait, 3, 8);
  const uint32_t c = s.kernel(3);
  const LaunchOrder order = s.order();
  CHECK(ordered(order, a, b));
  CHECK(ordered(order, a, c));
  CHECK(order.unordered({0, late}, {0, b}));
  const auto wait = order.wait_between({0, a}, {0, b});
  REQUIRE(wait.has_value());
  CHECK(wait->event == 7);
  CHECK(wait->recorded.row == recorded);
  CHECK(wait->waited.row == waited);
  CHECK_FALSE(order.wait_between({0, late}, {0, b}).has_value());
}

TEST_CASE("an event counts as it was last recorded before the wait") {
  Steps s;
  s.add(LaunchKind::event_record, 1, 7);
  const uint32_t a = s.kernel(1);
  s.add(LaunchKind::event_wait, 2, 7);
  const uint32_t b = s.kernel(2);
  s.add(LaunchKind::event_record, 1, 7);
  s.add(LaunchKind::event_wait, 2, 7);
  const uint32_t c = s.kernel(2);
  const LaunchOrder order = s.order();
  CHECK(order.unordered({0, a}, {0, b}));
  CHECK(ordered(order, a, c));
}

TEST_CASE("the default stream waits for blocking streams and they for it") {
  for (const bool blocking : {true, false}) {
    Steps s;
    const uint8_t flags = blocking ? 0 : kLaunchNonBlocking;
    const uint32_t a = s.kernel(1, flags), d = s.kernel(9, kLaunchLegacyStream), b = s.kernel(2, flags),
                   c = s.kernel(1, flags);
    const LaunchOrder order = s.order();
    CHECK(ordered(order, a, d) == blocking);
    CHECK(ordered(order, d, b) == blocking);
    CHECK(ordered(order, a, b) == blocking);
    CHECK(ordered(order, a, c));
  }
}

TEST_CASE("what the host waited for comes before all that it asks for afterwards") {
  for (const int how : {0, 1, 2}) {
    Steps s;
    const uint32_t a = s.kernel(1);
    s.add(LaunchKind::event_record, 1, 5);
    const uint32_t other = s.kernel(2);
    s.add(LaunchKind::synchronize, how == 0 ? kEveryStream : 1, how == 2 ? 5 : 0);
    const uint32_t b = s.kernel(3);
    const LaunchOrder order = s.order();
    CHECK(ordered(order, a, b));
    CHECK(ordered(order, other, b) == (how == 0));
  }
}

TEST_CASE("order reaches over steps") {
  Steps one, two;
  const uint32_t a = one.kernel(1);
  one.add(LaunchKind::event_record, 1, 5);
  two.add(LaunchKind::event_wait, 2, 5);
  const uint32_t b = two.kernel(2), c = two.kernel(3);
  const LaunchOrder order({&one.step, &two.step});
  CHECK(order.ordered({0, a}, {1, b}));
  CHECK(order.unordered({0, a}, {1, c}));
}
