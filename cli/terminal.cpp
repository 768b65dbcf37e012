#include "cli/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace forkpoint {

Style::Style(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  on_ = isatty(fileno(stream)) && !(no_color && *no_color) && !(term && std::string_view(term) == "dumb");
}

std::string Style::paint(std::string_view code, std::string_view text) const {
  return on_ ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

size_t terminal_width(std::FILE* stream) {
  winsize size{};
  if (!isatty(fileno(stream)) || ioctl(fileno(stream), TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col < 40 ? 0 : size.ws_col;
}

std::string wrapped(std::string_view text, size_t indent, size_t width) {
  if (width <= indent + 20) return std::string(text);
  std::string out;
  size_t column = indent;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(' ', start), text.size());
    const std::string_view word = text.substr(start, end - start);
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    start = end + 1;
  }
  return out;
}

std::string human_size(uint64_t size_bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (size_bytes < 1024) return fmt::format("{} {}", size_bytes, size_bytes == 1 ? "byte" : "bytes");
  double value = static_cast<double>(size_bytes);
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {  // C1 controls in UTF-8: some terminals obey them
      out += fmt::format("\\x{:02x}", next);
      ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

namespace {

// Unlike fmt::print this does not throw where stderr is closed or full: there is nobody left to tell.
void say(const std::string& text) { std::fputs(text.c_str(), stderr); }

}  // namespace

void print_error(const Error& error) {
  const Style style(stderr);
  say(fmt::format("{} {}\n", style.red("forkpoint:"), printable(error.what())));
  if (!error.hint().empty()) say(fmt::format("  {}\n", printable(error.hint())));
}

void print_note(std::string_view text) { say(fmt::format("forkpoint: {}\n", printable(text))); }

void print_warning(std::string_view text) {
  const Style style(stderr);
  say(fmt::format("forkpoint: {} {}\n", style.yellow("warning:"), printable(text)));
}

namespace {

void check_written(bool written) {
  if (written || errno == EPIPE) return;  // a reader that has seen enough, as in `| head`, is no trouble
  throw Error(fmt::format("cannot write to the standard output: {}.", std::strerror(errno)));
}

}  // namespace

void print_answer(std::string_view text) {
  check_written(std::fwrite(text.data(), 1, text.size(), stdout) == text.size());
}

void flush_answer() { check_written(std::fflush(stdout) == 0); }

void Progress::update(uint64_t done, uint64_t total) {
  using namespace std::chrono_literals;
  const auto now = Clock::now();
  if (total == 0 || now - start_ < 500ms || now - last_ < 100ms || !isatty(STDERR_FILENO)) return;
  last_ = now;
  shown_ = true;
  const uint64_t percent = std::min<uint64_t>(100, 100.0 * static_cast<double>(done) / static_cast<double>(total));
  say(fmt::format("\r\x1b[K{} {}%", what_, percent));
  std::fflush(stderr);
}

void Progress::clear() {
  if (shown_) say("\r\x1b[K");
  shown_ = false;
}

}  // namespace forkpoint
