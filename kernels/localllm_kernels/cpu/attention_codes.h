/* Products of queries and weights, rounded to int8, with keys and values in 4 bits that lie side by
 * side; see four_bits.h. They add up as integers, so a row has the same bits in any tile. */

#pragma once

#include "attention_tile.h"
#include "integer_dots.h"

/* A tile of rows and vectors whose sums stay in registers. */
#define CODE_ROWS 4
#define CODE_VECTORS (LANES == 16 ? 4 : 2)

/* scores[r][v] = scale[r] · Σ words[r] · (codes - 8), for a few rows and vectors of keys, whose numbers
 * callers pass as constants; `depth`: words of a key, `stride` bytes apart. */
INLINE void score_few(const Rows *state, int64_t first, const void *const *keys,
                      const void *const *ahead, int64_t stride, int64_t depth, float *scores,
                      const int rows, const int vectors) {
  i32v sums[CODE_ROWS][CODE_VECTORS];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = (i32v){0} - MIDDLE4 * state->q_sum[first + r];
  const int32_t *words = (const int32_t *)state->q + first * state->q_stride;
  for (int64_t i = 0; i < depth; i++, words += 2) {
    u8x4v low[CODE_VECTORS], high[CODE_VECTORS];
    for (int v = 0; v < vectors; v++) {
      memcpy(low + v, (const char *)keys[v] + i * stride, sizeof *low);
      if (ahead) __builtin_prefetch((const char *)ahead[v] + i * stride, 0, 2);
      high[v] = low[v] >> 4, low[v] &= 15;
    }
    for (int r = 0; r < rows; r++) {
      const int32_t *own = words + r * state->q_stride;
      for (int v = 0; v < vectors; v++)
        sums[r][v] = dot4(dot4(sums[r][v], low[v], own[0], 4), high[v], own[1], 4);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++)
      store(scores + r * KEY_TILE + v * LANES,
            __builtin_convertvector(sums[r][v], f32v) * state->q_scale[first + r]);
}

/* total[r] = total[r] · keep[r] + scale[r] · Σ weights[r] · (codes - 8), for a few rows and vectors of
 * bytes, each of which has two numbers; words `low` to `high` of the weights. */
INLINE void add_few(Rows *state, int64_t first, int64_t in_lanes, const void *const *values,
                    const void *const *ahead, int64_t at, int64_t low, int64_t high, const int rows,
                    const int vectors) {
  i32v sums[CODE_ROWS][2 * CODE_VECTORS];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2 * vectors; v++)
      sums[r][v] = (i32v){0} - MIDDLE4 * state->weight_sum[in_lanes + r];
  const int32_t *weights = (const int32_t *)state->weights + in_lanes * state->weight_stride;
  for (int64_t t = low; t < high; t++)
    for (int v = 0; v < vectors; v++) {
      u8x4v low4, high4;
      memcpy(&low4, (const char *)values[t] + at + v * (int64_t)sizeof low4, sizeof low4);
      if (ahead) __builtin_prefetch((const char *)ahead[t] + at + v * (int64_t)sizeof low4, 0, 2);
      high4 = low4 >> 4, low4 &= 15;
      for (int r = 0; r < rows; r++) {
        const int32_t word = weights[r * state->weight_stride + t];
        sums[r][v] = dot4(sums[r][v], low4, word, 4);
        sums[r][vectors + v] = dot4(sums[r][vectors + v], high4, word, 4);
      }
    }
  const int64_t half = state->dim / 2, number = at / 4;
  for (int r = 0; r < rows; r++) {
    const f32v keep = splat(state->keep[in_lanes + r]), scale = splat(state->weight_scale[in_lanes + r]);
    float *total = state->total + (first + r) * state->dim + number;
    for (int v = 0; v < 2 * vectors; v++) {
      float *to = total + (v < vectors ? v * LANES : half + (v - vectors) * LANES);
      store(to, fmav(__builtin_convertvector(sums[r][v], f32v), scale, load(to) * keep));
    }
  }
}

#define BY_CODE_ROWS(count, RUN)                       \
  do {                                                 \
    int64_t r = 0;                                     \
    for (; r + CODE_ROWS <= (count); r += CODE_ROWS) RUN(r, CODE_ROWS); \
    if ((count)-r >= 2) RUN(r, 2), r += 2;             \
    if ((count) > r) RUN(r, 1);                        \
  } while (0)

/* The tile's scores of `count` rows from `first` on, LANES keys a vector. */
INLINE void score_codes(Rows *state, int64_t first, int64_t count, const Columns *keys,
                        int64_t vectors, float *scores) {
  const int64_t depth = state->depth;
  const void *const *parts = keys->parts, *const *ahead = keys->ahead;
#define RUN(r, rows) \
  score_few(state, first + (r), parts + v, (r) || !ahead ? NULL : ahead + v, keys->stride, depth, \
            scores + (r) * KEY_TILE + v * LANES, rows, here)
#define RUN_ALL(number) { const int here = number; BY_CODE_ROWS(count, RUN); }
  for (int64_t v = 0, step; v < vectors; v += step) {
    step = vectors - v >= CODE_VECTORS ? CODE_VECTORS : vectors - v >= 2 ? 2 : 1;
    if (step == CODE_VECTORS) RUN_ALL(CODE_VECTORS)
    else if (step == 2) RUN_ALL(2)
    else RUN_ALL(1)
  }
#undef RUN_ALL
#undef RUN
}

/* Adds the tile's values to `count` rows from `first` on. */
INLINE void add_codes(Rows *state, int64_t first, int64_t count, const Columns *values, int64_t low,
                      int64_t high) {
  const int64_t vectors = state->dim / 2 / LANES;
  const void *const *parts = values->parts, *const *ahead = values->ahead;
#define RUN(r, rows) \
  add_few(state, first + (r), r, parts, (r) ? NULL : ahead, v * 4 * LANES, low, high, rows, here)
#define RUN_ALL(number) { const int here = number; BY_CODE_ROWS(count, RUN); }
  for (int64_t v = 0, step; v < vectors; v += step) {
    step = vectors - v >= CODE_VECTORS / 2 ? CODE_VECTORS / 2 : 1;
    if (step == CODE_VECTORS / 2) RUN_ALL(CODE_VECTORS / 2)
    else RUN_ALL(1)
  }
#undef RUN_ALL
#undef RUN
}
