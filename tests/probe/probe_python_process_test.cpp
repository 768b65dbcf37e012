// A Python that is taken in by the bridge does what it does without it.
#include <doctest/doctest.h>

#include <filesystem>

#include "tests/probe/harness.h"

using namespace forkpoint;
using namespace forkpoint::probe_test;

namespace {

// Those of this machine that can be run; the first is python3.
std::vector<std::string> pythons() {
  std::vector<std::string> found;
  for (const char* name : {"python3", "python3.9", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"}) {
    const Outcome outcome = run_program({"bash", "-c", std::string(name) + " -c 'import sys; print(sys.executable)'"});
    if (outcome.status == 0 && outcome.out.starts_with("/")) found.push_back(outcome.out.substr(0, outcome.out.find('\n')));
  }
  return found;
}


}  // namespace

TEST_CASE("output, status and state of the interpreter are as without the bridge") {
  const char* state =
      "import sys\n"
      "print(sorted(m for m in sys.modules if not m.startswith('_forkpoint_bridge')))\n"
      "print(sys.path, sys.argv, sys.flags, sys.warnoptions, len(sys.path_hooks), sys.getrecursionlimit())\n"
      "print(sys.gettrace(), sys.getprofile(), sys.excepthook, sys.displayhook, sys.stdout.name, sys.getswitchinterval())\n";
  // The thread that waits for the interpreter may be there for a moment more.
  const std::string own_threads =
      "import time\nfor i in range(200):\n  l = [l for l in open('/proc/self/status') if l.startswith('Threads')]\n"
      "  if l == ['Threads:\\t1\\n']: break\n  time.sleep(0.01)\nprint(l)\n";
  const std::string forks =
      "import os, warnings\nwarnings.simplefilter('error')\npid = os.fork()\n"
      "if pid == 0: os._exit(3)\nprint(os.waitpid(pid, 0)[1])\n";
  const std::vector<std::vector<std::string>> commands = {
      {"-c", ""},
      {"-S", "-c", ""},
      {"-I", "-S", "-c", state},
      {"-c", state},
      {"-I", "-c", state},
      {"-c", own_threads},
      {"-S", "-c", own_threads},
      {"-c", forks},
      {"-I", "-S", "-c", forks},
      {"-c", "import sys; sys.exit(7)"},
      {"-c", "raise ValueError('x')"},
      {"-c", "import os; os._exit(5)"},
      {"-c", "import os; os.abort()"},
      {"-c", "syntax error"},
      {"--version"},
      {"/no/such/file.py"},
      {"-c", "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(4)'], capture_output=True))"},
      {"-c", "import multiprocessing as m; p = m.get_context('fork').Process(target=print, args=('child',)); p.start(); p.join()"},
      {"-c", "import gc; gc.collect(); print(len(gc.garbage), gc.isenabled(), gc.get_threshold())"},
      {"-X", "dev", "-W", "error", "-c", "print('dev')"},
      {"-m", "this"},
  };
  for (const std::string& python : pythons()) {
    for (std::vector<std::string> command : commands) {
      command.insert(command.begin(), python);
      INFO(command[0], " ", command[1], " ", command.back());
      const TempFolder folder;
      const Outcome plain = run_program(command), taken_in = run_program(command, under_probe(folder.run()));
      CHECK(taken_in.status == plain.status);
      CHECK(taken_in.out == plain.out);
      CHECK(taken_in.err == plain.err);
      CHECK_FALSE(std::filesystem::exists(folder.run()));
    }
  }
}

TEST_CASE("the bridge is there before a script's first line, and not where it is not wanted") {
  const std::string seen = "import sys; print('_forkpoint_bridge' in sys.modules)";
  for (const std::string& python : pythons()) {
    INFO(python);
    const TempFolder folder;
    // Without site the script may be faster than we are: then it is there a moment later.
    const std::string soon = "import sys, time\nfor i in range(200):\n  if '_forkpoint_bridge' in sys.modules: break\n  time.sleep(0.01)\n" + seen;
    CHECK(run_program({python, "-c", soon}, under_probe(folder.run())).out == "True\n");
    CHECK(run_program({python, "-S", "-I", "-c", soon}, under_probe(folder.run())).out == "True\n");
    CHECK(run_program({python, "-c", seen}, under_probe(folder.run(), {{"FORKPOINT_TORCH", "0"}})).out == "False\n");
    CHECK(run_program({python, "-c", seen}, under_probe(folder.run(), {{"FORKPOINT_RANKS", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}})).out == "False\n");
    // Asleep, it waits for the import of torch, from which on the job can be attached.
    CHECK(run_program({python, "-c", soon}, {{"LD_PRELOAD", preload()}}).out == "True\n");
  }
}

TEST_CASE("a script that forks at once has the bridge on both sides") {
  const std::string script =
      "import os, sys, time\npid = os.fork()\nfor i in range(200):\n  if '_forkpoint_bridge' in sys.modules: break\n  time.sleep(0.01)\n"
      "if pid: os.waitpid(pid, 0)\nprint('_forkpoint_bridge' in sys.modules, flush=True)\n";
  for (const std::string& python : pythons()) {
    const TempFolder folder;
    CHECK(run_program({python, "-I", "-S", "-c", script}, under_probe(folder.run())).out == "True\nTrue\n");
  }
}

TEST_CASE("a module of the bridge is found by its name in tracebacks, with its lines") {
  const TempFolder folder;
  const Outcome outcome = run_program(
      {"python3", "-c",
       "import linecache; from _forkpoint_bridge import bootstrap as b; print(b.start.__code__.co_filename, b.__name__);"
       "print(linecache.getline(b.start.__code__.co_filename, b.start.__code__.co_firstlineno, vars(b)).strip())"},
      under_probe(folder.run()));
  CHECK(outcome.out == "<forkpoint>/bootstrap.py _forkpoint_bridge.bootstrap\ndef start():\n");
}

namespace {

// A program that brings a Python along (python_host.cpp), without the probe and with it. One that is linked with it has it
// already when the probe is loaded.
struct Hosted {
  Outcome without, with;
};
bool run_host(const std::string& way, bool linked, Hosted* hosted) {
  const Outcome found = run_program(
      {"python3", "-c",
       "import sysconfig as s, os, sys; p = os.path.join(s.get_config_var('LIBDIR') or '', s.get_config_var('LDLIBRARY') or ''); "
       "print(p if '.so' in p and os.path.exists(p) else '', sys.base_prefix, end='')"});
  const std::string library = found.out.substr(0, found.out.find(' ')), home = found.out.substr(found.out.find(' ') + 1);
  if (library.empty()) {
    MESSAGE("python3 has no shared libpython: not tried");
    return false;
  }
  const TempFolder folder;
  Environment plain = {{"PYTHONHOME", home}}, loaded = under_probe(folder.run(), {{"PYTHONHOME", home}});
  if (linked) {
    plain["LD_PRELOAD"] = library;
    loaded["LD_PRELOAD"] = preload() + ":" + library;
  }
  const std::vector<std::string> command = {client_path("python_host"), library, way};
  *hosted = {run_program(command, plain), run_program(command, loaded)};
  return true;
}

}  // namespace

TEST_CASE("a program that embeds Python, also late, again and again, or with subinterpreters, goes on as without us") {
  for (const char* way : {"late", "cycles", "subinterpreter", "never", "threads"}) {
    INFO(way);
    Hosted hosted;
    if (!run_host(way, std::string(way) != "late", &hosted)) return;
    CHECK(hosted.without.status == 0);
    CHECK(hosted.with.status == 0);
    CHECK(hosted.with.err == hosted.without.err);
    CHECK(hosted.with.out == hosted.without.out);
  }
}

TEST_CASE("a program that forks while we still wait for its Python, or before it has begun one, has the bridge on both sides") {
  for (const char* way : {"fork first", "fork at once"}) {
    INFO(way);
    Hosted hosted;
    if (!run_host(way, true, &hosted)) return;
    CHECK(hosted.without.out == "False\nFalse\n");
    CHECK(hosted.with.out == "True\nTrue\n");
    CHECK(hosted.with.err == "");  // Python 3.12 warns where a thread of ours is alive
    CHECK(hosted.with.status == 0);
  }
}

TEST_CASE("a bridge that cannot start says so once, and the import that it watched for goes on") {
  const TempFolder folder;
  const std::string broken = "import sys, _forkpoint_bridge as b\nn = b._native\nsource = n.source\n"
                             "n.source = lambda name: 'raise KeyError(1)' if name == 'bootstrap' else source(name)\n"
                             "try:\n  import torch\nexcept ImportError as e: print(e)\nn.scalar(0, 7, 'x', 1.0)";
  const Outcome outcome = run_program({"python3", "-I", "-S", "-c", "import time; time.sleep(0.3)\n" + broken}, under_probe(folder.run()));
  CHECK(outcome.out == "No module named 'torch'\n");
  CHECK(outcome.err == "forkpoint: PyTorch is not recorded by layers, the bridge failed: KeyError: 1\n");
  CHECK(has_gap(*open_stream(folder.run()), "the bridge failed: KeyError"));
}

TEST_CASE("a Python that only forgoes torch has two finders more and no further module") {
  const TempFolder folder;
  const std::string script = "import time; time.sleep(0.3)\nimport sys; print([m for m in sys.modules if 'forkpoint' in m], len(sys.meta_path))";
  const int plain = std::stoi(run_program({"python3", "-I", "-S", "-c", "import sys; print(len(sys.meta_path))"}).out);
  CHECK(run_program({"python3", "-I", "-S", "-c", script}, under_probe(folder.run())).out ==
        "['_forkpoint_bridge', '_forkpoint_bridge._native'] " + std::to_string(plain + 2) + "\n");
}

namespace {

Environment deterministic(const TempFolder& folder) {
  return under_probe(folder.run(), {{"FORKPOINT_DETERMINISTIC", "seeds,flash-attention"}});
}

// The bridge is there, and of the library nothing is left that has Python code: what is asked for is noted, and not found.
constexpr char kHalfStarted[] =
    "import sys, time\n"
    "for i in range(200):\n  if '_forkpoint_bridge' in sys.modules: break\n  time.sleep(0.01)\n"
    "import _forkpoint_bridge as b\n"
    "asked, seeded, _ = [], [], [vars(b).pop(name, None) for name in ('early', 'imports')]\n"
    "class Note:\n"
    "  @staticmethod\n"
    "  def find_spec(name, path=None, target=None):\n"
    "    if not name.startswith('_forkpoint'): asked.append(name)\n"
    "kept = {'sys', 'builtins', '__main__', '_frozen_importlib', '_frozen_importlib_external'}\n"
    "was = dict(sys.modules)\n"
    "for name in was:\n"
    "  if name not in kept and not name.startswith('_forkpoint') or name.endswith(('.early', '.imports')): del sys.modules[name]\n"
    "sys.meta_path.insert(0, Note)\n"
    "half = type(sys)('random')\n"
    "half.seed, half.getstate = seeded.append, lambda: 1\n"
    "half.__spec__ = type('Spec', (), {'_initializing': True})\n"
    "sys.modules['random'] = half\n"
    "b._start_deterministic()\n"
    "print(asked, len(seeded))\n"
    "sys.modules.update(was)\n"
    "half.__spec__._initializing = False\n"
    "import wave\n"
    "print(len(seeded))\n";

}  // namespace

TEST_CASE("deterministic mode starts in the middle of the interpreter's own imports, and needs none of them") {
  for (const std::string& python : pythons()) {
    INFO(python);
    const TempFolder folder;
    const std::vector<std::string> command = {python, "-c", "import time; time.sleep(0.3); import random; print(random.random())"};
    const Outcome one = run_program(command, deterministic(folder)), two = run_program(command, deterministic(folder));
    CHECK(one.err == "");
    CHECK(one.out == two.out);
    const Outcome half = run_program({python, "-I", "-S", "-c", kHalfStarted}, deterministic(folder));
    CHECK(half.out == "[] 0\n1\n");
    CHECK(half.err == "");
    // A program that was faster than we are keeps the generator that it has begun with.
    const char* begun =
        "import time; time.sleep(0.3); import random; import _forkpoint_bridge as b; early = b.early; early.knobs = frozenset(['seeds'])\n"
        "random.seed(7); early.started = False; early.start(); print(random.random(), early.started)\n";
    CHECK(run_program({python, "-c", begun}, deterministic(folder)).out == "0.32383276483316237 False\n");
  }
}
