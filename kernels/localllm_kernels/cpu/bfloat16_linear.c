/* y = x · wᵀ + bias for weights in bfloat16, row by row as stored in the file. The inputs are
 * rounded to bfloat16; products and sums are float32.
 *
 * An output is the sum of all lanes, each of which adds up its products in the order of the
 * inputs, so a row has the same bits in any batch. */

#include "float_tile.h"

#define STEP (2 * LANES)   /* inputs */
#define PANEL_BYTES 262144 /* rounded rows that stay in the second-level cache */

INLINE int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }

/* sums[r][o] += the two products per lane of STEP inputs of row r and output o. */
INLINE void add_products(f32v sums[ROWS][OUTPUTS], const uint16_t *w, int64_t width,
                         const uint16_t *x, int64_t stride, int rows, int outputs) {
#if defined(__AVX512BF16__)
  f32v inputs[ROWS];
  for (int r = 0; r < rows; r++)
    inputs[r] = kept((f32v)_mm512_loadu_si512(x + r * stride));
  for (int o = 0; o < outputs; o++) {
    const __m512bh weight = (__m512bh)_mm512_loadu_si512(w + o * width);
    for (int r = 0; r < rows; r++)
      sums[r][o] = (f32v)_mm512_dpbf16_ps((__m512)sums[r][o], weight, (__m512bh)inputs[r]);
  }
#else
  for (int part = 0; part < STEP; part += LANES) {
    f32v inputs[ROWS];
    for (int r = 0; r < rows; r++) inputs[r] = kept(load_bf16(x + r * stride + part));
    for (int o = 0; o < outputs; o++) {
      const f32v weight = load_bf16(w + o * width + part);
      for (int r = 0; r < rows; r++) sums[r][o] = fmav(weight, inputs[r], sums[r][o]);
    }
  }
#endif
}

/* `outputs` outputs from `first` on for `rows` rows of `stride` values; callers pass the counts as
 * constants. */
INLINE void multiply(const FloatWeight *w, const uint16_t *x, int64_t stride, float *y,
                     int64_t first, int rows, int outputs) {
  const int64_t width = w->width_in, whole = width / STEP * STEP;
  const uint16_t *values = (const uint16_t *)w->values + first * width;
  f32v sums[ROWS][OUTPUTS];
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
  for (int64_t i = 0; i < whole; i += STEP) {
    for (int o = 0; o < outputs; o++)
      __builtin_prefetch(values + (outputs + o) * width + i); /* the next outputs */
    add_products(sums, values + i, width, x + i, stride, rows, outputs);
  }
  if (whole < width) {
    uint16_t rest[OUTPUTS * STEP] = {0};
    for (int o = 0; o < outputs; o++)
      memcpy(rest + o * STEP, values + o * width + whole, (size_t)(width - whole) * sizeof(uint16_t));
    add_products(sums, rest, STEP, x + whole, stride, rows, outputs);
  }
  finish_tile(w, sums, y, first, rows, outputs);
}

INLINE void multiply_rows(const FloatWeight *w, const uint16_t *x, int64_t stride, float *y,
                          int64_t first, int64_t rows, int outputs) {
#define RUN(r, count) \
  multiply(w, x + (r) * stride, stride, y + (r) * w->width_out, first, count, outputs)
  BY_TILES_OF_ROWS(rows, RUN);
#undef RUN
}

static int64_t panel_rows(const FloatWeight *w, int64_t rows) {
  int64_t most = PANEL_BYTES / (padded(w->width_in) * (int64_t)sizeof(uint16_t)) / ROWS * ROWS;
  if (most < ROWS) most = ROWS;
  return rows < most ? rows : most;
}

int64_t bfloat16_scratch_bytes(const FloatWeight *w, int64_t rows) {
  return panel_rows(w, rows) * padded(w->width_in) * (int64_t)sizeof(uint16_t);
}

static void team_multiply_panel(const Team *team, const FloatWeight *w, const float *x, float *y,
                                int64_t rows, uint16_t *rounded) {
  const int64_t width = w->width_in, stride = padded(width);
  TEAM_FOR(team, row, rows) {
    uint16_t *to = rounded + row * stride;
    round_row(x + row * width, to, width);
    memset(to + width, 0, (size_t)(stride - width) * sizeof(uint16_t));
  }
  team_meet(team);
  const int64_t blocks = (w->width_out + OUTPUTS - 1) / OUTPUTS;
  TEAM_FOR(team, block, blocks) {
    const int64_t first = block * OUTPUTS;
    if (first + OUTPUTS <= w->width_out) {
      multiply_rows(w, rounded, stride, y, first, rows, OUTPUTS);
      continue;
    }
    for (int64_t o = first; o < w->width_out; o++) multiply_rows(w, rounded, stride, y, o, rows, 1);
  }
  team_meet(team);
}

/* x: [rows, in]; y: [rows, out]. */
void team_bfloat16_linear(const Team *team, const FloatWeight *w, const float *x, float *y,
                          int64_t rows, char *scratch) {
  const int64_t panel = panel_rows(w, rows);
  for (int64_t first = 0; first < rows; first += panel) {
    const int64_t count = rows - first < panel ? rows - first : panel;
    team_multiply_panel(team, w, x + first * w->width_in, y + first * w->width_out, count,
                        (uint16_t *)scratch);
  }
}
