/* A tile of keys and values as words, side by side: products with rows then need no sum across lanes,
 * and all rows read the tile from the caches. */

#pragma once

#include "attention_rows.h"
#include "transpose.h"

/* LANES numbers of a row of the cache from `at` on, without their scale; zeros behind its end. */
INLINE f32v load_numbers(const char *row, int64_t at, int64_t dim, const int kind) {
  if (kind == KV_INT4) {
    uint8_t bytes[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      const int64_t number = at + i, half = dim / 2;
      bytes[i] = MIDDLE4;
      if (number < dim) bytes[i] = (uint8_t)row[number % half] >> (number < half ? 0 : 4) & 15;
    }
    return load_codes(bytes, KV_INT8) - (float)MIDDLE4;
  }
  const char *from = row + at * value_bytes(kind);
  char part[LANES * sizeof(float)];
  if (at + LANES > dim) {
    memset(part, 0, sizeof part);
    if (at < dim) memcpy(part, from, (size_t)((dim - at) * value_bytes(kind)));
    from = part;
  }
  if (kind == KV_FLOAT32) return load((const float *)from);
  if (kind == KV_BFLOAT16) return load_bf16((const uint16_t *)from);
  return load_codes((const uint8_t *)from, kind);
}

/* LANES words of a row from word `i` on. */
INLINE f32v load_words(const char *row, int64_t i, int64_t dim, const int kind, const int words) {
  if (words == FLOATS) return load_numbers(row, i, dim, kind);
  if (kind == KV_BFLOAT16 && 2 * (i + LANES) <= dim) return load((const float *)row + i);
  uint16_t halves[2 * LANES];
  for (int h = 0; h < 2; h++) {
    const f32v numbers = load_numbers(row, 2 * i + h * LANES, dim, kind);
    const u16v upper = __builtin_convertvector((u32v)numbers >> 16, u16v); /* which is all of them */
    memcpy(halves + h * LANES, &upper, sizeof upper);
  }
  f32v found;
  memcpy(&found, halves, sizeof found);
  return found;
}

/* Keys or values of one layer, and the indices of a tile's rows and of those of the next one, which
 * are asked for ahead: blocks lie anywhere, so the processor cannot guess what comes next. */
typedef struct {
  const char *values;
  const void *scales;
  const int64_t *rows;
  int64_t dim; /* of a row */
} Tile;

INLINE const char *row_at(const Tile *tile, int64_t j, const int kind) {
  return tile->values + tile->rows[j] * row_bytes(tile->dim, kind);
}
INLINE void ask_for(const Tile *tile, int64_t j, const int kind) {
  const char *row = row_at(tile, j, kind);
  for (int64_t i = 0; i < row_bytes(tile->dim, kind); i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* Keys -> [depth, KEY_TILE] words: keys side by side. */
INLINE void turn_keys(const Tile *tile, int64_t low, int64_t high, int64_t depth, float *keys,
                      const int kind, const int words) {
  for (int64_t j = low; j < high; j += LANES) {
    for (int k = 0; k < LANES; k++) ask_for(tile, j + k + KEY_TILE, kind);
    for (int64_t i = 0; i < depth; i += LANES) {
      f32v m[LANES];
      for (int k = 0; k < LANES; k++)
        m[k] = load_words(row_at(tile, j + k, kind), i, tile->dim, kind, words);
      transpose(m);
      for (int k = 0; k < LANES; k++) store(keys + (i + k) * KEY_TILE + j, m[k]);
    }
  }
}

/* Values -> [KEY_TILE, dim] numbers, or [KEY_TILE / 2, dim] words with one number of each of two keys. */
INLINE void join_values(const Tile *tile, int64_t low, int64_t high, int64_t dim, float *values,
                        const int kind, const int words) {
  const int64_t step = words == PAIRS ? 2 : 1;
  for (int64_t j = low; j < high; j += step) {
    const char *row = row_at(tile, j, kind), *next = row_at(tile, j + step - 1, kind);
    for (int64_t k = 0; k < step; k++) ask_for(tile, j + k + KEY_TILE, kind);
    float *to = values + j / step * dim;
    for (int64_t i = 0; i < dim; i += LANES) {
      f32v here = load_numbers(row, i, tile->dim, kind);
      if (words == PAIRS) here = paired(here, load_numbers(next, i, tile->dim, kind));
      store(to + i, here);
    }
  }
}

INLINE void find_scales(const Tile *tile, float *scales, const int kind) {
  for (int64_t j = 0; j < KEY_TILE; j++)
    scales[j] = kind == KV_INT4 ? from_bf16(((const uint16_t *)tile->scales)[tile->rows[j]])
                                : ((const float *)tile->scales)[tile->rows[j]];
}

/* Where the keys and values of a tile lie: words of LANES keys side by side, and a row of words of each
 * value or pair of values; of a cache in 8 bits these are pairs of codes. */
typedef struct {
  const void *keys[KEY_TILE / LANES], *values[KEY_TILE];
  int64_t first_rows[KEY_TILE / LANES]; /* the index of each LANES keys' first one */
} Parts;

/* In the scratch, which is filled from rows. */
INLINE void scratch_parts(const Rows *state, Parts *parts) {
  for (int64_t v = 0; v < KEY_TILE / LANES; v++) parts->keys[v] = state->keys + v * LANES;
  for (int64_t i = 0; i < KEY_TILE; i++) parts->values[i] = state->values + i * state->dim;
}
INLINE void fill_tile(const KVCache *c, const Span *span, const int64_t *rows, Rows *state,
                      const int kind, const int words) {
  const Tile keys = {c->keys, c->key_scales, rows, c->head_dim};
  const Tile values = {c->values, c->value_scales, rows, c->head_dim};
  turn_keys(&keys, down_to(span->low, LANES), span->high, state->depth, state->keys, kind, words);
  join_values(&values, down_to(span->low, 2), span->high, state->dim, state->values, kind, words);
  if (!c->key_scales) return;
  find_scales(&keys, state->key_scales, kind), find_scales(&values, state->value_scales, kind);
}

/* In a cache with keys side by side, for the tile from position `first` on; outside the span, of the
 * nearest keys within it. */
INLINE void find_parts(const KVCache *c, const AttentionTask *task, const Span *span, int64_t first,
                       Parts *parts, const int kind) {
  const int64_t step = kind == KV_FLOAT32 ? 1 : 2, word = step * value_bytes(kind);
  for (int64_t v = 0; v < KEY_TILE / LANES; v++) {
    int64_t position = first + v * LANES;
    if (position >= span->end) position = down_to(span->end - 1, LANES);
    if (position + LANES <= span->start) position = down_to(span->start, LANES);
    const int64_t inner = position % c->block_size, row = row_of(c, task, position);
    if (kind == KV_INT4) {
      const int64_t block = (row - inner) * (c->head_dim / 2), four = 4 * (c->head_dim / 2);
      parts->first_rows[v] = row;
      parts->keys[v] = (const char *)c->keys + block + 4 * inner;
      for (int64_t k = 0; k < LANES; k += 4)
        parts->values[(v * LANES + k) / 4] = (const char *)c->values + block + (inner + k) / 4 * four;
      continue;
    }
    const int64_t at = (row - inner) * c->head_dim / step; /* of the block, in words */
    parts->first_rows[v] = row;
    parts->keys[v] = (const char *)c->keys + (at + inner) * word;
    for (int64_t k = 0; k < LANES; k += step)
      parts->values[(v * LANES + k) / step] =
          (const char *)c->values + (at + (inner + k) / step * c->head_dim) * word;
  }
}

/* A last value without a partner gets one of zeros: what lies there may not be finite. */
INLINE void end_values(const Span *span, Rows *state, Parts *parts, const int kind) {
  if (kind == KV_FLOAT32 || span->high % 2 == 0) return;
  const float *from = parts->values[span->high / 2];
  for (int64_t i = 0; i < state->dim; i += LANES)
    store(state->values + i, (f32v)((u32v)load(from + i) & 0xffff));
  parts->values[span->high / 2] = state->values;
}

/* Of the tile's keys that anyone sees; the others' are 0, since those may not be finite. */
INLINE void copy_scales(const void *from, const Span *span, const Parts *parts, float *scales,
                        const int kind) {
  for (int64_t v = 0; v < KEY_TILE / LANES; v++) {
    const int64_t at = parts->first_rows[v];
    store(scales + v * LANES, kind == KV_INT4 ? load_bf16((const uint16_t *)from + at)
                                              : load((const float *)from + at));
  }
  for (int64_t j = 0; j < span->low; j++) scales[j] = 0.0f;
  for (int64_t j = span->high; j < KEY_TILE; j++) scales[j] = 0.0f;
}

/* Codes with keys side by side become words in the scratch; those of the next tile are asked for. */
INLINE void unpack_tile(const KVCache *c, const Span *span, const Parts *codes, const Parts *ahead,
                        Rows *state, const CodeTable *table, const int kind) {
  const CodeTable own = *table; /* which no store changes */
  const int64_t step = 2 * c->block_size;
  for (int64_t v = span->low / LANES; v * LANES < span->high; v++) {
    const uint8_t *from = codes->keys[v], *next = ahead->keys[v];
    float *to = state->keys + v * LANES, *const end = to + state->depth * KEY_TILE;
    for (; to < end; to += 2 * KEY_TILE, from += 2 * step, next += 2 * step) {
      unpack_codes(from, from + step, &own, to, KEY_TILE, kind);
      __builtin_prefetch(next, 0, 2), __builtin_prefetch(next + step, 0, 2);
    }
  }
  for (int64_t j = down_to(span->low / 2, 2); 2 * j < span->high; j += 2) {
    const uint8_t *from = codes->values[j], *second = codes->values[j + 1];
    const uint8_t *next = ahead->values[j], *next_second = ahead->values[j + 1];
    float *const to = state->values + j * state->dim;
    for (int64_t i = 0; i < state->dim; i += LANES) {
      unpack_codes(from + 2 * i, second + 2 * i, &own, to + i, state->dim, kind);
      __builtin_prefetch(next + 2 * i, 0, 2), __builtin_prefetch(next_second + 2 * i, 0, 2);
    }
  }
  copy_scales(c->key_scales, span, codes, state->key_scales, kind);
  copy_scales(c->value_scales, span, codes, state->value_scales, kind);
}
