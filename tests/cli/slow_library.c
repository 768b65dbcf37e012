// A library that never comes back from being loaded, or ends the process: SLOW_LIBRARY=crash.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void hang(void) {
  const char* what = getenv("SLOW_LIBRARY");
  if (what && strcmp(what, "crash") == 0) abort();
  for (;;) pause();
}
