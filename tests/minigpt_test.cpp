// The sample as a program of its own, without forkpoint: what it prints, what it leaves behind and how it ends.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "samples/minigpt/philox.h"

namespace {

namespace fs = std::filesystem;

const std::string kSmall = "--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 ";

std::string program() {
  static const std::string path = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "samples/minigpt";
  REQUIRE_MESSAGE(fs::exists(path), path, " is not built");
  return path;
}

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "minigpt-test-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

struct Outcome {
  int status = -1;
  std::string out, err;
};

Outcome run(const std::string& options, const std::string& environment = "") {
  const Folder folder;
  const std::string command = fmt::format("env -u RANK -u WORLD_SIZE {} {} {} >{} 2>{}", environment, program(),
                                          options, folder / "out", folder / "err");
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), content(folder / "out"),
          content(folder / "err")};
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

double loss_in(const std::string& line) { return std::stod(line.substr(line.find("loss ") + 5)); }

std::string weights(const std::string& checkpoints, int step) {
  const std::string bytes = content(fmt::format("{}/step-{:06}/model.safetensors", checkpoints, step));
  REQUIRE(bytes.size() > 1000);
  return bytes;
}

pid_t start(const std::string& options) {
  std::vector<std::string> words = {program()};
  std::istringstream stream(options);
  for (std::string word; stream >> word;) words.push_back(word);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

std::vector<pid_t> children_of(pid_t parent) {
  std::istringstream list(content(fmt::format("/proc/{0}/task/{0}/children", parent)));
  std::vector<pid_t> children;
  for (pid_t pid; list >> pid;) children.push_back(pid);
  return children;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("Philox gives the numbers that its authors publish") {
  using minigpt::philox;
  const auto equal = [](minigpt::PhiloxWords found, std::initializer_list<uint32_t> expected) {
    return std::equal(expected.begin(), expected.end(), found.word);
  };
  CHECK(equal(philox({{0, 0, 0, 0}}, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK(equal(philox({{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(equal(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822),
              {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_CASE("every backward pass agrees with finite differences") {
  const Outcome check = run("--check-gradients");
  INFO(check.out);
  CHECK(check.status == 0);
  CHECK(lines(check.out).size() > 30);
  CHECK_FALSE(contains(check.out, "WRONG"));
}

TEST_CASE("the loss falls from chance to far below") {
  const Outcome trained = run("--steps 60");
  REQUIRE(trained.status == 0);
  const std::vector<std::string> steps = lines(trained.out);
  REQUIRE(steps.size() == 60);
  CHECK(loss_in(steps.front()) == doctest::Approx(std::log(256)).epsilon(0.02));
  CHECK(loss_in(steps.back()) < 2.85);
}

TEST_CASE("equal commands give equal bits, whatever the number of threads, and another seed gives others") {
  const Outcome first = run(kSmall + "--ranks 3 --steps 6");
  REQUIRE(first.status == 0);
  REQUIRE(lines(first.out).size() == 6);
  CHECK(run(kSmall + "--ranks 3 --steps 6").out == first.out);
  CHECK(run(kSmall + "--ranks 3 --steps 6 --threads 3").out == first.out);
  CHECK(run(kSmall + "--ranks 3 --steps 6 --seed 2").out != first.out);
  CHECK(run(kSmall + "--ranks 2 --steps 6").out != first.out);
}

TEST_CASE("a step does not depend on how many follow") {
  const std::vector<std::string> few = lines(run(kSmall + "--steps 3").out),
                                 more = lines(run(kSmall + "--steps 6").out);
  REQUIRE(few.size() == 3);
  CHECK(few == std::vector<std::string>(more.begin(), more.begin() + 3));
}

TEST_CASE("five steps and five after a resume are ten steps, to the last bit") {
  const Folder folder;
  const std::string common = kSmall + "--ranks 2 --data " + folder / "text";
  std::ofstream(folder / "text") << "So short a text that an epoch ends with 4 of the 10";
  const Outcome whole = run(common + " --steps 10 --checkpoint-dir " + folder / "whole");
  const Outcome part = run(common + " --steps 5 --checkpoint-dir " + folder / "parts");
  const Outcome rest = run(common + " --steps 10 --resume --checkpoint-dir " + folder / "parts");
  INFO(rest.err);
  REQUIRE(whole.status == 0);
  REQUIRE(rest.status == 0);
  CHECK(part.out + rest.out == whole.out);
  CHECK(weights(folder / "parts", 10) == weights(folder / "whole", 10));
  CHECK(content(folder / "parts/step-000010/optimizer.safetensors") ==
        content(folder / "whole/step-000010/optimizer.safetensors"));
  CHECK(content(folder / "parts/step-000010/rank-0001.json") == content(folder / "whole/step-000010/rank-0001.json"));
  CHECK_FALSE(contains(content(folder / "whole/step-000010/rank-0001.json"), "\"epoch\": 0"));
}

TEST_CASE("a resume takes the newest checkpoint that is complete") {
  const Folder folder;
  REQUIRE(run(kSmall + "--steps 6 --checkpoint-every 2 --checkpoint-dir " + folder / "c").status == 0);
  REQUIRE(fs::exists(folder / "c/step-000002/COMPLETE"));
  fs::remove(folder / "c/step-000006/COMPLETE");
  const Outcome rest = run(kSmall + "--steps 6 --resume --checkpoint-dir " + folder / "c");
  REQUIRE(rest.status == 0);
  CHECK(rest.out.starts_with("step      4 "));
  CHECK(lines(rest.out).size() == 2);
}

TEST_CASE("a checkpoint that is cut, missing or of another model is refused with a sentence") {
  const Folder folder;
  const std::string common = kSmall + "--resume --steps 9 --checkpoint-dir ";
  CHECK(contains(run(common + folder / "none").err, "cannot be read"));
  fs::create_directory(folder / "c");
  CHECK(contains(run(common + folder / "c").err, "no complete checkpoint"));
  REQUIRE(run(kSmall + "--steps 2 --checkpoint-dir " + folder / "c").status == 0);
  const Outcome other =
      run("--layers 3 --dim 32 --heads 2 --seq 32 --batch 2 --resume --steps 9 --checkpoint-dir " + folder / "c");
  CHECK(other.status == 1);
  CHECK(contains(other.err, "was made with layers 2, this run has 3"));
  CHECK(contains(run(kSmall + "--resume --steps 2 --checkpoint-dir " + folder / "c").err, "2 steps are done already"));
  const std::string model = folder / "c/step-000002/model.safetensors";
  for (const uintmax_t size : {uintmax_t{4}, uintmax_t{500}, fs::file_size(model) - 1}) {
    fs::resize_file(model, size);
    const Outcome cut = run(common + folder / "c");
    INFO(cut.err);
    CHECK(cut.status == 1);
    CHECK(contains(cut.err, "model.safetensors"));
    std::ofstream(model, std::ios::app) << std::string(100, 'x');
  }
}

TEST_CASE("each fault strikes at its step, on its rank, and changes what follows") {
  const Folder folder;
  const auto train = [&](const std::string& name, const std::string& fault) {
    const Outcome result =
        run(fmt::format("{} --ranks 3 --steps 4 --checkpoint-dir {} {}", kSmall, folder / name, fault));
    INFO(result.err);
    REQUIRE(result.status == 0);
    REQUIRE(lines(result.out).size() == 4);
    return result;
  };
  const Outcome clean = train("clean", "");
  int number = 0;
  for (const char* fault :
       {"bitflip@step=2,rank=1,layer=1,target=weight", "bitflip@step=2,rank=1,layer=0,target=activation",
        "bitflip@step=2,rank=1,layer=1,target=grad", "bitflip@step=2,rank=1,layer=1,target=grad,module=attn.qkv",
        "reorder@step=2,rank=1,layer=1", "reorder@step=2,layer=1", "data@step=2,rank=1", "dropout-seed@step=2,rank=1",
        "lr@step=2", "skip-allreduce@step=2,rank=0,layer=1", "nan@step=2,rank=1,layer=0"}) {
    const std::string name = fmt::format("faulty-{}", number++);
    const Outcome faulty = train(name, fmt::format("--fault {}", fault));
    INFO(fault);
    CHECK(contains(faulty.err, fmt::format("fault {}", fault)));
    CHECK(lines(faulty.out)[1] == lines(clean.out)[1]);
    CHECK(weights(folder / name, 4) != weights(folder / "clean", 4));
  }
  CHECK(contains(run(kSmall + "--steps 2 --fault nan@step=1").out, "loss nan"));
}

TEST_CASE("momentum that is lost on a resume changes the weights") {
  const Folder folder;
  REQUIRE(run(kSmall + "--steps 2 --checkpoint-dir " + folder / "a").status == 0);
  fs::copy(folder / "a", folder / "b", fs::copy_options::recursive);
  REQUIRE(run(kSmall + "--steps 4 --resume --checkpoint-dir " + folder / "a").status == 0);
  REQUIRE(run(kSmall + "--steps 4 --resume --fault lost-momentum@layer=1 --checkpoint-dir " + folder / "b").status ==
          0);
  CHECK(weights(folder / "a", 4) != weights(folder / "b", 4));
}

TEST_CASE("a mistake on the command line is answered with a sentence and status 2") {
  const struct {
    const char* options;
    const char* sentence;
  } mistakes[] = {
      {"--bogus", "unknown option --bogus"},
      {"--steps", "a value is missing"},
      {"--steps 0", "--steps 0: expected a whole number from 1"},
      {"--ranks two", "expected a whole number"},
      {"--dropout 1", "expected a number from 0 to below 1"},
      {"--dim 30", "--dim 30 is not a multiple of --heads 4"},
      {"--device tpu", "expected cpu or cuda"},
      {"--resume", "from where?"},
      {"--fault meteor@step=1", "unknown kind \"meteor\""},
      {"--fault nan", "when? Add @step=S"},
      {"--fault nan@step=-1", "expected a whole number from 0"},
      {"--fault nan@step=1,colour=red", "unknown field \"colour\""},
      {"--fault nan@step=1,layer=4", "layer 4 does not exist, the model has layers 0 to 3"},
      {"--ranks 2 --fault nan@step=1,rank=2", "rank 2 does not exist, the job has ranks 0 to 1"},
      {"--fault bitflip@step=1,target=soul", "unknown target \"soul\""},
      {"--fault reorder@step=1,rank=0,module=ln1", "no such fault in module \"ln1\""},
      {"--fault skip-allreduce@step=1", "one rank alone"},
      {"--fault lost-momentum@layer=1", "add --resume"},
  };
  for (const auto& mistake : mistakes) {
    const Outcome outcome = run(mistake.options);
    INFO(mistake.options);
    INFO(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(contains(outcome.err, mistake.sentence));
    CHECK(outcome.out.empty());
  }
  CHECK(run("-h").status == 0);
  CHECK(contains(run("-h").out, "Examples:"));
}

TEST_CASE("ranks that a launcher has started find one another and compute the same") {
  const std::string expected = run(kSmall + "--ranks 2 --steps 3").out;
  const struct {
    const char* rank;
    const char* size;
  } launchers[] = {
      {"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& launcher : launchers) {
    const std::string job = fmt::format("MASTER_PORT={}", getpid());
    Outcome other;
    std::thread second(
        [&] { other = run(kSmall + "--steps 3", fmt::format("{} {}=1 {}=2", job, launcher.rank, launcher.size)); });
    const Outcome first = run(kSmall + "--steps 3", fmt::format("{} {}=0 {}=2", job, launcher.rank, launcher.size));
    second.join();
    INFO(first.err);
    CHECK(first.out == expected);
    CHECK(other.status == 0);
    CHECK(other.out.empty());
  }
  CHECK(run("--ranks 3", "RANK=0 WORLD_SIZE=2").status == 2);
  CHECK(run("", "RANK=2 WORLD_SIZE=2").status == 2);
}

TEST_CASE("a rank that never comes is named after the timeout") {
  const std::string job = fmt::format("MASTER_PORT={} ", getpid());
  const Outcome first = run("--timeout 1", job + "RANK=0 WORLD_SIZE=2");
  CHECK(first.status == 1);
  CHECK(contains(first.err, "rank 1 did not come within 1 s"));
  const Outcome second = run("--timeout 1", job + "RANK=1 WORLD_SIZE=2");
  CHECK(second.status == 1);
  CHECK(contains(second.err, "rank 0 did not come within 1 s"));
}

TEST_CASE("a rank that is killed ends the job, and the status says how") {
  const Folder folder;
  const pid_t launcher =
      start(kSmall + "--ranks 3 --steps 1000000 --checkpoint-every 1 --checkpoint-dir " + folder / "c");
  for (int i = 0; i < 500 && !fs::exists(folder / "c/step-000001/COMPLETE"); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const std::vector<pid_t> ranks = children_of(launcher);
  REQUIRE(ranks.size() == 3);
  kill(ranks[1], SIGKILL);
  int status = 0;
  waitpid(launcher, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 128 + SIGKILL);
  for (const pid_t rank : ranks) CHECK(kill(rank, 0) == -1);
}
