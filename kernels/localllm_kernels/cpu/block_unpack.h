/* Blocks of GGUF's types, of LANES rows side by side, as codes without a sign with a scale, and for
 * some types an offset, for each group of 16 or 32 inputs. gguf_blocks.py has the same in torch.
 *
 * A lane of a vector belongs to a row, so that everything is unpacked by the same operations for
 * all rows. Codes: [in / 4][LANES][4]; scales, offsets: [groups][LANES]. */

#pragma once

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

/* A block's share of the next rows: processors do not look ahead in LANES rows at once. */
INLINE void prefetch_next(const BlockLanes *b, int64_t at, int64_t bytes) {
  for (int64_t line = 0; line < LANES * bytes; line += 64)
    __builtin_prefetch(b->next + LANES * at + line, 0, 2);
}

/* Sixteen bytes of each row, from byte `at` on: four vectors of words. */
INLINE void load_words(const BlockLanes *b, int64_t at, u8x4v *words) {
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

/* Bits of bytes, from bit `from` on; compilers know no shifts of bytes. */
INLINE u8x4v bits_from(u8x4v codes, int from, int mask) {
  return (u8x4v)((u32v)codes >> from & 0x01010101u * (uint32_t)mask);
}
INLINE u8x4v bits_up(u8x4v codes, int by) { return (u8x4v)((u32v)codes << by); }

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

/* The codes of 16 bytes: low halves, then high halves. */
INLINE void unpack_halves(const BlockLanes *b, int64_t at, u8x4v *codes) {
  u8x4v words[4];
  load_words(b, at, words);
  for (int i = 0; i < 4; i++) codes[i] = words[i] & 15, codes[4 + i] = bits_from(words[i], 4, 15);
}

/* Sixteen times the fifth bits of 32 values, added to their codes. */
INLINE void add_fifth_bits(u32v bits, u8x4v *codes) {
  for (int i = 0; i < 8; i++) {
    const u32v four = bits >> (4 * i) & 15;
    codes[i] |= (u8x4v)((four | four << 7 | four << 14 | four << 21) << 4 & 0x10101010u);
  }
}

/* Values of codes of four bits, from a table of bytes. */
INLINE u8x4v look_up(u8x4v codes, const uint8_t *table) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128((const __m128i *)table);
  return (u8x4v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif defined(__AVX2__) && LANES == 8
  const __m128i values = _mm_loadu_si128((const __m128i *)table);
  return (u8x4v)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#else
  for (int i = 0; i < 4 * LANES; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}
/* IQ4's values, 128 above them; MXFP4's doubled ones, 12 above them. */
static const uint8_t iq4_values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                       129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t float4_values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

INLINE void unpack_small(int64_t type, const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scale,
                         f32v *offset) {
  u8x4v head[4];
  load_words(b, at, head);
  const u32v first = (u32v)head[0];
  switch (type) {
    case BLOCK_Q4_0: unpack_halves(b, at + 2, codes); break;
    case BLOCK_Q4_1: unpack_halves(b, at + 4, codes); break;
    case BLOCK_Q5_0:
      unpack_halves(b, at + 6, codes);
      add_fifth_bits(first >> 16 | (u32v)head[1] << 16, codes);
      break;
    case BLOCK_Q5_1:
      unpack_halves(b, at + 8, codes);
      add_fifth_bits((u32v)head[1], codes);
      break;
    case BLOCK_Q8_0:
      load_words(b, at + 2, codes), load_words(b, at + 18, codes + 4);
      for (int i = 0; i < 8; i++) codes[i] ^= 128;
      break;
    case BLOCK_IQ4_NL:
      unpack_halves(b, at + 2, codes);
      for (int i = 0; i < 8; i++) codes[i] = look_up(codes[i], iq4_values);
      break;
    default: /* MXFP4 */
      unpack_halves(b, at + 1, codes);
      for (int i = 0; i < 8; i++) codes[i] = look_up(codes[i], float4_values);
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

INLINE void unpack_q4_k(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales,
                        f32v *offsets) {
  unpack_steps(b, at, scales, offsets);
  for (int g = 0; g < 4; g++, codes += 16) {
    u8x4v words[8];
    load_words(b, at + 16 + 32 * g, words), load_words(b, at + 32 + 32 * g, words + 4);
    for (int i = 0; i < 8; i++) codes[i] = words[i] & 15, codes[8 + i] = bits_from(words[i], 4, 15);
  }
}

INLINE void unpack_q5_k(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales,
                        f32v *offsets) {
  u8x4v high[8];
  unpack_steps(b, at, scales, offsets);
  load_words(b, at + 16, high), load_words(b, at + 32, high + 4);
  for (int g = 0; g < 4; g++, codes += 16) {
    u8x4v words[8];
    load_words(b, at + 48 + 32 * g, words), load_words(b, at + 64 + 32 * g, words + 4);
    for (int i = 0; i < 8; i++) {
      codes[i] = (words[i] & 15) | bits_up(bits_from(high[i], 2 * g, 1), 4);
      codes[8 + i] = bits_from(words[i], 4, 15) | bits_up(bits_from(high[i], 2 * g + 1, 1), 4);
    }
  }
}

INLINE void unpack_q6_k(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales) {
  u8x4v steps[4];
  load_words(b, at + 192, steps);
  u8x4v tail[4];
  load_words(b, at + 194, tail); /* its last two bytes are the scale */
  const f32v scale = half_of((u32v)tail[3] >> 16);
  for (int j = 0; j < 16; j++) {
    const i32v step = (i32v)((u32v)steps[j / 4] << (24 - 8 * (j % 4))) >> 24;
    scales[j] = scale * __builtin_convertvector(step, f32v);
  }
  for (int h = 0; h < 2; h++, codes += 32) {
    u8x4v low[16], high[8];
    for (int i = 0; i < 4; i++) load_words(b, at + 64 * h + 16 * i, low + 4 * i);
    load_words(b, at + 128 + 32 * h, high), load_words(b, at + 144 + 32 * h, high + 4);
    for (int i = 0; i < 8; i++) {
      codes[i] = (low[i] & 15) | (bits_up(high[i], 4) & 48);
      codes[8 + i] = (low[8 + i] & 15) | (bits_up(high[i], 2) & 48);
      codes[16 + i] = bits_from(low[i], 4, 15) | (high[i] & 48);
      codes[24 + i] = bits_from(low[8 + i], 4, 15) | bits_from(high[i], 2, 48);
    }
  }
}

/* Codes of two bits of 128 values in 32 bytes, with a third bit of the value's number in `third`. */
INLINE void unpack_runs(const BlockLanes *b, int64_t at, u8x4v *codes, const u8x4v *third,
                        int first) {
  u8x4v words[8];
  load_words(b, at, words), load_words(b, at + 16, words + 4);
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < 8; i++) {
      codes[8 * r + i] = bits_from(words[i], 2 * r, 3);
      if (third) codes[8 * r + i] |= bits_up(bits_from(third[i], first + r, 1), 2);
    }
}

INLINE void unpack_q3_k(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales) {
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
  for (int h = 0; h < 2; h++) unpack_runs(b, at + 32 + 32 * h, codes + 32 * h, mask, 4 * h);
}

INLINE void unpack_q2_k(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales,
                        f32v *offsets) {
  u8x4v steps[4], tail[4];
  load_words(b, at, steps), load_words(b, at + 68, tail);
  const u32v both = (u32v)tail[3]; /* behind the last codes */
  const f32v scale = half_of(both), offset = -half_of(both >> 16);
  for (int j = 0; j < 16; j++) {
    const u32v step = (u32v)steps[j / 4] >> (8 * (j % 4));
    scales[j] = scale * to_floats(step & 15), offsets[j] = offset * to_floats(step >> 4 & 15);
  }
  for (int h = 0; h < 2; h++) unpack_runs(b, at + 16 + 32 * h, codes + 32 * h, NULL, 0);
}

INLINE void unpack_iq4_xs(const BlockLanes *b, int64_t at, u8x4v *codes, f32v *scales) {
  u8x4v words[4];
  load_words(b, at, words);
  const u32v head = (u32v)words[0], low = (u32v)words[1];
  const f32v scale = half_of(head);
  for (int j = 0; j < 8; j++) {
    const u32v step = (low >> (4 * j) & 15) | (head >> (16 + 2 * j) & 3) << 4;
    scales[j] = scale * to_signed_floats(step, 32);
    unpack_halves(b, at + 8 + 16 * j, codes + 8 * j);
  }
  for (int i = 0; i < 64; i++) codes[i] = look_up(codes[i], iq4_values);
}

/* `count` values of each row, whole blocks, from block `first` on. */
INLINE void unpack_blocks(int64_t type, const BlockLanes *b, int64_t first, int64_t count,
                          u8x4v *codes, f32v *scales, f32v *offsets) {
  const BlockForm form = block_form(type);
  for (int64_t i = 0; i < count / form.values; i++) {
    const int64_t at = (first + i) * form.bytes, groups = form.values / form.group;
    prefetch_next(b, at, form.bytes);
    switch (type) {
      case BLOCK_Q2_K: unpack_q2_k(b, at, codes, scales, offsets); break;
      case BLOCK_Q3_K: unpack_q3_k(b, at, codes, scales); break;
      case BLOCK_Q4_K: unpack_q4_k(b, at, codes, scales, offsets); break;
      case BLOCK_Q5_K: unpack_q5_k(b, at, codes, scales, offsets); break;
      case BLOCK_Q6_K: unpack_q6_k(b, at, codes, scales); break;
      case BLOCK_IQ4_XS: unpack_iq4_xs(b, at, codes, scales); break;
      default: unpack_small(type, b, at, codes, scales, offsets);
    }
    codes += form.values / 4, scales += groups, offsets += groups;
  }
}
