#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/made_run.h"
#include "tests/cli/program.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Runs that the cases below read and never change.
struct Runs {
  TemporaryFolder folder;
  std::string good = folder / "good", same = folder / "same", bad = folder / "bad", evil = folder / "evil";
  std::string evil_bad = folder / "evil_bad", killed = folder / "killed";
  Runs() {
    make_run(good, {});
    make_run(same, {});
    make_run(bad, {.fault = {.step = 3, .rank = 1, .layer = 1}});
    const std::string name = "</script><script>alert(1)</script>&\"'\x1b[31m";
    make_run(evil, {.layer_prefix = name});
    make_run(evil_bad, {.layer_prefix = name, .fault = {.step = 2, .rank = 0, .layer = 2}});
    make_run(killed, {.steps = 4, .finish = false});
  }
};
const Runs& runs() {
  static const Runs made;
  return made;
}

void cut(const std::string& path, double part) {
  fs::resize_file(path, static_cast<uintmax_t>(static_cast<double>(fs::file_size(path)) * part));
}

}  // namespace

TEST_CASE("equal runs are identical: exit status 0 and what was looked at") {
  const ProgramResult result = run_forkpoint({"diff", runs().good, runs().same});
  CHECK(result.status == 0);
  CHECK(result.out.starts_with("identical"));
  CHECK(contains(result.out, "\n  coverage"));
  CHECK(contains(result.out, "2 ranks"));
  CHECK(result.err.empty());
}

TEST_CASE("the first line of a divergence names step, rank, phase, layer and tensor") {
  const ProgramResult result = run_forkpoint({"diff", runs().good, runs().bad});
  CHECK(result.status == 1);
  CHECK(result.out.starts_with("diverged at step 3, rank 1, backward, blocks.1.mlp.fc1: weight.grad\n"));
  for (const char* label :
       {"\n  cause ", "\n  points at ", "\n  run A ", "\n  run B ", "\n  ranks ", "\n  propagated ", "\n  coverage "}) {
    CHECK_MESSAGE(contains(result.out, label), label);
  }
  CHECK(contains(result.out, "word 77"));
  CHECK(contains(result.out, "consistent with a flipped bit"));
}

TEST_CASE("--json is one object with every field of the fixed form") {
  for (const std::string& other : {runs().same, runs().bad, runs().killed}) {
    CAPTURE(other);
    const ProgramResult result = run_forkpoint({"diff", "--json", runs().good, other});
    const auto json = nlohmann::json::parse(result.out);
    for (const char* key : {"verdict", "reason", "first", "also_first", "ranks_diverged", "cause", "propagated", "gaps",
                            "coverage", "records_compared"}) {
      CHECK_MESSAGE(json.contains(key), key);
    }
    for (const char* key : {"class", "class_candidates", "evidence", "next"})
      CHECK_MESSAGE(json["cause"].contains(key), key);
    if (other != runs().bad) continue;
    for (const char* key : {"step", "micro_step", "rank", "phase", "layer", "op", "tensor", "kind", "kernel"}) {
      CHECK_MESSAGE(json["first"].contains(key), key);
    }
    CHECK(json["verdict"] == "diverged");
    CHECK(json["first"]["step"] == 3);
    CHECK(json["first"]["rank"] == 1);
    CHECK(json["first"]["kernel"].is_null());
  }
}

TEST_CASE("--steps and --ranks narrow what is compared") {
  CHECK(run_forkpoint({"diff", "--steps", ":2", runs().good, runs().bad}).status == 0);
  CHECK(run_forkpoint({"diff", "--steps", "0:2", "--ranks", "0", runs().good, runs().bad}).status == 0);
  CHECK(run_forkpoint({"diff", "--steps", "3", runs().good, runs().bad}).status == 1);
}

TEST_CASE("--full-scan and --no-verify come to the same verdict") {
  const std::string expected = run_forkpoint({"diff", runs().good, runs().bad}).out;
  const std::string first_line = expected.substr(0, expected.find('\n'));
  CHECK(run_forkpoint({"diff", "--full-scan", runs().good, runs().bad}).out.starts_with(first_line));
  CHECK(run_forkpoint({"diff", "--no-verify", runs().good, runs().bad}).out.starts_with(first_line));
  CHECK(run_forkpoint({"diff", "--full-scan", runs().good, runs().same}).status == 0);
}

TEST_CASE("a run compared with itself is identical, with a warning that it is the same one") {
  const ProgramResult result = run_forkpoint({"diff", runs().good, runs().good + "/."});
  CHECK(result.status == 0);
  CHECK(contains(result.err, "one and the same folder"));
}

TEST_CASE("what is no run is trouble, with the path and a hint") {
  const TemporaryFolder folder;
  std::ofstream(folder / "file") << "x";
  fs::create_directory(folder / "empty");
  for (const std::string& path : {folder / "absent", folder / "file", folder / "empty"}) {
    CAPTURE(path);
    const ProgramResult result = run_forkpoint({"diff", runs().good, path});
    CHECK(result.status == 2);
    CHECK(result.out.empty());
    CHECK(result.err.starts_with("forkpoint: "));
    CHECK(contains(result.err, path));
  }
}

TEST_CASE("a run that was cut or damaged is never identical") {
  const TemporaryFolder folder;
  for (const double part : {0.999, 0.7, 0.3, 0.05}) {
    CAPTURE(part);
    fs::remove_all(folder / "cut");
    fs::copy(runs().good, folder / "cut");
    cut(folder / "cut/rank-00001.fkp", part);
    CHECK(run_forkpoint({"diff", runs().good, folder / "cut"}).status == 2);
  }
  fs::remove_all(folder / "cut");
  fs::copy(runs().good, folder / "cut");
  std::fstream file(folder / "cut/rank-00000.fkp", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(fs::file_size(folder / "cut/rank-00000.fkp") / 2));
  file.put('\x5a').put('\xa5');
  file.close();
  const ProgramResult result = run_forkpoint({"diff", runs().good, folder / "cut"});
  CHECK(result.status == 2);
  CHECK(contains(result.out, "\n  gap "));
}

TEST_CASE("a run that was killed is compared in what it has") {
  const ProgramResult result = run_forkpoint({"diff", runs().bad, runs().killed});
  CHECK(result.status == 1);
  CHECK(result.out.starts_with("diverged at step 3, rank 1, backward"));
}

TEST_CASE("equal runs whose commands failed are identical only until then, and the first line says so") {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name, int exit_status) {
    make_run(folder / name, {});
    Manifest manifest = read_manifest(folder / name);
    manifest.exit_status = exit_status;
    write_manifest(folder / name, manifest);
    return folder / name;
  };
  const std::string good = make("good", 0), one = make("one", 1), other = make("other", 1), killed = make("killed", 139);
  const auto line = [](const std::string& a, const std::string& b) {
    const ProgramResult result = run_forkpoint({"diff", a, b});
    CHECK(result.status == 0);
    return result.out.substr(0, result.out.find(':'));
  };
  CHECK(line(good, good) == "identical");
  CHECK(line(one, other) == "identical up to where both commands failed (exit status 1)");
  CHECK(line(one, killed) == "identical up to where both commands failed (exit status 1 in run A, 139 in run B)");
  CHECK(line(good, killed) == "identical up to where the command of run B failed (exit status 139)");
  CHECK(line(one, good) == "identical up to where the command of run A failed (exit status 1)");
}

TEST_CASE("the page stands alone: nothing in it points to the network or to another file") {
  const TemporaryFolder folder;
  const ProgramResult result = run_forkpoint({"diff", "--html", folder / "fork.html", runs().good, runs().bad});
  CHECK(result.status == 1);
  CHECK(contains(result.err, "report: " + (folder / "fork.html")));
  const std::string page = content(folder / "fork.html");
  for (const char* outside :
       {"http:", "https:", "src=", "href=", "url(", "@import", "fetch(", "XMLHttpRequest", "import("}) {
    CHECK_MESSAGE(!contains(page, outside), outside);
  }
  for (const char* part :
       {"<!doctype html>", "diverged at step 3, rank 1, backward, blocks.1.mlp.fc1: weight.grad", "id=\"map\"",
        "id=\"loss\"", "Around the fork", "Coverage", "prefers-color-scheme: dark", "</html>"}) {
    CHECK_MESSAGE(contains(page, part), part);
  }
  CHECK(fs::directory_iterator(folder.path()) != fs::directory_iterator());
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);  // no temporary file left
}

TEST_CASE("the page's data are JSON, and hold the map and both runs' losses") {
  const TemporaryFolder folder;
  run_forkpoint({"diff", "--html", folder / "fork.html", runs().good, runs().bad});
  const std::string page = content(folder / "fork.html");
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t start = page.find(open) + open.size();
  const auto data = nlohmann::json::parse(page.substr(start, page.find("</script>", start) - start));
  CHECK(data["first"]["step"] == 3);
  CHECK(data["rows"].size() > 6);
  bool fork_in_map = false;
  for (const auto& row : data["rows"]) {
    fork_in_map |= row[0] == "backward" && row[1] == "blocks.1.mlp.fc1" && contains(row[2].get<std::string>(), "d");
  }
  CHECK(fork_in_map);
  CHECK(data["losses"].size() == 2);  // a rank each
  CHECK(data["losses"][1]["a"].size() == 6);
  CHECK(data["losses"][1]["a"][3][1] == data["losses"][1]["b"][3][1]);
  CHECK(data["losses"][1]["a"][4][1] != data["losses"][1]["b"][4][1]);
}

TEST_CASE("names from the files are escaped, in the page and on the terminal") {
  const TemporaryFolder folder;
  const ProgramResult result = run_forkpoint({"diff", "--html", folder / "fork.html", runs().evil, runs().evil_bad});
  CHECK(result.status == 1);
  CHECK(result.out.find('\x1b') == std::string::npos);
  const std::string page = content(folder / "fork.html");
  CHECK(contains(page, "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#39;"));
  CHECK_FALSE(contains(page, "<script>alert"));
  CHECK(page.find('\x1b') == std::string::npos);
}

TEST_CASE("a page that cannot be written is trouble, but the verdict is printed") {
  const ProgramResult result = run_forkpoint({"diff", "--html", "/proc/no/such/fork.html", runs().good, runs().bad});
  CHECK(result.status == 2);
  CHECK(result.out.starts_with("diverged at step 3"));
  CHECK(contains(result.err, "cannot write the report `/proc/no/such/fork.html`"));
  CHECK(run_forkpoint({"diff", "--html", "/", runs().good, runs().bad}).status == 2);
}

TEST_CASE("a page replaces neither a file of the runs nor anything that is no regular file") {
  const TemporaryFolder folder;
  fs::copy(runs().good, folder / "good");
  const auto size = fs::file_size(folder / "good/rank-00000.fkp");
  const ProgramResult inside = run_forkpoint({"diff", "--html", folder / "good/rank-00000.fkp", folder / "good", runs().bad});
  CHECK(inside.status == 2);
  CHECK(inside.out.starts_with("diverged at step 3"));
  CHECK(contains(inside.err, "within the run"));
  CHECK(fs::file_size(folder / "good/rank-00000.fkp") == size);
  fs::create_symlink("target", folder / "link");
  CHECK(run_forkpoint({"diff", "--html", folder / "link", runs().good, runs().bad}).status == 2);
  CHECK(fs::is_symlink(folder / "link"));
}

TEST_CASE("identical runs and runs that do not line up get a page, too") {
  const TemporaryFolder folder;
  for (const std::string& other : {runs().same, runs().killed, runs().evil}) {
    run_forkpoint({"diff", "--html", folder / "page.html", runs().good, other});
    CHECK(contains(content(folder / "page.html"), "</html>"));
    fs::remove(folder / "page.html");
  }
}

TEST_CASE("a reader that leaves early changes neither exit status nor stderr") {
  const ProgramResult result =
      run_shell("$FORKPOINT diff " + runs().good + " " + runs().bad + " | true; echo ${PIPESTATUS[0]}");
  CHECK(result.out == "1\n");
  CHECK(result.err.empty());
}

TEST_CASE("merge joins the folders of two nodes, and refuses a rank that is there twice") {
  const TemporaryFolder folder;
  make_run(folder / "node0", {.leave_out = {1}});
  make_run(folder / "node1", {.leave_out = {0}});
  const ProgramResult result = run_forkpoint({"merge", "-o", folder / "both", folder / "node0", folder / "node1"});
  CHECK(result.status == 0);
  CHECK(result.out.empty());
  CHECK(contains(result.err, "2 ranks from 2 folders, whole"));
  CHECK(run_forkpoint({"diff", runs().good, folder / "both"}).status == 0);
  const ProgramResult twice = run_forkpoint({"merge", "-o", folder / "twice", folder / "node0", folder / "node0"});
  CHECK(twice.status == 2);
  CHECK_FALSE(fs::exists(folder / "twice/run.json"));
  CHECK(run_forkpoint({"merge", "-o", folder / "both", folder / "node0", folder / "node1"}).status == 2);
}

}  // namespace forkpoint
