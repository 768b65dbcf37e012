#include <doctest/doctest.h>

#include "cli/arguments.h"
#include "cli/terminal.h"

namespace forkpoint {

TEST_CASE("a range of steps may be open at either end, or a single step") {
  const auto range = [](const char* text) { return parse_steps(text); };
  CHECK(range("3:7").first == 3);
  CHECK(range("3:7").last == 7);
  CHECK(range("3:").first == 3);
  CHECK_FALSE(range("3:").last);
  CHECK_FALSE(range(":7").first);
  CHECK(range(":7").last == 7);
  CHECK(range("5").first == 5);
  CHECK(range("5").last == 5);
  CHECK(range("0:0").last == 0);
}

TEST_CASE("a range of steps that means nothing is refused") {
  for (const char* text :
       {"", ":", "a:b", "3:x", "-1:3", "7:3", "1:2:3", "1 :2", "99999999999999999999", "0x3", "+3"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_steps(text), UsageError);
  }
}

TEST_CASE("a list of ranks is sorted, with ranges spelled out and doubles removed") {
  CHECK(parse_ranks("4-7,0,2,5") == std::vector<int>{0, 2, 4, 5, 6, 7});
  CHECK(parse_ranks("3") == std::vector<int>{3});
}

TEST_CASE("a list of ranks that means nothing is refused") {
  for (const char* text : {"", ",", "1,", ",1", "3-1", "1-", "-1", "a", "1;2", "0-99999999", "1--2"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_ranks(text), UsageError);
  }
}

TEST_CASE("sizes take units of 1024") {
  CHECK(parse_size_bytes("1000", "--max-size") == 1000);
  CHECK(parse_size_bytes("3K", "--max-size") == 3 * 1024);
  CHECK(parse_size_bytes("500M", "--max-size") == 500ull << 20);
  CHECK(parse_size_bytes("2GiB", "--max-size") == 2ull << 30);
  CHECK(parse_size_bytes("2GB", "--max-size") == 2ull << 30);
  CHECK(parse_size_bytes("1t", "--max-size") == 1ull << 40);
  CHECK(parse_size_bytes("7B", "--max-size") == 7);
  for (const char* text : {"", "0", "G", "1X", "1MM", "-1", "1.5G", "99999999T", "1 G", "iB"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_size_bytes(text, "--max-size"), UsageError);
  }
}

TEST_CASE("a misspelled word finds its neighbour, a foreign one finds none") {
  const std::vector<std::string_view> verbs{"record", "diff", "show", "merge", "version"};
  CHECK(nearest("recrod", verbs) == "record");
  CHECK(nearest("dif", verbs) == "diff");
  CHECK(nearest("ver", verbs) == "version");
  CHECK(nearest("shwo", verbs) == "show");
  CHECK(nearest("xylophone", verbs).empty());
  CHECK(nearest("", verbs).empty());
}

TEST_CASE("sizes are told in the unit that reads best") {
  CHECK(human_size(0) == "0 bytes");
  CHECK(human_size(1) == "1 byte");
  CHECK(human_size(1023) == "1023 bytes");
  CHECK(human_size(1024) == "1.0 KiB");
  CHECK(human_size((1 << 20) - 1) == "1.0 MiB");
  CHECK(human_size(1288490189) == "1.2 GiB");
  CHECK(human_size(~0ull) == "16.0 EiB");
}

TEST_CASE("control characters of names cannot reach the terminal") {
  CHECK(printable("a\x1b[31mb\nc\x7f") == "a\\x1b[31mb\\x0ac\\x7f");
  CHECK(printable("\xC2\x9B"
                  "31m") == "\\x9b31m");
  CHECK(printable("sch\xC3\xB6n") == "sch\xC3\xB6n");
}

TEST_CASE("long lines break at blanks, and words longer than a line are kept whole") {
  CHECK(wrapped("aaa bbb ccc", 2, 0) == "aaa bbb ccc");
  CHECK(wrapped("aaaaaaaaaa bbbbbbbbbb cccccccccc", 2, 25) == "aaaaaaaaaa bbbbbbbbbb\n  cccccccccc");
  const std::string word(60, 'x');
  CHECK(wrapped("a " + word + " b", 2, 30) == "a\n  " + word + "\n  b");
}

}  // namespace forkpoint
