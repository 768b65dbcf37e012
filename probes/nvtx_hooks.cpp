#include "probes/nvtx_hooks.h"

#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <exception>
#include <new>

#include "probes/entry.h"
#include "probes/launch_level.h"
#include "probes/nccl_hooks.h"
#include "probes/nvtx_ranges.h"
#include "probes/nvtx_types.h"
#include "probes/recorder.h"
#include "probes/step_marks.h"

namespace forkpoint {
namespace {

constexpr char kInjection[] = "NVTX_INJECTION64_PATH";
constexpr size_t kMostTextBytes = 1024;

template <typename Body>
void enter(Body body) {
  if (!recorder.is_awake()) return;
  const Guard guard;
  if (!guard.entered()) return;  // a range of a library that we call
  try {
    launch_level_outside_callbacks(guard.token());
    body(guard.token());
  } catch (const std::exception& error) {
    recorder.refuse_broken(error.what());
  }
}

// UTF-8 of a wide string, cut where it does not fit.
class Utf8 {
 public:
  explicit Utf8(const wchar_t* text) {
    for (; text && *text && length_ + 4 < sizeof(bytes_); ++text) add(static_cast<uint32_t>(*text));
  }
  std::string_view view() const { return {bytes_, length_}; }

 private:
  void put(uint32_t byte) { bytes_[length_++] = static_cast<char>(byte); }
  void add(uint32_t code) {
    if (code > 0x10FFFF) code = 0xFFFD;
    if (code < 0x80) return put(code);
    if (code >= 0x10000) put(0xF0 | code >> 18);
    if (code >= 0x800) put((code >= 0x10000 ? 0x80 : 0xE0) | (code >> 12 & 0x3F));
    put((code >= 0x800 ? 0x80 : 0xC0) | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
  char bytes_[kMostTextBytes];
  size_t length_ = 0;
};

const RangeName* name_of(const Token& token, const char* text) {
  return text ? range_name(token, {text, strnlen(text, kMostTextBytes)}) : nullptr;
}
const RangeName* name_of(const Token& token, const wchar_t* text) {
  return text ? range_name(token, Utf8(text).view()) : nullptr;
}
const RangeName* name_of(const Token& token, const NvtxEvent* event) {
  if (!event || event->size < sizeof(NvtxEvent) || !event->message) return nullptr;
  switch (event->message_type) {
    case kNvtxAscii:
      return name_of(token, static_cast<const char*>(event->message));
    case kNvtxWide:
      return name_of(token, static_cast<const wchar_t*>(event->message));
    case kNvtxRegistered:
      return static_cast<const RangeName*>(event->message);  // a handle that we gave out
    default:
      return nullptr;
  }
}

// NCCL's own ranges come and go within its calls.
bool is_passed_over(const NvtxDomain* domain) { return inside_nccl() || (domain && domain->is_nccls); }

template <typename Text>
int push(const NvtxDomain* domain, Text text) {
  if (!is_passed_over(domain)) enter([=](const Token& token) { push_range(token, domain, name_of(token, text)); });
  return kNvtxNoTracking;
}
template <typename Text>
int push_default(Text text) {
  return push<Text>(nullptr, text);
}

int pop(const NvtxDomain* domain) {
  if (!is_passed_over(domain)) enter([=](const Token& token) { pop_range(token, domain); });
  return kNvtxNoTracking;
}
int pop_default() { return pop(nullptr); }

template <typename Text>
void mark(const NvtxDomain* domain, Text text) {
  if (!is_passed_over(domain)) enter([=](const Token& token) { mark_range(token, name_of(token, text)); });
}
template <typename Text>
void mark_default(Text text) {
  mark<Text>(nullptr, text);
}
template <typename Text>
uint64_t start(const NvtxDomain* domain, Text text) {
  return mark<Text>(domain, text), 0;
}
template <typename Text>
uint64_t start_default(Text text) {
  return mark<Text>(nullptr, text), 0;
}

template <typename Text>
const RangeName* register_string(const NvtxDomain*, Text text) {
  const RangeName* name = nullptr;
  enter([&](const Token& token) { name = name_of(token, text); });
  return name;
}

const NvtxDomain* create_domain(const char* name) {
  return new (std::nothrow) NvtxDomain{name && strcmp(name, "NCCL") == 0};
}
const NvtxDomain* create_wide_domain(const wchar_t* name) {
  return new (std::nothrow) NvtxDomain{name && wcscmp(name, L"NCCL") == 0};
}

class Table {
 public:
  Table(const NvtxCallbacks& callbacks, NvtxModule module) {
    if (callbacks.get_table(module, &table_, &size_) == 0) table_ = nullptr;
  }
  template <typename Function>
  void set(unsigned id, Function* function) {
    if (table_ && id < size_ && table_[id]) *table_[id] = reinterpret_cast<NvtxFunction>(function);
  }

 private:
  NvtxFunctionTable table_ = nullptr;
  unsigned int size_ = 0;
};

void attach_ranges(Table& core, Table& domains) {
  core.set(kNvtxRangePushEx, &push_default<const NvtxEvent*>);
  core.set(kNvtxRangePushA, &push_default<const char*>);
  core.set(kNvtxRangePushW, &push_default<const wchar_t*>);
  core.set(kNvtxRangePop, &pop_default);
  domains.set(kNvtxDomainRangePushEx, &push<const NvtxEvent*>);
  domains.set(kNvtxDomainRangePop, &pop);
  domains.set(kNvtxDomainRegisterStringA, &register_string<const char*>);
  domains.set(kNvtxDomainRegisterStringW, &register_string<const wchar_t*>);
  domains.set(kNvtxDomainCreateA, &create_domain);
  domains.set(kNvtxDomainCreateW, &create_wide_domain);
}

// What is not on a thread's stack tells steps only.
void attach_marks(Table& core, Table& domains) {
  core.set(kNvtxMarkEx, &mark_default<const NvtxEvent*>);
  core.set(kNvtxMarkA, &mark_default<const char*>);
  core.set(kNvtxMarkW, &mark_default<const wchar_t*>);
  core.set(kNvtxRangeStartEx, &start_default<const NvtxEvent*>);
  core.set(kNvtxRangeStartA, &start_default<const char*>);
  core.set(kNvtxRangeStartW, &start_default<const wchar_t*>);
  domains.set(kNvtxDomainMarkEx, &mark<const NvtxEvent*>);
  domains.set(kNvtxDomainRangeStartEx, &start<const NvtxEvent*>);
}

bool is_same_file(const char* left, const char* right) {
  struct stat a = {}, b = {};
  return stat(left, &a) == 0 && stat(right, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

void offer_nvtx_injection(const char* own_path) {
  const char* other = getenv(kInjection);
  if (!other || !*other)
    setenv(kInjection, own_path, 1);
  else if (!is_same_file(other, own_path))
    recorder.limit(Limit::nvtx_taken);
}

}  // namespace forkpoint

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    forkpoint::NvtxGetExportTable get_export_table) {
  using namespace forkpoint;
  ensure_environment_read();
  if (!recorder.is_awake()) return 1;
  const auto* callbacks = static_cast<const NvtxCallbacks*>(get_export_table(kNvtxCallbacks));
  if (!callbacks || callbacks->struct_size < sizeof(NvtxCallbacks)) return 0;
  const auto* version = static_cast<const NvtxVersionInfo*>(get_export_table(kNvtxVersionInfo));
  if (version && version->struct_size >= sizeof(NvtxVersionInfo)) version->set_injection_version(3);
  Table core(*callbacks, kNvtxCore), domains(*callbacks, kNvtxDomains);
  attach_ranges(core, domains);
  if (has_step_mark()) attach_marks(core, domains);
  return 1;
}
