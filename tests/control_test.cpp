#include "lib/control.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "lib/error.h"
#include "tests/support/temporary_folder.h"

namespace forkpoint::control {

TEST_CASE("a message comes back as it was sent, whatever its values hold") {
  std::string every_byte;
  for (int i = 0; i < 256; ++i) every_byte += static_cast<char>(i);
  Message message("arm");
  message.set("first", 41207).set("run", every_byte).set("empty", "").set("low", INT64_MIN);
  const auto read = decode(encode(message));
  REQUIRE(read);
  CHECK(read->word == "arm");
  CHECK(read->fields == message.fields);
  CHECK(read->number("first") == 41207);
  CHECK(read->number("low") == INT64_MIN);
  CHECK_FALSE(read->number("run"));
  CHECK_FALSE(read->number("absent"));
  CHECK(read->text("absent").empty());
}

TEST_CASE("what is no message is nothing") {
  for (const std::string text : {"", "\n", "forkpoint", "forkpoint \n", "forkpoint 1 \n", "forkpoint 1\n", "forkpoint 1 status", "forkpoint 0 x\n",
                                 "forkpoint -1 x\n", "forkpoint 1x status\n", "forkpoint 1 Status\n", "forkpoint 1 a b\n", "forkpoint 1 x\nno field\n",
                                 "forkpoint 1 x\n=value\n", "forkpoint 1 x\na=%\n", "forkpoint 1 x\na=%zz\n", "forkpoint 1 x\na=1\na=2\n",
                                 "forkpoint 1 x\na=\x01\n", "forkpoint 1 x\n\n", "forkpoint 99999999999999 x\n"}) {
    CAPTURE(text);
    CHECK_FALSE(decode(text));
  }
  CHECK(decode("forkpoint 1 status\n"));
}

TEST_CASE("of another version's message only the version is read") {
  const auto read = decode("forkpoint 2 !! whatever\x01\n");
  REQUIRE(read);
  CHECK(read->version == 2);
  CHECK(read->word.empty());
}

TEST_CASE("sizes are bounded on both sides") {
  Message large("arm");
  large.set("run", std::string(kMaxBytes, 'x'));
  CHECK_THROWS_AS(encode(large), Error);
  CHECK_FALSE(decode("forkpoint 1 x\na=" + std::string(kMaxBytes, 'x') + "\n"));
  std::string many = "forkpoint 1 x\n";
  for (char a = 'a'; a <= 'z'; ++a) many += std::string("a") + a + "=1\nb" + a + "=1\n";
  CHECK_FALSE(decode(many));
}

TEST_CASE("no sequence of bytes does harm") {
  std::mt19937 random(5);
  const std::string whole = encode(Message("listen").set("level", "layer").set("odd", "%\n\x7f"));
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = whole.substr(0, random() % (whole.size() + 1));
    for (unsigned k = random() % 4; k > 0 && !bytes.empty(); --k) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (const auto read = decode(bytes)) CHECK(read->fields.size() <= kMaxFields);
  }
}

TEST_CASE("a socket's name is that of one process, and no other file's") {
  const auto read = parse_socket_name(socket_name({4711, 123456789}));
  REQUIRE(read);
  CHECK(read->pid == 4711);
  CHECK(read->start_ticks == 123456789);
  for (const char* other : {"", ".sock", "-.sock", "1-.sock", "-1.sock", "0-1.sock", "01-1.sock", "1-1.sock.sock", ".1-1.sock", "1-1", "1--1.sock"}) {
    CAPTURE(other);
    CHECK_FALSE(parse_socket_name(other));
  }
}

TEST_CASE("sockets lie where the variables say, else where only the user can look") {
  CHECK(socket_folder("/chosen", "/run/user/7", 7) == "/chosen");
  CHECK(socket_folder("", "/run/user/7", 7) == "/run/user/7/forkpoint");
  CHECK(socket_folder(nullptr, "relative", 7) == "/tmp/forkpoint-7");
  CHECK(socket_folder(nullptr, nullptr, 7) == "/tmp/forkpoint-7");
}

TEST_CASE("a folder that others may enter, that is a link or that is somebody else's is refused") {
  const TemporaryFolder folder;
  const std::string path = folder / "sockets";
  const int made = open_socket_folder(path, geteuid(), true);
  REQUIRE(made >= 0);
  close(made);
  CHECK_THROWS_AS(open_socket_folder(path, geteuid() + 1, false), Error);
  for (const int mode : {0710, 0701, 0750, 0777, 0704}) {
    CAPTURE(mode);
    REQUIRE(chmod(path.c_str(), static_cast<mode_t>(mode)) == 0);
    CHECK_THROWS_AS(open_socket_folder(path, geteuid(), true), Error);
  }
  REQUIRE(chmod(path.c_str(), 0700) == 0);
  REQUIRE(symlink(path.c_str(), (folder / "link").c_str()) == 0);
  CHECK_THROWS_AS(open_socket_folder(folder / "link", geteuid(), true), Error);
  CHECK_THROWS_AS(open_socket_folder(folder / "absent", geteuid(), false), Error);
}

}  // namespace forkpoint::control
