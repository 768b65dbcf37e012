// forkpoint check on minigpt (4 ranks): references made, met and missed.
#include <doctest/doctest.h>

#include "lib/run.h"
#include "tests/cli/replay_support.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

using Words = std::vector<std::string>;

ProgramResult check(const std::string& reference, const Words& options, const Words& command,
                    const ProgramOptions& how = {}) {
  static int count = 0;
  static const TemporaryFolder runs;
  const Words begin = {"check", "--reference", reference, "-o", runs / std::to_string(count++)};
  return run_forkpoint(words(words(begin, options), words({"--"}, command)), how);
}

// A reference of 8 steps, made once. No test writes to it.
const std::string& blessed() {
  static const TemporaryFolder folder;
  static const std::string path = [] {
    const ProgramResult made = check(folder / "gpt.json", {"--steps", "8", "--update"}, kMinigpt);
    INFO(made.err << made.out);
    REQUIRE(made.status == 0);
    CHECK(made.out.find("gpt.json: made: ") != std::string::npos);
    return folder / "gpt.json";
  }();
  return path;
}

std::string first_line(const ProgramResult& result) { return result.out.substr(0, result.out.find('\n')); }

// "NAME passed|failure|error|skipped" of each testcase, and the counts, as Python's parser reads the file.
std::string junit(const std::string& path) {
  const std::string script =
      "import sys, xml.etree.ElementTree as E\n"
      "s = E.parse(sys.argv[1]).getroot().find('testsuite')\n"
      "print(*[s.get(k) for k in ('tests', 'failures', 'errors', 'skipped')])\n"
      "for c in s.findall('testcase'):\n"
      "    print(c.get('name'), c[0].tag if len(c) else 'passed', c[0].get('message') if len(c) else '')\n";
  ProgramOptions options;
  options.environment["SCRIPT"] = script;
  options.environment["FILE"] = path;
  const ProgramResult result = run_shell("python3 -c \"$SCRIPT\" \"$FILE\"", options);
  CHECK_MESSAGE(result.status == 0, result.err);
  return result.out;
}

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a reference that was made is met again, and making it again changes no byte of it") {
  const TemporaryFolder folder;
  const ProgramResult same =
      check(blessed(), {"--junit", folder / "junit.xml", "--summary", folder / "summary.md"}, kMinigpt);
  INFO(same.err << same.out);
  CHECK(same.status == 0);
  CHECK(holds(first_line(same), "identical: "));
  CHECK(holds(first_line(same), "in 8 steps on 4 ranks agree (level step)"));
  const std::string found = junit(folder / "junit.xml");
  CHECK(holds(found, "9 0 0 0\n"));
  for (const char* group : {"loss", "gradients", "parameters", "optimizer state"})
    CHECK(holds(found, std::string(group) + " passed"));
  CHECK(holds(file_content(folder / "summary.md"), "### forkpoint check: identical: "));
  CHECK(holds(file_content(folder / "summary.md"), "| parameters | "));

  fs::copy(blessed(), folder / "copy.json");
  const ProgramResult again = check(folder / "copy.json", {"--update"}, kMinigpt);
  CHECK(again.status == 0);
  CHECK(holds(first_line(again), "nothing has changed"));
  CHECK(file_content(folder / "copy.json") == file_content(blessed()));
}

TEST_CASE("planted faults are diverged at their step, rank and group") {
  const struct {
    const char *fault, *first_line;
  } cases[] = {
      {"data@step=5,rank=2", "diverged at step 5, rank 2, data"},
      {"dropout-seed@step=5,rank=1,layer=1", "diverged at step 5, rank 1, generators"},
      {"lr@step=5", "diverged at step 5, all ranks, hyperparameters"},
      {"bitflip@step=5,rank=2,layer=1,target=weight", "diverged at step 5, rank 2, loss"},
      {"bitflip@step=5,rank=2,layer=1,target=grad", "diverged at step 5, rank 2, gradients"},
      {"skip-allreduce@step=6,rank=2,layer=1", "diverged at step 6, rank 2, collectives"},
      {"nan@step=3,rank=0", "diverged at step 3, rank 0, loss"},
  };
  for (const auto& [fault, line] : cases) {
    CAPTURE(fault);
    const ProgramResult found = check(blessed(), {}, words(kMinigpt, {"--fault", fault}));
    INFO(found.err << found.out);
    CHECK(found.status == 1);
    CHECK(first_line(found) == line);
    CHECK(holds(found.out, "after the last step "));
    CHECK(holds(found.out, "    parameters: blocks.0.attn.proj: "));
  }
}

TEST_CASE("a failure is in the JUnit file and in the summary, with the verdict") {
  const TemporaryFolder folder;
  fs::copy(blessed(), folder / "a & <b>.json");
  const Words options = {"--junit", folder / "junit.xml", "--summary", folder / "summary.md"};
  const ProgramResult found = check(folder / "a & <b>.json", options,
                                    words(kMinigpt, {"--fault", "bitflip@step=5,rank=2,layer=1,target=grad"}));
  INFO(found.err << found.out);
  CHECK(found.status == 1);
  const std::string text = junit(folder / "junit.xml");
  CHECK(holds(text,
              "gradients failure gradients differs from step 5 on, rank 2 (diverged at step 5, rank 2, gradients)"));
  CHECK(holds(text, "loss failure loss differs from step 6 on"));
  CHECK(holds(text, "data passed"));
  const std::string summary = file_content(folder / "summary.md");
  CHECK(holds(summary, "### forkpoint check: diverged at step 5, rank 2, gradients"));
  CHECK(holds(summary, "| gradients | "));
  CHECK(holds(summary, "**differs from step 5 on, rank 2**"));
}

TEST_CASE("another world size is incomparable") {
  Words three = kMinigpt;
  three[2] = "3";
  const TemporaryFolder folder;
  const ProgramResult found = check(blessed(), {"--junit", folder / "junit.xml"}, three);
  INFO(found.err << found.out);
  CHECK(found.status == 2);
  CHECK(first_line(found) == "incomparable: the reference is of another world_size: 4, here 3");
  CHECK(holds(junit(folder / "junit.xml"), "9 0 9 0\n"));
}

TEST_CASE("a variable that can change numbers excuses a difference, and is a note where there is none") {
  const ProgramOptions other{.environment = {{"OMP_NUM_THREADS", "3"}}};
  const ProgramResult equal = check(blessed(), {}, kMinigpt, other);
  INFO(equal.err << equal.out);
  CHECK(equal.status == 0);
  CHECK(holds(first_line(equal), "identical although OMP_NUM_THREADS is "));
  const ProgramResult differs = check(blessed(), {}, words(kMinigpt, {"--fault", "lr@step=5"}), other);
  CHECK(differs.status == 2);
  CHECK(holds(first_line(differs), "incomparable: it differs from the reference at step 5"));
  CHECK(holds(first_line(differs), "but OMP_NUM_THREADS is "));
}

TEST_CASE("without a reference nothing is run, and the way to make it is named") {
  const TemporaryFolder folder;
  const ProgramResult found = run_forkpoint(
      words({"check", "--reference", folder / "no.json", "-o", folder / "run", "--junit", folder / "junit.xml", "--"},
            kMinigpt));
  CHECK(found.status == 2);
  CHECK(found.out.empty());
  CHECK(holds(found.err, "no.json: there is no such reference."));
  CHECK(holds(found.err, "--update"));
  CHECK_FALSE(fs::exists(folder / "run"));
  CHECK(holds(junit(folder / "junit.xml"), "loss error "));
}

TEST_CASE(
    "a reference that is damaged, edited, of another schema or of other steps is trouble before anything is run") {
  const TemporaryFolder folder;
  const std::string good = file_content(blessed());
  const auto refused = [&](const std::string& text, const Words& options, const std::string& why) {
    std::ofstream(folder / "ref.json", std::ios::binary) << text;
    const ProgramResult found = run_forkpoint(words(
        words({"check", "--reference", folder / "ref.json", "-o", folder / "run"}, options), words({"--"}, kMinigpt)));
    CAPTURE(found.err);
    CHECK(found.status == 2);
    CHECK(holds(found.err, why));
    CHECK_FALSE(fs::exists(folder / "run"));
    CHECK(file_content(folder / "ref.json") == text);
  };
  refused(good.substr(0, good.size() / 2), {}, "not valid JSON");
  std::string edited = good;
  const size_t at = edited.find("\"gradients\":\"") + 20;
  edited[at] = edited[at] == '0' ? '1' : '0';
  refused(edited, {}, "edited or damaged");
  std::string later = good;
  later.replace(later.find("forkpoint_reference\": 2"), 23, "forkpoint_reference\": 9");
  refused(later, {}, "schema 9");
  refused("", {}, "not valid JSON");
  refused(good, {"--steps", "9"}, "it holds steps 0 to 7");
  // --update replaces what cannot be read, and says so.
  std::ofstream(folder / "ref.json", std::ios::binary) << edited;
  const ProgramResult made = check(folder / "ref.json", {"--update", "--steps", "8"}, kMinigpt);
  CHECK(made.status == 0);
  CHECK(holds(made.err, "It is replaced."));
  CHECK(file_content(folder / "ref.json") == good);
}

TEST_CASE("--update says what it changed") {
  const TemporaryFolder folder;
  fs::copy(blessed(), folder / "ref.json");
  const ProgramResult made = check(folder / "ref.json", {"--update"}, words(kMinigpt, {"--fault", "lr@step=5"}));
  INFO(made.err << made.out);
  CHECK(made.status == 0);
  CHECK(holds(first_line(made), "ref.json: updated: "));
  CHECK(holds(made.out, "3 of 9 steps differ, from step 5 on: "));
  CHECK(holds(made.out, "tensors of parameters differ: "));
  CHECK(check(folder / "ref.json", {}, words(kMinigpt, {"--fault", "lr@step=5"})).status == 0);
  CHECK(check(folder / "ref.json", {}, kMinigpt).status == 1);
}

TEST_CASE("a job that ends early is never identical, and no reference is made from it") {
  const TemporaryFolder folder;
  const Words short_job = words(kMinigpt, {"--steps", "6"});
  const ProgramResult found = check(blessed(), {}, short_job);
  INFO(found.err << found.out);
  CHECK(found.status == 2);
  CHECK(holds(first_line(found), "incomparable: the command exited with status 0"));
  const ProgramResult differs = check(blessed(), {}, words(short_job, {"--fault", "data@step=2,rank=1"}));
  CHECK(differs.status == 1);
  CHECK(first_line(differs) == "diverged at step 2, rank 1, data");

  fs::copy(blessed(), folder / "ref.json");
  const ProgramResult refused = check(folder / "ref.json", {"--update"}, short_job);
  CHECK(refused.status == 2);
  CHECK(holds(refused.err, "not updated: "));
  CHECK(file_content(folder / "ref.json") == file_content(blessed()));
  const std::string script = "RANK=0 WORLD_SIZE=2 " TINY_TRAINER " 2000 --pause 5 & RANK=1 WORLD_SIZE=2 " TINY_TRAINER
                             " 2000 --pause 5 --die-at 3; wait";
  const ProgramResult died = check(folder / "new.json", {"--update", "--steps", "40"}, {"sh", "-c", script});
  CHECK(died.status == 2);
  CHECK_FALSE(fs::exists(folder / "new.json"));
}

TEST_CASE("a training that goes on from a checkpoint is checked from its first step on, lost momentum included") {
  const TemporaryFolder folder;
  const Words saving =
      words(kMinigpt, {"--steps", "4", "--checkpoint-dir", folder / "ckpts", "--checkpoint-every", "4"});
  REQUIRE(run_forkpoint(words({"record", "-o", folder / "run", "--"}, saving)).status == 0);
  const Words resumed = words(kMinigpt, {"--resume", "--checkpoint-dir", folder / "ckpts"});
  const std::string reference = folder / "ref.json";
  const ProgramResult unsaid = check(reference, {"--update", "--steps", "3"}, resumed);
  CHECK(unsaid.status == 2);
  CHECK(holds(unsaid.err, "--first-step"));
  const ProgramResult made = check(reference, {"--update", "--steps", "3", "--first-step", "4"}, resumed);
  INFO(made.err << made.out);
  REQUIRE(made.status == 0);
  CHECK(check(reference, {}, resumed).status == 0);
  const ProgramResult lost = check(reference, {}, words(resumed, {"--fault", "lost-momentum"}));
  INFO(lost.err << lost.out);
  CHECK(lost.status == 1);
  CHECK(first_line(lost) == "diverged before step 4, all ranks, optimizer state");
}

}  // namespace forkpoint
