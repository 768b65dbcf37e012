// All that the program and the probe agree on besides the files of a run. The program sets these variables for the command
// that it starts; the probe reads them once when it is loaded. Unset or malformed: the probe says so on stderr (once) and
// stays dormant. The same contract serves LD_PRELOAD by hand.
#pragma once

#include <cstdint>

namespace forkpoint::contract {

inline constexpr char kRun[] = "FORKPOINT_RUN";                // absolute path of the run folder; unset: dormant
inline constexpr char kLevel[] = "FORKPOINT_LEVEL";            // step | layer | launch; default step
inline constexpr char kSteps[] = "FORKPOINT_STEPS";            // A:B inclusive; unset: all
inline constexpr char kRanks[] = "FORKPOINT_RANKS";            // 0,2,4-7; unset: all
inline constexpr char kEvery[] = "FORKPOINT_EVERY";            // record every n-th step
inline constexpr char kMaxSizeBytes[] = "FORKPOINT_MAX_SIZE_BYTES";  // of one rank's stream; then recording ends with a Gap
inline constexpr char kMaskNames[] = "FORKPOINT_MASK_NAMES";   // 1: layer, op and tensor names are written as hashes
inline constexpr char kFirstStep[] = "FORKPOINT_FIRST_STEP";   // step base where the program gives none
inline constexpr char kInputs[] = "FORKPOINT_INPUTS";          // 1: launch level also takes digests right before each launch
inline constexpr char kStepOn[] = "FORKPOINT_STEP_ON";         // regular expression: a kernel or range that begins a step
inline constexpr char kRetry[] = "FORKPOINT_RETRY";            // how often the launch below is run again
inline constexpr char kLaunch[] = "FORKPOINT_LAUNCH";          // STEP:INDEX of one launch
// step=N;launch=INDEX, or step=N and any of ;phase=P ;layer=L ;op=O: whose operands are saved, in RUN/operands. No `;` in a name.
inline constexpr char kSave[] = "FORKPOINT_SAVE";
inline constexpr char kSequence[] = "FORKPOINT_SEQUENCE";      // 1: launches without digests, but for what goes to the host
inline constexpr char kTorch[] = "FORKPOINT_TORCH";            // 0: PyTorch is left alone; default 1
inline constexpr char kOps[] = "FORKPOINT_OPS";                // layers (globs, by commas) whose framework ops are recorded too
inline constexpr char kWatch[] = "FORKPOINT_WATCH";            // nan, replicas, or both by comma: looked at while the job runs
inline constexpr char kOnTrigger[] = "FORKPOINT_ON_TRIGGER";   // warn | stop | deepen: what is done then; default warn
// Knobs of deterministic mode that are in force, by name (lib/knobs.h), with commas; those of the probe's own act on it.
inline constexpr char kDeterministic[] = "FORKPOINT_DETERMINISTIC";
inline constexpr char kJob[] = "FORKPOINT_JOB";                // name of a job that sleeps, for `forkpoint attach --job`
inline constexpr char kSockets[] = "FORKPOINT_SOCKETS";        // folder of the sockets by which sleeping jobs are reached
inline constexpr char kWhyCalledOff[] =
    "it was called off";  // a sleeping job's `why`, where a request has ended its window
inline constexpr char kCupti[] = "FORKPOINT_CUPTI";            // path of libcupti, where it is in no usual place
inline constexpr char kStopAfter[] = "FORKPOINT_STOP_AFTER";  // the job is ended behind this step: see StopBoard
inline constexpr char kRingSlots[] = "FORKPOINT_RING_SLOTS";   // power of two; default 65536
inline constexpr char kRingWaitMs[] = "FORKPOINT_RING_WAIT_MS";  // bound of a wait on a full ring; default 10000

// With FORKPOINT_STOP_AFTER each recorded rank keeps such a board in the run folder, from its first step on: a small file
// that both sides map. Step FORKPOINT_STOP_AFTER over, the rank ends its stream as whole and says `written`. Where the
// next step would begin it waits (bounded: another rank may need it for what it still has to do; a signal ends the wait)
// to be ended by the program, which does so when all ranks have written. Fields are read and written atomically.
struct StopBoard {
  static constexpr char kPrefix[] = "stop-";  // stop-RANK-PID
  static constexpr uint32_t kMagic = 0x46504b53;
  enum State : uint32_t { running, ending, written, lost };  // lost: recording ended before the step was over
  uint32_t magic;       // set last
  uint32_t state;
  int32_t rank;
  int32_t world_size;
  int64_t pid;
  int64_t first_step;   // that this rank began
  int64_t step;         // that it began last
  int64_t stop_after;   // the program may lower it, to a step that no rank is past
};

// Of the run folder: what the program that watches asks of the ranks while they run. Replaced as a whole (by a rename),
// looked at by each rank's writer about every 50 ms. Words, separated by blanks:
//   deepen FIRST LAST   steps FIRST to LAST are recorded at level layer
inline constexpr char kControlFile[] = "watch-control";

inline constexpr char kProbeFile[] = "libforkpoint.so";
inline constexpr int kProbeAbi = 1;

}  // namespace forkpoint::contract
