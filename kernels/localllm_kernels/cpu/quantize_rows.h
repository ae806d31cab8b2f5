/* Rows of floats as int8, with one scale per group of `group_size`: x ≈ scale · code, |code| ≤ 127.
 *
 * Four codes of a row are in a word. The words of a tile's rows lie side by side, [width / 4][rows], or
 * behind each other, [rows][width / 4]; scales and sums of the codes [groups][rows]. */

#pragma once

#include "common.h"

typedef struct {
  int32_t *words;
  float *scales;
  int32_t *sums;
  int64_t word_step, row_step; /* between the words of a row, and the rows of a word */
} QuantizedRows;

/* The `rows` rows of a tile whose bytes begin at `memory`. */
INLINE QuantizedRows place_rows(char *memory, int64_t rows, int64_t width, int64_t groups,
                                int are_behind) {
  return (QuantizedRows){(int32_t *)memory, (float *)(memory + width * rows),
                         (int32_t *)(memory + (width + 4 * groups) * rows),
                         are_behind ? 1 : rows, are_behind ? width / 4 : 1};
}
INLINE int64_t quantized_bytes(int64_t width, int64_t groups) { return width + 8 * groups; }

/* Quantizes row `row` of a tile of `rows` rows. */
INLINE void quantize_row(const float *x, int64_t width, int64_t group_size,
                         const QuantizedRows *to, int64_t row, int64_t rows) {
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  for (int64_t group = 0; group * group_size < width; group++) {
    const float *values = x + group * group_size;
    f32v most = splat(0.0f), poison = splat(0.0f);
    for (int64_t i = 0; i < group_size; i += LANES) {
      const f32v v = load(values + i);
      most = maxv(most, maxv(v, -v));
      poison += v * 0.0f; /* NaN if anything is not finite, which no code can express */
    }
    const float scale = max_lanes(most) / 127.0f + sum_lanes(poison);
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t *words = to->words + group * group_size / 4 * to->word_step + row * to->row_step;
    i32v sums = (i32v){0};
    for (int64_t i = 0; i < group_size; i += LANES) {
      const i32v codes = (i32v)(load(values + i) * inverse + magic) - (i32v)magic;
      const s8v bytes = __builtin_convertvector(codes, s8v);
      int32_t here[LANES / 4];
      memcpy(here, &bytes, sizeof here);
      for (int j = 0; j < LANES / 4; j++) words[(i / 4 + j) * to->word_step] = here[j];
      sums += codes;
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    to->scales[group * rows + row] = scale;
    to->sums[group * rows + row] = sum;
  }
}
