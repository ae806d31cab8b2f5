/* y = x · wᵀ + bias for weights in 4 or 8 bits; see IntegerWeight in operators.h.
 *
 * The inputs are rounded to int8 with one scale per group, so that the products of a group add up
 * as integers, without rounding and in any order; only one product per group is in floats. Dettmers
 * et al. 2022 ("LLM.int8()", section 2) round inputs this way, with one scale per row. */

#include "operators.h"
#include "quantize_rows.h"

#define TILE 8             /* rows that share a pass over the weights */
#define PANEL_BYTES 262144 /* quantized rows that stay in the second-level cache */

/* acc + the four products of each lane; w: uint8, x: int8 from -127. */
INLINE i32x16 dot4(i32x16 acc, u8x64 w, int32_t x, int bits) {
#if defined(__AVX512VNNI__)
  (void)bits;
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  __m256i codes[2], sums[2];
  memcpy(codes, &w, sizeof codes), memcpy(sums, &acc, sizeof sums);
  const __m256i values = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; i++) {
    __m256i whole = codes[i];
    if (bits == 8) { /* a pair of products does not fit in 16 bits: the lowest bit goes by itself */
      const __m256i low = _mm256_and_si256(whole, _mm256_set1_epi8(1));
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(low, values), ones));
      whole = _mm256_and_si256(_mm256_srli_epi16(whole, 1), _mm256_set1_epi8(127));
    }
    __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(whole, values), ones);
    if (bits == 8) sum = _mm256_slli_epi32(sum, 1);
    sums[i] = _mm256_add_epi32(sums[i], sum);
  }
  memcpy(&acc, sums, sizeof sums);
  return acc;
#else
  (void)bits;
  int8_t four[4];
  memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) acc[lane] += (int32_t)w[4 * lane + i] * four[i];
  return acc;
#endif
}

INLINE f32x16 load_scales(const IntegerWeight *w, int64_t at) {
  return w->scale_kind == SCALE_BFLOAT16 ? load_bf16((const uint16_t *)w->scales + at * LANES)
                                         : load((const float *)w->scales + at * LANES);
}

/* Half of two to the exponents; 0 where that is too small for a float that is not subnormal. */
INLINE f32x16 load_powers(const IntegerWeight *w, int64_t at) {
  u8x16 bytes;
  memcpy(&bytes, (const uint8_t *)w->scales + at * LANES, sizeof bytes);
  return 0.5f * (f32x16)(__builtin_convertvector(bytes, i32x16) << 23);
}

/* What a code stands for. FLOAT4: e2m1, whose values are whole numbers once they are doubled. */
enum { SIGNED8, SIGNED4, WITH_ZEROS4, FLOAT4 };
#define FLOAT4_OFFSET 12

/* Codes of e2m1 as doubled values, FLOAT4_OFFSET above them. */
INLINE u8x64 decode_float4(u8x64 codes) {
#define DOUBLED 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
#if defined(__AVX512BW__)
  const __m128i table = _mm_setr_epi8(DOUBLED);
  return (u8x64)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(DOUBLED));
  __m256i half[2];
  memcpy(half, &codes, sizeof half);
  for (int i = 0; i < 2; i++) half[i] = _mm256_shuffle_epi8(table, half[i]);
  memcpy(&codes, half, sizeof half);
  return codes;
#else
  static const uint8_t table[16] = {DOUBLED};
  for (int i = 0; i < 64; i++) codes[i] = table[codes[i]];
  return codes;
#endif
#undef DOUBLED
}

/* One block of 16 outputs for `rows` rows; callers pass `rows` and `form` as constants. */
INLINE void multiply_block(const IntegerWeight *w, int64_t block, const QuantizedRows *x, float *y,
                           int rows, int form) {
  const int bits = form == SIGNED8 ? 8 : 4, has_zeros = form == WITH_ZEROS4;
  const int middle = form == FLOAT4 ? FLOAT4_OFFSET : 1 << (bits - 1);
  const int64_t groups = w->width_in / w->group_size, steps = w->group_size / 8;
  const uint8_t *codes = w->codes + block * w->width_in * 2 * bits;
  const int32_t *words = x->words;
  const int two_sums = rows <= TILE / 2; /* few rows: the steps of one sum would wait in line */
  f32x16 total[TILE];
  for (int r = 0; r < rows; r++) total[r] = splat(0.0f);
  for (int64_t group = 0; group < groups; group++) {
    i32x16 sum[TILE], other[TILE];
    for (int r = 0; r < rows; r++) {
      const int32_t offset = has_zeros ? 0 : -middle * x->sums[group * rows + r];
      sum[r] = (i32x16){0} + offset, other[r] = (i32x16){0};
    }
    for (int64_t step = 0; step < steps; step++, codes += 16 * bits, words += 2 * rows) {
      u8x64 first, second;
      memcpy(&first, codes, sizeof first);
      __builtin_prefetch(codes + 2048);
      if (bits == 8) {
        memcpy(&second, codes + 64, sizeof second);
        __builtin_prefetch(codes + 2048 + 64);
      } else {
        second = first >> 4, first = first & 15;
        if (form == FLOAT4) first = decode_float4(first), second = decode_float4(second);
      }
      for (int r = 0; r < rows; r++) sum[r] = dot4(sum[r], first, words[r], bits);
      for (int r = 0; r < rows; r++) {
        i32x16 *to = two_sums ? other + r : sum + r;
        *to = dot4(*to, second, words[rows + r], bits);
      }
    }
    const int64_t at = block * groups + group;
    f32x16 scales = splat(1.0f);
    if (bits == 4) scales = form == FLOAT4 ? load_powers(w, at) : load_scales(w, at);
    i32x16 zeros = (i32x16){0};
    if (has_zeros) {
      u8x16 bytes;
      memcpy(&bytes, w->zeros + at * LANES, sizeof bytes);
      zeros = __builtin_convertvector(bytes, i32x16);
    }
    for (int r = 0; r < rows; r++) {
      if (two_sums) sum[r] += other[r];
      if (has_zeros) sum[r] -= zeros * x->sums[group * rows + r];
      const float own = x->scales[group * rows + r];
      const f32x16 scale = bits == 8 ? splat(own) : scales * own;
      total[r] = fma16(__builtin_convertvector(sum[r], f32x16), scale, total[r]);
    }
  }
  const int64_t start = block * LANES;
  const int64_t count = w->width_out - start < LANES ? w->width_out - start : LANES;
  const f32x16 bias = w->bias ? load_part(w->bias + start, count, 0.0f) : splat(0.0f);
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

static void multiply_all(const Team *team, void *arguments) {
  const LinearCall *a = arguments;
  team_integer_linear(team, a->weight, a->x, a->y, a->rows, a->scratch);
}

/* x: [num_rows, in], y: [num_rows, out]; returns 0, or 1 if there is no memory. */
int integer_linear(const IntegerWeight *w, const float *x, float *y, int64_t num_rows,
                   int64_t threads) {
  char *scratch = malloc((size_t)integer_scratch_bytes(w, num_rows));
  if (!scratch) return 1;
  run_team(threads, multiply_all, &(LinearCall){w, x, y, num_rows, scratch});
  free(scratch);
  return 0;
}
