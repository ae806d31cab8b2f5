/* y = x · wᵀ + bias for weights in 3, 4 or 8 bits; see IntegerWeight in operators.h.
 *
 * The inputs are rounded to int8 with one scale per group, so that the products of a group add up
 * as integers, without rounding and in any order; only one product per group is in floats. Dettmers
 * et al. 2022 ("LLM.int8()", section 2) round inputs this way, with one scale per row. Inputs that are
 * kept apart are multiplied as floats with the codes' values. */

#include "integer_dots.h"
#include "operators.h"
#include "quantize_rows.h"
#include "tiles.h"
#include "transpose.h"
#include "trellis.h"

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

INLINE i32v load_bytes(const void *bytes, int64_t at) {
  u8v found;
  memcpy(&found, (const uint8_t *)bytes + at * LANES, sizeof found);
  return __builtin_convertvector(found, i32v);
}

/* Half of two to the exponents; 0 where that is too small for a float that is not subnormal. */
INLINE f32v load_powers(const IntegerWeight *w, int64_t at) {
  return 0.5f * (f32v)(load_bytes(w->scales, at) << 23);
}

/* Half of the floats of e4m3, which are whole numbers of 2^-9: up to 15 · 2^14 of them. */
INLINE f32v load_e4m3(const IntegerWeight *w, int64_t at) {
  const i32v bytes = load_bytes(w->scales, at), exponent = bytes >> 3 & 15, sign = bytes << 24;
  const i32v is_normal = exponent > 0; /* -1 where it is */
  const i32v whole = ((bytes & 7) - 8 * is_normal) << (exponent + is_normal);
  const f32v found = __builtin_convertvector(whole, f32v) * 0x1p-10f;
  return (f32v)((i32v)found | (sign & INT32_MIN));
}

/* What a code stands for. FLOAT4: e2m1, whose values are whole numbers once they are doubled, with a
 * power of two for each group; FLOAT4_SCALED: with a float of e4m3. */
enum { SIGNED8, SIGNED4, WITH_ZEROS4, FLOAT4, FLOAT4_SCALED, TRELLIS3 };
INLINE int bits_of(int form) { return form == SIGNED8 ? 8 : form == TRELLIS3 ? 3 : 4; }
INLINE int has_scales(int form) { return form != SIGNED8 && form != TRELLIS3; } /* of groups */
INLINE int is_float4(int form) { return form == FLOAT4 || form == FLOAT4_SCALED; }
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

/* What the sums of one group and block are multiplied with, and their zeros. */
typedef struct {
  f32v scales;
  i32v zeros;
} Factors;
INLINE Factors load_factors(const IntegerWeight *w, int64_t at, int form) {
  Factors found = {splat(1.0f), (i32v){0}};
  if (form == FLOAT4) found.scales = load_powers(w, at);
  else if (form == FLOAT4_SCALED) found.scales = load_e4m3(w, at);
  else if (has_scales(form)) found.scales = load_scales(w, at);
  if (form == WITH_ZEROS4) found.zeros = load_bytes(w->zeros, at);
  return found;
}

/* total + the sum of a group, whose inputs have the scale and the sum of their own codes at x[at]. */
INLINE f32v add_group(f32v total, i32v sum, const Factors *by, const QuantizedRows *x, int64_t at,
                      int form) {
  if (form == WITH_ZEROS4) sum -= by->zeros * x->sums[at];
  const f32v scale = has_scales(form) ? by->scales * x->scales[at] : splat(x->scales[at]);
  return fmav(__builtin_convertvector(sum, f32v), scale, total);
}

/* The codes of eight inputs as bytes: those of the first four, and of the next four. */
INLINE void unpack(const IntegerWeight *w, const uint8_t *codes, u8x4v *first, u8x4v *second,
                   int form) {
  if (form == TRELLIS3) {
    unpack_steps(codes, w->table, first, second);
    return;
  }
  memcpy(first, codes, sizeof *first);
  if (form == SIGNED8) {
    memcpy(second, codes + sizeof *first, sizeof *second);
    return;
  }
  *second = *first >> 4, *first &= 15;
  if (is_float4(form)) *first = decode_float4(*first), *second = decode_float4(*second);
}
/* What the codes are above those that they stand for. */
INLINE int middle_of(int form) {
  if (form == TRELLIS3) return STEP_MIDDLE;
  return is_float4(form) ? FLOAT4_OFFSET : form == SIGNED8 ? 128 : form == SIGNED4 ? 8 : 0;
}

/* The codes of input `i` less their middle, of a block. */
INLINE i32v column_of(const IntegerWeight *w, const uint8_t *codes, int64_t i, int form) {
  u8x4v first, second;
  unpack(w, codes + i / 8 * LANES * bits_of(form), &first, &second, form);
  return ((i32v)(i % 8 < 4 ? first : second) >> (int)(8 * (i % 4)) & 255) - middle_of(form);
}

INLINE void store_totals(const IntegerWeight *w, int64_t block, const f32v *total, float *y,
                         int64_t rows) {
  const int64_t start = block * LANES;
  const int64_t count = w->width_out - start < LANES ? w->width_out - start : LANES;
  const f32v bias = w->bias ? load_part(w->bias + start, count, 0.0f) : splat(0.0f);
  for (int64_t r = 0; r < rows; r++) {
    const f32v found = w->factors ? total[r] * load(w->factors + block * LANES) : total[r];
    store_part(y + r * w->width_out + start, w->bias ? found + bias : found, count);
  }
}

/* One block of LANES outputs for `rows` rows; callers pass `rows` and `form` as constants. */
INLINE void multiply_block(const IntegerWeight *w, int64_t block, const uint8_t *codes,
                           const QuantizedRows *x, float *y, int rows, int form) {
  const int bits = bits_of(form);
  const int middle = form == SIGNED8 && IS_SIGNED8 ? 0 : middle_of(form);
  const int64_t groups = w->width_in / w->group_size, steps = w->group_size / 8;
  const int32_t *words = x->words;
  const int two_sums = rows <= TILE / 2; /* few rows: the steps of one sum would wait in line */
  f32v total[TILE];
  for (int r = 0; r < rows; r++) total[r] = splat(0.0f);
  for (int64_t group = 0; group < groups; group++) {
    i32v sum[TILE], other[TILE];
    for (int r = 0; r < rows; r++) {
      const int32_t offset = middle ? -middle * x->sums[group * rows + r] : 0;
      sum[r] = (i32v){0} + offset, other[r] = (i32v){0};
    }
    for (int64_t step = 0; step < steps; step++, codes += LANES * bits, words += 2 * rows) {
      u8x4v first, second;
      unpack(w, codes, &first, &second, form);
      __builtin_prefetch(codes + 2048);
      if (bits == 8) __builtin_prefetch(codes + 2048 + sizeof first);
      if (bits == 8 && IS_SIGNED8) first ^= 128, second ^= 128;
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
    const Factors by = load_factors(w, block * groups + group, form);
    for (int r = 0; r < rows; r++) {
      if (two_sums) sum[r] += other[r];
      total[r] = add_group(total[r], sum[r], &by, x, group * rows + r, form);
    }
  }
  store_totals(w, block, total, y, rows);
}

/* Adds the products of the inputs that are apart to outputs that are stored; `codes`: those of the
 * block. */
static void add_apart(const IntegerWeight *w, int64_t block, const uint8_t *codes,
                      const QuantizedRows *x, float *y, int64_t rows, int form) {
  const int64_t groups = w->width_in / w->group_size, most = most_apart(w->width_in);
  const int64_t start = block * LANES, left = w->width_out - start, count = left < LANES ? left : LANES;
  for (int64_t r = 0; r < rows; r++) {
    float *to = y + r * w->width_out + start;
    f32v total = splat(0.0f);
    for (int64_t i = 0; i < x->num_apart[r]; i++) {
      ApartInput each = x->apart[r * most + i];
      int32_t one = 1; /* an input's code, and its value is the scale */
      const QuantizedRows alone = {.scales = &each.value, .sums = &one};
      const Factors by = load_factors(w, block * groups + each.input / w->group_size, form);
      total = add_group(total, column_of(w, codes, each.input, form), &by, &alone, 0, form);
    }
    if (w->factors) total *= load(w->factors + block * LANES);
    if (x->num_apart[r]) store_part(to, load_part(to, count, 0.0f) + total, count);
  }
}
INLINE int has_apart(const QuantizedRows *x, int64_t rows) {
  int32_t found = 0;
  for (int64_t r = 0; r < rows; r++) found |= x->num_apart[r];
  return found != 0;
}

INLINE void multiply(const IntegerWeight *w, int64_t block, const uint8_t *codes,
                     const QuantizedRows *x, float *y, int64_t rows, int form) {
  switch (rows) {
    case 1: multiply_block(w, block, codes, x, y, 1, form); break;
    case 2: multiply_block(w, block, codes, x, y, 2, form); break;
    case 3: multiply_block(w, block, codes, x, y, 3, form); break;
    case 4: multiply_block(w, block, codes, x, y, 4, form); break;
    case 5: multiply_block(w, block, codes, x, y, 5, form); break;
    case 6: multiply_block(w, block, codes, x, y, 6, form); break;
    case 7: multiply_block(w, block, codes, x, y, 7, form); break;
    default: multiply_block(w, block, codes, x, y, TILE, form); break;
  }
  if (has_apart(x, rows)) add_apart(w, block, codes, x, y, rows, form);
}

#if HAS_TILES
/* A block for `count` tiles of `rows` rows each, which share the codes; callers pass `count` and `form`
 * as constants. */
INLINE void multiply_in_tiles(const IntegerWeight *w, int64_t block, const uint8_t *codes,
                              const QuantizedRows *x, float *y, int64_t rows, const int count,
                              int form) {
  const int64_t group_words = w->group_size / 4, groups = w->width_in / w->group_size;
  const int64_t words = group_words % TILE_ROWS == 0 ? TILE_ROWS : 4; /* of a tile: its depth */
  const int step = LANES * bits_of(form), middle = middle_of(form);
  const uint8_t *const start = codes;
  f32v total[TILES * TILE_ROWS];
  for (int64_t r = 0; r < count * rows; r++) total[r] = splat(0.0f);
  shape_tiles(rows, words);
  for (int64_t group = 0; group < groups; group++) {
    for (int64_t from = 0; from < group_words; from += words) {
      u8x4v unpacked[TILE_ROWS];
      for (int64_t i = 0; i < words; i += 2, codes += step) {
        unpack(w, codes, unpacked + i, unpacked + i + 1, form);
        for (int ahead = 0; ahead < step; ahead += 64) __builtin_prefetch(codes + 2048 + ahead);
      }
      LOAD_COLUMNS(unpacked);
      const int64_t at = group * group_words + from;
      ADD_BYTES(0, x[0].words + at, w->width_in);
      if (count > 1) ADD_BYTES(1, x[1].words + at, w->width_in);
      if (count > 2) ADD_BYTES(2, x[2].words + at, w->width_in);
      if (count > 3) ADD_BYTES(3, x[3].words + at, w->width_in);
    }
    i32v sums[TILES * TILE_ROWS];
    TAKE_SUMS(0, sums);
    if (count > 1) TAKE_SUMS(1, sums + TILE_ROWS);
    if (count > 2) TAKE_SUMS(2, sums + 2 * TILE_ROWS);
    if (count > 3) TAKE_SUMS(3, sums + 3 * TILE_ROWS);
    const Factors by = load_factors(w, block * groups + group, form);
    for (int64_t t = 0; t < count; t++)
      for (int64_t r = 0, at = group * rows; r < rows; r++, at++)
        total[t * rows + r] = add_group(total[t * rows + r],
                                        sums[t * TILE_ROWS + r] - middle * x[t].sums[at], &by, x + t,
                                        at, form);
  }
  store_totals(w, block, total, y, count * rows);
  for (int64_t t = 0; t < count; t++)
    if (has_apart(x + t, rows))
      add_apart(w, block, start, x + t, y + t * rows * w->width_out, rows, form);
}
#endif

/* Whether `rows` rows are multiplied in tiles of the processor: more than others take at once. */
INLINE int in_tiles(int64_t rows) { return HAS_TILES && rows > TILE && tiles_are_allowed(); }

/* The rows of a tile out of `rows`, and those of its number `first`. */
INLINE int64_t tile_rows(int64_t rows) { return in_tiles(rows) ? TILE_ROWS : TILE; }
INLINE QuantizedRows tile_from(const IntegerWeight *w, int64_t first, int64_t rows, char *memory) {
  const int64_t most = tile_rows(rows), left = rows - first, count = left < most ? left : most;
  return place_rows(memory + first * integer_row_bytes(w), count, w->width_in,
                    w->width_in / w->group_size, most == TILE_ROWS);
}

/* The codes of a block as the others have them, from rows that lie apart. */
static void turn_block(const IntegerWeight *w, int64_t block, uint8_t *turned) {
  const int64_t width = w->width_in, last = w->width_out - 1;
  const uint8_t *rows[LANES];
  for (int64_t o = 0, at = block * LANES; o < LANES; o++, at++)
    rows[o] = w->codes + (at < last ? at : last) * width;
  for (int64_t i = 0; i < width; i += 4 * LANES, turned += 4 * LANES * LANES) {
    f32v words[LANES];
    for (int o = 0; o < LANES; o++) {
      memcpy(words + o, rows[o] + i, sizeof words[o]);
      __builtin_prefetch(rows[o] + i + LANES * width, 0, 2);
    }
    transpose(words);
    for (int k = 0; k < LANES; k++) {
      const u8x4v raised = (u8x4v)words[k] ^ 128;
      memcpy(turned + 4 * LANES * k, &raised, sizeof raised);
    }
  }
}

INLINE void multiply_panel(const IntegerWeight *w, int64_t block, char *memory, float *y, int64_t rows,
                           int form) {
  const int before = form == TRELLIS3 ? LANES : 0; /* bytes of a block before its chunks */
  const int64_t most = tile_rows(rows), bytes = before + w->width_in * LANES * bits_of(form) / 8;
  const int is_in_rows = form == SIGNED8 && w->is_in_rows;
  const uint8_t *codes = w->codes + block * bytes + before;
  uint8_t turned[is_in_rows ? bytes : 1];
  if (is_in_rows) turn_block(w, block, turned), codes = turned;
  for (int64_t first = 0, count; first < rows; first += count) {
    const QuantizedRows x = tile_from(w, first, rows, memory);
    float *to = y + first * w->width_out;
    count = rows - first < most ? rows - first : most;
#if HAS_TILES
    if (most == TILE_ROWS) {
      if (rows - first >= TILES * TILE_ROWS) {
        QuantizedRows parts[TILES];
        for (int t = 0; t < TILES; t++) parts[t] = tile_from(w, first + t * TILE_ROWS, rows, memory);
        multiply_in_tiles(w, block, codes, parts, to, TILE_ROWS, TILES, form);
        count = TILES * TILE_ROWS;
      } else {
        multiply_in_tiles(w, block, codes, &x, to, count, 1, form);
      }
      continue;
    }
#endif
    multiply(w, block, codes, &x, to, count, form);
  }
#if HAS_TILES
  if (most == TILE_ROWS) _tile_release();
#endif
}

static int64_t panel_rows(const IntegerWeight *w, int64_t num_rows) {
  const int64_t most = tile_rows(num_rows);
  const int64_t bytes = codes_bytes(w->width_in, w->width_in / w->group_size);
  const int64_t rows = PANEL_BYTES / bytes / most * most;
  if (rows < most) return num_rows < most ? num_rows : most;
  return num_rows < rows ? num_rows : rows;
}

int64_t integer_row_bytes(const IntegerWeight *w) {
  return quantized_bytes(w->width_in, w->width_in / w->group_size);
}

int64_t integer_scratch_bytes(const IntegerWeight *w, int64_t rows) {
  return panel_rows(w, rows) * integer_row_bytes(w);
}

void integer_quantize_row(const IntegerWeight *w, const float *x, int64_t row, int64_t rows,
                          char *memory) {
  const int64_t most = tile_rows(rows), first = row / most * most, left = rows - first;
  const QuantizedRows to = tile_from(w, first, rows, memory);
  float rotated[w->signs ? w->width_in : 1];
  if (w->signs) rotate_inputs(x, w->signs, rotated, w->width_in), x = rotated;
  quantize_row(x, w->width_in, w->group_size, &to, row - first, left < most ? left : most);
}

int64_t integer_blocks(const IntegerWeight *w) { return (w->width_out + LANES - 1) / LANES; }

void integer_multiply_block(const IntegerWeight *w, int64_t block, char *memory, float *y,
                            int64_t rows) {
  if (w->bits == 8)
    multiply_panel(w, block, memory, y, rows, SIGNED8);
  else if (w->bits == 3)
    multiply_panel(w, block, memory, y, rows, TRELLIS3);
  else if (w->scale_kind == SCALE_E8M0)
    multiply_panel(w, block, memory, y, rows, FLOAT4);
  else if (w->scale_kind == SCALE_E4M3)
    multiply_panel(w, block, memory, y, rows, FLOAT4_SCALED);
  else if (w->zeros)
    multiply_panel(w, block, memory, y, rows, WITH_ZEROS4);
  else
    multiply_panel(w, block, memory, y, rows, SIGNED4);
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
