/* y = x · wᵀ + bias for weights in float32 or bfloat16, row by row as they stand in the file.
 *
 * An output is the sum of sixteen lanes, each of which adds up every sixteenth product. */

#include "operators.h"

#define ROWS 4
#define OUTPUTS 4

INLINE f32x16 load_weight(const void *w, int64_t at, int is_bfloat16) {
  return is_bfloat16 ? load_bf16((const uint16_t *)w + at) : load((const float *)w + at);
}
INLINE f32x16 load_weight_part(const void *w, int64_t at, int64_t count, int is_bfloat16) {
  if (!is_bfloat16) return load_part((const float *)w + at, count, 0.0f);
  uint16_t part[LANES] = {0};
  memcpy(part, (const uint16_t *)w + at, (size_t)count * sizeof(uint16_t));
  return load_bf16(part);
}

/* `outputs` outputs from `first` on for `rows` rows; both are constants where this is called. */
INLINE void multiply(const void *w, const float *bias, const float *x, float *y, int64_t width_in,
                     int64_t width_out, int64_t first, int rows, int outputs, int is_bfloat16) {
  f32x16 sums[ROWS][OUTPUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= width_in; i += LANES) {
    f32x16 values[ROWS];
    for (int r = 0; r < rows; r++) values[r] = load(x + r * width_in + i);
    for (int o = 0; o < outputs; o++) {
      const f32x16 weight = load_weight(w, (first + o) * width_in + i, is_bfloat16);
      for (int r = 0; r < rows; r++) sums[r][o] = fma16(values[r], weight, sums[r][o]);
    }
  }
  if (i < width_in)
    for (int o = 0; o < outputs; o++) {
      const f32x16 weight =
          load_weight_part(w, (first + o) * width_in + i, width_in - i, is_bfloat16);
      for (int r = 0; r < rows; r++) {
        const f32x16 value = load_part(x + r * width_in + i, width_in - i, 0.0f);
        sums[r][o] = fma16(value, weight, sums[r][o]);
      }
    }
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) {
      const float sum = sum_lanes(sums[r][o]);
      y[r * width_out + first + o] = bias ? sum + bias[first + o] : sum;
    }
}

INLINE void multiply_rows(const void *w, const float *bias, const float *x, float *y,
                          int64_t width_in, int64_t width_out, int64_t first, int64_t rows,
                          int outputs, int is_bfloat16) {
  int64_t r = 0;
#define RUN(count) \
  multiply(w, bias, x + r * width_in, y + r * width_out, width_in, width_out, first, count, \
           outputs, is_bfloat16)
  for (; r + ROWS <= rows; r += ROWS) RUN(4);
  switch (rows - r) {
    case 1: RUN(1); break;
    case 2: RUN(2); break;
    case 3: RUN(3); break;
  }
#undef RUN
}

INLINE void multiply_all(const FloatWeight *w, const float *x, float *y, int64_t rows,
                         int is_bfloat16) {
  const int64_t width_in = w->width_in, width_out = w->width_out;
  const int64_t blocks = (width_out + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t first = block * OUTPUTS;
    if (first + OUTPUTS <= width_out) {
      multiply_rows(w->values, w->bias, x, y, width_in, width_out, first, rows, OUTPUTS, is_bfloat16);
      continue;
    }
    for (int64_t o = first; o < width_out; o++)
      multiply_rows(w->values, w->bias, x, y, width_in, width_out, o, rows, 1, is_bfloat16);
  }
}

/* x: [rows, in]; y: [rows, out]. */
void team_float_linear(const FloatWeight *w, const float *x, float *y, int64_t rows) {
  if (w->is_bfloat16)
    multiply_all(w, x, y, rows, 1);
  else
    multiply_all(w, x, y, rows, 0);
}
void float_linear(const FloatWeight *w, const float *x, float *y, int64_t rows, int64_t threads) {
#pragma omp parallel num_threads(threads)
  team_float_linear(w, x, y, rows);
}
