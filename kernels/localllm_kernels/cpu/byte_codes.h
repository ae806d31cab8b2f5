/* Codes of eight bits, whole numbers with a sign or e4m3, and the numbers that they are. */

#pragma once

#include "operators.h"
#include "words.h"

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
/* Two codes in each lane of two vectors, as words of two numbers. */
typedef struct {
  f32v of[2];
} Words;
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
INLINE Words unpack_words(const uint8_t *first, const uint8_t *second, const CodeTable *table,
                          const int kind) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); /* whose bytes then interleave */
  const __m512i both = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first)),
      _mm256_loadu_si256((const __m256i *)second), 1);
  const __m512i codes = _mm512_permutexvar_epi64(order, both);
  const __m512i sizes = kind == KV_INT8 ? _mm512_abs_epi8(codes) : codes;
  const __m512i low = _mm512_permutex2var_epi8(table->lower[0], sizes, table->lower[1]);
  const __m512i high = _mm512_permutex2var_epi8(table->upper[0], sizes, table->upper[1]) |
                       (codes & _mm512_set1_epi8((char)0x80));
  return (Words){{(f32v)_mm512_unpacklo_epi8(low, high), (f32v)_mm512_unpackhi_epi8(low, high)}};
}
#else
typedef char CodeTable;
INLINE CodeTable code_table(const int kind) { return (CodeTable)kind; }
INLINE Words unpack_words(const uint8_t *first, const uint8_t *second, const CodeTable *table,
                          const int kind) {
  Words found;
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
    found.of[i] = paired(low, high);
  }
  return found;
}
#endif
INLINE void unpack_codes(const uint8_t *first, const uint8_t *second, const CodeTable *table,
                         float *words, int64_t stride, const int kind) {
  const Words found = unpack_words(first, second, table, kind);
  store(words, found.of[0]), store(words + stride, found.of[1]);
}
