/* Rows of the cache in 4 bits, as four_bits.py has them: rotated, and keys with feedback.
 *
 * Where keys lie side by side, a word has eight numbers of a key, the first four in the low halves of
 * its bytes: [head_dim / 8][block_size][4]; and a byte of values one token's numbers i and
 * i + head_dim / 2: [block_size / 4][head_dim / 2][4]. Each byte belongs to one token, so that threads
 * may write those of a block at once. */

#pragma once

#include "operators.h"

#define MIDDLE4 8     /* of codes above what they stand for */
#define REACH4 7.5f   /* a row's greatest number in steps */

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

/* The scale of a row in bfloat16; `inverse`: what makes codes of its numbers. */
INLINE uint16_t scale4(const float *x, int64_t dim, float *inverse) {
  float most = 0.0f, poison = 0.0f; /* NaN if anything is not finite, and so is the scale then */
  for (int64_t i = 0; i < dim; i++) most = fmaxf(most, fabsf(x[i])), poison += x[i] - x[i];
  const uint16_t scale = to_bf16(most / REACH4 + poison);
  const float step = from_bf16(scale);
  *inverse = step > 0.0f ? 1.0f / step : 0.0f;
  return scale;
}
/* Of what is no number, any. */
INLINE float nearest4(float steps) {
  const float whole = rintf(steps);
  return whole > MIDDLE4 - 1 ? MIDDLE4 - 1 : whole > -MIDDLE4 ? whole : -MIDDLE4;
}

/* Codes without a sign, and the scale. */
INLINE uint16_t code_value(const float *x, int64_t dim, uint8_t *codes) {
  float rotated[MAX_DIM], inverse;
  memcpy(rotated, x, (size_t)dim * sizeof(float));
  rotate_numbers(rotated, dim);
  const uint16_t scale = scale4(rotated, dim, &inverse);
  for (int64_t i = 0; i < dim; i++) codes[i] = (uint8_t)(nearest4(rotated[i] * inverse) + MIDDLE4);
  return scale;
}
INLINE uint16_t code_key(const KVCache *c, int64_t head, const float *x, uint8_t *codes) {
  const int64_t dim = c->head_dim, at = head * dim;
  float left[MAX_DIM + LANES] = {0}, inverse;
  for (int64_t i = 0; i < dim; i++) left[i] = (x[i] - c->key_means[at + i]) * c->key_factors[at + i];
  rotate_numbers(left, dim);
  const uint16_t scale = scale4(left, dim, &inverse);
  const float step = from_bf16(scale);
  for (int64_t i = 0; i < dim; i++) {
    const float code = nearest4(left[i] * inverse), error = left[i] - code * step;
    const float *feedback = c->key_feedback + (at + i) * dim; /* 0 up to its own place */
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
  uint8_t codes[MAX_DIM];
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
  uint8_t codes[MAX_DIM];
  const int64_t dim = c->head_dim, first = row - at % 4;
  ((uint16_t *)c->value_scales)[row] = code_value(x, dim, codes);
  uint8_t *values = c->values;
  if (c->is_turned) place_halves(codes, dim, values + first * (dim / 2) + at % 4, 4);
  else place_halves(codes, dim, values + row * (dim / 2), 1);
}

/* A query as it meets codes of keys: scores are its product with these, plus what is returned. */
INLINE float turn_query(const KVCache *c, int64_t head, float *q) {
  const int64_t dim = c->head_dim, at = head * dim;
  float offset = 0.0f;
  for (int64_t i = 0; i < dim; i++) {
    offset += q[i] * c->key_means[at + i];
    q[i] /= c->key_factors[at + i];
  }
  rotate_numbers(q, dim);
  return offset;
}
/* What weights found in codes of values, or of keys that are values. */
INLINE void turn_found(const KVCache *c, int64_t head, float *found) {
  const int64_t dim = c->head_dim, at = head * dim;
  rotate_numbers(found, dim);
  if (c->values != c->keys) return;
  for (int64_t i = 0; i < dim; i++)
    found[i] = found[i] / c->key_factors[at + i] + c->key_means[at + i];
}
