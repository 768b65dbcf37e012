// Writers that live, die, meet each other and run out of disk.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "lib/error.h"
#include "lib/hash_stream.h"
#include "tests/support/sample_stream.h"
#include "tests/support/stream_exercise.h"
#include "tests/support/temporary_folder.h"

using namespace forkpoint;

namespace {

// A process that does `work` and then waits to be killed.
class Child {
 public:
  explicit Child(const std::function<void()>& work) {
    int pipe_ends[2];
    REQUIRE(pipe(pipe_ends) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(pipe_ends[0]);
      work();
      if (write(pipe_ends[1], "x", 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(pipe_ends[1]);
    char ready = 0;
    is_ready_ = read(pipe_ends[0], &ready, 1) == 1;
    close(pipe_ends[0]);
  }
  ~Child() { reap(); }
  void kill() { ::kill(pid_, SIGKILL); }
  void reap() {
    if (pid_ <= 0) return;
    kill();
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  bool is_ready() const { return is_ready_; }

 private:
  pid_t pid_ = 0;
  bool is_ready_ = false;
};

StreamHeader own_header() {
  StreamHeader header;
  header.rank = 0;
  return header;
}

// A whole step, then half a step of which part is on disk. Leaves the writer open.
std::unique_ptr<HashStreamWriter> write_half_a_step(const std::string& path) {
  auto writer = HashStreamWriter::create(path, own_header());
  writer->begin_step(0);
  for (int i = 0; i < 10; ++i) writer->append(sample_record(writer.get(), 0, i), 1);
  writer->end_step();
  writer->begin_step(1);
  for (int i = 0; i < 6; ++i) writer->append(sample_record(writer.get(), 1, i), 1);
  writer->flush();
  for (int i = 6; i < 9; ++i) writer->append(sample_record(writer.get(), 1, i), 1);
  return writer;
}

void check_half_a_step(const Exercise& read) {
  REQUIRE(read.steps.size() == 2);
  CHECK(read.steps[0].summary.complete);
  CHECK(read.steps[0].rows.size() == 10);
  CHECK_FALSE(read.steps[1].summary.complete);
  CHECK(read.steps[1].rows.size() == 6);  // what had been flushed
  CHECK(read.damage == "");
}

// Runs work in a process of its own and returns its exit status.
int status_of(const std::function<int()>& work) {
  const pid_t pid = fork();
  if (pid == 0) _exit(work());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Appends until the disk is full. 0: it ended in an Error with file, number of bytes and `reason`.
int fill_disk(const std::string& path, const std::string& reason) {
  try {
    const auto writer = HashStreamWriter::create(path, own_header());
    for (int64_t step = 0; step < 10000; ++step) {
      writer->begin_step(step);
      for (int i = 0; i < 500; ++i) writer->append(sample_record(writer.get(), step, i % 40), 1);
      try {
        writer->end_step();
      } catch (const Error& error) {
        const std::string text = error.what();
        const bool says_all = text.find(path) != std::string::npos && text.find(reason) != std::string::npos &&
                              text.find("bytes could not be written") != std::string::npos && !error.hint().empty();
        if (!says_all) return 2;
        try {
          writer->begin_step(step + 1);  // no later frame may hide the loss
          return 3;
        } catch (const Error&) {
          return 0;
        }
      }
    }
  } catch (const Error&) {
    return 4;
  }
  return 1;
}

void check_cut_back(const std::string& path) {
  const Exercise read = exercise_stream(path);
  CHECK(read.error == "");
  CHECK(read.state == StreamState::died);
  CHECK(read.damage == "");  // cut back to whole frames
  CHECK(read.gaps.empty());
  CHECK(read.complete_steps() >= 2);
  CHECK(read.complete_steps() == read.steps.size());
}

}  // namespace

TEST_CASE("a rank killed by SIGKILL within a step leaves every frame that it had written") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  std::unique_ptr<HashStreamWriter> writer;
  Child child([&] { writer = write_half_a_step(path); });
  REQUIRE(child.is_ready());
  const Exercise alive = exercise_stream(path);
  CHECK(alive.state == StreamState::recording);
  CHECK(alive.gaps.empty());
  check_half_a_step(alive);
  child.kill();
  child.reap();
  const Exercise dead = exercise_stream(path);
  CHECK(dead.state == StreamState::died);
  check_half_a_step(dead);
  REQUIRE(dead.gaps.size() == 1);
  CHECK(dead.gaps[0].first_step == 1);
  CHECK(dead.gaps[0].reason.find("the stream ends within step 1: process ") != std::string::npos);
}

TEST_CASE("a frame of which only a part is there yet is no damage while its writer lives, and is a Gap once it is dead") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  std::unique_ptr<HashStreamWriter> writer;
  Child child([&] { writer = write_half_a_step(path); });
  REQUIRE(child.is_ready());
  std::vector<uint8_t> bytes = read_bytes(path);
  bytes.insert(bytes.end(), bytes.begin() + 16, bytes.begin() + 16 + 90);
  {
    std::ofstream file(path, std::ios::binary | std::ios::in);  // in place: the child's lock stays
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  const Exercise alive = exercise_stream(path);
  CHECK(alive.state == StreamState::recording);
  CHECK(alive.gaps.empty());
  check_half_a_step(alive);
  child.reap();
  const Exercise dead = exercise_stream(path);
  CHECK(dead.state == StreamState::died);
  CHECK(dead.damage.find("within a header frame") != std::string::npos);
  CHECK(dead.gaps.size() == 1);
  CHECK(dead.rows() == 16);
}

TEST_CASE("a killed rank that nobody has waited for yet counts as dead") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  std::unique_ptr<HashStreamWriter> writer;
  Child child([&] { writer = write_half_a_step(path); });
  REQUIRE(child.is_ready());
  child.kill();
  siginfo_t info = {};
  REQUIRE(waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT) == 0);
  CHECK(exercise_stream(path).state == StreamState::died);
}

TEST_CASE("a data loader forked from a dead rank does not make it look alive, though it holds the file") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp", note = folder / "loader";
  std::unique_ptr<HashStreamWriter> writer;
  Child child([&] {
    writer = write_half_a_step(path);
    const pid_t loader = fork();
    if (loader == 0) {
      for (;;) pause();
    }
    const std::string text = std::to_string(loader);
    write_bytes(note, std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  });
  REQUIRE(child.is_ready());
  CHECK(exercise_stream(path).state == StreamState::recording);
  child.reap();
  CHECK(exercise_stream(path).state == StreamState::died);
  const std::vector<uint8_t> loader = read_bytes(note);
  ::kill(std::stoi(std::string(loader.begin(), loader.end())), SIGKILL);
}

TEST_CASE("a writer that goes without finish leaves a stream that died, though its process lives") {
  const TemporaryFolder folder;
  auto writer = write_half_a_step(folder / "s.fkp");
  CHECK(exercise_stream(folder / "s.fkp").state == StreamState::recording);
  writer.reset();
  CHECK(exercise_stream(folder / "s.fkp").state == StreamState::died);
}

TEST_CASE("a stream from another host goes by its lock") {
  const TemporaryFolder folder;
  auto writer = HashStreamWriter::create(folder / "s.fkp", sample_header());
  CHECK(exercise_stream(folder / "s.fkp").state == StreamState::recording);
  writer.reset();
  CHECK(exercise_stream(folder / "s.fkp").state == StreamState::died);
}

TEST_CASE("a second writer is refused and told who writes, or who has written") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  std::unique_ptr<HashStreamWriter> writer;
  Child child([&] { writer = write_half_a_step(path); });
  REQUIRE(child.is_ready());
  const std::string who = "process " + std::to_string(child.pid());
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(path, own_header()), doctest::Contains((who + " on host").c_str()),
                       Error);
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(path, own_header()), doctest::Contains("is recording to it"), Error);
  child.reap();
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(path, own_header()), doctest::Contains("(died)"), Error);
  check_half_a_step(exercise_stream(path));
  write_bytes(folder / "other.fkp", {});
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(folder / "other.fkp", own_header()),
                       doctest::Contains("exists already"), Error);
}

TEST_CASE("a folder that is missing, no folder or not writable is named with the reason") {
  const TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(folder / "none/s.fkp", own_header()), doctest::Contains("No such file"),
                       Error);
  write_bytes(folder / "file", {});
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(folder / "file/s.fkp", own_header()),
                       doctest::Contains("Not a directory"), Error);
  const std::string closed = folder / "closed";
  REQUIRE(mkdir(closed.c_str(), 0555) == 0);
  const int status = status_of([&] {
    if (getuid() == 0 && setuid(65534) != 0) return 3;  // root may write anywhere
    try {
      HashStreamWriter::create(closed + "/s.fkp", own_header());
    } catch (const Error& error) {
      return std::string(error.what()).find("Permission denied") != std::string::npos ? 0 : 2;
    }
    return 1;
  });
  CHECK(status == 0);
}

TEST_CASE("a file that may not grow on ends in an Error, cut back to whole frames") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  const int status = status_of([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {100'000, 100'000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 5;
    return fill_disk(path, "File too large");
  });
  CHECK(status == 0);
  check_cut_back(path);
}

TEST_CASE("a full disk ends in an Error, cut back to whole frames") {
  const TemporaryFolder folder;
  const std::string disk = folder / "disk";
  REQUIRE(mkdir(disk.c_str(), 0777) == 0);
  if (mount("none", disk.c_str(), "tmpfs", 0, "size=256k") != 0) {
    MESSAGE("not run: a small file system can be mounted by root only; the test with a size limit covers the code");
    return;
  }
  const struct Unmount {
    std::string path;
    ~Unmount() { umount2(path.c_str(), MNT_DETACH); }
  } unmount{disk};
  CHECK(status_of([&] { return fill_disk(disk + "/s.fkp", "No space left on device"); }) == 0);
  check_cut_back(disk + "/s.fkp");
  // Not even the header fits: no file stays behind that would stand in the way of the next attempt.
  std::filesystem::remove(disk + "/s.fkp");
  std::vector<uint8_t> filler(256 << 10, 1);
  write_bytes(disk + "/filler", filler);
  CHECK_THROWS_WITH_AS(HashStreamWriter::create(disk + "/t.fkp", own_header()), doctest::Contains("No space left"),
                       Error);
  CHECK_FALSE(std::filesystem::exists(disk + "/t.fkp"));
}

TEST_CASE("a stream that grows while it is read always gives a whole beginning of it") {
  const TemporaryFolder folder;
  const std::string path = folder / "s.fkp";
  auto writer = HashStreamWriter::create(path, own_header());
  std::atomic<bool> done = false;
  std::thread growing([&] {
    for (int64_t step = 0; step < 200; ++step) {
      writer->begin_step(step);
      for (int i = 0; i < 60; ++i) {
        writer->append(sample_record(writer.get(), step, i), 1);
        if (i % 25 == 24) writer->flush();
      }
      writer->end_step();
    }
    done = true;
  });
  size_t seen = 0, opened = 0;
  while (!done) {
    const Exercise read = exercise_stream(path);
    ++opened;
    REQUIRE(read.error == "");
    REQUIRE(read.state == StreamState::recording);
    REQUIRE(read.gaps.empty());
    REQUIRE(read.damage == "");
    REQUIRE(read.complete_steps() >= seen);
    REQUIRE(read.steps.size() - read.complete_steps() <= 1);
    seen = read.complete_steps();
  }
  growing.join();
  writer->finish();
  CHECK(opened > 0);
  const Exercise read = exercise_stream(path);
  CHECK(read.looks_perfect());
  CHECK(read.complete_steps() == 200);
}
