/* Rows of the cache in 4 bits, as four_bits.py has them: rotated, and keys with feedback.
 *
 * Where keys lie side by side, a word has eight numbers of a key, the first four in the low halves of
 * its bytes: [head_dim / 8][block_size][4]; and a byte of values one token's numbers i and
 * i + head_dim / 2: [block_size / 4][head_dim / 2][4]. Each byte belongs to one token, so that threads
 * may write those of a block at once. */

#pragma once

#include <float.h>

#include "operators.h"

#define MIDDLE4 8     /* of codes above what they stand for */

/* Times the Hadamard matrix, its own inverse, by as many neighbours as a power of two divides. */
INLINE void rotate_numbers(float *x, int64_t dim) {
  const int64_t size = dim & -dim;
  const float factor = 1.0f / sqrtf((float)size);
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t i = 0; i < dim; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        const float first = x[j], second = x[j + half];
        x[j] = first + second, x[j + half] = first - second;
      }
  for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

/* Of what is no number, any. */
INLINE float nearest4(float steps) {
  const float whole = rintf(steps);
  return whole > MIDDLE4 - 1 ? MIDDLE4 - 1 : whole > -MIDDLE4 ? whole : -MIDDLE4;
}

INLINE float inverse4(uint16_t scale) {
  const float step = from_bf16(scale);
  return fabsf(step) >= FLT_MIN ? 1.0f / step : 0.0f;
}
/* The sum of the squares that rounding leaves, of whole vectors. */
INLINE float error4(const float *x, int64_t dim, uint16_t scale) {
  const f32v inverse = splat(inverse4(scale)), step = splat(from_bf16(scale));
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  f32v sum = splat(0.0f);
  for (int64_t i = 0; i < dim; i += LANES) {
    const f32v number = load(x + i), whole = fmav(number, inverse, magic) - magic;
    const f32v code = -maxv(-maxv(whole, splat(-MIDDLE4)), splat(1 - MIDDLE4));
    const f32v away = fmav(code, step, -number);
    sum = fmav(away, away, sum);
  }
  return sum_lanes(sum);
}
/* The scale of a row in bfloat16, the best of a few: a bit of `kept` is the scale's, the others are
 * those of `mark`. `x` has whole vectors, whose rest is 0. */
INLINE uint16_t scale4(const float *x, int64_t dim, uint16_t kept, uint16_t mark) {
  static const float reaches[] = {7.5f, -7.5f, 8.5f, -8.5f}; /* the greatest number in steps */
  float most = 0.0f, poison = 0.0f; /* NaN if anything is not finite, and so is the scale then */
  for (int64_t i = 0; i < dim; i++) most = fmaxf(most, fabsf(x[i])), poison += x[i] - x[i];
  uint16_t best = to_bf16(most + poison);
  float least = INFINITY;
  for (int i = 0; i < 4; i++) {
    const uint16_t tried = (to_bf16(most / reaches[i] + poison) & kept) | mark;
    const float error = error4(x, dim, tried);
    if (error < least) least = error, best = tried;
  }
  return best;
}

/* Codes without a sign, and the scale. */
INLINE uint16_t code_value(const float *x, int64_t dim, uint8_t *codes) {
  float rotated[STORED_DIM + LANES] = {0};
  memcpy(rotated, x, (size_t)dim * sizeof(float));
  rotate_numbers(rotated, dim);
  const uint16_t scale = scale4(rotated, dim, 0xffff, 0);
  const float inverse = inverse4(scale);
  for (int64_t i = 0; i < dim; i++) codes[i] = (uint8_t)(nearest4(rotated[i] * inverse) + MIDDLE4);
  return scale;
}
/* The difference from the nearest mean, times the factors; returns which mean that is. */
INLINE uint16_t from_mean(const KVCache *c, int64_t head, const float *x, float *left) {
  const int64_t dim = c->head_dim;
  const float *factors = c->key_factors + head * dim, *means = c->key_means + head * MEANS4 * dim;
  float least = INFINITY;
  uint16_t nearest = 0;
  for (uint16_t m = 0; m < MEANS4; m++) {
    f32v sum = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
      const int64_t count = dim - i < LANES ? dim - i : LANES;
      const f32v away = load_part(x + i, count, 0.0f) - load_part(means + m * dim + i, count, 0.0f);
      const f32v scaled = away * load_part(factors + i, count, 0.0f);
      sum = fmav(scaled, scaled, sum);
    }
    const float distance = sum_lanes(sum);
    if (distance < least) least = distance, nearest = m;
  }
  for (int64_t i = 0; i < dim; i++) left[i] = (x[i] - means[nearest * dim + i]) * factors[i];
  return nearest;
}
INLINE uint16_t code_key(const KVCache *c, int64_t head, const float *x, uint8_t *codes) {
  const int64_t dim = c->head_dim;
  float left[STORED_DIM + LANES] = {0};
  const uint16_t mean = from_mean(c, head, x, left);
  rotate_numbers(left, dim);
  const uint16_t scale = scale4(left, dim, (uint16_t)~(MEANS4 - 1), mean);
  const float step = from_bf16(scale), inverse = inverse4(scale);
  for (int64_t i = 0; i < dim; i++) {
    const float code = nearest4(left[i] * inverse), error = left[i] - code * step;
    const float *feedback = c->key_feedback + (head * dim + i) * dim; /* 0 up to its own place */
    codes[i] = (uint8_t)(code + MIDDLE4);
    for (int64_t j = i / LANES * LANES; j < dim; j += LANES) {
      const int64_t count = dim - j < LANES ? dim - j : LANES;
      store(left + j, fmav(splat(-error), load_part(feedback + j, count, 0.0f), load(left + j)));
    }
  }
  return scale;
}

/* In halves of a row. */
INLINE void place_halves(const uint8_t *codes, int64_t dim, uint8_t *to, int64_t stride) {
  for (int64_t i = 0; i < dim / 2; i++)
    to[i * stride] = (uint8_t)(codes[i] | codes[i + dim / 2] << 4);
}
INLINE void write_key4(const KVCache *c, int64_t row, int64_t at, const float *x) {
  uint8_t codes[STORED_DIM];
  const int64_t dim = c->head_dim, size = c->block_size;
  ((uint16_t *)c->key_scales)[row] = code_key(c, row / size % c->kv_heads, x, codes);
  if (!c->is_turned) {
    place_halves(codes, dim, (uint8_t *)c->keys + row * (dim / 2), 1);
    return;
  }
  uint8_t *to = (uint8_t *)c->keys + (row - at) * (dim / 2) + 4 * at;
  for (int64_t i = 0; i < dim; i += 8, to += 4 * size)
    for (int64_t b = 0; b < 4; b++) to[b] = (uint8_t)(codes[i + b] | codes[i + 4 + b] << 4);
}
INLINE void write_value4(const KVCache *c, int64_t row, int64_t at, const float *x) {
  uint8_t codes[STORED_DIM];
  const int64_t dim = c->head_dim, first = row - at % 4;
  ((uint16_t *)c->value_scales)[row] = code_value(x, dim, codes);
  uint8_t *values = c->values;
  if (c->is_turned) place_halves(codes, dim, values + first * (dim / 2) + at % 4, 4);
  else place_halves(codes, dim, values + row * (dim / 2), 1);
}

/* A query as it meets codes of keys: scores are its product with these, plus the offset of a key's
 * mean. */
INLINE void turn_query(const KVCache *c, int64_t head, float *q, float *offsets) {
  const int64_t dim = c->head_dim;
  const float *factors = c->key_factors + head * dim, *means = c->key_means + head * MEANS4 * dim;
  for (int64_t m = 0; m < MEANS4; m++) {
    offsets[m] = 0.0f;
    for (int64_t i = 0; i < dim; i++) offsets[m] += q[i] * means[m * dim + i];
  }
  for (int64_t i = 0; i < dim; i++) q[i] /= factors[i];
  rotate_numbers(q, dim);
}
/* The offsets of keys with these scales, which have come from bfloat16. */
INLINE f32v offsets_of(const float *offsets, f32v scales) {
  const i32v bits = (i32v)scales;
  const i32v is_odd = (bits & 1 << 16) != 0, is_high = (bits & 2 << 16) != 0;
  return selectv(is_high, selectv(is_odd, splat(offsets[3]), splat(offsets[2])),
                 selectv(is_odd, splat(offsets[1]), splat(offsets[0])));
}
/* What weights, whose sum is given, found in codes of values, or of keys that are values, whose means
 * are all alike. */
INLINE void turn_found(const KVCache *c, int64_t head, float *found, float sum) {
  const int64_t dim = c->head_dim;
  const float *factors = c->key_factors + head * dim, *means = c->key_means + head * MEANS4 * dim;
  rotate_numbers(found, dim);
  if (c->values != c->keys) return;
  for (int64_t i = 0; i < dim; i++) found[i] = found[i] / factors[i] + means[i] * sum;
}
