#include "tests/fakes/fake_nccl_world.h"

#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "tests/fakes/fake_cuda.h"

namespace forkpoint::fake_nccl {
namespace {

constexpr int kPatienceMs = 20'000;

template <typename Condition>
bool wait_until(Condition condition) {
  for (int waited_us = 0; !condition(); waited_us += 100) {
    if (waited_us > kPatienceMs * 1000) return false;
    usleep(100);
  }
  return true;
}

// Work that nobody comes to do ends the process: a test sees that.
template <typename Condition>
void must_come(Condition condition, const char* what) {
  if (wait_until(condition)) return;
  fprintf(stderr, "fake nccl: %s\n", what);
  _exit(77);
}

std::mutex lock;  // of all below
std::condition_variable changed;
std::map<std::string, std::shared_ptr<Family>> families;

// ---- Streams

struct Driver {
  void* library = nullptr;
  template <typename Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library, name));
  }
};
Driver driver() { return {dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD)}; }

using Work = std::function<void()>;
void run_work(const FakeKernelCall* call, void*) {
  Work* work = nullptr;
  memcpy(&work, call->params, sizeof(work));
  (*work)();
  delete work;
}

CUfunction kernel_named(const Driver& cuda, const std::string& name) {
  static std::map<std::string, CUfunction> known;  // under lock
  CUfunction& function = known[name];
  if (function) return function;
  const FakeKernelParam param = {0, sizeof(void*)};
  cuda.find<decltype(fake_cuda_define_kernel)>("fake_cuda_define_kernel")(name.c_str(), &run_work, nullptr, &param, 1);
  CUmodule module = nullptr;
  cuda.find<CUresult(CUmodule*, const void*)>("cuModuleLoadData")(&module, kFakeImage);
  cuda.find<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction")(&function, module, name.c_str());
  return function;
}

// On the first stream, after what all of them have and the events `before`, and before what comes on any; `behind` are
// events behind it then.
void enqueue(const std::string& name, const std::vector<void*>& before, const std::vector<void**>& behind,
             std::vector<void*> streams, Work work) {
  const Driver cuda = driver();
  if (!cuda.library) return work();
  for (void* event : before) {
    if (event) cuda.find<CUresult(void*, void*, unsigned)>("cuStreamWaitEvent")(streams[0], event, 0);
  }
  std::sort(streams.begin() + 1, streams.end());
  streams.erase(std::unique(streams.begin() + 1, streams.end()), streams.end());
  const auto order = [&](void* first, void* then) {
    if (first == then) return;
    CUevent event = nullptr;
    cuda.find<CUresult(CUevent*, unsigned)>("cuEventCreate")(&event, 0);
    cuda.find<CUresult(CUevent, void*)>("cuEventRecord")(event, first);
    cuda.find<CUresult(void*, CUevent, unsigned)>("cuStreamWaitEvent")(then, event, 0);
  };
  for (void* stream : streams) order(stream, streams[0]);
  CUfunction function = nullptr;
  {
    const std::lock_guard held(lock);
    function = kernel_named(cuda, name);
  }
  Work* parameter = new Work(std::move(work));
  void* parameters[] = {&parameter};
  using Launch =
      CUresult(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  cuda.find<Launch>("cuLaunchKernel")(function, 1, 1, 1, 1, 1, 1, 0, streams[0], parameters, nullptr);
  for (void** last : behind) {
    CUevent event = nullptr;
    cuda.find<CUresult(CUevent*, unsigned)>("cuEventCreate")(&event, 0);
    cuda.find<CUresult(CUevent, void*)>("cuEventRecord")(event, streams[0]);
    *last = event;
  }
  for (void* stream : streams) order(streams[0], stream);
}

// ---- Calls

// The n-th call of all ranks of this process at once: gives, waits for the other processes, takes.
void do_together(Family& family, uint64_t number, const std::vector<Call>& calls) {
  Shared& shared = *family.shared;
  const int size = family.size;
  const auto all = [&](auto counter, uint64_t least) {
    for (int i = 0; i < size; ++i) {
      if ((shared.member[i].*counter).load() < least) return false;
    }
    return true;
  };
  must_come([&] { return all(&Shared::Member::taken, number - 1) || family.aborted; },
            "a rank did not take the call before");
  if (family.aborted) return;
  for (const Call& call : calls) {
    memcpy(shared.member[call.place].data, call.input, call.input_bytes);
    shared.member[call.place].posted = number;
  }
  must_come([&] { return all(&Shared::Member::posted, number) || family.aborted; },
            "a rank did not come to a collective");
  if (family.aborted) return;
  std::vector<const char*> given;
  for (int i = 0; i < size; ++i) given.push_back(shared.member[i].data);
  for (const Call& call : calls) call.finish(given);
  for (const Call& call : calls) shared.member[call.place].taken = number;
}

void do_message(Shared& shared, const Call& call) {
  if (call.send_to >= 0) {
    Shared::Channel& to = shared.channel[call.place][call.send_to];
    must_come([&] { return to.posted - to.taken < kMailboxes; }, "nobody receives");
    memcpy(to.data[to.posted % kMailboxes], call.input, call.message_bytes);
    ++to.posted;
  } else {
    Shared::Channel& from = shared.channel[call.receive_from][call.place];
    must_come([&] { return from.posted > from.taken; }, "nobody sends");
    memcpy(call.output, from.data[from.taken % kMailboxes], call.message_bytes);
    ++from.taken;
    call.finish({});
  }
}

// Where the ranks of this process meet before a call is enqueued for all of them.
struct Meeting {
  std::map<int, std::vector<Call>> waiting;  // by place
  uint64_t taken = 0, launched = 0;          // calls so far
};
std::map<Family*, Meeting> meetings;

// Takes the next call of every rank; the last one to come enqueues it. REQUIRES: lock is held.
bool take_complete(Family& family, std::vector<Call>* calls, uint64_t* number) {
  Meeting& meeting = meetings[&family];
  for (const int place : family.places) {
    if (meeting.waiting[place].empty()) return false;
  }
  for (const int place : family.places) {
    auto& queue = meeting.waiting[place];
    calls->push_back(std::move(queue.front()));
    queue.erase(queue.begin());
  }
  *number = ++meeting.taken;
  return true;
}

void enqueue_together(const std::shared_ptr<Family>& family, std::vector<Call> calls, uint64_t number) {
  std::vector<void*> streams;
  for (const Call& call : calls) streams.push_back(call.stream);
  const std::string name = std::string("ncclDevKernel_") + calls[0].name;
  std::vector<void*> before = {family->last};
  for (const auto& [place, last] : family->last_messages) before.push_back(last);
  enqueue(name, before, {&family->last}, streams,
          [family, number, calls = std::move(calls)] { do_together(*family, number, calls); });
}

// As NCCL does it at the first message: both sides have to come.
void connect(const std::vector<Issued>& messages) {
  const auto peer_of = [](const Call& call) { return std::max(call.send_to, call.receive_from); };
  for (const Issued& one : messages) one.family->shared->channel[one.call.place][peer_of(one.call)].asked = 1;
  for (const Issued& one : messages) {
    const auto& other = one.family->shared->channel[peer_of(one.call)][one.call.place];
    must_come([&] { return other.asked != 0 || one.family->aborted; }, "a rank did not come to be connected");
  }
}

void launch_messages(const std::vector<Issued>& messages) {
  if (messages.empty()) return;
  connect(messages);
  std::vector<void*> streams, before;
  std::vector<void**> behind;
  for (const Issued& one : messages) {
    streams.push_back(one.call.stream);
    behind.push_back(&one.family->last_messages.at(one.call.place));
    before.insert(before.end(), {one.family->last, *behind.back()});
  }
  enqueue("ncclDevKernel_SendRecv", before, behind, streams, [messages] {
    for (const bool sends : {true, false}) {
      for (const Issued& one : messages) {
        if ((one.call.send_to >= 0) == sends) do_message(*one.family->shared, one.call);
      }
    }
  });
}

std::string path_of(const std::string& name) {
  const char* folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm/" : "/tmp/";
  return folder + name;
}

bool all_are_there(const Family& family) {
  for (int i = 0; i < family.size; ++i) {
    if (family.shared->member[i].attached == 0) return false;
  }
  return true;
}

}  // namespace

std::string new_name() {
  static std::atomic<int> count{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++count) + "-" + std::to_string(now);
}

std::shared_ptr<Family> attach(const std::string& name, int size, int place) {
  const std::lock_guard held(lock);
  auto& family = families[name];
  if (!family) {
    family = std::make_shared<Family>();
    family->name = name;
    family->size = size;
    const int file = open(path_of(name).c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return nullptr;
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    family->shared = static_cast<Shared*>(memory);
  }
  family->places.push_back(place);
  std::sort(family->places.begin(), family->places.end());
  family->last_messages[place] = nullptr;
  family->shared->member[place].attached = 1;
  if (all_are_there(*family)) unlink(path_of(name).c_str());  // nobody opens it any more
  return family;
}

bool wait_for_all(Family& family) {
  return wait_until([&] { return all_are_there(family); });
}

void launch(std::vector<Issued> calls) {
  std::vector<Issued> messages;
  std::vector<std::pair<std::shared_ptr<Family>, uint64_t>> awaited;
  for (Issued& issued : calls) {
    if (issued.call.send_to >= 0 || issued.call.receive_from >= 0) {
      messages.push_back(std::move(issued));
      continue;
    }
    std::vector<Call> complete;
    uint64_t number = 0;
    {
      const std::lock_guard held(lock);
      Meeting& meeting = meetings[issued.family.get()];
      auto& queue = meeting.waiting[issued.call.place];
      queue.push_back(std::move(issued.call));
      awaited.push_back({issued.family, meeting.taken + queue.size()});
      if (!take_complete(*issued.family, &complete, &number)) continue;
    }
    enqueue_together(issued.family, std::move(complete), number);
    const std::lock_guard held(lock);
    meetings[issued.family.get()].launched = number;
    changed.notify_all();
  }
  launch_messages(messages);
  std::unique_lock held(lock);
  for (const auto& [family, number] : awaited) {
    changed.wait(held, [&, family = family, number = number] { return meetings[family.get()].launched >= number; });
  }
}

}  // namespace forkpoint::fake_nccl
