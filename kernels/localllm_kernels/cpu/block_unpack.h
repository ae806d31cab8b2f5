/* Blocks of GGUF's types, of LANES rows side by side, as codes without a sign with a scale, and for
 * some types an offset, for each group of 16 or 32 inputs. gguf_blocks.py has the same in torch.
 *
 * A lane of a vector belongs to a row, so that everything is unpacked by the same operations for
 * all rows. Codes: [in / 4][LANES][4]; scales, offsets: [groups][LANES]. */

#pragma once

#include "integer_dots.h"
#include "operators.h"

/* What a type's codes stand for: (code - middle) * scale + offset. A type has a middle or offsets. */
typedef struct {
  int64_t values, bytes; /* of a block */
  int group;             /* inputs of a scale */
  int middle;
  int has_offsets;
} BlockForm;

INLINE BlockForm block_form(int64_t type) {
  switch (type) {
    case BLOCK_Q4_0: return (BlockForm){32, 18, 32, 8, 0};
    case BLOCK_Q4_1: return (BlockForm){32, 20, 32, 0, 1};
    case BLOCK_Q5_0: return (BlockForm){32, 22, 32, 16, 0};
    case BLOCK_Q5_1: return (BlockForm){32, 24, 32, 0, 1};
    case BLOCK_Q8_0: return (BlockForm){32, 34, 32, 128, 0};
    case BLOCK_Q2_K: return (BlockForm){256, 84, 16, 0, 1};
    case BLOCK_Q3_K: return (BlockForm){256, 110, 16, 4, 0};
    case BLOCK_Q4_K: return (BlockForm){256, 144, 32, 0, 1};
    case BLOCK_Q5_K: return (BlockForm){256, 176, 32, 0, 1};
    case BLOCK_Q6_K: return (BlockForm){256, 210, 16, 32, 0};
    case BLOCK_IQ4_NL: return (BlockForm){32, 18, 32, 128, 0};
    case BLOCK_IQ4_XS: return (BlockForm){256, 136, 32, 128, 0};
    default: return (BlockForm){32, 17, 32, 12, 0}; /* MXFP4 */
  }
}

/* next: the rows that are unpacked after these, side by side. */
typedef struct {
  const uint8_t *row[LANES], *next;
} BlockLanes;

/* The share of the next rows that stands for `bytes` of each of these rows from byte `at` on:
 * processors do not look ahead in LANES rows at once. */
INLINE void prefetch_next(const BlockLanes *b, int64_t at, int64_t bytes) {
  for (int64_t line = 0; line < LANES * bytes; line += 64)
    __builtin_prefetch(b->next + LANES * at + line, 0, 2);
}

/* Sixteen bytes of each row, from byte `at` on: four vectors of words. */
INLINE void load_words(const BlockLanes *b, int64_t at, u8x4v *words) {
  prefetch_next(b, at, 16);
#if defined(__AVX512F__)
#define QUARTER(i) _mm_loadu_si128((const __m128i *)(b->row[i] + at))
  __m512i z[4];
  for (int i = 0; i < 4; i++) {
    z[i] = _mm512_castsi128_si512(QUARTER(i));
    z[i] = _mm512_inserti32x4(z[i], QUARTER(i + 4), 1);
    z[i] = _mm512_inserti32x4(z[i], QUARTER(i + 8), 2);
    z[i] = _mm512_inserti32x4(z[i], QUARTER(i + 12), 3);
  }
#undef QUARTER
  const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), c = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i e = _mm512_unpacklo_epi32(z[2], z[3]), g = _mm512_unpackhi_epi32(z[2], z[3]);
  words[0] = (u8x4v)_mm512_unpacklo_epi64(a, e), words[1] = (u8x4v)_mm512_unpackhi_epi64(a, e);
  words[2] = (u8x4v)_mm512_unpacklo_epi64(c, g), words[3] = (u8x4v)_mm512_unpackhi_epi64(c, g);
#elif defined(__AVX2__) && LANES == 8
#define QUARTER(i) _mm_loadu_si128((const __m128i *)(b->row[i] + at))
  __m256i z[4];
  for (int i = 0; i < 4; i++) z[i] = _mm256_set_m128i(QUARTER(i + 4), QUARTER(i));
#undef QUARTER
  const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), c = _mm256_unpackhi_epi32(z[0], z[1]);
  const __m256i e = _mm256_unpacklo_epi32(z[2], z[3]), g = _mm256_unpackhi_epi32(z[2], z[3]);
  words[0] = (u8x4v)_mm256_unpacklo_epi64(a, e), words[1] = (u8x4v)_mm256_unpackhi_epi64(a, e);
  words[2] = (u8x4v)_mm256_unpacklo_epi64(c, g), words[3] = (u8x4v)_mm256_unpackhi_epi64(c, g);
#else
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) memcpy((uint8_t *)&words[i] + 4 * lane, b->row[lane] + at + 4 * i, 4);
#endif
}

/* Four bytes of each row: a third of the work of load_words. */
INLINE u32v load_word(const BlockLanes *b, int64_t at) {
  prefetch_next(b, at, 4);
  int32_t word[LANES];
  for (int lane = 0; lane < LANES; lane++) memcpy(&word[lane], b->row[lane] + at, 4);
#define QUARTER(i) _mm_setr_epi32(word[i], word[i + 1], word[i + 2], word[i + 3])
#if defined(__AVX512F__)
  const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512(QUARTER(0)), QUARTER(4), 1);
  return (u32v)_mm512_inserti32x4(_mm512_inserti32x4(low, QUARTER(8), 2), QUARTER(12), 3);
#elif defined(__AVX2__) && LANES == 8
  return (u32v)_mm256_set_m128i(QUARTER(4), QUARTER(0));
#else
  u32v words;
  memcpy(&words, word, sizeof words);
  return words;
#endif
#undef QUARTER
}

/* Bits of bytes, from bit `from` on, moved to bit `to`; compilers know no shifts of bytes. */
INLINE u8x4v move_bits(u8x4v codes, int from, int to, int mask) {
  const u32v moved = from < to ? (u32v)codes << (to - from) : (u32v)codes >> (from - to);
  return (u8x4v)(moved & (0x01010101u * (uint32_t)mask) << to);
}
INLINE u8x4v bits_from(u8x4v codes, int from, int mask) { return move_bits(codes, from, 0, mask); }

/* The half in the lower 16 bits of each lane. */
INLINE f32v half_of(u32v word) {
  const u16v half = __builtin_convertvector(word & 0xffff, u16v);
  uint16_t bits[LANES];
  memcpy(bits, &half, sizeof bits);
  return load_f16(bits);
}

INLINE f32v to_floats(u32v whole) { return __builtin_convertvector((i32v)whole, f32v); }
INLINE f32v to_signed_floats(u32v whole, int middle) {
  return __builtin_convertvector((i32v)whole - middle, f32v);
}

/* Where the codes of 16 values go: to memory, or, for one row of inputs, into the integer sum of their
 * products while they are in registers. */
typedef struct {
  u8x4v *codes; /* or NULL */
  i32v *sums;
  const int32_t *inputs, *input_sums; /* four in a word, and the sums of 16 */
  int middle, bits;                   /* of the codes; a middle is left out where codes are signed */
} Sink;

INLINE void put(const Sink *to, int place, const u8x4v *codes) {
  if (to->codes) {
    for (int i = 0; i < 4; i++) to->codes[4 * place + i] = codes[i];
    return;
  }
  i32v sum = {0};
  if (to->middle) sum -= to->middle * to->input_sums[place];
  for (int i = 0; i < 4; i++)
    sum = dot4(sum, is_signed(to->bits) ? codes[i] ^ 128 : codes[i], to->inputs[4 * place + i],
               to->bits);
  to->sums[place] = sum;
}

/* Values of codes of four bits, from a table of bytes. */
INLINE u8x4v look_up(u8x4v codes, const uint8_t *table) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128((const __m128i *)table);
  return (u8x4v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif defined(__AVX2__) && LANES == 8
  const __m128i values = _mm_loadu_si128((const __m128i *)table);
  return (u8x4v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#elif defined(__aarch64__)
  return (u8x4v)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  for (int i = 0; i < 4 * LANES; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}
/* IQ4's values, 128 above them; MXFP4's doubled ones, 12 above them. */
static const uint8_t iq4_values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                       129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t float4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The codes of 16 bytes: the low halves, for `place`, and the high ones. */
INLINE void put_halves(const BlockLanes *b, int64_t at, const Sink *to, int place, int next) {
  u8x4v words[4], high[4];
  load_words(b, at, words);
  for (int i = 0; i < 4; i++) high[i] = bits_from(words[i], 4, 15), words[i] &= 15;
  put(to, place, words), put(to, next, high);
}

/* put_halves of codes for which a table has values. */
INLINE void put_values(const BlockLanes *b, int64_t at, const Sink *to, int place,
                       const uint8_t *table) {
  u8x4v words[4], high[4];
  load_words(b, at, words);
  for (int i = 0; i < 4; i++) {
    high[i] = look_up(bits_from(words[i], 4, 15), table);
    words[i] = look_up(words[i] & 15, table);
  }
  put(to, place, words), put(to, place + 1, high);
}

/* put_halves of codes that have a fifth bit each, in `bits`. */
INLINE void put_fives(const BlockLanes *b, int64_t at, const Sink *to, u32v bits) {
  u8x4v words[4], codes[8];
  load_words(b, at, words);
  for (int i = 0; i < 8; i++) {
    const u8x4v eight = (u8x4v)((bits >> (8 * (i / 2)) & 255) * 0x01010101u);
    const u8x4v own = (u8x4v)((u32v){0} + (i % 2 ? 0x80402010u : 0x08040201u));
    const u8x4v fifth = (u8x4v)((eight & own) == own) & 16;
    codes[i] = fifth | (i < 4 ? words[i] & 15 : bits_from(words[i - 4], 4, 15));
  }
  put(to, 0, codes), put(to, 1, codes + 4);
}

INLINE void unpack_small(int64_t type, const BlockLanes *b, int64_t at, const Sink *to, f32v *scale,
                         f32v *offset) {
  const u32v first = load_word(b, at);
  u8x4v words[4];
  switch (type) {
    case BLOCK_Q4_0: put_halves(b, at + 2, to, 0, 1); break;
    case BLOCK_Q4_1: put_halves(b, at + 4, to, 0, 1); break;
    case BLOCK_Q5_0: put_fives(b, at + 6, to, load_word(b, at + 2)); break;
    case BLOCK_Q5_1: put_fives(b, at + 8, to, load_word(b, at + 4)); break;
    case BLOCK_Q8_0:
      for (int h = 0; h < 2; h++) {
        load_words(b, at + 2 + 16 * h, words);
        for (int i = 0; i < 4; i++) words[i] ^= 128;
        put(to, h, words);
      }
      break;
    case BLOCK_IQ4_NL: put_values(b, at + 2, to, 0, iq4_values); break;
    default: /* MXFP4 */
      put_values(b, at + 1, to, 0, float4_values);
      *scale = 0.5f * (f32v)((first & 255) << 23);
      return;
  }
  *scale = half_of(first);
  if (type == BLOCK_Q4_1 || type == BLOCK_Q5_1) *offset = half_of(first >> 16);
}

/* The eight scales and offsets of Q4_K and Q5_K, six bits each. */
INLINE void unpack_steps(const BlockLanes *b, int64_t at, f32v *scales, f32v *offsets) {
  u8x4v head[4];
  load_words(b, at, head);
  const u32v first = (u32v)head[1], second = (u32v)head[2], last = (u32v)head[3];
  const f32v scale = half_of((u32v)head[0]), offset = -half_of((u32v)head[0] >> 16);
  for (int j = 0; j < 4; j++) {
    scales[j] = scale * to_floats(first >> (8 * j) & 63);
    offsets[j] = offset * to_floats(second >> (8 * j) & 63);
    scales[4 + j] =
        scale * to_floats((last >> (8 * j) & 15) | (first >> (8 * j + 6) & 3) << 4);
    offsets[4 + j] =
        offset * to_floats((last >> (8 * j + 4) & 15) | (second >> (8 * j + 6) & 3) << 4);
  }
}

INLINE void unpack_q4_k(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales,
                        f32v *offsets) {
  unpack_steps(b, at, scales, offsets);
  for (int g = 0; g < 4; g++)
    for (int h = 0; h < 2; h++)
      put_halves(b, at + 16 + 32 * g + 16 * h, to, 4 * g + h, 4 * g + 2 + h);
}

INLINE void unpack_q5_k(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales,
                        f32v *offsets) {
  unpack_steps(b, at, scales, offsets);
  for (int h = 0; h < 2; h++) {
    u8x4v fifths[4];
    load_words(b, at + 16 + 16 * h, fifths);
    for (int g = 0; g < 4; g++) {
      u8x4v words[4], high[4];
      load_words(b, at + 48 + 32 * g + 16 * h, words);
      for (int i = 0; i < 4; i++) {
        high[i] = bits_from(words[i], 4, 15) | move_bits(fifths[i], 2 * g + 1, 4, 1);
        words[i] = (words[i] & 15) | move_bits(fifths[i], 2 * g, 4, 1);
      }
      put(to, 4 * g + h, words), put(to, 4 * g + 2 + h, high);
    }
  }
}

INLINE void unpack_q6_k(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales) {
  u8x4v steps[4];
  load_words(b, at + 192, steps);
  const f32v scale = half_of(load_word(b, at + 206) >> 16);
  for (int j = 0; j < 16; j++) {
    const i32v step = (i32v)((u32v)steps[j / 4] << (24 - 8 * (j % 4))) >> 24;
    scales[j] = scale * __builtin_convertvector(step, f32v);
  }
  for (int h = 0; h < 2; h++)
    for (int q = 0; q < 2; q++) { /* 16 of each 32 values */
      u8x4v first[4], second[4], high[4], codes[4];
      load_words(b, at + 64 * h + 16 * q, first), load_words(b, at + 64 * h + 32 + 16 * q, second);
      load_words(b, at + 128 + 32 * h + 16 * q, high);
      const int place = 8 * h + q;
      for (int i = 0; i < 4; i++) codes[i] = (first[i] & 15) | move_bits(high[i], 0, 4, 3);
      put(to, place, codes);
      for (int i = 0; i < 4; i++) codes[i] = (second[i] & 15) | move_bits(high[i], 2, 4, 3);
      put(to, place + 2, codes);
      for (int i = 0; i < 4; i++) codes[i] = bits_from(first[i], 4, 15) | move_bits(high[i], 4, 4, 3);
      put(to, place + 4, codes);
      for (int i = 0; i < 4; i++) codes[i] = bits_from(second[i], 4, 15) | move_bits(high[i], 6, 4, 3);
      put(to, place + 6, codes);
    }
}

/* Codes of two bits of 128 values in 32 bytes, from the 128 h-th value on; with `thirds`, a third
 * bit of each. */
INLINE void put_runs(const BlockLanes *b, int64_t at, const Sink *to, const u8x4v *thirds, int h) {
  for (int q = 0; q < 2; q++) {
    u8x4v words[4], codes[4];
    load_words(b, at + 16 * q, words);
    for (int r = 0; r < 4; r++) {
      for (int i = 0; i < 4; i++) {
        codes[i] = bits_from(words[i], 2 * r, 3);
        if (thirds) codes[i] |= move_bits(thirds[4 * q + i], 4 * h + r, 2, 1);
      }
      put(to, 8 * h + 2 * r + q, codes);
    }
  }
}

INLINE void unpack_q3_k(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales) {
  u8x4v mask[8], tail[4];
  load_words(b, at, mask), load_words(b, at + 16, mask + 4);
  load_words(b, at + 94, tail); /* the last two codes, the steps, and the scale */
  const u32v low[2] = {(u32v)tail[0] >> 16 | (u32v)tail[1] << 16,
                       (u32v)tail[1] >> 16 | (u32v)tail[2] << 16};
  const u32v upper = (u32v)tail[2] >> 16 | (u32v)tail[3] << 16;
  const f32v scale = half_of((u32v)tail[3] >> 16);
  for (int j = 0; j < 16; j++) {
    const u32v four = low[j % 8 / 4] >> (8 * (j % 4) + 4 * (j / 8)) & 15;
    const u32v two = upper >> (8 * (j % 4) + 2 * (j / 4)) & 3;
    scales[j] = scale * to_signed_floats(four | two << 4, 32);
  }
  for (int h = 0; h < 2; h++) put_runs(b, at + 32 + 32 * h, to, mask, h);
}

INLINE void unpack_q2_k(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales,
                        f32v *offsets) {
  u8x4v steps[4];
  load_words(b, at, steps);
  const u32v both = load_word(b, at + 80);
  const f32v scale = half_of(both), offset = -half_of(both >> 16);
  for (int j = 0; j < 16; j++) {
    const u32v step = (u32v)steps[j / 4] >> (8 * (j % 4));
    scales[j] = scale * to_floats(step & 15), offsets[j] = offset * to_floats(step >> 4 & 15);
  }
  for (int h = 0; h < 2; h++) put_runs(b, at + 16 + 32 * h, to, NULL, h);
}

INLINE void unpack_iq4_xs(const BlockLanes *b, int64_t at, const Sink *to, f32v *scales) {
  const u32v head = load_word(b, at), low = load_word(b, at + 4);
  const f32v scale = half_of(head);
  for (int j = 0; j < 8; j++) {
    const u32v step = (low >> (4 * j) & 15) | (head >> (16 + 2 * j) & 3) << 4;
    scales[j] = scale * to_signed_floats(step, 32);
    put_values(b, at + 8 + 16 * j, to, 2 * j, iq4_values);
  }
}

/* The block at byte `at` of each row. */
INLINE void unpack_block(int64_t type, const BlockLanes *b, int64_t at, const Sink *to,
                         f32v *scales, f32v *offsets) {
  switch (type) {
    case BLOCK_Q2_K: unpack_q2_k(b, at, to, scales, offsets); break;
    case BLOCK_Q3_K: unpack_q3_k(b, at, to, scales); break;
    case BLOCK_Q4_K: unpack_q4_k(b, at, to, scales, offsets); break;
    case BLOCK_Q5_K: unpack_q5_k(b, at, to, scales, offsets); break;
    case BLOCK_Q6_K: unpack_q6_k(b, at, to, scales); break;
    case BLOCK_IQ4_XS: unpack_iq4_xs(b, at, to, scales); break;
    default: unpack_small(type, b, at, to, scales, offsets);
  }
}
