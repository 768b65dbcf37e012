// What of one job keeps it from repeating itself, or forkpoint from seeing it. Pure judgements: of the programs that
// its command runs, of what two recorded runs held, of the verdict on them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lib/doctor.h"
#include "lib/elf_file.h"
#include "lib/run.h"
#include "lib/verdict.h"

namespace forkpoint {

// A program that the command runs: launcher, interpreter or trainer.
struct ProgramLook {
  std::string word;  // as the command, or a script's first line, names it
  std::string path;  // empty: not found
  bool executable = true;
  std::string trouble;         // why it could not be read; then nothing below is known
  std::optional<ElfFile> elf;  // nothing: a script, whose interpreter is looked at by itself
  std::string changes_user;    // "is set-uid", "has capabilities": the loader drops what is preloaded; empty: no
  SymbolPlace nccl = SymbolPlace::absent;  // its ncclAllReduce
  bool has_nccl_texts = false;             // its symbols were stripped, and it holds NCCL's own texts
  bool reports = false;                    // it was compiled with forkpoint.h
};
Findings judge_program(const ProgramLook& look);
// PyTorch's library that calls NCCL. path empty: there is none (a CPU build).
Findings judge_torch_links(const std::string& path, SymbolPlace nccl);

// How the command starts its programs, as far as its words tell.
struct JobLineLook {
  std::vector<std::string> programs;      // outermost first: "env", "torchrun"
  std::string drops_preload;              // "sudo": what does not pass LD_PRELOAD on; empty: nothing that is known
  std::string how;                        // "starts CMD with another environment"
  std::string not_followed;               // "a shell's line": what it starts cannot be told; empty: it can
  bool ignores_python_variables = false;  // python -E, -I
  std::map<std::string, std::optional<std::string>> environment;  // NAME=VALUE before the command; nothing: env -u NAME
};
Findings judge_job_line(const JobLineLook& look);

// What a recorded run held.
struct JobSeen {
  int ranks = 0, world_size = 0;
  std::vector<int> missing_ranks;
  std::vector<std::string> gaps;
  std::vector<CoverageLimit> limits;                   // each once
  std::map<std::string, std::set<std::string>> facts;  // of the streams' headers, over ranks
  std::string step_base;
  bool on_gpu = false;
  uint64_t batches = 0;  // records of batches
  uint64_t unnamed = 0;  // tensors of an optimizer that belong to no module
  std::string unnamed_example;
};
JobSeen look_at_run(const Run& run);
// repeats: the verdict of the pair was identical.
Findings judge_seen(const JobSeen& seen, bool repeats);

struct PairLook {
  std::string steps;         // "steps 0 to 1"
  std::string run_a, run_b;  // folders
  std::string trouble;       // why the pair was not run to its end; empty: it was
  std::optional<Verdict> verdict;
  // Of the pair in deterministic mode, where it is identical: the job once more without, against its second run before. Only
  // where these differ as well has the mode done anything.
  std::optional<Verdict> without;
};
// deterministic: the same pair in deterministic mode, where it was run. how: the command line that switches it on.
Findings judge_pair(const PairLook& pair, const JobSeen& seen, const std::optional<PairLook>& deterministic,
                    const std::string& how);

}  // namespace forkpoint
