// What goes to people: colour, wrapping, numbers, progress and error lines. stdout is the answer, stderr the rest.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "lib/error.h"

namespace forkpoint {

// Escape sequences when the stream is a terminal and NO_COLOR is unset or empty; else nothing.
class Style {
 public:
  explicit Style(std::FILE* stream);
  std::string bold(std::string_view text) const { return paint("1", text); }
  std::string dim(std::string_view text) const { return paint("2", text); }
  std::string red(std::string_view text) const { return paint("1;31", text); }
  std::string green(std::string_view text) const { return paint("1;32", text); }
  std::string yellow(std::string_view text) const { return paint("1;33", text); }

 private:
  std::string paint(std::string_view code, std::string_view text) const;
  bool on_ = false;
};

// Columns of the terminal that the stream is; 0 when it is none (then nothing is wrapped).
size_t terminal_width(std::FILE* stream);
// Breaks at blanks so that lines hold at most width columns; later lines are indented. width 0: unchanged.
std::string wrapped(std::string_view text, size_t indent, size_t width);

std::string human_size(uint64_t size_bytes);  // "1.2 GiB"
// Names come from files: control characters are shown as \xNN, so that they cannot steer the terminal.
std::string printable(std::string_view text);

void print_error(const Error& error);
void print_note(std::string_view text);     // "forkpoint: TEXT" on stderr
void print_warning(std::string_view text);  // "forkpoint: warning: TEXT" on stderr
// Writes to stdout. Throws Error when that fails for another reason than a reader that has left.
void print_answer(std::string_view text);
void flush_answer();

// One line on stderr that is rewritten; silent unless stderr is a terminal and the work takes over half a second.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)) {}
  ~Progress() { clear(); }
  void update(uint64_t done, uint64_t total);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  Clock::time_point start_ = Clock::now(), last_{};
  bool shown_ = false;
};

}  // namespace forkpoint
