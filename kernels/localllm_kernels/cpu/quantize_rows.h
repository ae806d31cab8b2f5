/* Rows of floats as int8, with one scale per group of `group_size`: x ≈ scale · code, |code| ≤ 127.
 *
 * Four codes of a row are in a word. The words of a tile's rows lie side by side, [width / 4][rows], or
 * behind each other, [rows][width / 4]; scales and sums of the codes [groups][rows].
 *
 * A number that is far greater than the others of its group would take their codes from them: it is
 * kept apart as it is, and its code is 0 (Dettmers et al. 2022, "LLM.int8()", section 3.1, where whole
 * columns are). Each row decides by itself, so its bits are the same in any batch. */

#pragma once

#include "common.h"

/* Times the mean size of the others that are not 0: 0 loses nothing, and gates leave many. The greatest
 * of Gaussian numbers is at 3 to 5. */
#define APART 32

typedef struct {
  int32_t input;
  float value;
} ApartInput;

typedef struct {
  int32_t *words;
  float *scales;
  int32_t *sums, *num_apart; /* num_apart: [rows] */
  ApartInput *apart;         /* [rows][most_apart(width)] */
  int64_t word_step, row_step; /* between the words of a row, and the rows of a word */
} QuantizedRows;

/* Numbers of a row that can be apart. */
INLINE int64_t most_apart(int64_t width) { return width / 64; }

/* The `rows` rows of a tile whose bytes begin at `memory`. */
INLINE QuantizedRows place_rows(char *memory, int64_t rows, int64_t width, int64_t groups,
                                int are_behind) {
  int32_t *sums = (int32_t *)(memory + (width + 4 * groups) * rows), *counts = sums + groups * rows;
  return (QuantizedRows){(int32_t *)memory, (float *)(memory + width * rows), sums, counts,
                         (ApartInput *)(counts + rows), are_behind ? 1 : rows,
                         are_behind ? width / 4 : 1};
}
/* Of a row, and those of them that every product reads. */
INLINE int64_t codes_bytes(int64_t width, int64_t groups) { return width + 8 * groups; }
INLINE int64_t quantized_bytes(int64_t width, int64_t groups) {
  return codes_bytes(width, groups) + 8 + (int64_t)sizeof(ApartInput) * most_apart(width);
}

typedef struct {
  float most, sum, not_zero; /* sizes of numbers, and how many are not 0 */
  float poison;              /* NaN if anything is not finite, which no code can express, else 0 */
} Sizes;
INLINE Sizes sizes_of(const float *values, int64_t count) {
  f32v most = splat(0.0f), sum = splat(0.0f), not_zero = splat(0.0f), poison = splat(0.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    const f32v v = load(values + i), size = maxv(v, -v);
    most = maxv(most, size), sum += size, poison += v * 0.0f;
    not_zero += selectv(v == splat(0.0f), splat(0.0f), splat(1.0f));
  }
  return (Sizes){max_lanes(most), sum_lanes(sum), sum_lanes(not_zero), sum_lanes(poison)};
}

/* Moves the numbers above `limit` to `apart`, of which there are `count` of at most `most`; returns how
 * many there are then. */
INLINE int32_t move_apart(float *values, int64_t first, int64_t size, float limit, ApartInput *apart,
                          int32_t count, int64_t most) {
  for (int64_t i = 0; i < size && count < most; i++)
    if (fabsf(values[i]) > limit) {
      apart[count++] = (ApartInput){(int32_t)(first + i), values[i]};
      values[i] = 0.0f;
    }
  return count;
}

/* Quantizes row `row` of a tile of `rows` rows. */
INLINE void quantize_row(const float *x, int64_t width, int64_t group_size,
                         const QuantizedRows *to, int64_t row, int64_t rows) {
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  const int64_t most_here = most_apart(width);
  ApartInput *apart = to->apart + row * most_here;
  int32_t count = 0;
  float own[group_size];
  for (int64_t group = 0; group * group_size < width; group++) {
    const float *values = x + group * group_size;
    Sizes sizes = sizes_of(values, group_size);
    const float limit = APART * (sizes.sum - sizes.most) / (sizes.not_zero - 1.0f);
    if (sizes.most > limit && count < most_here) {
      memcpy(own, values, sizeof own);
      count = move_apart(own, group * group_size, group_size, limit, apart, count, most_here);
      values = own, sizes = sizes_of(values, group_size);
    }
    const float scale = sizes.most / 127.0f + sizes.poison;
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
  to->num_apart[row] = count;
}
