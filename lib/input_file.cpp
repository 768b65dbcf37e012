#include "lib/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/error.h"

namespace forkpoint {

ReadOnlyFile::ReadOnlyFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: a pipe of that name must not hang us.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) throw Error(fmt::format("{}: cannot be read: {}.", path, std::strerror(errno)));
  struct stat status {};
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    throw Error(fmt::format("{}: is not a regular file.", path));
  }
  size_bytes_ = static_cast<uint64_t>(status.st_size);
}

ReadOnlyFile::~ReadOnlyFile() { close(descriptor_); }

void ReadOnlyFile::read(uint64_t offset, void* data, size_t size) const {
  char* to = static_cast<char*>(data);
  for (size_t done = 0; done < size;) {
    const ssize_t got = pread(descriptor_, to + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(fmt::format("{}: cannot be read at byte {}: {}.", path_, offset + done, std::strerror(errno)));
    if (got == 0) {
      throw Error(fmt::format("{}: ends at byte {}, expected {} bytes from byte {} on: the file is cut.", path_, offset + done,
                              size, offset),
                  "Is it still being written?");
    }
    done += static_cast<size_t>(got);
  }
}

FileSlice FileSlice::part(uint64_t offset, uint64_t size, const std::string& what) const {
  if (offset > size_bytes_ || size > size_bytes_ - offset) {
    throw Error(fmt::format("{}: {} should lie at bytes {} to {}, but {} {} bytes: the file is cut or damaged.", path(), what,
                            offset_ + offset, offset_ + offset + size, offset_ ? "its part of the file has" : "there are",
                            size_bytes_));
  }
  FileSlice part = *this;
  part.offset_ += offset;
  part.size_bytes_ = size;
  return part;
}

void FileSlice::read(uint64_t offset, void* data, size_t size) const {
  part(offset, size, "what is read");
  file_->read(offset_ + offset, data, size);
}

std::string FileSlice::text(uint64_t offset, uint64_t size, const std::string& what) const {
  const FileSlice from = part(offset, size, what);  // before the memory is taken: a damaged size may be anything
  std::string bytes(size, '\0');
  from.read(0, bytes.data(), bytes.size());
  return bytes;
}

FileSlice open_slice(const std::string& path) { return FileSlice(std::make_shared<const ReadOnlyFile>(path)); }

}  // namespace forkpoint
