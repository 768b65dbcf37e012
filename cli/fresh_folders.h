// Takes back the folders that a command which never started has no use for; none that were there before.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace forkpoint {

class FreshFolders {
 public:
  // REQUIRES: before the run folder is made.
  explicit FreshFolders(const std::string& run_directory) {
    namespace fs = std::filesystem;
    for (fs::path path = fs::absolute(run_directory).lexically_normal(); !fs::exists(path); path = path.parent_path()) {
      made_.push_back(path);
    }
  }
  void remove(const std::string& run_directory) const {
    namespace fs = std::filesystem;
    std::error_code ignored;
    // The run folder may have been there, empty: then only what we put in goes.
    for (const auto& entry : fs::directory_iterator(run_directory, ignored)) fs::remove_all(entry.path(), ignored);
    for (const fs::path& path : made_) fs::remove(path, ignored);
  }

 private:
  std::vector<std::filesystem::path> made_;
};

}  // namespace forkpoint
