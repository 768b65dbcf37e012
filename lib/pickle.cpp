// Opcodes: Lib/pickletools.py of CPython. Each opcode makes at most one value of at most its own length, so memory is bounded by
// the size of the pickle, which is bounded too.
#include "lib/pickle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "lib/error.h"

namespace forkpoint {

using Type = PickleValue::Type;

namespace {
constexpr size_t kMaxPickleBytes = 1ull << 30;
constexpr size_t kMaxValues = 50'000'000;
}  // namespace

class PickleParser {
 public:
  PickleParser(std::string_view bytes, const std::string& where) : rest_(bytes), where_(where), size_(bytes.size()) {
    if (size_ > kMaxPickleBytes) fail(fmt::format("it has {} bytes, over the limit of {}", size_, kMaxPickleBytes));
    pickle_.values_.emplace_back();  // id 0: None
  }

  Pickle run() {
    for (;;) {
      const auto code = static_cast<uint8_t>(take(1)[0]);
      if (code == '.') break;
      if (!scalar(code) && !text(code) && !memo(code) && !container(code) && !call(code)) {
        fail(fmt::format("the opcode 0x{:02x} is not known", code));
      }
    }
    pickle_.root_ = pop();
    return std::move(pickle_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(fmt::format("{}: no whole pickle: at byte {} of {}, {}.", where_, size_ - rest_.size(), size_, what));
  }

  std::string_view take(uint64_t size) {
    if (size > rest_.size()) fail(fmt::format("{} more bytes are needed", size - rest_.size()));
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <typename T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const size_t end = rest_.find('\n');
    if (end == rest_.npos) fail("a line has no end");
    const std::string_view taken = take(end);
    take(1);
    return taken;
  }
  int64_t decimal() {
    const std::string digits(line());
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(digits.c_str(), &end, 10);
    if (errno == ERANGE) fail(fmt::format("`{}` is over the limit of 64 bits", digits));
    if (digits.empty() || (*end != '\0' && std::string_view(end) != "L")) fail(fmt::format("`{}` is no number", digits));
    return value;
  }

  PickleId add(Type type) {
    if (pickle_.values_.size() >= kMaxValues) fail(fmt::format("it holds more than {} values", kMaxValues));
    pickle_.values_.emplace_back().type = type;
    return static_cast<PickleId>(pickle_.values_.size() - 1);
  }
  PickleValue& made(Type type) { return value(push(add(type))); }
  PickleValue& value(PickleId id) { return pickle_.values_[id]; }
  PickleId push(PickleId id) {
    stack_.push_back(id);
    return id;
  }
  void push_text(Type type, std::string_view bytes) { made(type).text = bytes; }
  void push_integer(int64_t integer, Type type = Type::integer) { made(type).integer = integer; }

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleId pop() {
    if (stack_.size() <= floor()) fail("its stack is empty");
    const PickleId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  PickleId top() {
    if (stack_.size() <= floor()) fail("its stack is empty");
    return stack_.back();
  }
  std::vector<PickleId> pop_to_mark() {
    if (marks_.empty()) fail("there is no mark");
    std::vector<PickleId> items(stack_.begin() + static_cast<int64_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  bool scalar(uint8_t code);
  bool text(uint8_t code);
  bool memo(uint8_t code);
  bool container(uint8_t code);
  bool call(uint8_t code);
  void push_long(std::string_view bytes);
  void push_tuple(std::vector<PickleId> items) { made(Type::tuple).items = std::move(items); }
  void push_call(PickleId callable, PickleId arguments);
  void push_global(std::string_view module, std::string_view name);
  void extend(PickleId target, const std::vector<PickleId>& items);
  void assign(PickleId target, const std::vector<PickleId>& entries);

  Pickle pickle_;
  std::string_view rest_;
  std::string where_;
  size_t size_;
  std::vector<PickleId> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, PickleId> memo_;
};

void PickleParser::push_long(std::string_view bytes) {
  if (bytes.size() > 8) return push_text(Type::big_integer, bytes);
  uint64_t value = 0;
  if (!bytes.empty() && (bytes.back() & 0x80)) value = ~0ull;  // sign
  std::memcpy(&value, bytes.data(), bytes.size());
  push_integer(static_cast<int64_t>(value));
}

bool PickleParser::scalar(uint8_t code) {
  switch (code) {
    case 0x80: take(1); return true;  // PROTO
    case 0x95: take(8); return true;  // FRAME
    case 'N': push(0); return true;
    case 0x88: push_integer(1, Type::boolean); return true;
    case 0x89: push_integer(0, Type::boolean); return true;
    case 'J': push_integer(number<int32_t>()); return true;
    case 'K': push_integer(number<uint8_t>()); return true;
    case 'M': push_integer(number<uint16_t>()); return true;
    case 'I': {
      const bool boolean = rest_.starts_with("00\n") || rest_.starts_with("01\n");
      push_integer(decimal(), boolean ? Type::boolean : Type::integer);
      return true;
    }
    case 'L': push_integer(decimal()); return true;
    case 0x8a: push_long(take(number<uint8_t>())); return true;
    case 0x8b: {
      const auto size = number<int32_t>();
      if (size < 0) fail("a number has a negative size");
      push_long(take(static_cast<uint64_t>(size)));
      return true;
    }
    case 'F': made(Type::real).real = std::strtod(std::string(line()).c_str(), nullptr); return true;
    case 'G': {
      const uint64_t bits = __builtin_bswap64(number<uint64_t>());
      std::memcpy(&made(Type::real).real, &bits, sizeof(bits));
      return true;
    }
    default: return false;
  }
}

bool PickleParser::text(uint8_t code) {
  switch (code) {
    case 'S': case 'V': push_text(Type::text, line()); return true;
    case 'U': push_text(Type::bytes, take(number<uint8_t>())); return true;
    case 'T': push_text(Type::bytes, take(number<uint32_t>())); return true;
    case 'X': push_text(Type::text, take(number<uint32_t>())); return true;
    case 0x8c: push_text(Type::text, take(number<uint8_t>())); return true;
    case 0x8d: push_text(Type::text, take(number<uint64_t>())); return true;
    case 'B': push_text(Type::bytes, take(number<uint32_t>())); return true;
    case 'C': push_text(Type::bytes, take(number<uint8_t>())); return true;
    case 0x8e: case 0x96: push_text(Type::bytes, take(number<uint64_t>())); return true;
    default: return false;
  }
}

bool PickleParser::memo(uint8_t code) {
  const auto get = [&](uint32_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) fail(fmt::format("nothing was remembered as {}", key));
    push(found->second);
    return true;
  };
  const auto put = [&](uint32_t key) {
    memo_[key] = top();
    return true;
  };
  switch (code) {
    case 'h': return get(number<uint8_t>());
    case 'j': return get(number<uint32_t>());
    case 'g': return get(static_cast<uint32_t>(decimal()));
    case 'q': return put(number<uint8_t>());
    case 'r': return put(number<uint32_t>());
    case 'p': return put(static_cast<uint32_t>(decimal()));
    case 0x94: return put(static_cast<uint32_t>(memo_.size()));
    default: return false;
  }
}

void PickleParser::extend(PickleId target, const std::vector<PickleId>& items) {
  if (target == 0) fail("it adds to None");
  auto& to = value(target).items;
  to.insert(to.end(), items.begin(), items.end());
}

void PickleParser::assign(PickleId target, const std::vector<PickleId>& entries) {
  if (target == 0) fail("it adds to None");
  if (entries.size() % 2 != 0) fail("a key has no value");
  auto& to = value(target).entries;
  to.insert(to.end(), entries.begin(), entries.end());
}

bool PickleParser::container(uint8_t code) {
  switch (code) {
    case '(': marks_.push_back(stack_.size()); return true;
    case '0': pop(); return true;
    case '1': pop_to_mark(); return true;
    case '2': push(top()); return true;
    case ']': made(Type::list); return true;
    case ')': made(Type::tuple); return true;
    case '}': made(Type::dict); return true;
    case 0x8f: made(Type::set); return true;
    case 'l': { auto items = pop_to_mark(); made(Type::list).items = std::move(items); return true; }
    case 't': push_tuple(pop_to_mark()); return true;
    case 0x91: { auto items = pop_to_mark(); made(Type::set).items = std::move(items); return true; }
    case 'd': { const auto entries = pop_to_mark(); assign(push(add(Type::dict)), entries); return true; }
    case 0x85: push_tuple({pop()}); return true;
    case 0x86: { const PickleId b = pop(), a = pop(); push_tuple({a, b}); return true; }
    case 0x87: { const PickleId c = pop(), b = pop(), a = pop(); push_tuple({a, b, c}); return true; }
    case 'a': { const PickleId item = pop(); extend(top(), {item}); return true; }
    case 'e': case 0x90: { const auto items = pop_to_mark(); extend(top(), items); return true; }
    case 's': { const PickleId item = pop(), key = pop(); assign(top(), {key, item}); return true; }
    case 'u': { const auto entries = pop_to_mark(); assign(top(), entries); return true; }
    default: return false;
  }
}

// Mappings of the standard library become dicts at once: what is assigned to them later is what they hold.
void PickleParser::push_call(PickleId callable, PickleId arguments) {
  const PickleValue& function = value(callable);
  const std::string_view name = function.type == Type::global ? std::string_view(function.text) : std::string_view();
  if (name == "collections.OrderedDict" && value(arguments).items.empty()) {
    made(Type::dict);
    return;
  }
  if (value(arguments).type != Type::tuple) fail("a call has no tuple of arguments");
  PickleValue& object = made(Type::object);
  object.callable = callable;
  object.arguments = arguments;
}

void PickleParser::push_global(std::string_view module, std::string_view name) {
  push_text(Type::global, fmt::format("{}.{}", module, name));
}

bool PickleParser::call(uint8_t code) {
  switch (code) {
    case 'c': { const auto module = line(), name = line(); push_global(module, name); return true; }
    case 0x93: {
      const PickleId name = pop(), module = pop();
      push_global(std::string(value(module).text), std::string(value(name).text));
      return true;
    }
    case 'P': { const auto id = line(); push_text(Type::persistent, id); return true; }
    case 'Q': { const PickleId what = pop(); made(Type::persistent).arguments = what; return true; }
    case 'R': case 0x81: { const PickleId arguments = pop(), callable = pop(); push_call(callable, arguments); return true; }
    case 0x92: {  // with keyword arguments
      const PickleId keywords = pop(), arguments = pop(), callable = pop();
      const std::vector<PickleId> entries = value(keywords).entries;
      push_call(callable, arguments);
      assign(top(), entries);
      return true;
    }
    case 'i': {
      const auto module = line(), name = line();
      auto items = pop_to_mark();
      push_global(module, name);
      const PickleId callable = pop();
      push_tuple(std::move(items));
      const PickleId arguments = pop();
      push_call(callable, arguments);
      return true;
    }
    case 'o': {
      auto items = pop_to_mark();
      if (items.empty()) fail("an object has no class");
      const PickleId callable = items.front();
      items.erase(items.begin());
      push_tuple(std::move(items));
      const PickleId arguments = pop();
      push_call(callable, arguments);
      return true;
    }
    case 'b': {
      const PickleId state = pop();
      if (top() == 0) fail("it adds to None");
      if (value(top()).state != 0) fail("an object gets a second state");
      value(top()).state = state;
      return true;
    }
    default: return false;
  }
}

Pickle Pickle::parse(std::string_view bytes, const std::string& where) { return PickleParser(bytes, where).run(); }

const PickleValue* Pickle::find(const PickleValue& in, std::string_view key) const {
  for (size_t i = 0; i + 1 < in.entries.size(); i += 2) {
    const PickleValue& name = at(in.entries[i]);
    if (name.type == Type::text && name.text == key) return &at(in.entries[i + 1]);
  }
  if (in.state == 0 || &at(in.state) == &in) return nullptr;
  const PickleValue& state = at(in.state);
  for (size_t i = 0; i + 1 < state.entries.size(); i += 2) {
    const PickleValue& name = at(state.entries[i]);
    if (name.type == Type::text && name.text == key) return &at(state.entries[i + 1]);
  }
  return nullptr;
}

std::string_view Pickle::callable_name(const PickleValue& value) const {
  if (value.type != Type::object) return {};
  const PickleValue& callable = at(value.callable);
  return callable.type == Type::global ? std::string_view(callable.text) : std::string_view();
}

}  // namespace forkpoint
