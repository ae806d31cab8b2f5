/* y = x · wᵀ + bias in float32 for weights in float32, bfloat16 or float16, row by row as stored in
 * the file.
 *
 * An output is the sum of all lanes, each of which adds up the products of some of the inputs. */

#include "float_tile.h"

/* A vector of weights from `at` on, or the first `count` of them. */
INLINE f32v load_halves(const uint16_t *values, int kind) {
  return kind == VALUES_BFLOAT16 ? load_bf16(values) : load_f16(values);
}
INLINE f32v load_weights(const FloatWeight *w, int64_t at, int kind) {
  if (kind == VALUES_FLOAT32) return load((const float *)w->values + at);
  return load_halves((const uint16_t *)w->values + at, kind);
}
INLINE f32v load_last_weights(const FloatWeight *w, int64_t at, int64_t count, int kind) {
  if (kind == VALUES_FLOAT32) return load_part((const float *)w->values + at, count, 0.0f);
  uint16_t part[LANES] = {0};
  memcpy(part, (const uint16_t *)w->values + at, (size_t)count * sizeof(uint16_t));
  return load_halves(part, kind);
}

/* `outputs` outputs from `first` on for `rows` rows; callers pass these counts, and the kind
 * of the weights, as constants. */
INLINE void multiply(const FloatWeight *w, const float *x, float *y, int64_t first, int rows,
                     int outputs, int kind) {
  const int64_t width = w->width_in, whole = width / LANES * LANES, start = first * width;
  const char *values = w->values;
  const int64_t bytes = kind == VALUES_FLOAT32 ? 4 : 2;
  f32v sums[ROWS][OUTPUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
  for (int64_t i = 0; i < whole; i += LANES) {
    f32v inputs[ROWS];
    for (int r = 0; r < rows; r++) inputs[r] = kept(load(x + r * width + i));
    for (int o = 0; o < outputs; o++) {
      const f32v weight = load_weights(w, start + o * width + i, kind);
      /* the next outputs */
      __builtin_prefetch(values + bytes * (start + (outputs + o) * width + i));
      for (int r = 0; r < rows; r++) sums[r][o] = fmav(inputs[r], weight, sums[r][o]);
    }
  }
  if (whole < width)
    for (int o = 0; o < outputs; o++) {
      const f32v weight =
          load_last_weights(w, start + o * width + whole, width - whole, kind);
      for (int r = 0; r < rows; r++) {
        const f32v value = load_part(x + r * width + whole, width - whole, 0.0f);
        sums[r][o] = fmav(value, weight, sums[r][o]);
      }
    }
  finish_tile(w, sums, y, first, rows, outputs);
}

INLINE void multiply_rows(const FloatWeight *w, const float *x, float *y, int64_t first,
                          int64_t rows, int outputs, int kind) {
#define RUN(r, count) \
  multiply(w, x + (r) * w->width_in, y + (r) * w->width_out, first, count, outputs, kind)
  BY_TILES_OF_ROWS(rows, RUN);
#undef RUN
}

INLINE void team_multiply(const Team *team, const FloatWeight *w, const float *x, float *y,
                          int64_t rows, int kind) {
  const int64_t blocks = (w->width_out + OUTPUTS - 1) / OUTPUTS;
  TEAM_FOR(team, block, blocks) {
    const int64_t first = block * OUTPUTS;
    if (first + OUTPUTS <= w->width_out) {
      multiply_rows(w, x, y, first, rows, OUTPUTS, kind);
      continue;
    }
    for (int64_t o = first; o < w->width_out; o++) multiply_rows(w, x, y, o, rows, 1, kind);
  }
  team_meet(team);
}

/* x: [rows, in]; y: [rows, out]. */
void team_float32_linear(const Team *team, const FloatWeight *w, const float *x, float *y,
                         int64_t rows) {
  switch (w->values_kind) {
    case VALUES_FLOAT32: team_multiply(team, w, x, y, rows, VALUES_FLOAT32); break;
    case VALUES_BFLOAT16: team_multiply(team, w, x, y, rows, VALUES_BFLOAT16); break;
    default: team_multiply(team, w, x, y, rows, VALUES_FLOAT16);
  }
}
