// Reads a Python pickle (protocols 0 to 5) into plain data. Nothing is called or imported: what a pickle would have Python
// construct stands as an object that names its class or function, with its arguments and state. Not for hostile amounts: limits
// on size, depth and number of values end in an Error. Plain values: thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint {

using PickleId = uint32_t;  // of a value in its Pickle; values are shared, and may hold themselves

struct PickleValue {
  enum class Type : uint8_t {
    none, boolean, integer, big_integer, real, text, bytes,
    list, tuple, set, dict,
    global,      // a class or function by name
    object,      // the result of a call: `callable`, `arguments`, and what was put into it later
    persistent,  // something that lies outside of the pickle; `arguments` says what (torch: a storage)
  };
  Type type = Type::none;
  int64_t integer = 0;   // also boolean
  double real = 0;
  std::string text;      // text (UTF-8), bytes, big_integer (two's complement, little-endian), global ("module.name")
  std::vector<PickleId> items;    // of list, tuple, set; what an object was extended with
  std::vector<PickleId> entries;  // of dict: key, value, key, value...; what an object was assigned
  PickleId callable = 0, arguments = 0, state = 0;  // 0: none
};

class Pickle {
 public:
  // Of the first pickle in `bytes`. `where` is for messages: the file, and the entry in it. Throws Error when the bytes are no
  // whole pickle or go over a limit.
  static Pickle parse(std::string_view bytes, const std::string& where);

  PickleId root() const { return root_; }
  const PickleValue& at(PickleId id) const { return values_[id]; }
  const PickleValue& operator[](PickleId id) const { return values_[id]; }
  // The value of a text key: in a dict, or in the state or entries of an object. nullptr: none.
  const PickleValue* find(const PickleValue& in, std::string_view key) const;
  // The name of the class or function of an object; empty for others.
  std::string_view callable_name(const PickleValue& value) const;
  size_t size() const { return values_.size(); }

 private:
  friend class PickleParser;
  std::deque<PickleValue> values_;
  PickleId root_ = 0;
};

}  // namespace forkpoint
