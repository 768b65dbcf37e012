/* stubborn_trainer COMMAND...: ignores every signal that can be ignored and runs COMMAND in a session of its own, again and again. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  for (int number = 1; number < 32; ++number) {
    if (number != SIGCHLD) signal(number, SIG_IGN);
  }
  for (;;) {
    const pid_t child = fork();
    if (child == 0) {
      setsid();
      execvp(argv[1], argv + 1);
      _exit(127);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
    }
    usleep(20000);
  }
}
