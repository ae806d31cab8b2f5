/* Attention of a few rows at a time, as in decode: keys and values are read in place, and how soon
 * they arrive bounds the speed. The sums are those of attention_many.h, bit for bit. */

#pragma once

#include "attention_rows.h"

/* The most rows whose sums and queries stay in registers. */
#define MOST_ROWS (LANES == 16 ? 8 : 4)

/* Keys or values, and the indices of a tile's rows and of those of the next one, which are asked for
 * ahead: blocks lie anywhere, so the processor cannot guess what comes next. */
typedef struct {
  const char *values;
  const float *scales;
  const int64_t *rows;
} Tile;

INLINE f32v load_vector(const char *row, int i, float scale, const int kind) {
  if (kind == KV_FLOAT32) return load((const float *)row + i * LANES);
  if (kind == KV_BFLOAT16) return load_bf16((const uint16_t *)row + i * LANES);
  return load_codes((const uint8_t *)row + i * LANES, kind) * scale;
}

INLINE float scale_of(const Tile *tile, int64_t j, const int kind) {
  return kind == KV_INT8 || kind == KV_FP8 ? tile->scales[tile->rows[j]] : 1.0f;
}

INLINE void ask_for(const char *row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* scores[r][j] = q[r] · k[j] for `rows` rows, 2, 4 or 8; as many sums over lanes at a time as there
 * are lanes. */
INLINE void score_few(const float *q, const Tile *keys, const Span *span, float *scores,
                      const int rows, const int kind, const int vectors) {
  const int together = LANES / rows;
  for (int64_t j = span->low / together * together; j < span->high; j += together) {
    f32v sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = splat(0.0f);
    const int64_t row_bytes = vectors * LANES * value_bytes(kind);
    const float *queries = q;
    __asm__("" : "+r"(queries)); /* else each row's address would be kept, in memory */
    for (int n = 0; n < together; n++)
      ask_for(keys->values + keys->rows[j + n + KEY_TILE] * row_bytes, row_bytes);
    for (int i = 0; i < vectors; i++) {
      f32v own[MOST_ROWS];
      for (int r = 0; r < rows; r++) own[r] = kept(load(queries + (r * vectors + i) * LANES));
      for (int n = 0; n < together; n++) {
        const f32v key = load_vector(keys->values + keys->rows[j + n] * row_bytes, i,
                                     scale_of(keys, j + n, kind), kind);
        for (int r = 0; r < rows; r++)
          sums[r * together + n] = fmav(own[r], key, sums[r * together + n]);
      }
    }
    float totals[LANES];
    sum_lanes_of_each(sums, totals);
    for (int r = 0; r < rows; r++)
      memcpy(scores + r * KEY_TILE + j, totals + r * together, (size_t)together * sizeof(float));
  }
}

/* total[r] = total[r] · keep[r] + weights[r] · v for `rows` rows and `count` vectors from `at` on. */
INLINE void add_few(const float *weights, const Tile *values, const Span *span, const float *keep,
                    float *total, const int rows, const int at, const int count, const int kind,
                    const int vectors) {
  const int64_t row_bytes = vectors * LANES * value_bytes(kind);
  f32v sums[MOST_ROWS][MAX_DIM / LANES];
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < count; i++)
      sums[r][i] = load(total + (r * vectors + at + i) * LANES) * keep[r];
  for (int64_t j = span->low; j < span->high; j++) {
    const char *row = values->values + values->rows[j] * row_bytes;
    if (at == 0) ask_for(values->values + values->rows[j + KEY_TILE] * row_bytes, row_bytes);
    f32v own[MOST_ROWS];
    for (int r = 0; r < rows; r++) own[r] = kept(splat(weights[r * KEY_TILE + j]));
    for (int i = 0; i < count; i++) {
      const f32v value = load_vector(row, at + i, scale_of(values, j, kind), kind);
      for (int r = 0; r < rows; r++) sums[r][i] = fmav(own[r], value, sums[r][i]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < count; i++) store(total + (r * vectors + at + i) * LANES, sums[r][i]);
}

/* Whether there are loops for heads of this size, with sums that stay in registers. */
INLINE int has_few(int64_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512;
}

/* Calls CALL with the number of rows, the kind and the vectors of a row as constants. */
#define FOR_ROWS(CALL, kind, vectors)              \
  switch (rows_at(state, r)) {                     \
    case 2: CALL(2, kind, vectors); break;         \
    case 4: CALL(4, kind, vectors); break;         \
    default: CALL(MOST_ROWS, kind, vectors);       \
  }
#define FOR_VECTORS(CALL, kind)                        \
  switch (state->dim) {                                \
    case 64: FOR_ROWS(CALL, kind, 64 / LANES) break;   \
    case 128: FOR_ROWS(CALL, kind, 128 / LANES) break; \
    case 256: FOR_ROWS(CALL, kind, 256 / LANES) break; \
    case 512: FOR_ROWS(CALL, kind, 512 / LANES) break; \
  }
#define FOR_ALL(CALL)                                        \
  switch (cache_kind) {                                      \
    case KV_FLOAT32: FOR_VECTORS(CALL, KV_FLOAT32) break;    \
    case KV_BFLOAT16: FOR_VECTORS(CALL, KV_BFLOAT16) break;  \
    case KV_INT8: FOR_VECTORS(CALL, KV_INT8) break;          \
    case KV_FP8: FOR_VECTORS(CALL, KV_FP8) break;            \
  }

/* How many rows from `r` on are computed at a time. */
INLINE int rows_at(const Rows *state, int64_t r) {
  const int64_t left = state->padded_rows - r;
  return left >= MOST_ROWS ? MOST_ROWS : left >= 4 ? 4 : 2;
}

static void score_rows(const Tile *keys, const Span *span, int64_t cache_kind, int64_t r, Rows *state) {
#define SCORE(rows, kind, vectors) \
  score_few(state->q + r * state->dim, keys, span, state->weights + r * KEY_TILE, rows, kind, vectors)
  FOR_ALL(SCORE)
#undef SCORE
}

static void add_rows(const Tile *values, const Span *span, int64_t cache_kind, int64_t r, Rows *state) {
#define ADD(rows, kind, vectors)                                                                \
  for (int i = 0; i < vectors; i += LANES / rows < vectors ? LANES / rows : vectors)             \
    add_few(state->weights + r * KEY_TILE, values, span, state->keep + r,                       \
            state->total + r * state->dim, rows, i,                                             \
            LANES / rows < vectors ? LANES / rows : vectors, kind, vectors)
  FOR_ALL(ADD)
#undef ADD
}

static void attend_few(const AttentionShape *s, const AttentionTask *task, const float *query,
                       float *out) {
  const KVCache *cache = &s->cache;
  Rows state;
  int64_t rows[2 * KEY_TILE];
  start_rows(s, task, query, 2, (int)(cache->head_dim / LANES), &state);
  Span span = seen_keys(s, task);
  for (int64_t first = span.start / KEY_TILE * KEY_TILE; first < span.end; first += KEY_TILE) {
    move_to(&span, first);
    if (span.low >= span.high) continue; /* all of its keys are hidden */
    find_rows(cache, task, &span, 2 * KEY_TILE, rows);
    const Tile keys = {cache->keys, cache->key_scales, rows};
    for (int64_t r = 0; r < state.rows; r += rows_at(&state, r))
      score_rows(&keys, &span, cache->kind, r, &state);
    weigh_rows(s, task, &span, &state);
    const Tile values = {cache->values, cache->value_scales, rows};
    for (int64_t r = 0; r < state.rows; r += rows_at(&state, r))
      add_rows(&values, &span, cache->kind, r, &state);
  }
  finish_rows(s, task, &state, out);
}
