// What the doctor makes of what was seen on a machine: each look by hand, each finding by its id.
#include "lib/doctor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lib/doctor_machine.h"

namespace forkpoint {
namespace {

using Variables = std::map<std::string, std::string>;

const Finding* find(const Findings& findings, const std::string& id) {
  const auto found =
      std::find_if(findings.begin(), findings.end(), [&](const Finding& finding) { return finding.id == id; });
  return found == findings.end() ? nullptr : &*found;
}

FindingKind kind_of(const Findings& findings, const std::string& id) {
  const Finding* finding = find(findings, id);
  REQUIRE_MESSAGE(finding != nullptr, id);
  return finding->kind;
}

bool any(const Findings& findings, FindingKind kind) {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& finding) { return finding.kind == kind; });
}

Finding finding(FindingKind kind, FindingAbout about, const std::string& id = "x") {
  return {id, kind, about, "found", "why", "fix"};
}

Look whole(const std::string& text) {
  Look look = parse_look(text);
  look.whole = true;
  return look;
}

Look broken(const std::string& text, const std::string& trouble) {
  Look look = parse_look(text);
  look.trouble = trouble;
  return look;
}

const BuiltFor kBuilt{"13.0", "90-real,90-virtual"};
const GpuSigns kNoGpu, kOneGpu{"580.65.06", 1};

std::string driver_with(const std::string& devices, int version = 13000) {
  return "at=loading libcuda.so.1\nlibrary=/lib/libcuda.so.1\nversion=" + std::to_string(version) + "\ninit=0\n" +
         devices;
}

Findings knobs(const Variables& users) { return judge_knobs(resolve(parse_knobs("all"), users), users); }

}  // namespace

TEST_CASE("the first line counts what keeps a job from repeating and what keeps it from being seen") {
  const Finding repeats = finding(FindingKind::fix, FindingAbout::repeating),
                seen = finding(FindingKind::fix, FindingAbout::recording);
  CHECK(doctor_headline({repeats, repeats, repeats, seen}, DoctorScope::job_run) ==
        "3 things keep this job from repeating, 1 keeps forkpoint from seeing it");
  CHECK(doctor_headline({repeats}, DoctorScope::job_run) == "1 thing keeps this job from repeating");
  CHECK(doctor_headline({seen, seen}, DoctorScope::job_not_run) == "2 things keep forkpoint from seeing this job");
  CHECK(doctor_headline({repeats, seen}, DoctorScope::machine) ==
        "1 thing keeps jobs from repeating here, 1 keeps forkpoint from seeing them");
  const Finding unknown = finding(FindingKind::unknown, FindingAbout::recording);
  CHECK(doctor_headline({seen, unknown}, DoctorScope::job_run) ==
        "1 thing keeps forkpoint from seeing this job, 1 could not be looked at");
}

TEST_CASE("nothing to fix is said as widely as was looked, and no wider") {
  const Finding ok = finding(FindingKind::ok, FindingAbout::repeating),
                note = finding(FindingKind::note, FindingAbout::repeating);
  CHECK(doctor_headline({ok, note}, DoctorScope::machine) ==
        "nothing to fix was found on this machine and in its environment");
  CHECK(doctor_headline({ok, note}, DoctorScope::job_not_run) == "nothing to fix was found; the job was not run");
  CHECK(doctor_headline({ok}, DoctorScope::job_run) == "nothing to fix was found");
  Finding repeats = finding(FindingKind::ok, FindingAbout::repeating, "repeats");
  repeats.found = "two runs are identical";
  CHECK(doctor_headline({repeats}, DoctorScope::job_run) == "nothing to fix: two runs are identical");
  const Finding unknown = finding(FindingKind::unknown, FindingAbout::repeating, "repeats");
  CHECK(doctor_headline({ok, unknown}, DoctorScope::job_run) ==
        "nothing to fix in what could be looked at, 1 could not be looked at");
}

TEST_CASE("exit status: 1 with something to fix, 2 with something unknown alone, 0 else") {
  const auto of = [](std::initializer_list<FindingKind> kinds) {
    Findings findings;
    for (const FindingKind kind : kinds) findings.push_back(finding(kind, FindingAbout::recording));
    return doctor_exit_status(findings);
  };
  CHECK(of({}) == 0);
  CHECK(of({FindingKind::ok, FindingKind::note}) == 0);
  CHECK(of({FindingKind::ok, FindingKind::unknown}) == 2);
  CHECK(of({FindingKind::unknown, FindingKind::fix}) == 1);
}

TEST_CASE("the JSON has every field, and null for what does not apply") {
  Finding bare = finding(FindingKind::ok, FindingAbout::recording, "probe");
  bare.why = bare.fix = "";
  const auto json = to_json({bare, finding(FindingKind::unknown, FindingAbout::repeating, "repeats")},
                            DoctorScope::job_run, {"runs/a"});
  CHECK(json["verdict"] == "unknown");
  CHECK(json["job_was_run"] == true);
  CHECK(json["findings"][0] == nlohmann::ordered_json{{"id", "probe"},
                                                      {"kind", "ok"},
                                                      {"about", "recording"},
                                                      {"found", "found"},
                                                      {"why", nullptr},
                                                      {"fix", nullptr}});
  CHECK(json["findings"][1]["kind"] == "unknown");
  CHECK(json["runs"] == nlohmann::json{"runs/a"});
  CHECK(to_json({}, DoctorScope::machine, {})["job_was_run"].is_null());
  CHECK(to_json({}, DoctorScope::machine, {})["verdict"] == "ok");
}

TEST_CASE("findings are sorted by what they ask for, and stay in their order within") {
  Findings findings{finding(FindingKind::ok, {}, "a"), finding(FindingKind::note, {}, "b"),
                    finding(FindingKind::fix, {}, "c"), finding(FindingKind::unknown, {}, "d"),
                    finding(FindingKind::fix, {}, "e")};
  sort_findings(&findings);
  std::string order;
  for (const Finding& each : findings) order += each.id;
  CHECK(order == "cedba");
}

TEST_CASE("lines of a look that were cut by a crash do not count") {
  const Look look = parse_look("at=loading\nversion=13000\ninit=");
  CHECK(look.number("version") == 13000);
  CHECK_FALSE(look.value("init").has_value());
  CHECK(look.where() == "loading");
  CHECK(version_numbers("2.11.0+cu130") == std::vector<int>{2, 11, 0});
  CHECK(version_numbers("") == std::vector<int>{});
  CHECK(version_numbers("x1") == std::vector<int>{});
}

TEST_CASE("the probe is ok only where it was loaded and told its version") {
  CHECK(kind_of(judge_probe("/p.so", "", "", whole("abi=1\n"), 1), "probe") == FindingKind::ok);
  CHECK(kind_of(judge_probe("/p.so", "", "", whole("abi=2\n"), 1), "probe-version") == FindingKind::fix);
  CHECK(kind_of(judge_probe("/p.so", "", "", whole(""), 1), "probe-version") == FindingKind::fix);
  CHECK(kind_of(judge_probe("/p.so", "", "", whole("error=no such version GLIBC_2.99\n"), 1), "probe") ==
        FindingKind::fix);
  CHECK(kind_of(judge_probe("", "it was not found", "build it", {}, 1), "probe") == FindingKind::fix);
  CHECK(kind_of(judge_probe("/p.so", "", "", broken("at=loading\n", "did not end within 30 s"), 1), "probe") ==
        FindingKind::unknown);
}

TEST_CASE("LD_PRELOAD: broken entries, other probes and tools are to be fixed, other libraries noted") {
  const auto judged = [](PreloadEntry entry) { return judge_preload({std::move(entry)}, false, "/own.so"); };
  CHECK(kind_of(judge_preload({}, false, "/own.so"), "preload") == FindingKind::ok);
  CHECK(kind_of(judged({"/x.so", "there is no such file", false, false, false}), "preload") == FindingKind::fix);
  CHECK(kind_of(judged({"/x.so", "", true, false, false}), "preload-second-probe") == FindingKind::fix);
  CHECK(kind_of(judged({"/x.so", "", false, false, true}), "preload-tool") == FindingKind::fix);
  CHECK(judged({"/x.so", "", false, true, false}).front().kind == FindingKind::note);
  CHECK(judged({"/x.so", "", false, true, false}).front().found.find("NCCL") != std::string::npos);
  CHECK_FALSE(any(judged({"/own.so", "", true, false, false}), FindingKind::fix));
  CHECK(kind_of(judge_preload({}, true, "/own.so"), "secure-execution") == FindingKind::fix);
}

TEST_CASE("tools that the environment asks for are named, ours is none") {
  CHECK(kind_of(judge_tools({}, "/own.so"), "tools") == FindingKind::ok);
  CHECK(kind_of(judge_tools({{"CUDA_INJECTION64_PATH", "/nsys.so"}}, "/own.so"), "cuda-injection") == FindingKind::fix);
  CHECK(kind_of(judge_tools({{"NVTX_INJECTION64_PATH", "/nsys.so"}}, "/own.so"), "nvtx-injection") == FindingKind::fix);
  CHECK(kind_of(judge_tools({{"CUDA_INJECTION64_PATH", "/own.so"}}, "/own.so"), "tools") == FindingKind::ok);
  CHECK(kind_of(judge_tools({{"FORKPOINT_TORCH", "0"}}, "/own.so"), "torch-left-alone") == FindingKind::fix);
  CHECK(kind_of(judge_tools({{"FORKPOINT_TORCH", "1"}}, "/own.so"), "tools") == FindingKind::ok);
}

TEST_CASE("no driver is a note on a machine without a GPU, and to be fixed on one with") {
  const Look absent = whole("at=loading libcuda.so.1\nerror=libcuda.so.1: cannot open shared object file\n");
  CHECK(kind_of(judge_driver(absent, kNoGpu, kBuilt, {}), "driver") == FindingKind::note);
  CHECK(kind_of(judge_driver(absent, kOneGpu, kBuilt, {}), "driver") == FindingKind::fix);
}

TEST_CASE("a driver that hangs or crashes is unknown, with what it was doing, and never ok") {
  const Findings hung =
      judge_driver(broken("at=loading libcuda.so.1\n", "did not end within 30 s"), kOneGpu, kBuilt, {});
  CHECK(kind_of(hung, "driver") == FindingKind::unknown);
  CHECK(find(hung, "driver")->found.find("loading libcuda.so.1") != std::string::npos);
  CHECK_FALSE(any(hung, FindingKind::ok));
  // Even where it had said that it starts: its devices were not seen.
  const Findings crashed =
      judge_driver(broken(driver_with("at=counting\n"), "was killed by signal 11"), kOneGpu, kBuilt, {});
  CHECK(kind_of(crashed, "driver") == FindingKind::unknown);
  CHECK(find(crashed, "devices") == nullptr);
  CHECK(kind_of(judge_driver(whole("version=13000\n"), kOneGpu, kBuilt, {}), "driver") == FindingKind::unknown);
}

TEST_CASE("a driver that does not start is to be fixed, unless its GPUs are hidden or there are none") {
  const Look none = whole("version=13000\ninit=100\n"), other = whole("version=13000\ninit=803\n");
  CHECK(kind_of(judge_driver(none, kOneGpu, kBuilt, {}), "driver") == FindingKind::fix);
  CHECK(kind_of(judge_driver(none, kNoGpu, kBuilt, {}), "driver") == FindingKind::note);
  CHECK(kind_of(judge_driver(none, kOneGpu, kBuilt, {{"CUDA_VISIBLE_DEVICES", ""}}), "driver") == FindingKind::note);
  CHECK(kind_of(judge_driver(other, kNoGpu, kBuilt, {}), "driver") == FindingKind::fix);
}

TEST_CASE("the driver's version is held against the CUDA that the probe was built with") {
  const std::string one = "device=0|NVIDIA H200|9.0|0|132\n";
  CHECK(kind_of(judge_driver(whole(driver_with(one, 13000)), kOneGpu, kBuilt, {}), "driver-version") ==
        FindingKind::ok);
  CHECK(kind_of(judge_driver(whole(driver_with(one, 12080)), kOneGpu, kBuilt, {}), "driver-version") ==
        FindingKind::fix);
  CHECK(kind_of(judge_driver(whole(driver_with(one, 12080)), kOneGpu, {"12.4", "90"}, {}), "driver-version") ==
        FindingKind::ok);
  CHECK(kind_of(judge_driver(whole(driver_with(one)), kOneGpu, {"", ""}, {}), "built-without-cuda") ==
        FindingKind::fix);
}

TEST_CASE("models that are mixed, GPUs without code and modes in which no job runs are named") {
  const std::string h200 = "device=0|NVIDIA H200|9.0|0|132\n";
  const Findings mixed =
      judge_driver(whole(driver_with(h200 + "device=1|NVIDIA A100|8.0|0|108\n")), kOneGpu, kBuilt, {});
  CHECK(kind_of(mixed, "mixed-devices") == FindingKind::fix);
  CHECK(find(mixed, "mixed-devices")->about == FindingAbout::repeating);
  CHECK(find(mixed, "mixed-devices")->fix == "export CUDA_VISIBLE_DEVICES=0");
  CHECK(kind_of(mixed, "device-architecture") == FindingKind::fix);
  const Findings alike =
      judge_driver(whole(driver_with(h200 + "device=1|NVIDIA H200|9.0|0|132\n")), kOneGpu, kBuilt, {});
  CHECK(kind_of(alike, "devices") == FindingKind::ok);
  CHECK(find(alike, "devices")->found == "2 x NVIDIA H200");
  CHECK_FALSE(any(alike, FindingKind::fix));
  CHECK(kind_of(judge_driver(whole(driver_with("device=0|NVIDIA H200|9.0|2|132\n")), kOneGpu, kBuilt, {}),
                "compute-mode") == FindingKind::fix);
  CHECK(kind_of(judge_driver(whole(driver_with("device=0|NVIDIA H200|9.0|3|132\n")), kOneGpu, kBuilt, {}),
                "compute-mode") == FindingKind::note);
}

TEST_CASE("device code runs on its own generation, later ones by translation, and not on earlier ones") {
  const auto runs = [](const std::string& capability, const std::string& architectures) {
    const Look look = whole(driver_with("device=0|GPU|" + capability + "|0|1\n"));
    return find(judge_driver(look, kOneGpu, {"13.0", architectures}, {}), "device-architecture") == nullptr;
  };
  CHECK(runs("9.0", "90-real"));
  CHECK(runs("8.6", "80-real"));
  CHECK(runs("8.9", "80"));
  CHECK(runs("10.0", "90-virtual"));
  CHECK(runs("12.0", "90"));
  CHECK(runs("8.0", "80-real,90-real,90-virtual"));
  CHECK_FALSE(runs("8.0", "90-real,90-virtual"));
  CHECK_FALSE(runs("10.0", "90-real"));
  CHECK_FALSE(runs("8.0", "86-real"));
  CHECK(runs("9.0", "90a-real"));
  CHECK_FALSE(runs("10.0", "90a-virtual"));
}

TEST_CASE("ECC that is off and slices of some GPUs only are to be fixed") {
  CHECK(kind_of(judge_devices(whole("device=0|H200|1|1|0|0\ndevice=1|H200|1|1|0|0\n"), true), "ecc") ==
        FindingKind::ok);
  CHECK(kind_of(judge_devices(whole("device=0|H200|0|0|0|0\n"), true), "ecc") == FindingKind::fix);
  CHECK(kind_of(judge_devices(whole("device=0|RTX|?|?|?|?\n"), true), "ecc") == FindingKind::note);
  CHECK(kind_of(judge_devices(whole("device=0|H200|1|1|1|1\ndevice=1|H200|1|1|0|0\n"), true), "mig") ==
        FindingKind::fix);
  CHECK(kind_of(judge_devices(whole("device=0|H200|1|1|1|1\n"), true), "mig") == FindingKind::note);
  CHECK(kind_of(judge_devices(whole("error=no such file\n"), true), "nvml") == FindingKind::unknown);
  CHECK(kind_of(judge_devices(broken("at=starting it\n", "did not end within 30 s"), true), "nvml") ==
        FindingKind::unknown);
  CHECK(judge_devices(whole(""), false).empty());
}

TEST_CASE("CUPTI is ok only where it was subscribed to; who holds it already is told from who refuses") {
  const Look driver = whole(driver_with("device=0|NVIDIA H200|9.0|0|132\n"));
  CHECK(kind_of(judge_cupti(whole("library=/x/libcupti.so.13\nsubscribe=0\n"), driver, {}), "cupti") ==
        FindingKind::ok);
  CHECK(kind_of(judge_cupti(whole("library=/x/libcupti.so.13\n"), driver, {}), "cupti") == FindingKind::note);
  CHECK(kind_of(judge_cupti(whole("library=/x/libcupti.so.13\nsubscribe=39\n"), driver, {}), "cupti-taken") ==
        FindingKind::fix);
  CHECK(kind_of(judge_cupti(whole("library=/x/libcupti.so.13\nsubscribe=15\n"), driver, {}), "cupti") ==
        FindingKind::fix);
  CHECK(kind_of(judge_cupti(whole("at=loading\n"), driver, {}), "cupti") == FindingKind::fix);
  const Look older = whole(driver_with("device=0|NVIDIA H200|9.0|0|132\n", 12040));
  CHECK(kind_of(judge_cupti(whole("library=/x/libcupti.so.13\n"), older, {}), "cupti-version") == FindingKind::fix);
  CHECK(find(judge_cupti(whole(""), older, {}), "cupti")->fix == "pip install nvidia-cuda-cupti-cu12");
  CHECK(judge_cupti(whole(""), whole("error=none\n"), {}).empty());
}

TEST_CASE("NCCL: its versions by name, two of them noted, one that cannot be loaded to be fixed") {
  const Look absent = whole("error=no such file\n"), one = whole("library=/a\nversion=22809\n"),
             other = whole("library=/b\nversion=22105\n");
  CHECK(kind_of(judge_nccl(absent, std::nullopt, true), "nccl") == FindingKind::note);
  CHECK(judge_nccl(one, std::nullopt, true).front().found.find("NCCL 2.28.9") == 0);
  CHECK(kind_of(judge_nccl(one, other, true), "nccl-versions") == FindingKind::note);
  CHECK(find(judge_nccl(one, one, true), "nccl-versions") == nullptr);
  CHECK(kind_of(judge_nccl(absent, absent, true), "nccl") == FindingKind::fix);
  CHECK(kind_of(judge_nccl(broken("at=loading\n", "did not end within 30 s"), std::nullopt, true), "nccl") ==
        FindingKind::unknown);
  CHECK(kind_of(judge_nccl(whole("library=/a\n"), std::nullopt, true), "nccl") == FindingKind::unknown);
}

TEST_CASE("pythons and torches that the hooks do not support are told by their versions") {
  const auto of = [](const std::string& version, const std::string& torch, const std::string& more = "") {
    return judge_python(whole("executable=/py\nimplementation=cpython\nversion=" + version + "\ngil=1\n" + more +
                              "torch=" + torch + "\n"),
                        "python3", "/py", true);
  };
  CHECK(kind_of(of("3.11.2", "2.11.0+cu130"), "python") == FindingKind::ok);
  CHECK(kind_of(of("3.11.2", "2.11.0+cu130"), "torch") == FindingKind::ok);
  CHECK(kind_of(of("3.9.0", "2.4.0"), "torch") == FindingKind::ok);
  CHECK(kind_of(of("3.8.19", "2.3.1"), "python") == FindingKind::fix);
  CHECK(kind_of(of("3.8.19", "2.3.1"), "torch") == FindingKind::fix);
  CHECK(kind_of(of("3.11.2", ""), "torch") == FindingKind::note);
  CHECK(kind_of(of("3.11.2", "git"), "torch") == FindingKind::unknown);
  CHECK(kind_of(judge_python(whole("implementation=pypy\nversion=3.10.1\ngil=1\ntorch=\n"), "python3", "/py", true),
                "python") == FindingKind::fix);
  CHECK(kind_of(judge_python(whole("implementation=cpython\nversion=3.13.1\ngil=0\ntorch=\n"), "python3", "/py", true),
                "python") == FindingKind::fix);
  CHECK(kind_of(judge_python({}, "python3", "", false), "python") == FindingKind::note);
  CHECK(kind_of(judge_python(broken("", "exited with status 1"), "python3", "/py", false), "python") ==
        FindingKind::unknown);
  // It got as far as its version: nothing is said of torch.
  CHECK(kind_of(judge_python(broken("implementation=cpython\nversion=3.11.2\n", "did not end within 30 s"), "python3",
                             "/py", false),
                "torch") == FindingKind::unknown);
}

TEST_CASE("the run folder: what cannot be made, and too little room") {
  FolderLook good{"runs/x", "", "/work", 100ull << 30, 1'000'000, true};
  CHECK_FALSE(any(judge_run_folder(good), FindingKind::fix));
  FolderLook full = good, files = good, unasked = good, refused = good;
  full.free_bytes = 100 << 20;
  CHECK(kind_of(judge_run_folder(full), "disk-room") == FindingKind::fix);
  files.free_files = 3;
  CHECK(kind_of(judge_run_folder(files), "disk-room") == FindingKind::fix);
  files.free_files = 0;  // not counted there
  CHECK(kind_of(judge_run_folder(files), "disk-room") == FindingKind::ok);
  unasked.known_size = false;
  CHECK(kind_of(judge_run_folder(unasked), "disk-room") == FindingKind::unknown);
  refused.trouble = "read-only";
  CHECK(kind_of(judge_run_folder(refused), "run-folder") == FindingKind::fix);
  CHECK(find(judge_run_folder(refused), "disk-room") == nullptr);
}

TEST_CASE("limits of the system: a stream that would be cut is to be fixed, small ones noted") {
  SystemLook good;
  good.shared_memory_bytes = 8ull << 30;
  good.sockets = "/run/user/1/forkpoint";
  good.fixed_addresses = true;
  good.open_files_limit = 65536;
  CHECK_FALSE(any(judge_system(good), FindingKind::fix));
  CHECK_FALSE(any(judge_system(good), FindingKind::note));
  SystemLook bad = good;
  bad.file_size_limit_bytes = 8192;
  CHECK(kind_of(judge_system(bad), "file-size-limit") == FindingKind::fix);
  bad.shared_memory_bytes = 64 << 20;
  CHECK(kind_of(judge_system(bad), "shared-memory") == FindingKind::note);
  bad.shared_memory_bytes = std::nullopt;
  CHECK(kind_of(judge_system(bad), "shared-memory") == FindingKind::fix);
  bad.sockets_trouble = "belongs to another user";
  CHECK(kind_of(judge_system(bad), "sockets") == FindingKind::fix);
  bad.fixed_addresses = false;
  CHECK(kind_of(judge_system(bad), "addresses") == FindingKind::note);
  bad.open_files_limit = 256;
  CHECK(kind_of(judge_system(bad), "open-files-limit") == FindingKind::note);
}

TEST_CASE("variables in conflict with a knob are to be fixed by a line that resolves the conflict") {
  const Findings cublas = knobs({{"CUBLAS_WORKSPACE_CONFIG", ":0:0"}});
  CHECK(kind_of(cublas, "knob-cublas") == FindingKind::fix);
  CHECK(find(cublas, "knob-cublas")->about == FindingAbout::repeating);
  CHECK(find(cublas, "knob-cublas")->fix == "export CUBLAS_WORKSPACE_CONFIG=':4096:8'");
  CHECK(find(cublas, "knob-cublas")->found == "CUBLAS_WORKSPACE_CONFIG=:0:0 is set");
  CHECK(kind_of(knobs({{"CUBLAS_WORKSPACE_CONFIG", ":16:8"}}), "knob-cublas") == FindingKind::ok);
  CHECK(kind_of(knobs({{"PYTHONHASHSEED", "random"}}), "knob-python-hash") == FindingKind::fix);
  // Only what is in conflict is named, of a knob of two variables.
  CHECK(find(knobs({{"NCCL_ALGO", "Ring"}, {"NCCL_NVLS_ENABLE", "1"}}), "knob-nccl")->fix ==
        "export NCCL_NVLS_ENABLE=0");
  const Findings xla = knobs({{"XLA_FLAGS", "--xla_dump_to=/tmp --xla_gpu_autotune_level=4"}});
  CHECK(find(xla, "knob-xla")->fix == "export XLA_FLAGS='--xla_dump_to=/tmp --xla_gpu_autotune_level=0'");
  // A knob that deterministic mode leaves alone unless told.
  CHECK(kind_of(knobs({{"NVIDIA_TF32_OVERRIDE", "1"}}), "knob-tf32") == FindingKind::note);
}

TEST_CASE("each fix of a knob resolves its conflict") {
  for (const Variables& users : std::vector<Variables>{{{"CUBLAS_WORKSPACE_CONFIG", ""}},
                                                       {{"NCCL_ALGO", "NVLS"}},
                                                       {{"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"}},
                                                       {{"PYTHONHASHSEED", "random"}}}) {
    for (const Finding& each : knobs(users)) {
      if (each.kind != FindingKind::fix) continue;
      CAPTURE(each.fix);
      Variables fixed = users;
      const std::string assignment = each.fix.substr(7);
      std::string value = assignment.substr(assignment.find('=') + 1);
      value.erase(std::remove(value.begin(), value.end(), '\''), value.end());
      fixed[assignment.substr(0, assignment.find('='))] = value;
      CHECK_FALSE(any(knobs(fixed), FindingKind::fix));
    }
  }
}

TEST_CASE("knobs that nobody set are one note, with what deterministic mode would set") {
  const Findings findings = knobs({});
  CHECK_FALSE(any(findings, FindingKind::fix));
  const Finding* unset = find(findings, "knobs-unset");
  REQUIRE(unset != nullptr);
  CHECK(unset->kind == FindingKind::note);
  CHECK(unset->found.find("cublas") != std::string::npos);
  CHECK(unset->why.find("CUBLAS_WORKSPACE_CONFIG=:4096:8") != std::string::npos);
  CHECK(unset->found.find("tf32") == std::string::npos);
  CHECK(find(knobs({{"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}}), "knobs-unset")->found.find("cublas") ==
        std::string::npos);
}

TEST_CASE("other variables that results can depend on are listed, those of knobs not again") {
  CHECK(judge_other_variables({}).empty());
  CHECK(judge_other_variables({{"CUBLAS_WORKSPACE_CONFIG", ":0:0"}}).empty());
  CHECK(judge_other_variables({{"OMP_NUM_THREADS", "4"}}).front().found == "OMP_NUM_THREADS=4");
}

}  // namespace forkpoint
