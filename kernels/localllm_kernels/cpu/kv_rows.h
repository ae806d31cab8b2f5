/* Rows of the paged cache, read as and written from floats; see kv_cache.py for the formulas. */

#pragma once

#include "byte_codes.h"
#include "four_bits.h"

INLINE int64_t value_bytes(int64_t kind) { return kind == KV_FLOAT32 ? 4 : kind == KV_BFLOAT16 ? 2 : 1; }
INLINE int64_t row_bytes(int64_t dim, int64_t kind) {
  return kind == KV_INT4 ? dim / 2 : dim * value_bytes(kind);
}

/* What a row's numbers are multiplied by to become codes, and the scale that undoes it. */
INLINE float code_factor(const float *x, float *scale, int64_t dim, int64_t kind) {
  const float limit = kind == KV_FP8 ? 448.0f : 127.0f;
  f32v largest = splat(0.0f), not_finite = splat(0.0f);
  for (int64_t i = 0; i < dim; i += LANES) {
    const f32v v = dim - i < LANES ? load_part(x + i, dim - i, 0.0f) : load(x + i);
    largest = maxv(largest, maxv(v, -v));
    not_finite += v - v; /* NaN if anything is not finite, and so is the scale then */
  }
  const float most = max_lanes(largest);
  *scale = most / limit + sum_lanes(not_finite);
  return most > 0.0f ? limit / most : 0.0f;
}
INLINE u8v to_codes(f32v x, float factor, int64_t kind) {
  const f32v limit = splat(kind == KV_FP8 ? 448.0f : 127.0f);
  const f32v within = -maxv(-maxv(x * factor, -limit), -limit);
  if (kind == KV_FP8) return to_e4m3(within);
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  return (u8v)__builtin_convertvector((i32v)(within + magic) - (i32v)magic, s8v);
}
INLINE void write_codes(const float *x, uint8_t *to, float *scale, int64_t dim, int64_t kind) {
  const float factor = code_factor(x, scale, dim, kind);
  for (int64_t i = 0; i < dim; i += LANES) {
    const int64_t count = dim - i < LANES ? dim - i : LANES;
    const u8v codes = to_codes(load_part(x + i, count, 0.0f), factor, kind);
    memcpy(to + i, &codes, (size_t)count);
  }
}

INLINE void write_row(const KVCache *c, void *values, float *scales, int64_t row, const float *x) {
  const int64_t dim = c->head_dim;
  if (c->kind == KV_FLOAT32)
    memcpy((float *)values + row * dim, x, (size_t)dim * sizeof(float));
  else if (c->kind == KV_BFLOAT16)
    round_row(x, (uint16_t *)values + row * dim, dim);
  else
    write_codes(x, (uint8_t *)values + row * dim, scales + row, dim, c->kind);
}

/* Whole vectors of numbers, in bfloat16 or as codes: number i of the row goes to `to`, in numbers,
 * + i / 2 · far + i % 2 · near. */
INLINE void write_apart(const KVCache *c, void *values, float *scale, int64_t to, const float *x,
                        int64_t far, int64_t near) {
  if (c->kind == KV_BFLOAT16) {
    uint16_t *halves = (uint16_t *)values + to;
    for (int64_t i = 0; i < c->head_dim; i++) halves[i / 2 * far + i % 2 * near] = to_bf16(x[i]);
    return;
  }
  uint8_t *bytes = (uint8_t *)values + to;
  const float factor = code_factor(x, scale, c->head_dim, c->kind);
  for (int64_t i = 0; i < c->head_dim; i += LANES) {
    const u8v codes = to_codes(load(x + i), factor, c->kind);
    for (int64_t k = 0; k < LANES; k++) bytes[(i + k) / 2 * far + k % 2 * near] = codes[k];
  }
}

/* `at`: the position in the block; a word has two numbers of a key, or one of each of two values. */
INLINE void write_turned_key(const KVCache *c, int64_t row, int64_t at, const float *x) {
  const int64_t dim = c->head_dim, size = c->block_size, start = (row - at) * dim;
  if (c->kind != KV_FLOAT32)
    write_apart(c, c->keys, (float *)c->key_scales + row, start + 2 * at, x, 2 * size, 1);
  else
    for (int64_t i = 0; i < dim; i++) ((float *)c->keys)[start + i * size + at] = x[i];
}
INLINE void write_turned_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  const int64_t start = (row - at % 2) * c->head_dim + at % 2;
  if (c->kind != KV_FLOAT32) write_apart(c, c->values, (float *)c->value_scales + row, start, x, 4, 2);
  else write_row(c, c->values, NULL, row, x);
}

INLINE void write_key(const KVCache *c, int64_t row, int64_t at, const float *x) {
  float less[STORED_DIM + LANES];
  if (c->kind != KV_INT4 && c->key_means) {
    const float *means = c->key_means + row / c->block_size % c->kv_heads * c->head_dim;
    for (int64_t i = 0; i < c->head_dim; i++) less[i] = x[i] - means[i];
    x = less;
  }
  if (c->kind == KV_INT4) write_key4(c, row, at, x);
  else if (c->is_turned) write_turned_key(c, row, at, x);
  else write_row(c, c->keys, c->key_scales, row, x);
}
INLINE void write_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  if (c->values == c->keys) return; /* it is there already */
  if (c->kind == KV_INT4) write_value4(c, row, at, x);
  else if (c->is_turned) write_turned_value(c, row, at, x);
  else write_row(c, c->values, c->value_scales, row, x);
}
