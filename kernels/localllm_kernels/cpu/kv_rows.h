/* Rows of the paged cache, read as and written from floats; see kv_cache.py for the formulas. */

#pragma once

#include "operators.h"
#include "words.h"

INLINE int64_t value_bytes(int64_t kind) { return kind == KV_FLOAT32 ? 4 : kind == KV_BFLOAT16 ? 2 : 1; }

/* e4m3 has the bits of a float that is smaller by 2^120, except for zeros between sign and exponent
 * and after the mantissa. */
INLINE f32v from_e4m3(u32v bits) {
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
#if defined(__AVX512F__)
  if (kind == KV_FP8) return from_e4m3((u32v)_mm512_cvtepu8_epi32((__m128i)bytes));
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
  if (kind == KV_FP8) return from_e4m3(__builtin_convertvector(bytes, u32v));
  return __builtin_convertvector((s8v)bytes, f32v);
#endif
}
/* How codes become numbers in bfloat16, which has them exactly. */
#if defined(__AVX512VBMI__)
/* Bytes of the numbers for the codes 0 to 127; with their sign, others stand for the same. */
typedef struct {
  __m512i lower[2], upper[2];
} CodeTable;

INLINE CodeTable code_table(const int kind) {
  uint8_t codes[128], lower[128], upper[128];
  float numbers[LANES];
  uint32_t bits[LANES];
  for (int64_t i = 0; i < 128; i++) codes[i] = (uint8_t)i;
  for (int64_t i = 0; i < 128; i += LANES) {
    store(numbers, load_codes(codes + i, kind));
    memcpy(bits, numbers, sizeof bits);
    for (int64_t k = 0; k < LANES; k++)
      lower[i + k] = (uint8_t)(bits[k] >> 16), upper[i + k] = (uint8_t)(bits[k] >> 24);
  }
  return (CodeTable){{_mm512_loadu_si512(lower), _mm512_loadu_si512(lower + 64)},
                     {_mm512_loadu_si512(upper), _mm512_loadu_si512(upper + 64)}};
}
/* Two codes in each lane of two vectors, as words: `words` and `stride` floats after it. */
INLINE void unpack_codes(const uint8_t *first, const uint8_t *second, const CodeTable *table,
                         float *words, int64_t stride, const int kind) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); /* whose bytes then interleave */
  const __m512i both = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first)),
      _mm256_loadu_si256((const __m256i *)second), 1);
  const __m512i codes = _mm512_permutexvar_epi64(order, both);
  const __m512i sizes = kind == KV_INT8 ? _mm512_abs_epi8(codes) : codes;
  const __m512i low = _mm512_permutex2var_epi8(table->lower[0], sizes, table->lower[1]);
  const __m512i high = _mm512_permutex2var_epi8(table->upper[0], sizes, table->upper[1]) |
                       (codes & _mm512_set1_epi8((char)0x80));
  store(words, (f32v)_mm512_unpacklo_epi8(low, high));
  store(words + stride, (f32v)_mm512_unpackhi_epi8(low, high));
}
#else
typedef char CodeTable;
INLINE CodeTable code_table(const int kind) { return (CodeTable)kind; }
INLINE void unpack_codes(const uint8_t *first, const uint8_t *second, const CodeTable *table,
                         float *words, int64_t stride, const int kind) {
  (void)table;
  for (int i = 0; i < 2; i++) {
    const u32v pairs = load_u16((const uint16_t *)(i ? second : first));
    f32v low, high;
    if (kind == KV_FP8) {
      low = from_e4m3(pairs & 0xff), high = from_e4m3(pairs >> 8);
    } else {
      low = __builtin_convertvector((i32v)(pairs << 24) >> 24, f32v);
      high = __builtin_convertvector((i32v)(pairs << 16) >> 24, f32v);
    }
    store(words + i * stride, paired(low, high));
  }
}
#endif

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
    write_apart(c, c->keys, c->key_scales + row, start + 2 * at, x, 2 * size, 1);
  else
    for (int64_t i = 0; i < dim; i++) ((float *)c->keys)[start + i * size + at] = x[i];
}
INLINE void write_turned_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  const int64_t start = (row - at % 2) * c->head_dim + at % 2;
  if (c->kind != KV_FLOAT32) write_apart(c, c->values, c->value_scales + row, start, x, 4, 2);
  else write_row(c, c->values, NULL, row, x);
}

INLINE void write_key(const KVCache *c, int64_t row, int64_t at, const float *x) {
  if (c->is_turned) write_turned_key(c, row, at, x);
  else write_row(c, c->keys, c->key_scales, row, x);
}
INLINE void write_value(const KVCache *c, int64_t row, int64_t at, const float *x) {
  if (c->is_turned) write_turned_value(c, row, at, x);
  else write_row(c, c->values, c->value_scales, row, x);
}
