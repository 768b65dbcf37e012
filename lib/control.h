// What `forkpoint attach`, `ps` and `detach` and the probe of a sleeping job say to each other over a Unix socket
// (SOCK_SEQPACKET: a message is a packet), and where these sockets lie. Every request has one reply. Nothing in a message
// is trusted: what is too large, of another version or out of form is no message.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace forkpoint::control {

inline constexpr int kVersion = 1;
inline constexpr size_t kMaxBytes = 16u << 10;  // of a message as it is sent
inline constexpr size_t kMaxFields = 48;

// "forkpoint VERSION WORD\n", then "NAME=VALUE\n" for each field. In values % and control characters stand as %XX.
struct Message {
  int version = kVersion;
  std::string word;  // lower-case letters: a request ("arm"), or "ok", "refused"
  std::map<std::string, std::string, std::less<>> fields;

  Message() = default;
  explicit Message(std::string text) : word(std::move(text)) {}
  Message& set(std::string name, std::string value);
  Message& set(std::string name, int64_t value);
  std::string text(std::string_view name) const;  // empty where there is none
  std::optional<int64_t> number(std::string_view name) const;
};

// Throws Error when it is larger than kMaxBytes.
std::string encode(const Message& message);
// Nothing: no message. One of another version has its version only.
std::optional<Message> decode(std::string_view bytes);

// ---- Sockets. One a process, named by pid and start time, so that a pid that is used again is not taken for it; in a
// folder that belongs to the process's user and that nobody else may enter.

struct SocketName {
  int64_t pid = 0;
  uint64_t start_ticks = 0;
};
std::string socket_name(const SocketName& name);                      // "4711-123456.sock"
std::optional<SocketName> parse_socket_name(std::string_view file);  // nothing: not such a name

// Where a process of that user with these variables has its socket: FORKPOINT_SOCKETS, else forkpoint in XDG_RUNTIME_DIR,
// else /tmp/forkpoint-UID. nullptr and empty count as unset.
std::string socket_folder(const char* chosen, const char* runtime, uint32_t uid);
// A descriptor (of O_PATH) of the folder, found to be a true folder (no link) of that user with no right for others. create: made
// if missing. Throws Error.
int open_socket_folder(const std::string& path, uint32_t uid, bool create);
// The path by which a socket in an opened folder is bound or reached, however long the folder's own path is.
std::string path_within(int folder, const std::string& file);

}  // namespace forkpoint::control
