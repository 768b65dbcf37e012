#include "cli/proc_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace forkpoint {

std::string read_proc_file(const std::string& path) {
  std::string content;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return content;
  char part[4096];
  for (;;) {
    const ssize_t got = read(file, part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      if (got < 0) content.clear();
      break;
    }
    content.append(part, static_cast<size_t>(got));
  }
  close(file);
  return content;
}

}  // namespace forkpoint
