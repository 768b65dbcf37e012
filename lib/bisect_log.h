// The log of a bisection: what it was asked, and one entry for each thing that is done and need not be done again. JSON
// lines, on the disk (fsync) before the next thing begins, so that after a kill or a power cut nothing finished is
// repeated. Not thread-safe.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace forkpoint {

class BisectLog {
 public:
  using Json = nlohmann::ordered_json;

  // A new log, which must not exist yet. `request` becomes its first line. Throws Error.
  static BisectLog create(const std::string& path, const Json& request);
  // One that is there. A last line that was cut short is taken off. Throws Error when it is no log, or of another
  // version, or a line in its midst is damaged, or when another process has it open.
  static BisectLog resume(const std::string& path);
  ~BisectLog();
  BisectLog(BisectLog&& other) noexcept;
  BisectLog(const BisectLog&) = delete;
  BisectLog& operator=(const BisectLog&) = delete;

  const std::string& path() const { return path_; }
  const Json& request() const { return request_; }
  // What was noted under the key; nullptr: nothing. Valid until the next note().
  const Json* find(const std::string& key) const;
  // Is on the disk when this returns. Throws Error. REQUIRES: find(key) == nullptr.
  void note(const std::string& key, const Json& entry);

 private:
  BisectLog() = default;
  void open(int flags);
  void append(const Json& line);

  std::string path_;
  int file_ = -1;
  Json request_;
  std::map<std::string, Json> entries_;
};

}  // namespace forkpoint
