/* See tiles.h. */

#define _GNU_SOURCE
#include "tiles.h"

const int64_t has_tiles = HAS_TILES;

#if HAS_TILES && defined(__linux__)
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of the kernel's asm/prctl.h and asm/fpu/types.h. */
#define ASK_FOR_STATE 0x1023
#define STATE_OF_TILES 18

int tiles_are_allowed(void) {
  static atomic_int known; /* 1: yes, 2: no */
  if (!atomic_load(&known))
    atomic_store(&known, syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES) ? 2 : 1);
  return atomic_load(&known) == 1;
}
#else
int tiles_are_allowed(void) { return 0; }
#endif
