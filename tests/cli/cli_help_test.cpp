#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

const std::vector<std::string> kVerbs{"record", "diff",        "replay", "bisect", "resume", "check",  "doctor", "show",
                                      "merge",  "checkpoints", "run",    "ps",     "attach", "detach", "version"};

}  // namespace

TEST_CASE("every verb explains itself with two to four examples, on the standard output") {
  for (const std::string& verb : kVerbs) {
    CAPTURE(verb);
    const ProgramResult result = run_forkpoint({verb, "-h"});
    CHECK(result.status == 0);
    CHECK(result.err.empty());
    CHECK(result.out.starts_with("usage: forkpoint " + verb));
    const std::string examples = result.out.substr(result.out.find("examples:"));
    const size_t shown = count(examples, "\n  forkpoint " + verb);
    CHECK(shown >= 2);
    CHECK(shown <= 4);
    CHECK(run_forkpoint({verb, "--help"}).out == result.out);
    CHECK(run_forkpoint({"help", verb}).out == result.out);
  }
}

TEST_CASE("the program's help lists every verb, and no line of help is wider than 120 columns") {
  const ProgramResult result = run_forkpoint({"-h"});
  CHECK(result.status == 0);
  std::string all = result.out;
  for (const std::string& verb : kVerbs) {
    CHECK(result.out.find("\n  " + verb) != std::string::npos);
    all += run_forkpoint({verb, "-h"}).out;
  }
  for (size_t start = 0; start < all.size();) {
    const size_t end = std::min(all.find('\n', start), all.size());
    CHECK_MESSAGE(end - start <= 120, all.substr(start, end - start));
    start = end + 1;
  }
}

TEST_CASE("no option's text runs into its name, in the help of any verb") {
  const std::regex line("  (-., |    )--[a-z-]+(\\[=[A-Z]+\\])?( [A-Za-z:|]+)?(  +[^ ].*)?");
  for (const std::string& verb : kVerbs) {
    CAPTURE(verb);
    const std::string help = run_forkpoint({verb, "-h"}).out;
    std::istringstream lines(help.substr(help.find("options:\n") + 9, help.find("\nexamples:") - help.find("options:\n") - 9));
    size_t options = 0;
    for (std::string text; std::getline(lines, text);) {
      if (text.starts_with("          ")) continue;  // goes on
      ++options;
      CHECK_MESSAGE(std::regex_match(text, line), text);
    }
    if (help.find("options:") != std::string::npos) CHECK(options >= 1);
  }
}

TEST_CASE("no arguments at all are a usage error with the help on stderr") {
  const ProgramResult result = run_forkpoint({});
  CHECK(result.status == 2);
  CHECK(result.out.empty());
  CHECK(result.err.find("verbs:") != std::string::npos);
}

TEST_CASE("an unknown verb gets one sentence and the nearest verb") {
  const ProgramResult result = run_forkpoint({"dfif", "a", "b"});
  CHECK(result.status == 2);
  CHECK(result.out.empty());
  CHECK(result.err ==
        "forkpoint: there is no verb `dfif`.\n  Did you mean `forkpoint diff`? `forkpoint -h` lists the verbs.\n");
}

TEST_CASE("an unknown option gets one sentence and the nearest option") {
  const ProgramResult result = run_forkpoint({"diff", "--setps", "1:2", "a", "b"});
  CHECK(result.status == 2);
  CHECK(result.err.find("diff: there is no option --setps.") != std::string::npos);
  CHECK(result.err.find("Did you mean --steps?") != std::string::npos);
  const ProgramResult shortened =
      run_forkpoint({"diff", "--full", "a", "b"});  // no guessing: --full could come to mean more
  CHECK(shortened.status == 2);
  CHECK(shortened.err.find("Did you mean --full-scan?") != std::string::npos);
}

TEST_CASE("options without their value, given twice, or with a value too many are refused") {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"diff", "a", "b", "--steps"},
                                             {"diff", "--json=1", "a", "b"},
                                             {"diff", "--steps", "1", "--steps", "2", "a", "b"},
                                             {"diff", "a"},
                                             {"diff", "a", "b", "c"},
                                             {"show"},
                                             {"merge", "a", "b"},
                                             {"version", "x"},
                                             {"help", "dance"}}) {
    CAPTURE(words);
    const ProgramResult result = run_forkpoint(words);
    CHECK(result.status == 2);
    CHECK(result.out.empty());
    CHECK(result.err.starts_with("forkpoint: "));
  }
}

TEST_CASE("version tells version, format, build and probe, and --version is the same") {
  const ProgramResult result = run_forkpoint({"version"});
  CHECK(result.status == 0);
  CHECK(result.out.starts_with("forkpoint 0."));
  for (const char* fact : {"format", "hash stream 1", "built", "CUDA", FORKPOINT_PROBE_FILE}) {
    CHECK_MESSAGE(result.out.find(fact) != std::string::npos, fact);
  }
  CHECK(run_forkpoint({"--version"}).out == result.out);
  const auto json = nlohmann::json::parse(run_forkpoint({"version", "--json"}).out);
  for (const char* key :
       {"version", "stream_format", "manifest_format", "probe_abi", "compiler", "build_type", "cuda", "probe"}) {
    CHECK_MESSAGE(json.contains(key), key);
  }
}

TEST_CASE("a full disk behind the standard output is an error, not silence") {
  CHECK(run_shell("$FORKPOINT version > /dev/full").status == 2);
  CHECK(run_shell("$FORKPOINT version > /dev/full").err.find("cannot write to the standard output") !=
        std::string::npos);
}

TEST_CASE("no escape sequence is written where there is no terminal") {
  const ProgramResult result = run_forkpoint({"dance"});
  CHECK(result.err.find('\x1b') == std::string::npos);
}

}  // namespace forkpoint
