#include "lib/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>

#include "lib/error.h"

namespace forkpoint::control {
namespace {

constexpr std::string_view kMagic = "forkpoint ";
constexpr std::string_view kSuffix = ".sock";
constexpr size_t kMaxName = 32;

template <typename Number>
bool read_whole(std::string_view text, Number* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

bool is_word(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
}

void append_escaped(std::string* out, std::string_view value) {
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 32 || byte == 127 || c == '%') *out += fmt::format("%{:02x}", byte);
    else *out += c;
  }
}

bool unescape(std::string_view text, std::string* value) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (static_cast<unsigned char>(text[i]) < 32) return false;
    if (text[i] != '%') {
      *value += text[i];
      continue;
    }
    unsigned byte = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
    if (digits.size() != 2 || error != std::errc() || end != digits.data() + 2) return false;
    *value += static_cast<char>(byte);
    i += 2;
  }
  return true;
}

bool read_field(std::string_view line, Message* message) {
  const size_t equals = line.find('=');
  if (equals == line.npos || !is_word(line.substr(0, equals)) || message->fields.size() == kMaxFields) return false;
  std::string value;
  if (!unescape(line.substr(equals + 1), &value)) return false;
  return message->fields.emplace(line.substr(0, equals), std::move(value)).second;
}

}  // namespace

Message& Message::set(std::string name, std::string value) {
  fields[std::move(name)] = std::move(value);
  return *this;
}
Message& Message::set(std::string name, int64_t value) { return set(std::move(name), std::to_string(value)); }

std::string Message::text(std::string_view name) const {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

std::optional<int64_t> Message::number(std::string_view name) const {
  int64_t number = 0;
  const auto found = fields.find(name);
  if (found == fields.end() || !read_whole(std::string_view(found->second), &number)) return std::nullopt;
  return number;
}

std::string encode(const Message& message) {
  std::string bytes = fmt::format("{}{} {}\n", kMagic, message.version, message.word);
  for (const auto& [name, value] : message.fields) {
    bytes += name + "=";
    append_escaped(&bytes, value);
    bytes += '\n';
  }
  if (bytes.size() <= kMaxBytes) return bytes;
  throw Error(fmt::format("a message `{}` of {} bytes is larger than the {} that are allowed.", message.word, bytes.size(), kMaxBytes),
              "Choose a shorter path.");
}

std::optional<Message> decode(std::string_view bytes) {
  if (bytes.size() > kMaxBytes || !bytes.starts_with(kMagic) || bytes.back() != '\n') return std::nullopt;
  Message message;
  size_t end = bytes.find('\n');
  const std::string_view first = bytes.substr(kMagic.size(), end - kMagic.size());
  const size_t blank = first.find(' ');
  if (!read_whole(first.substr(0, blank), &message.version) || message.version < 1) return std::nullopt;
  if (message.version != kVersion) return message;
  if (blank == first.npos || !is_word(first.substr(blank + 1))) return std::nullopt;
  message.word = first.substr(blank + 1);
  for (size_t start = end + 1; start < bytes.size(); start = end + 1) {
    end = bytes.find('\n', start);
    if (!read_field(bytes.substr(start, end - start), &message)) return std::nullopt;
  }
  return message;
}

std::string socket_name(const SocketName& name) { return fmt::format("{}-{}{}", name.pid, name.start_ticks, kSuffix); }

std::optional<SocketName> parse_socket_name(std::string_view file) {
  SocketName name;
  if (!file.ends_with(kSuffix)) return std::nullopt;
  const std::string_view stem = file.substr(0, file.size() - kSuffix.size());
  const size_t dash = stem.find('-');
  if (dash == stem.npos || !read_whole(stem.substr(0, dash), &name.pid) || name.pid < 1 ||
      !read_whole(stem.substr(dash + 1), &name.start_ticks) || socket_name(name) != file) {
    return std::nullopt;
  }
  return name;
}

std::string socket_folder(const char* chosen, const char* runtime, uint32_t uid) {
  if (chosen && *chosen) return chosen;
  if (runtime && *runtime == '/') return std::string(runtime) + "/forkpoint";
  return fmt::format("/tmp/forkpoint-{}", uid);
}

int open_socket_folder(const std::string& path, uint32_t uid, bool create) {
  const auto refuse = [&](const std::string& found) -> Error {
    return Error(fmt::format("{}: {}.", path, found),
                 "A folder of the job's user that only this user may enter is expected (mode 0700); FORKPOINT_SOCKETS can name another.");
  };
  if (create && mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw refuse("it cannot be made: " + std::system_category().message(errno));
  }
  const int folder = open(path.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0) throw refuse("it cannot be opened: " + std::system_category().message(errno));
  struct stat status = {};
  const bool known = fstat(folder, &status) == 0;
  if (known && status.st_uid == uid && (status.st_mode & 077) == 0) return folder;
  close(folder);
  if (known && status.st_uid != uid) throw refuse(fmt::format("it belongs to user {}, not to user {}", status.st_uid, uid));
  throw refuse(fmt::format("its mode is {:04o}", status.st_mode & 07777));
}

std::string path_within(int folder, const std::string& file) { return fmt::format("/proc/self/fd/{}/{}", folder, file); }

}  // namespace forkpoint::control
