/* y = x · wᵀ + bias for weights in float32, row by row as they stand in the file.
 *
 * An output is the sum of sixteen lanes, each of which adds up every sixteenth product. */

#include "float_tile.h"

/* `outputs` outputs from `first` on for `rows` rows; both are constants where this is called. */
INLINE void multiply(const FloatWeight *w, const float *x, float *y, int64_t first, int rows,
                     int outputs) {
  const int64_t width = w->width_in, whole = width / LANES * LANES;
  const float *weights = (const float *)w->values + first * width;
  f32x16 sums[ROWS][OUTPUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
  for (int64_t i = 0; i < whole; i += LANES)
    for (int o = 0; o < outputs; o++) {
      const f32x16 weight = load(weights + o * width + i);
      __builtin_prefetch(weights + (outputs + o) * width + i); /* the next outputs */
      for (int r = 0; r < rows; r++)
        sums[r][o] = fma16(load(x + r * width + i), weight, sums[r][o]);
    }
  if (whole < width)
    for (int o = 0; o < outputs; o++) {
      const f32x16 weight = load_part(weights + o * width + whole, width - whole, 0.0f);
      for (int r = 0; r < rows; r++) {
        const f32x16 value = load_part(x + r * width + whole, width - whole, 0.0f);
        sums[r][o] = fma16(value, weight, sums[r][o]);
      }
    }
  finish_tile(w, sums, y, first, rows, outputs);
}

INLINE void multiply_rows(const FloatWeight *w, const float *x, float *y, int64_t first,
                          int64_t rows, int outputs) {
#define RUN(r, count) multiply(w, x + (r) * w->width_in, y + (r) * w->width_out, first, count, outputs)
  BY_TILES_OF_ROWS(rows, RUN);
#undef RUN
}

/* x: [rows, in]; y: [rows, out]. */
void team_float32_linear(const Team *team, const FloatWeight *w, const float *x, float *y,
                         int64_t rows) {
  const int64_t blocks = (w->width_out + OUTPUTS - 1) / OUTPUTS;
  TEAM_FOR(team, block, blocks) {
    const int64_t first = block * OUTPUTS;
    if (first + OUTPUTS <= w->width_out) {
      multiply_rows(w, x, y, first, rows, OUTPUTS);
      continue;
    }
    for (int64_t o = first; o < w->width_out; o++) multiply_rows(w, x, y, o, rows, 1);
  }
  team_meet(team);
}

static void multiply_all(const Team *team, void *arguments) {
  const LinearCall *a = arguments;
  team_float32_linear(team, a->weight, a->x, a->y, a->rows);
}

int float32_linear(const FloatWeight *w, const float *x, float *y, int64_t rows, int64_t threads) {
  run_team(threads, multiply_all, &(LinearCall){w, x, y, rows, NULL});
  return 0;
}
