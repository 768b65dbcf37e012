#include "lib/bisect_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "lib/error.h"

namespace forkpoint {
namespace {

constexpr int kVersion = 1;
constexpr char kVersionField[] = "forkpoint_bisect";

// The name is on the disk when its folder is.
void sync_folder_of(const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;
  fsync(file);  // some file systems cannot; the log is whole all the same
  close(file);
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw Error(fmt::format("{}: cannot be read: {}.", path, std::strerror(errno)),
                "Is it the log of a bisect (DIR/bisect.jsonl)?");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

BisectLog BisectLog::create(const std::string& path, const Json& request) {
  BisectLog log;
  log.path_ = path;
  log.open(O_CREAT | O_EXCL);
  log.request_ = request;
  log.append({{kVersionField, kVersion}, {"request", request}});
  sync_folder_of(path);
  return log;
}

BisectLog BisectLog::resume(const std::string& path) {
  BisectLog log;
  log.path_ = path;
  log.open(0);
  const std::string content = content_of(path);
  size_t whole = 0;
  for (size_t number = 1; whole < content.size(); ++number) {
    const size_t end = content.find('\n', whole);
    if (end == std::string::npos) break;  // the line that was being written
    const Json line = Json::parse(content.substr(whole, end - whole), nullptr, false);
    const bool is_first = number == 1;
    const bool good =
        line.is_object() && (is_first ? line.value(kVersionField, 0) == kVersion && line.contains("request")
                                      : line.contains("key") && line["key"].is_string() && line.contains("entry"));
    if (!good) {
      throw Error(fmt::format("{}: line {} is not what a bisect of this version writes.", path, number),
                  "Start anew with another folder (-o).");
    }
    if (is_first)
      log.request_ = line["request"];
    else
      log.entries_[line["key"].get<std::string>()] = line["entry"];
    whole = end + 1;
  }
  if (whole == 0)
    throw Error(fmt::format("{}: it does not hold a whole line.", path), "Start anew with another folder (-o).");
  if (whole < content.size() && ftruncate(log.file_, static_cast<off_t>(whole)) != 0)
    throw Error(fmt::format("{}: cannot be written: {}.", path, std::strerror(errno)));
  return log;
}

BisectLog::BisectLog(BisectLog&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      request_(std::move(other.request_)),
      entries_(std::move(other.entries_)) {}

BisectLog::~BisectLog() {
  if (file_ >= 0) close(file_);
}

void BisectLog::open(int flags) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | flags, 0666);
  if (file_ < 0) {
    throw Error(fmt::format("{}: the log cannot be opened: {}.", path_, std::strerror(errno)),
                errno == EEXIST ? "Go on with it by --resume, or name another folder with -o." : "");
  }
  // Two at once would end each other's jobs. Where the file system knows no locks, nobody is kept out.
  if (flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw Error(fmt::format("{}: another bisect is at work with this log.", path_),
                "Wait for its end, or name another folder with -o.");
  }
}

void BisectLog::append(const Json& line) {
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(file_, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      throw Error(fmt::format("{}: the log cannot be written: {}.", path_, std::strerror(errno)),
                  "Is the disk full? Go on with --resume.");
    written += static_cast<size_t>(count);
  }
  if (fsync(file_) != 0 && errno != EINVAL)
    throw Error(fmt::format("{}: the log did not reach the disk: {}.", path_, std::strerror(errno)));
}

const BisectLog::Json* BisectLog::find(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

void BisectLog::note(const std::string& key, const Json& entry) {
  append({{"key", key}, {"entry", entry}});
  entries_[key] = entry;
}

}  // namespace forkpoint
