#include "cli/checkpoint_view.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "lib/error.h"

namespace forkpoint {
namespace fs = std::filesystem;
namespace {

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (descriptor_ < 0) throw Error(fmt::format("{}: cannot be opened: {}.", path, std::strerror(errno)));
  }
  ~File() { close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

void copy_bytes(const std::string& from, const std::string& to, int in, int out) {
  std::vector<char> buffer(4u << 20);
  for (;;) {
    const ssize_t got = read(in, buffer.data(), buffer.size());
    if (got == 0) return;
    if (got < 0) throw Error(fmt::format("{}: cannot be read: {}.", from, std::strerror(errno)));
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = write(out, buffer.data() + done, static_cast<size_t>(got - done));
      if (put < 0) {
        throw Error(fmt::format("{}: cannot be written: {}.", to, std::strerror(errno)),
                    "The checkpoint is copied beside the run, so that the original is not written to: -o names a "
                    "folder with space.");
      }
      done += put;
    }
  }
}

}  // namespace

CheckpointView::CheckpointView(const Checkpoint& checkpoint, const std::string& folder)
    : folder_(fs::absolute(folder).lexically_normal().string()) {
  fs::path source = fs::absolute(checkpoint.path).lexically_normal();
  if (source.filename().empty()) source = source.parent_path();
  checkpoint_ = folder_ + "/" + source.filename().string();
  std::error_code error;
  if (!fs::create_directory(folder_, error)) {
    throw Error(fmt::format("{}: cannot be made: {}.", folder_, error ? error.message() : "it is there already"));
  }
  try {
    copy_tree(source.string(), checkpoint_);
    write_marker(checkpoint);
  } catch (const fs::filesystem_error& failure) {
    remove();
    throw Error(fmt::format("{}: cannot be copied: {}.", source.string(), failure.code().message()));
  } catch (...) {
    remove();
    throw;
  }
}

CheckpointView::~CheckpointView() { remove(); }

void CheckpointView::remove() noexcept {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

CheckpointView::Seen CheckpointView::look_at(const std::string& path) {
  struct stat status = {};
  if (stat(path.c_str(), &status) != 0) return {};
  return {static_cast<uint64_t>(status.st_size), status.st_ino,
          static_cast<int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

// Links are followed: a checkpoint may lie elsewhere, and a link out of the copy would lead the job back to the
// original.
void CheckpointView::copy_tree(const std::string& from, const std::string& to) {
  if (!fs::is_directory(from)) return copy_file(from, to);
  fs::create_directory(to);
  for (const auto& entry : fs::directory_iterator(from)) {
    copy_tree(entry.path().string(), to + "/" + entry.path().filename().string());
  }
}

void CheckpointView::copy_file(const std::string& from, const std::string& to) {
  if (!fs::is_regular_file(from)) throw Error(fmt::format("{}: expected a file or a folder in a checkpoint.", from));
  const Seen seen = look_at(from);
  originals_[from] = seen;
  const File in(from, O_RDONLY);
  {
    const File out(to, O_WRONLY | O_CREAT | O_EXCL);
    if (ioctl(out.get(), FICLONE, in.get()) == 0) return;
    if (seen.size_bytes <= left_bytes_) {
      left_bytes_ -= seen.size_bytes;
      return copy_bytes(from, to, in.get(), out.get());
    }
  }
  fs::remove(to);
  fs::create_symlink(from, to);
}

void CheckpointView::write_marker(const Checkpoint& checkpoint) {
  const std::string name = fs::path(checkpoint_).filename().string();
  if (checkpoint.kind == "megatron") std::ofstream(folder_ + "/latest_checkpointed_iteration.txt") << checkpoint.step;
  if (checkpoint.kind == "deepspeed") std::ofstream(folder_ + "/latest") << name;
}

std::vector<std::string> CheckpointView::changed() const {
  std::vector<std::string> found;
  for (const auto& [path, seen] : originals_) {
    if (look_at(path) != seen) found.push_back(path);
  }
  return found;
}

}  // namespace forkpoint
