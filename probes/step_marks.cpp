#include "probes/step_marks.h"

#include <cxxabi.h>
#include <regex.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "probes/os.h"
#include "probes/recorder.h"

namespace forkpoint {
namespace {

enum class Source : uint32_t { nobody, program, marks };

regex_t mark;  // written when the library is loaded, before any other thread
constinit std::atomic<bool> mark_set{false};
constinit std::atomic<Source> source{Source::nobody};
constinit std::atomic<int64_t> begun{0};  // marked steps
constinit std::atomic<bool> said{false};
constinit std::atomic<const char*> program_base{"step(n)"};

// Who comes first begins the steps from then on.
bool is_source(Source wanted) {
  Source known = source.load(std::memory_order_relaxed);
  if (known == Source::nobody && source.compare_exchange_strong(known, wanted)) return true;
  return known == wanted;
}

void say_once(const char* what) {
  if (!said.exchange(true)) say("FORKPOINT_STEP_ON and steps of the program itself: %s", what);
}

bool matches(const char* name) { return regexec(&mark, name, 0, nullptr, 0) == 0; }

}  // namespace

bool set_step_mark(const char* expression, char* problem, size_t problem_bytes) {
  if (mark_set.exchange(false)) regfree(&mark);
  const int error = regcomp(&mark, expression, REG_EXTENDED | REG_NOSUB);
  if (error != 0) regerror(error, &mark, problem, problem_bytes);
  mark_set.store(error == 0);
  return error == 0;
}

bool has_step_mark() { return mark_set.load(std::memory_order_relaxed); }

bool is_step_mark(const char* name) {
  if (!has_step_mark() || !name) return false;
  if (matches(name)) return true;
  if (strncmp(name, "_Z", 2) != 0) return false;
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  const bool found = readable && matches(readable);
  free(readable);
  return found;
}

void begin_marked_step(const Token& token) {
  if (!is_source(Source::marks)) return say_once("the program's count");
  recorder.begin_counted_step(token, &begun);
}

bool may_begin_own_step() {
  if (!has_step_mark() || is_source(Source::program)) return true;
  say_once("the marks count");
  return false;
}

const char* step_base() { return has_step_mark() && source.load() != Source::program ? "step-on" : program_base.load(); }

void set_program_step_base(const char* base) { program_base.store(base); }

void forget_steps_in_child() {
  source.store(Source::nobody);
  begun.store(0);
}

}  // namespace forkpoint
