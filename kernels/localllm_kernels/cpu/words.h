/* Products of tiles whose factors are words of 32 bits: a float, or two numbers in bfloat16 that are
 * multiplied and added up together (PAIRS).
 *
 * A sum adds up its words in their order, so it has the same bits in any tile; and on any processor,
 * since a product of two numbers in bfloat16 is exact: of a pair the second comes first, as the
 * instructions have it. */

#pragma once

#include "common.h"

enum { FLOATS, PAIRS };
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* A tile of rows and vectors of columns whose sums stay in registers. */
#define WORD_ROWS 4
#define WORD_VECTORS (LANES == 16 ? 4 : 2)

/* How many floats stand for one word of a row: where no instruction takes pairs, both numbers. */
INLINE int64_t row_word(const int kind) { return kind == PAIRS && !HAS_PAIRS ? 2 : 1; }

/* sum + row · columns, where `row` is one word. */
INLINE f32v add_word(f32v sum, const float *row, f32v columns, const int kind) {
  if (kind == FLOATS) return fmav(splat(*row), columns, sum);
#if HAS_PAIRS
  int32_t pair;
  memcpy(&pair, row, sizeof pair);
  return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)columns, (__m512bh)_mm512_set1_epi32(pair));
#else
  sum = fmav(splat(row[1]), (f32v)((u32v)columns & 0xffff0000), sum);
  return fmav(splat(row[0]), (f32v)((u32v)columns << 16), sum);
#endif
}

/* Numbers as words of a row, of which there are whole vectors. */
INLINE void as_row(const float *x, float *words, int64_t count, const int kind) {
  for (int64_t i = 0; i < count; i += LANES) {
    if (kind == FLOATS) {
      store(words + i, load(x + i));
      continue;
    }
    const f32v low = load(x + 2 * i), high = load(x + 2 * i + LANES);
#if HAS_PAIRS
    store(words + i, (f32v)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(words + 2 * i, (f32v)(__builtin_convertvector(round_bf16(low), u32v) << 16));
    store(words + 2 * i + LANES, (f32v)(__builtin_convertvector(round_bf16(high), u32v) << 16));
#endif
  }
}

/* A number of `first` and one of `second` in each word; bfloat16 has both exactly. */
INLINE f32v paired(f32v first, f32v second) { return (f32v)((u32v)first >> 16 | (u32v)second); }

/* Where the columns of a tile lie: those of word `i` and vector `v` at parts[i] + v · LANES, or, if
 * `stride` is not 0, at parts[v] + i · stride. `ahead`: those that are needed next, or NULL. */
typedef struct {
  const void *const *parts, *const *ahead;
  int64_t stride;
} Columns;

/* y[r][j] = y[r][j] · keep[r] + Σ rows[r][i] · columns[i][j] over `depth` words, for a few rows and
 * vectors, whose numbers callers pass as constants; rows and y are `row_stride` and `stride` apart.
 * Without `keep` y is only written. */
INLINE void multiply_few(const float *rows, int64_t row_stride, const Columns *columns, int64_t at,
                         int64_t depth, const float *keep, float *y, int64_t stride,
                         const int count, const int vectors, const int kind, const int is_strided) {
  const void *const *parts = columns->parts + (is_strided ? at : 0);
  const void *const *ahead = columns->ahead ? columns->ahead + (is_strided ? at : 0) : NULL;
  f32v sums[WORD_ROWS][WORD_VECTORS];
  for (int r = 0; r < count; r++)
    for (int v = 0; v < vectors; v++) sums[r][v] = splat(0.0f);
  for (int64_t i = 0; i < depth; i++, rows += row_word(kind)) {
    f32v here[WORD_VECTORS];
    for (int v = 0; v < vectors; v++) {
      const int64_t part = is_strided ? v : i;
      const int64_t offset = is_strided ? i * columns->stride : (at + v) * LANES;
      here[v] = kept(load((const float *)parts[part] + offset));
      if (ahead) __builtin_prefetch((const float *)ahead[part] + offset, 0, 2);
    }
    for (int r = 0; r < count; r++)
      for (int v = 0; v < vectors; v++)
        sums[r][v] = add_word(sums[r][v], rows + r * row_stride, here[v], kind);
  }
  for (int r = 0; r < count; r++)
    for (int v = 0; v < vectors; v++) {
      float *to = y + r * stride + v * LANES;
      store(to, keep ? fmav(load(to), splat(keep[r]), sums[r][v]) : sums[r][v]);
    }
}

/* The same for `count` rows, and for columns in whole vectors. */
INLINE void multiply_words(const float *rows, int64_t row_stride, int64_t count,
                           const Columns *columns, int64_t num_vectors, int64_t depth,
                           const float *keep, float *y, int64_t stride, const int kind,
                           const int is_strided) {
  Columns own = *columns;
#define RUN(r, rows_here, vectors)                                                                 \
  multiply_few(rows + (r) * row_stride, row_stride, &own, at, depth, keep ? keep + (r) : NULL,     \
               y + (r) * stride + at * LANES, stride, rows_here, vectors, kind, is_strided),       \
      own.ahead = NULL
#define RUN_ALL(vectors)                                                        \
  do {                                                                          \
    int64_t r = 0;                                                              \
    own.ahead = columns->ahead;                                                 \
    for (; r + WORD_ROWS <= count; r += WORD_ROWS) RUN(r, WORD_ROWS, vectors);  \
    if (count - r >= 2) RUN(r, 2, vectors), r += 2;                             \
    if (count > r) RUN(r, 1, vectors);                                          \
  } while (0)
  for (int64_t at = 0, vectors; at < num_vectors; at += vectors) {
    const int64_t left = num_vectors - at;
    vectors = left >= WORD_VECTORS ? WORD_VECTORS : left >= 2 ? 2 : 1;
    if (vectors == WORD_VECTORS) RUN_ALL(WORD_VECTORS);
    else if (vectors == 2) RUN_ALL(2);
    else RUN_ALL(1);
  }
#undef RUN
#undef RUN_ALL
}
