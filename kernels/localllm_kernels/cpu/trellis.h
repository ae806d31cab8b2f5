/* Weights of 3 bits on a trellis, as trellis.py has them: the steps of a table at windows of 7 bits.
 *
 * A chunk has eight inputs of LANES outputs: [3][LANES] bytes, the bits of each output behind each
 * other. The last bytes of the chunk before, or of a beginning of zeros, have the older bits. */

#pragma once

#include "common.h"

#define STEP_MIDDLE 64 /* of the table's bytes above the steps; they are below 128 */
#define STEP_COUNT 128

/* Steps of the table at the lowest 7 bits of each byte. */
INLINE u8x4v look_up(const uint8_t *table, u8x4v windows) {
#if defined(__AVX512VBMI__) && LANES == 16
  const __m512i low = _mm512_loadu_si512(table), high = _mm512_loadu_si512(table + 64);
  return (u8x4v)_mm512_permutex2var_epi8(low, (__m512i)windows, high);
#elif defined(__AVX2__)
  /* By the lowest four bits, then by each of the others. */
  typedef u8x4v Choices[8];
  Choices of;
  for (int i = 0; i < 8; i++) {
    const __m128i part = _mm_loadu_si128((const __m128i *)(table + 16 * i));
#if LANES == 16
    of[i] = (u8x4v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(part), (__m512i)(windows & 127));
#else
    of[i] = (u8x4v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(part), (__m256i)(windows & 127));
#endif
  }
  for (int bit = 4, count = 4; count; bit++, count /= 2)
    for (int i = 0; i < count; i++) {
#if LANES == 16
      const __mmask64 is_set = _mm512_test_epi8_mask((__m512i)windows, _mm512_set1_epi8(1 << bit));
      of[i] = (u8x4v)_mm512_mask_blend_epi8(is_set, (__m512i)of[2 * i], (__m512i)of[2 * i + 1]);
#else
      const __m256i is_set = (__m256i)(windows << (7 - bit)); /* in the highest bits */
      of[i] = (u8x4v)_mm256_blendv_epi8((__m256i)of[2 * i], (__m256i)of[2 * i + 1], is_set);
#endif
    }
  return of[0];
#elif defined(__aarch64__)
  const uint8x16_t at = (uint8x16_t)windows & 127;
  const uint8x16_t low = vqtbl4q_u8(vld1q_u8_x4(table), at);
  return (u8x4v)vqtbx4q_u8(low, vld1q_u8_x4(table + 64), at - 64);
#else
  for (int i = 0; i < 4 * LANES; i++) windows[i] = table[windows[i] & 127];
  return windows;
#endif
}

/* The steps of a chunk, STEP_MIDDLE above: those of its first four inputs, and of the next four. */
INLINE void unpack_steps(const uint8_t *chunk, const uint8_t *table, u8x4v *first, u8x4v *second) {
  u8x4v bytes; /* those before the chunk too */
  memcpy(&bytes, chunk - LANES, sizeof bytes);
#if defined(__AVX512VBMI__) && LANES == 16
  static const uint8_t order[64] = {
#define OF_LANE(i) i, i + 16, i + 32, i + 48
      OF_LANE(0), OF_LANE(1), OF_LANE(2),  OF_LANE(3),  OF_LANE(4),  OF_LANE(5),  OF_LANE(6),  OF_LANE(7),
      OF_LANE(8), OF_LANE(9), OF_LANE(10), OF_LANE(11), OF_LANE(12), OF_LANE(13), OF_LANE(14), OF_LANE(15)};
#undef OF_LANE
  const __m512i words = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), (__m512i)bytes);
  /* Of two outputs, whose bits begin at 0 and 32. */
  const __m512i at = _mm512_set1_epi64(0x2d2a27240d0a0704), next = _mm512_set1_epi64(0x3936333019161310);
  *first = (u8x4v)_mm512_multishift_epi64_epi8(at, words);
  *second = (u8x4v)_mm512_multishift_epi64_epi8(next, words);
#else
  u8v parts[4];
  memcpy(parts, &bytes, sizeof parts);
  u32v words = (u32v){0};
  for (int i = 0; i < 4; i++) words |= __builtin_convertvector(parts[i], u32v) << 8 * i;
  *first = (u8x4v)((words >> 4 & 0x7f) | (words << 1 & 0x7f00) | (words << 6 & 0x7f0000) |
                   (words << 11 & 0x7f000000));
  *second = (u8x4v)((words >> 16 & 0x7f) | (words >> 11 & 0x7f00) | (words >> 6 & 0x7f0000) |
                    (words >> 1 & 0x7f000000));
#endif
  *first = look_up(table, *first), *second = look_up(table, *second);
}

#define MOST_MIXED 256

/* x · signs, mixed by the Hadamard matrix: as many as a power of two divides, which lie evenly apart. */
INLINE void rotate_inputs(const float *x, const float *signs, float *y, int64_t width) {
  const int64_t most = width & -width, mixed = most < MOST_MIXED ? most : MOST_MIXED;
  for (int64_t i = 0; i < width; i++) y[i] = x[i] * signs[i];
  for (int64_t run = width, half; run * mixed > width; run = half) {
    half = run / 2;
    for (int64_t i = 0; i < width; i += run)
      for (int64_t j = i; j < i + half; j++) {
        const float first = y[j], second = y[j + half];
        y[j] = first + second, y[j + half] = first - second;
      }
  }
}
