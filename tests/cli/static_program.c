// Linked statically: no library can be preloaded into it.
#include <stdio.h>

int main(void) { return puts("static") < 0; }
