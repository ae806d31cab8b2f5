/* A square of words, in registers. */

#pragma once

#include "common.h"

#if defined(__AVX__)
/* Transposes as many vectors as there are lanes: in rounds halves, quarters, … change places. The
 * orders are written out, since constants stay in registers. */
#define EXCHANGE(half, low, high)                                                     \
  for (int i = 0; i < LANES; i++)                                                     \
    if (!(i & half)) {                                                                \
      const f32v a = m[i], b = m[i + half];                                         \
      m[i] = PICK(a, b, low);                                    \
      m[i + half] = PICK(a, b, high);                            \
    }
#define ORDER(...) __VA_ARGS__
INLINE void transpose(f32v m[LANES]) {
#if LANES == 16
  EXCHANGE(8, ORDER(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           ORDER(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  EXCHANGE(4, ORDER(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
           ORDER(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  EXCHANGE(2, ORDER(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           ORDER(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  EXCHANGE(1, ORDER(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           ORDER(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
  EXCHANGE(4, ORDER(0, 1, 2, 3, 8, 9, 10, 11), ORDER(4, 5, 6, 7, 12, 13, 14, 15))
  EXCHANGE(2, ORDER(0, 1, 8, 9, 4, 5, 12, 13), ORDER(2, 3, 10, 11, 6, 7, 14, 15))
  EXCHANGE(1, ORDER(0, 8, 2, 10, 4, 12, 6, 14), ORDER(1, 9, 3, 11, 5, 13, 7, 15))
#endif
}
#undef EXCHANGE
#undef ORDER
#else
INLINE void transpose(f32v m[LANES]) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < i; j++) {
      const float a = m[i][j];
      m[i][j] = m[j][i], m[j][i] = a;
    }
}
#endif
