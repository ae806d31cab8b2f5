/* y = x · wᵀ + bias for weights in 4 bits, w = (code - zero) · scale with a scale and a zero for each
 * group of inputs.
 *
 * The inputs are rounded to int8 with a scale for each of the same groups, so that the products of
 * a group are sums of integers, which have no rounding and no order; only one product a group is of
 * floats. Dettmers et al. 2022 ("LLM.int8()", section 2) round inputs so, a scale a row. */

#include "quantize_rows.h"

#define TILE 8             /* rows that share a pass over the weights */
#define PANEL_BYTES 262144 /* quantized rows that stay in the second cache meanwhile */

typedef struct {
  const uint8_t *codes;   /* [blocks][in / 8][16][4], low halves: inputs 0 to 3, high: 4 to 7 */
  const void *scales;     /* [blocks][groups][16] */
  const uint8_t *zeros;   /* [blocks][groups][16], or NULL: all 8 */
  const float *bias;      /* [out], or NULL */
  int64_t has_bfloat16_scales; /* else float32 */
  int64_t width_out, width_in, group_size;
} Int4Weight;

/* acc + the four products of each lane; w: uint8 of at most 15, x: int8. */
INLINE i32x16 dot4(i32x16 acc, u8x64 w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  __m256i codes[2], sums[2];
  memcpy(codes, &w, sizeof codes), memcpy(sums, &acc, sizeof sums);
  for (int i = 0; i < 2; i++) {
    __m256i pairs = _mm256_maddubs_epi16(codes[i], _mm256_set1_epi32(x));
    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  memcpy(&acc, sums, sizeof sums);
  return acc;
#else
  int8_t four[4];
  memcpy(four, &x, sizeof four);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) acc[lane] += (int32_t)w[4 * lane + i] * four[i];
  return acc;
#endif
}

/* One block of 16 outputs for `rows` rows; `rows` is a constant where this is called. */
INLINE void multiply_block(const Int4Weight *w, int64_t block, const QuantizedRows *x, float *y, int rows) {
  const int64_t groups = w->width_in / w->group_size, steps = w->group_size / 8;
  const uint8_t *codes = w->codes + block * w->width_in * 8;
  const int32_t *words = x->words;
  f32x16 total[TILE];
  for (int r = 0; r < rows; r++) total[r] = splat(0.0f);
  for (int64_t group = 0; group < groups; group++) {
    i32x16 low[TILE], high[TILE];
    for (int r = 0; r < rows; r++) low[r] = high[r] = (i32x16){0};
    for (int64_t step = 0; step < steps; step++, codes += 64, words += 2 * rows) {
      u8x64 packed;
      memcpy(&packed, codes, sizeof packed);
      __builtin_prefetch(codes + 2048);
      const u8x64 first = packed & 15, second = packed >> 4;
      for (int r = 0; r < rows; r++) low[r] = dot4(low[r], first, words[r]);
      for (int r = 0; r < rows; r++) high[r] = dot4(high[r], second, words[rows + r]);
    }
    const int64_t at = block * groups + group;
    const f32x16 scales = w->has_bfloat16_scales
                              ? load_bf16((const uint16_t *)w->scales + at * LANES)
                              : load((const float *)w->scales + at * LANES);
    i32x16 zeros = (i32x16){0} + 8;
    if (w->zeros) {
      u8x16 bytes;
      memcpy(&bytes, w->zeros + at * LANES, sizeof bytes);
      zeros = __builtin_convertvector(bytes, i32x16);
    }
    for (int r = 0; r < rows; r++) {
      const i32x16 sum = low[r] + high[r] - zeros * x->sums[group * rows + r];
      const f32x16 scale = scales * x->scales[group * rows + r];
      total[r] = fma16(__builtin_convertvector(sum, f32x16), scale, total[r]);
    }
  }
  const int64_t start = block * LANES;
  const int64_t count = w->width_out - start < LANES ? w->width_out - start : LANES;
  const f32x16 bias = w->bias ? load_part(w->bias + start, count, 0.0f) : splat(0.0f);
  for (int r = 0; r < rows; r++)
    store_part(y + r * w->width_out + start, w->bias ? total[r] + bias : total[r], count);
}

INLINE void multiply(const Int4Weight *w, int64_t block, const QuantizedRows *x, float *y,
                     int64_t rows) {
  switch (rows) {
    case 1: multiply_block(w, block, x, y, 1); break;
    case 2: multiply_block(w, block, x, y, 2); break;
    case 3: multiply_block(w, block, x, y, 3); break;
    case 4: multiply_block(w, block, x, y, 4); break;
    case 5: multiply_block(w, block, x, y, 5); break;
    case 6: multiply_block(w, block, x, y, 6); break;
    case 7: multiply_block(w, block, x, y, 7); break;
    default: multiply_block(w, block, x, y, TILE); break;
  }
}

/* A panel of at most PANEL_BYTES: quantized to `memory`, then multiplied tile by tile. */
static void multiply_panel(const Int4Weight *w, const float *x, float *y, int64_t num_rows,
                           char *memory, int64_t threads) {
  const int64_t width = w->width_in, groups = width / w->group_size;
  const int64_t blocks = (w->width_out + LANES - 1) / LANES;
  const int64_t tile_bytes = TILE * quantized_bytes(width, groups);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t tile = row / TILE, left = num_rows - tile * TILE;
      const int64_t rows = left < TILE ? left : TILE;
      const QuantizedRows to = place_rows(memory + tile * tile_bytes, rows, width, groups);
      quantize_row(x + row * width, width, w->group_size, &to, row % TILE, rows);
    }
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t first = 0; first < num_rows; first += TILE) {
        const int64_t rows = num_rows - first < TILE ? num_rows - first : TILE;
        const QuantizedRows from =
            place_rows(memory + first / TILE * tile_bytes, rows, width, groups);
        multiply(w, block, &from, y + first * w->width_out, rows);
      }
  }
}

/* x: [num_rows, in], y: [num_rows, out]; returns 0, or 1 if there is no memory. */
int int4_linear(const Int4Weight *w, const float *x, float *y, int64_t num_rows, int64_t threads) {
  const int64_t row_bytes = quantized_bytes(w->width_in, w->width_in / w->group_size);
  int64_t panel = PANEL_BYTES / row_bytes / TILE * TILE;
  if (panel < TILE) panel = TILE;
  if (panel > num_rows) panel = num_rows;
  char *memory = malloc((size_t)((panel + TILE) * row_bytes));
  if (!memory) return 1;
  for (int64_t first = 0; first < num_rows; first += panel) {
    const int64_t rows = num_rows - first < panel ? num_rows - first : panel;
    multiply_panel(w, x + first * w->width_in, y + first * w->width_out, rows, memory, threads);
  }
  free(memory);
  return 0;
}
