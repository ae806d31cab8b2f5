/* y = x · wᵀ · scale + bias for weights of int8 with a scale for each output, row by row as they
 * stand in the file; the inputs are rounded to int8 with a scale for each group. */

#include "quantize_rows.h"

#define ROWS 2
#define OUTPUTS 4

typedef struct {
  const int8_t *codes; /* [out, in] */
  const float *scales; /* [out] */
  const float *bias;   /* [out], or NULL */
  int64_t width_out, width_in, group_size;
} Int8Weight;

/* acc + the four products of each lane; w: magnitudes up to 128, x: up to 127. */
INLINE i32x16 dot4_signed(i32x16 acc, const int8_t *w, const int8_t *x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  const __m512i weights = _mm512_loadu_si512(w), values = _mm512_loadu_si512(x);
  const __m512i turned = _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(weights),
                                              _mm512_setzero_si512(), values);
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_abs_epi8(weights), turned);
#elif defined(__AVX2__)
  __m256i sums[2];
  memcpy(sums, &acc, sizeof sums);
  for (int i = 0; i < 2; i++) {
    const __m256i weights = _mm256_loadu_si256((const __m256i *)w + i);
    const __m256i values = _mm256_loadu_si256((const __m256i *)x + i);
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(values, weights));
    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  memcpy(&acc, sums, sizeof sums);
  return acc;
#else
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 4 * lane; i < 4 * lane + 4; i++) acc[lane] += (int32_t)w[i] * x[i];
  return acc;
#endif
}

/* `outputs` outputs from `first` on for `rows` rows; both are constants where this is called. */
INLINE void multiply(const Int8Weight *w, const QuantizedRows *x, float *y, int64_t first, int rows,
                     int outputs) {
  f32x16 totals[ROWS][OUTPUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) totals[r][o] = splat(0.0f);
  for (int64_t start = 0, group = 0; start < w->width_in; start += w->group_size, group++) {
    i32x16 sums[ROWS][OUTPUTS];
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outputs; o++) sums[r][o] = (i32x16){0};
    for (int64_t i = start; i < start + w->group_size; i += 4 * LANES)
      for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++)
          sums[r][o] = dot4_signed(sums[r][o], w->codes + (first + o) * w->width_in + i,
                                   (const int8_t *)x[r].words + i);
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outputs; o++)
        totals[r][o] = fma16(__builtin_convertvector(sums[r][o], f32x16),
                             splat(x[r].scales[group]), totals[r][o]);
  }
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) {
      const float product = sum_lanes(totals[r][o]) * w->scales[first + o];
      y[r * w->width_out + first + o] = w->bias ? product + w->bias[first + o] : product;
    }
}

INLINE void multiply_rows(const Int8Weight *w, const QuantizedRows *x, float *y, int64_t first,
                          int64_t rows, int outputs) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) multiply(w, x + r, y + r * w->width_out, first, ROWS, outputs);
  if (r < rows) multiply(w, x + r, y + r * w->width_out, first, 1, outputs);
}

/* x: [num_rows, in], y: [num_rows, out]; the group size is a multiple of 64. Returns 0, or 1 if
 * there is no memory. */
int int8_linear(const Int8Weight *w, const float *x, float *y, int64_t num_rows, int64_t threads) {
  const int64_t width = w->width_in, groups = width / w->group_size;
  const int64_t row_bytes = quantized_bytes(width, groups);
  char *memory = malloc((size_t)(num_rows * (row_bytes + (int64_t)sizeof(QuantizedRows))));
  if (!memory) return 1;
  QuantizedRows *rows = (QuantizedRows *)memory;
  char *codes = memory + num_rows * (int64_t)sizeof(QuantizedRows);
  const int64_t blocks = (w->width_out + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
      rows[r] = place_rows(codes + r * row_bytes, 1, width, groups);
      quantize_row(x + r * width, width, w->group_size, rows + r, 0, 1);
    }
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = block * OUTPUTS;
      if (first + OUTPUTS <= w->width_out) {
        multiply_rows(w, rows, y, first, num_rows, OUTPUTS);
        continue;
      }
      for (int64_t o = first; o < w->width_out; o++) multiply_rows(w, rows, y, o, num_rows, 1);
    }
  }
  free(memory);
  return 0;
}
