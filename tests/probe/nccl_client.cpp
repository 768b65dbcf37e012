// nccl_client CUDA_LIBRARY SCENARIO RANK SIZE FOLDER: one rank. nccl_client ranks N CUDA_LIBRARY SCENARIO FOLDER
// [LIBRARY]: starts N of them, as a launcher would; with LIBRARY each loads the scenarios from there instead of being
// linked with NCCL.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#ifdef NCCL_CLIENT_LOADS
int run_rank(int argc, char** argv) {
  const char* scenarios = getenv("NCCL_SCENARIOS");
  if (const char* also = getenv("NCCL_SCENARIOS_TOO")) dlopen(also, RTLD_NOW | RTLD_LOCAL);  // brings another NCCL
  void* library = scenarios ? dlopen(scenarios, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) {
    printf("%s\n", dlerror());
    return 94;
  }
  return reinterpret_cast<int (*)(int, char**)>(dlsym(library, "nccl_program_main"))(argc, argv);
}
#else
#include "tests/probe/nccl_program.h"
int run_rank(int argc, char** argv) { return nccl_program_main(argc, argv); }
#endif

int main(int argc, char** argv) {
  if (argc < 2 || strcmp(argv[1], "ranks") != 0) return run_rank(argc, argv);
  if (argc < 6) return 98;
  const int size = atoi(argv[2]);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    const std::string own = std::to_string(rank), all = std::to_string(size);
    if (!getenv("NO_LAUNCHER")) {
      setenv("RANK", own.c_str(), 1);
      setenv("WORLD_SIZE", all.c_str(), 1);
    }
    execl(argv[0], argv[0], argv[3], argv[4], own.c_str(), all.c_str(), argv[5], nullptr);
    _exit(95);
  }
  int worst = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return worst;
}
