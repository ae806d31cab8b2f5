/* Shared by the products with float32 and bfloat16 weights: a tile of rows and outputs whose sums
 * stay in registers. */

#pragma once

#include "operators.h"

#define ROWS 4
#define OUTPUTS (LANES / 4) /* shorter vectors come with fewer registers */

/* y = the sums over lanes, plus the bias; y: [rows, width_out] from the tile's first row on. */
INLINE void finish_tile(const FloatWeight *w, f32v sums[ROWS][OUTPUTS], float *y, int64_t first,
                        int rows, int outputs) {
  float totals[ROWS][OUTPUTS];
  if (2 * rows > ROWS && outputs == OUTPUTS) {
    for (int r = rows; r < ROWS; r++)
      for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
    sum_lanes_of_each(sums[0], totals[0]);
  } else
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outputs; o++) totals[r][o] = sum_lanes(sums[r][o]);
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++)
      y[r * w->width_out + first + o] = w->bias ? totals[r][o] + w->bias[first + o] : totals[r][o];
}

/* Calls RUN(first row, number of rows) with constant numbers of rows. */
#define BY_TILES_OF_ROWS(rows, RUN)              \
  do {                                           \
    int64_t r_ = 0;                              \
    for (; r_ + ROWS <= rows; r_ += ROWS) RUN(r_, ROWS); \
    switch (rows - r_) {                         \
      case 1: RUN(r_, 1); break;                 \
      case 2: RUN(r_, 2); break;                 \
      case 3: RUN(r_, 3); break;                 \
    }                                            \
  } while (0)
