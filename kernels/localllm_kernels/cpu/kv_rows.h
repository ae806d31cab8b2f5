/* Rows of the paged cache, read as and written from floats; see kv_cache.py for the formulas. */

#pragma once

#include "operators.h"

INLINE int64_t value_bytes(int64_t kind) { return kind == KV_FLOAT32 ? 4 : kind == KV_BFLOAT16 ? 2 : 1; }

/* e4m3 has the bits of a float that is smaller by 2^120, except for zeros between sign and exponent
 * and after the mantissa. */
INLINE f32v from_e4m3(u8v codes) {
#if defined(__AVX512F__)
  const u32v bits = (u32v)_mm512_cvtepu8_epi32((__m128i)codes);
#else
  const u32v bits = __builtin_convertvector(codes, u32v);
#endif
  return (f32v)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * splat(0x1p120f);
}
/* Rounded half to even; at most 448 in absolute value. */
INLINE u8v to_e4m3(f32v values) {
  const u32v bits = (u32v)(values * splat(0x1p-120f)), magnitude = bits & 0x7fffffff;
  const u32v rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  return __builtin_convertvector(rounded | (bits >> 24 & 0x80), u8v);
}

INLINE f32v load_codes(const uint8_t *codes, int64_t kind) {
  u8v bytes;
  memcpy(&bytes, codes, sizeof bytes);
  if (kind == KV_FP8) return from_e4m3(bytes);
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
  return __builtin_convertvector((s8v)bytes, f32v);
#endif
}

INLINE void write_codes(const float *x, uint8_t *to, float *scale, int64_t dim, int64_t kind) {
  const float limit = kind == KV_FP8 ? 448.0f : 127.0f;
  f32v largest = splat(0.0f), not_finite = splat(0.0f);
  for (int64_t i = 0; i < dim; i += LANES) {
    const f32v v = dim - i < LANES ? load_part(x + i, dim - i, 0.0f) : load(x + i);
    largest = maxv(largest, maxv(v, -v));
    not_finite += v - v; /* NaN if anything is not finite, and so is the scale then */
  }
  const float most = max_lanes(largest), factor = most > 0.0f ? limit / most : 0.0f;
  *scale = most / limit + sum_lanes(not_finite);
  for (int64_t i = 0; i < dim; i += LANES) {
    const int64_t count = dim - i < LANES ? dim - i : LANES;
    const f32v v = (count < LANES ? load_part(x + i, count, 0.0f) : load(x + i)) * factor;
    const f32v within = -maxv(-maxv(v, splat(-limit)), splat(-limit));
    u8v codes;
    if (kind == KV_FP8) {
      codes = to_e4m3(within);
    } else {
      const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
      const i32v whole = (i32v)(within + magic) - (i32v)magic;
      codes = (u8v)__builtin_convertvector(whole, s8v);
    }
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

/* `at`: the position in the block; bfloat16 has two numbers of a key, or one of each of two values, in
 * a word. */
INLINE void write_turned_key(const KVCache *c, int64_t row, int64_t at, const float *x) {
  const int64_t dim = c->head_dim, size = c->block_size, start = (row - at) * dim;
  if (c->kind == KV_FLOAT32) {
    for (int64_t i = 0; i < dim; i++) ((float *)c->keys)[start + i * size + at] = x[i];
    return;
  }
  uint16_t *to = (uint16_t *)c->keys + start + 2 * at;
  for (int64_t i = 0; i < dim; i++) to[i / 2 * 2 * size + i % 2] = to_bf16(x[i]);
}
INLINE void write_turned_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  const int64_t dim = c->head_dim;
  if (c->kind == KV_FLOAT32) {
    write_row(c, c->values, NULL, row, x);
    return;
  }
  uint16_t *to = (uint16_t *)c->values + (row - at % 2) * dim + at % 2;
  for (int64_t i = 0; i < dim; i++) to[2 * i] = to_bf16(x[i]);
}

INLINE void write_key(const KVCache *c, int64_t row, int64_t at, const float *x) {
  if (c->is_turned) write_turned_key(c, row, at, x);
  else write_row(c, c->keys, c->key_scales, row, x);
}
INLINE void write_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  if (c->is_turned) write_turned_value(c, row, at, x);
  else write_row(c, c->values, c->value_scales, row, x);
}
