// Every collective of NCCL, as programs like nccl-tests call them: in place and not, one by one and in groups, on
// communicators that were made in every way. Exits with 1 where NCCL's results are not what they must be.
//
// Usage: nccl_program ARRANGEMENT [--steps N] [--alter-input RANK:STEP] [--alter-output RANK:STEP] [--unverified]
//                     [--nccl-memory]
// ARRANGEMENT: all      one process, one thread, a communicator for each of 2 GPUs (ncclCommInitAll)
//              threads  one process, a thread for each of 2 GPUs
//              raced    likewise, and each thread sets itself up and looks at no result before the step's end
//              ranks    one of 2 processes, told by RANK and WORLD_SIZE or by Open MPI's variables; they meet in the
//                       file that NCCL_PROGRAM_MEETING names
// A step is an NVTX range "step". --alter-*: a kernel of the program's own flips a bit of what an all-reduce is given,
// or of what it gave, on that rank in that step. Prints a line a call: STEP RANK COMMUNICATOR OP TYPE IN OUT ROOT
// REDUCTION.
#include "nccl_program.h"

#include <execinfo.h>
#include <nvtx3/nvToolsExt.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

using namespace nccl_program;

namespace {

// ---- Setting up

struct Options {
  std::string arrangement;
  int steps = 3, alter_rank = -1, alter_step = -1;
  bool alters_input = false, verified = true, nccl_memory = false;
};

void set_up_memory(Rank& rank, bool of_nccl) {
  use(rank);
  CHECK(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
  for (int slot = 0; slot < kSlots; ++slot) {
    for (char** buffer : {&rank.in[slot], &rank.out[slot]}) {
      if (of_nccl) CHECK(ncclMemAlloc(reinterpret_cast<void**>(buffer), kSlotBytes));
      else CHECK(cudaMalloc(reinterpret_cast<void**>(buffer), kSlotBytes));
      CHECK(cudaMemsetAsync(*buffer, 0, kSlotBytes, rank.stream));
    }
  }
  const float quarter = 0.25f;
  CHECK(cudaMalloc(reinterpret_cast<void**>(&rank.factor), sizeof(quarter)));
  CHECK(cudaMemcpyAsync(rank.factor, &quarter, sizeof(quarter), cudaMemcpyHostToDevice, rank.stream));
  CHECK(cudaStreamSynchronize(rank.stream));
}

struct Meeting {
  ncclUniqueId world, configured, scalable[2];
};

// Calls make(rank, communicator) for each rank, in a group where there are several; waits for non-blocking ones.
void make(const Job& job, Which which, int size, const std::function<void(Rank&, Communicator&)>& body) {
  if (job.ranks.size() > 1) CHECK(ncclGroupStart());
  for (Rank* rank : job.ranks) {
    use(*rank);
    Communicator& made = rank->comms[which];
    made.place = size == 1 ? 0 : rank->number;
    made.size = size;
    body(*rank, made);
  }
  if (job.ranks.size() > 1) CHECK(ncclGroupEnd());
}
void settle_all(const Job& job, Which which) {
  for (const Rank* rank : job.ranks) settle(rank->comms[which].handle);
}

void make_communicators(const Job& job, Meeting meeting) {
  const int size = job.ranks[0]->size;
  if (job.ranks.size() > 1) {
    std::vector<ncclComm_t> handles(job.ranks.size());
    std::vector<int> devices;
    for (const Rank* rank : job.ranks) devices.push_back(rank->device);
    CHECK(ncclCommInitAll(handles.data(), size, devices.data()));
    for (Rank* rank : job.ranks) rank->comms[kWorld] = {handles[static_cast<size_t>(rank->number)], rank->number, size};
  } else {
    make(job, kWorld, size, [&](Rank& rank, Communicator& made) {
      CHECK(ncclCommInitRank(&made.handle, size, meeting.world, rank.number));
    });
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  make(job, kConfigured, size, [&](Rank& rank, Communicator& made) {
    CHECK(ncclCommInitRankConfig(&made.handle, size, meeting.configured, rank.number, &config));
  });
  settle_all(job, kConfigured);
  ncclConfig_t plain = NCCL_CONFIG_INITIALIZER;
  make(job, kScalable, size, [&](Rank& rank, Communicator& made) {
    CHECK(ncclCommInitRankScalable(&made.handle, size, rank.number, 2, meeting.scalable, &plain));
  });
  make(job, kReversed, size, [&](Rank& rank, Communicator& made) {
    made.place = size - 1 - rank.number;
    CHECK(ncclCommSplit(rank.comms[kWorld].handle, 0, -rank.number, &made.handle, nullptr));
  });
  make(job, kAlone, 1, [&](Rank& rank, Communicator& made) {
    CHECK(ncclCommSplit(rank.comms[kWorld].handle, rank.number, 0, &made.handle, nullptr));
  });
  make(job, kLate, size, [&](Rank& rank, Communicator& made) {
    CHECK(ncclCommSplit(rank.comms[kConfigured].handle, 0, rank.number, &made.handle, nullptr));
  });
  settle_all(job, kConfigured), settle_all(job, kLate);
}

// Finalized and destroyed, destroyed only, and aborted.
void take_down(const Job& job) {
  for (const Which which : {kLate, kAlone, kReversed}) {
    for (const Rank* rank : job.ranks) use(*rank), CHECK(ncclCommDestroy(rank->comms[which].handle));
  }
  for (const Rank* rank : job.ranks) use(*rank), CHECK(ncclCommAbort(rank->comms[kScalable].handle));
  for (const Which which : {kConfigured, kWorld}) {
    if (job.ranks.size() > 1) CHECK(ncclGroupStart());
    for (const Rank* rank : job.ranks) use(*rank), CHECK(ncclCommFinalize(rank->comms[which].handle));
    if (job.ranks.size() > 1) CHECK(ncclGroupEnd());
    settle_all(job, which);
    for (const Rank* rank : job.ranks) use(*rank), CHECK(ncclCommDestroy(rank->comms[which].handle));
  }
}

void invite(Meeting* meeting) {
  for (ncclUniqueId* id : {&meeting->world, &meeting->configured, &meeting->scalable[0], &meeting->scalable[1]}) {
    CHECK(ncclGetUniqueId(id));
  }
}

int from_environment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* text = getenv(name)) return atoi(text);
  }
  fail("RANK and WORLD_SIZE, or OMPI_COMM_WORLD_RANK and _SIZE", "not set");
}

// Rank 0 leaves the ids in a file.
void meet(int rank, Meeting* meeting) {
  const char* place = getenv("NCCL_PROGRAM_MEETING");
  if (!place) fail("NCCL_PROGRAM_MEETING", "not set");
  const std::string path = place, part = path + ".part";
  auto* bytes = reinterpret_cast<char*>(meeting);
  if (rank == 0) {
    invite(meeting);
    std::ofstream(part, std::ios::binary).write(bytes, sizeof(*meeting));
    if (rename(part.c_str(), path.c_str()) != 0) fail("the meeting's file", strerror(errno));
    return;
  }
  for (int i = 0; i < 60'000 && access(path.c_str(), R_OK) != 0; ++i) usleep(1000);
  if (!std::ifstream(path, std::ios::binary).read(bytes, sizeof(*meeting))) fail("the meeting", "nobody came");
}

// ---- Running

void in_threads(std::vector<Rank>& ranks, const std::function<void(Rank&)>& body) {
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) threads.emplace_back([&] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

// What each of the process's threads does, in one thread or in several.
struct Process {
  std::vector<Rank> ranks;
  bool threaded = false;

  void each(const std::function<void(Job)>& body) {
    if (threaded) return in_threads(ranks, [&](Rank& rank) { body(Job{{&rank}}); });
    Job job;
    for (Rank& rank : ranks) job.ranks.push_back(&rank);
    body(job);
  }
};

Rank rank_of(int number, int size, int device) {
  Rank rank;
  rank.number = number, rank.size = size, rank.device = device;
  return rank;
}

Process process_of(const Options& options, Meeting* meeting) {
  Process process;
  process.threaded = options.arrangement == "threads" || options.arrangement == "raced";
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  if (options.arrangement != "ranks") {
    if (devices < 2) fail("2 GPUs", "not there");
    process.ranks = {rank_of(0, 2, 0), rank_of(1, 2, 1)};
    invite(meeting);
    return process;
  }
  const int rank = from_environment({"RANK", "OMPI_COMM_WORLD_RANK"});
  const int size = from_environment({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"});
  process.ranks = {rank_of(rank, size, rank % devices)};
  CHECK(cudaSetDevice(rank % devices));
  meet(rank, meeting);
  return process;
}

int run_program(const Options& options) {
  Meeting meeting;
  Process process = process_of(options, &meeting);
  const bool raced = options.arrangement == "raced";
  if (raced) in_threads(process.ranks, [&](Rank& rank) { set_up_memory(rank, options.nccl_memory); });
  else for (Rank& rank : process.ranks) set_up_memory(rank, options.nccl_memory);
  process.each([&](const Job& job) { make_communicators(job, meeting); });
  for (int step = 0; step < options.steps; ++step) {
    nvtxRangePushA("step");
    process.each([&](Job job) {
      job.step = step;
      job.looks = !raced;
      job.compares = options.verified;
      const bool alters = step == options.alter_step;
      job.alter_rank = options.alter_rank;
      job.alter_input = alters && options.alters_input, job.alter_output = alters && !options.alters_input;
      run_step(job);
    });
    nvtxRangePop();
  }
  process.each([](const Job& job) { take_down(job); });
  for (const Rank& rank : process.ranks) {
    for (const std::string& line : rank.lines) printf("%s\n", line.c_str());
  }
  printf("%s\n", any_wrong() ? "wrong" : "right");
  return any_wrong() ? 1 : 0;
}

Options parse(int count, char** words) {
  Options options;
  if (count > 1) options.arrangement = words[1];
  for (int i = 2; i < count; ++i) {
    const std::string word = words[i], value = i + 1 < count ? words[i + 1] : "";
    if (word == "--steps") options.steps = atoi(value.c_str()), ++i;
    else if (word == "--unverified") options.verified = false;
    else if (word == "--nccl-memory") options.nccl_memory = true;
    else if ((word == "--alter-input" || word == "--alter-output") &&
             sscanf(value.c_str(), "%d:%d", &options.alter_rank, &options.alter_step) == 2) {
      options.alters_input = word == "--alter-input", ++i;
    } else {
      fail(word.c_str(), "not understood");
    }
  }
  for (const char* known : {"all", "threads", "raced", "ranks"}) {
    if (options.arrangement == known) return options;
  }
  fail(options.arrangement.c_str(), "no arrangement: all, threads, raced or ranks");
}

// Where it was when it died: frees of what is not there happen in NCCL, in the driver or in whoever is loaded beside them.
void tell_where(int signal_number) {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

}  // namespace

int main(int count, char** words) {
  void* warm[1];
  backtrace(warm, 1);  // the first one allocates
  for (const int number : {SIGABRT, SIGSEGV}) signal(number, tell_where);
  return run_program(parse(count, words));
}
