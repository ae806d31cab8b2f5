/* y = x · wᵀ + bias for weights in 4 or 8 bits; see IntegerWeight in operators.h.
 *
 * The inputs are rounded to int8 with one scale per group, so that the products of a group add up
 * as integers, without rounding and in any order; only one product per group is in floats. Dettmers
 * et al. 2022 ("LLM.int8()", section 2) round inputs this way, with one scale per row. */

#include "integer_dots.h"
#include "operators.h"
#include "quantize_rows.h"

#define TILE 8             /* rows that share a pass over the weights */
#define PANEL_BYTES 262144 /* quantized rows that stay in the second-level cache */

/* acc + the products of two vectors of codes of 4 bits, or of small ones. */
INLINE i32v dot8(i32v acc, u8x4v first, u8x4v second, int32_t x, int32_t y) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && LANES == 8
  /* Eight products of a code up to 24 fit in 16 bits. */
  const __m256i low = _mm256_maddubs_epi16((__m256i)first, _mm256_set1_epi32(x));
  const __m256i high = _mm256_maddubs_epi16((__m256i)second, _mm256_set1_epi32(y));
  const __m256i pairs = _mm256_add_epi16(low, high), ones = _mm256_set1_epi16(1);
  return acc + (i32v)_mm256_madd_epi16(pairs, ones);
#else
  return dot4(dot4(acc, first, x, 4), second, y, 4);
#endif
}

INLINE f32v load_scales(const IntegerWeight *w, int64_t at) {
  return w->scale_kind == SCALE_BFLOAT16 ? load_bf16((const uint16_t *)w->scales + at * LANES)
                                         : load((const float *)w->scales + at * LANES);
}

/* Half of two to the exponents; 0 where that is too small for a float that is not subnormal. */
INLINE f32v load_powers(const IntegerWeight *w, int64_t at) {
  u8v bytes;
  memcpy(&bytes, (const uint8_t *)w->scales + at * LANES, sizeof bytes);
  return 0.5f * (f32v)(__builtin_convertvector(bytes, i32v) << 23);
}

/* What a code stands for. FLOAT4: e2m1, whose values are whole numbers once they are doubled. */
enum { SIGNED8, SIGNED4, WITH_ZEROS4, FLOAT4 };
#define FLOAT4_OFFSET 12

/* Codes of e2m1 as doubled values, FLOAT4_OFFSET above them. */
INLINE u8x4v decode_float4(u8x4v codes) {
#define DOUBLED 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
#if defined(__AVX512BW__)
  const __m128i table = _mm_setr_epi8(DOUBLED);
  return (u8x4v)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(DOUBLED));
  return (u8x4v)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
  static const uint8_t table[16] = {DOUBLED};
  return (u8x4v)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  static const uint8_t table[16] = {DOUBLED};
  for (int i = 0; i < 4 * LANES; i++) codes[i] = table[codes[i]];
  return codes;
#endif
#undef DOUBLED
}

/* One block of LANES outputs for `rows` rows; callers pass `rows` and `form` as constants. */
INLINE void multiply_block(const IntegerWeight *w, int64_t block, const QuantizedRows *x, float *y,
                           int rows, int form) {
  const int bits = form == SIGNED8 ? 8 : 4, has_zeros = form == WITH_ZEROS4;
  const int middle = form == FLOAT4 ? FLOAT4_OFFSET : 1 << (bits - 1);
  const int64_t groups = w->width_in / w->group_size, steps = w->group_size / 8;
  const uint8_t *codes = w->codes + block * w->width_in * LANES * bits / 8;
  const int32_t *words = x->words;
  const int two_sums = rows <= TILE / 2; /* few rows: the steps of one sum would wait in line */
  f32v total[TILE];
  for (int r = 0; r < rows; r++) total[r] = splat(0.0f);
  for (int64_t group = 0; group < groups; group++) {
    i32v sum[TILE], other[TILE];
    for (int r = 0; r < rows; r++) {
      const int is_raised = !has_zeros && !(form == SIGNED8 && IS_SIGNED8);
      const int32_t offset = is_raised ? -middle * x->sums[group * rows + r] : 0;
      sum[r] = (i32v){0} + offset, other[r] = (i32v){0};
    }
    for (int64_t step = 0; step < steps; step++, codes += LANES * bits, words += 2 * rows) {
      u8x4v first, second;
      memcpy(&first, codes, sizeof first);
      __builtin_prefetch(codes + 2048);
      if (bits == 8) {
        memcpy(&second, codes + sizeof first, sizeof second);
        __builtin_prefetch(codes + 2048 + sizeof first);
        if (IS_SIGNED8) first ^= 128, second ^= 128;
      } else {
        second = first >> 4, first = first & 15;
        if (form == FLOAT4) first = decode_float4(first), second = decode_float4(second);
      }
      if (bits == 4 && LANES < 16) {
        for (int r = 0; r < rows; r++)
          sum[r] = dot8(sum[r], first, second, words[r], words[rows + r]);
        continue;
      }
      for (int r = 0; r < rows; r++) sum[r] = dot4(sum[r], first, words[r], bits);
      for (int r = 0; r < rows; r++) {
        i32v *to = two_sums ? other + r : sum + r;
        *to = dot4(*to, second, words[rows + r], bits);
      }
    }
    const int64_t at = block * groups + group;
    f32v scales = splat(1.0f);
    if (bits == 4) scales = form == FLOAT4 ? load_powers(w, at) : load_scales(w, at);
    i32v zeros = (i32v){0};
    if (has_zeros) {
      u8v bytes;
      memcpy(&bytes, w->zeros + at * LANES, sizeof bytes);
      zeros = __builtin_convertvector(bytes, i32v);
    }
    for (int r = 0; r < rows; r++) {
      if (two_sums) sum[r] += other[r];
      if (has_zeros) sum[r] -= zeros * x->sums[group * rows + r];
      const float own = x->scales[group * rows + r];
      const f32v scale = bits == 8 ? splat(own) : scales * own;
      total[r] = fmav(__builtin_convertvector(sum[r], f32v), scale, total[r]);
    }
  }
  const int64_t start = block * LANES;
  const int64_t count = w->width_out - start < LANES ? w->width_out - start : LANES;
  const f32v bias = w->bias ? load_part(w->bias + start, count, 0.0f) : splat(0.0f);
  for (int r = 0; r < rows; r++) {
    if (bits == 8) total[r] *= load_scales(w, block);
    store_part(y + r * w->width_out + start, w->bias ? total[r] + bias : total[r], count);
  }
}

INLINE void multiply(const IntegerWeight *w, int64_t block, const QuantizedRows *x, float *y,
                     int64_t rows, int form) {
  switch (rows) {
    case 1: multiply_block(w, block, x, y, 1, form); break;
    case 2: multiply_block(w, block, x, y, 2, form); break;
    case 3: multiply_block(w, block, x, y, 3, form); break;
    case 4: multiply_block(w, block, x, y, 4, form); break;
    case 5: multiply_block(w, block, x, y, 5, form); break;
    case 6: multiply_block(w, block, x, y, 6, form); break;
    case 7: multiply_block(w, block, x, y, 7, form); break;
    default: multiply_block(w, block, x, y, TILE, form); break;
  }
}

static int64_t panel_rows(const IntegerWeight *w, int64_t num_rows) {
  const int64_t row_bytes = quantized_bytes(w->width_in, w->width_in / w->group_size);
  const int64_t rows = PANEL_BYTES / row_bytes / TILE * TILE;
  if (rows < TILE) return num_rows < TILE ? num_rows : TILE;
  return num_rows < rows ? num_rows : rows;
}

int64_t integer_scratch_bytes(const IntegerWeight *w, int64_t rows) {
  const int64_t row_bytes = quantized_bytes(w->width_in, w->width_in / w->group_size);
  return (panel_rows(w, rows) + TILE) * row_bytes;
}

int64_t integer_row_bytes(const IntegerWeight *w) {
  return quantized_bytes(w->width_in, w->width_in / w->group_size);
}

void integer_quantize_row(const IntegerWeight *w, const float *x, int64_t row, int64_t rows,
                          char *memory) {
  const int64_t width = w->width_in, groups = width / w->group_size;
  const int64_t tile = row / TILE, left = rows - tile * TILE, count = left < TILE ? left : TILE;
  const QuantizedRows to =
      place_rows(memory + tile * TILE * integer_row_bytes(w), count, width, groups);
  quantize_row(x, width, w->group_size, &to, row % TILE, count);
}

int64_t integer_blocks(const IntegerWeight *w) { return (w->width_out + LANES - 1) / LANES; }

void integer_multiply_block(const IntegerWeight *w, int64_t block, char *memory, float *y,
                            int64_t rows) {
  const int64_t width = w->width_in, groups = width / w->group_size;
  for (int64_t first = 0; first < rows; first += TILE) {
    const int64_t count = rows - first < TILE ? rows - first : TILE;
    const QuantizedRows from =
        place_rows(memory + first * integer_row_bytes(w), count, width, groups);
    float *to = y + first * w->width_out;
    if (w->bits == 8)
      multiply(w, block, &from, to, count, SIGNED8);
    else if (w->scale_kind == SCALE_E8M0)
      multiply(w, block, &from, to, count, FLOAT4);
    else if (w->zeros)
      multiply(w, block, &from, to, count, WITH_ZEROS4);
    else
      multiply(w, block, &from, to, count, SIGNED4);
  }
}

/* Quantizes a panel into `memory`, then multiplies it tile by tile. */
static void team_multiply_panel(const Team *team, const IntegerWeight *w, const float *x, float *y,
                                int64_t rows, char *memory) {
  TEAM_FOR(team, row, rows)
    integer_quantize_row(w, x + row * w->width_in, row, rows, memory);
  team_meet(team);
  TEAM_FOR(team, block, integer_blocks(w)) integer_multiply_block(w, block, memory, y, rows);
  team_meet(team);
}

void team_integer_linear(const Team *team, const IntegerWeight *w, const float *x, float *y,
                         int64_t rows, char *scratch) {
  const int64_t panel = panel_rows(w, rows);
  for (int64_t first = 0; first < rows; first += panel) {
    const int64_t count = rows - first < panel ? rows - first : panel;
    team_multiply_panel(team, w, x + first * w->width_in, y + first * w->width_out, count, scratch);
  }
}
