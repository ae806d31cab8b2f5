/* y = x · wᵀ + bias for weights in bfloat16 or e4m3, row by row as stored in the file. The inputs are
 * rounded to bfloat16, which has e4m3 exactly; products and sums are float32. What is multiplied of
 * e4m3 with more than a tile of rows is unpacked once, and each block's sums are scaled.
 *
 * An output is the sum of all lanes, each of which adds up its products in the order of the
 * inputs, so a row has the same bits in any batch. In tiles of AMX, in which any number of rows is
 * multiplied where there are any, it is one sum in that order. */

#include "byte_codes.h"
#include "float_tile.h"
#include "tiles.h"

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

/* Numbers of e4m3 in bfloat16, [outputs, padded width], zeros behind the width. */
static void unpack_outputs(const FloatWeight *w, const CodeTable *table, int64_t first,
                           int64_t outputs, uint16_t *to) {
  const int64_t width = w->width_in, stride = padded(width), whole = width / (2 * STEP) * (2 * STEP);
  const uint8_t *from = (const uint8_t *)w->values + first * width;
  for (int64_t o = 0; o < outputs; o++, from += width, to += stride) {
    float *words = (float *)to, last[2 * LANES];
    for (int64_t i = 0; i < whole; i += 2 * STEP, words += 2 * LANES) {
      __builtin_prefetch(from + outputs * width + i);
      unpack_codes(from + i, from + i + STEP, table, words, LANES, KV_FP8);
    }
    if (whole == width) continue;
    uint8_t rest[2 * STEP] = {0};
    memcpy(rest, from + whole, (size_t)(width - whole));
    unpack_codes(rest, rest + STEP, table, last, LANES, KV_FP8);
    memcpy(words, last, (size_t)(stride - whole) * sizeof(uint16_t));
  }
}
/* The scales of an output's blocks of inputs. */
INLINE const float *scales_of(const FloatWeight *w, int64_t output) {
  const int64_t blocks = (w->width_in + w->block_inputs - 1) / w->block_inputs;
  return w->scales + output / w->block_outputs * blocks;
}
INLINE int64_t block_of(const FloatWeight *w) {
  return w->block_inputs < w->width_in ? w->block_inputs : padded(w->width_in);
}

#if HAS_PAIRS
/* `add_products` for codes of e4m3, of `parts` times STEP inputs: 1 or 2, a constant of callers. */
INLINE void add_codes(f32v sums[ROWS][OUTPUTS], const uint8_t *codes, int64_t width,
                      const CodeTable *table, const uint16_t *x, int64_t stride, int rows, int outputs,
                      const int parts) {
  Words words[OUTPUTS];
  for (int o = 0; o < outputs; o++) {
    const uint8_t *from = codes + o * width;
    __builtin_prefetch(from + outputs * width); /* the next outputs */
    words[o] = unpack_words(from, from + (parts - 1) * STEP, table, KV_FP8);
  }
  for (int part = 0; part < parts; part++)
    for (int r = 0; r < rows; r++) {
      const __m512bh inputs = (__m512bh)_mm512_loadu_si512(x + r * stride + part * STEP);
      for (int o = 0; o < outputs; o++)
        sums[r][o] = (f32v)_mm512_dpbf16_ps((__m512)sums[r][o], (__m512bh)words[o].of[part], inputs);
    }
}
/* `add_products` for `left` codes. */
INLINE void add_block_of_codes(f32v sums[ROWS][OUTPUTS], const uint8_t *codes, int64_t width,
                               int64_t left, const CodeTable *table, const uint16_t *x,
                               int64_t stride, int rows, int outputs) {
  for (; left >= 2 * STEP; left -= 2 * STEP, codes += 2 * STEP, x += 2 * STEP)
    add_codes(sums, codes, width, table, x, stride, rows, outputs, 2);
  if (left <= 0) return;
  if (left == STEP) {
    add_codes(sums, codes, width, table, x, stride, rows, outputs, 1);
    return;
  }
  uint8_t rest[OUTPUTS * 2 * STEP] = {0};
  for (int o = 0; o < outputs; o++) memcpy(rest + o * 2 * STEP, codes + o * width, (size_t)left);
  if (left > STEP) add_codes(sums, rest, 2 * STEP, table, x, stride, rows, outputs, 2);
  else add_codes(sums, rest, 2 * STEP, table, x, stride, rows, outputs, 1);
}
#endif

/* Outputs from `first` on, each block of inputs by itself: of `values`, which are unpacked, or where
 * there are none of the codes. */
INLINE void multiply_blocks(const FloatWeight *w, const CodeTable *table, const uint16_t *values,
                            const uint16_t *x, int64_t stride, float *y, int64_t first, int rows,
                            int outputs) {
  const int64_t width = padded(w->width_in), block = block_of(w);
  const float *scales[OUTPUTS];
  f32v totals[ROWS][OUTPUTS];
  (void)table; /* where values are always unpacked */
  for (int o = 0; o < outputs; o++) {
    scales[o] = scales_of(w, first + o);
    for (int r = 0; r < rows; r++) totals[r][o] = splat(0.0f);
  }
  for (int64_t start = 0; start < width; start += block) {
    const int64_t end = start + block < width ? start + block : width;
    f32v sums[ROWS][OUTPUTS];
    for (int r = 0; r < rows; r++)
      for (int o = 0; o < outputs; o++) sums[r][o] = splat(0.0f);
#if HAS_PAIRS
    if (!values)
      add_block_of_codes(sums, (const uint8_t *)w->values + first * w->width_in + start, w->width_in,
                         (end < w->width_in ? end : w->width_in) - start, table, x + start, stride,
                         rows, outputs);
    else
#endif
      for (int64_t i = start; i < end; i += STEP)
        add_products(sums, values + i, width, x + i, stride, rows, outputs);
    for (int o = 0; o < outputs; o++) {
      const f32v scale = splat(*scales[o]++);
      for (int r = 0; r < rows; r++) totals[r][o] = fmav(sums[r][o], scale, totals[r][o]);
    }
  }
  finish_tile(w, totals, y, first, rows, outputs);
}

/* `outputs` outputs from `first` on for `rows` rows of `stride` values; callers pass the counts as
 * constants. */
INLINE void multiply(const FloatWeight *w, const uint16_t *values, const uint16_t *x, int64_t stride,
                     float *y, int64_t first, int rows, int outputs) {
  const int64_t width = w->width_in, whole = width / STEP * STEP;
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
  const uint16_t *values = (const uint16_t *)w->values + first * w->width_in;
#define RUN(r, count) \
  multiply(w, values, x + (r) * stride, stride, y + (r) * w->width_out, first, count, outputs)
  BY_TILES_OF_ROWS(rows, RUN);
#undef RUN
}
INLINE void multiply_scaled(const FloatWeight *w, const CodeTable *table, const uint16_t *values,
                            const uint16_t *x, int64_t stride, float *y, int64_t first, int64_t rows,
                            int outputs) {
#define RUN(r, count)                                                                     \
  multiply_blocks(w, table, values, x + (r) * stride, stride, y + (r) * w->width_out, first, count, \
                  outputs)
  BY_TILES_OF_ROWS(rows, RUN);
#undef RUN
}
/* A tile of rows reads codes; more read what is unpacked once. */
static void multiply_e4m3(const FloatWeight *w, const CodeTable *table, const uint16_t *x,
                          int64_t stride, float *y, int64_t first, int64_t rows) {
  const int64_t left = w->width_out - first, outputs = left < OUTPUTS ? left : OUTPUTS;
#if HAS_PAIRS
  if (rows <= ROWS) {
    if (outputs == OUTPUTS) multiply_scaled(w, table, NULL, x, stride, y, first, rows, OUTPUTS);
    else
      for (int64_t o = 0; o < outputs; o++)
        multiply_scaled(w, table, NULL, x, stride, y, first + o, rows, 1);
    return;
  }
#endif
  uint16_t values[OUTPUTS * stride] ALIGNED;
  unpack_outputs(w, table, first, outputs, values);
  if (outputs == OUTPUTS) multiply_scaled(w, table, values, x, stride, y, first, rows, OUTPUTS);
  else
    for (int64_t o = 0; o < outputs; o++)
      multiply_scaled(w, table, values + o * stride, x, stride, y, first + o, rows, 1);
}

#if HAS_TILES
/* Rounded rows lie side by side by sixteens: [rows / 16][padded width / 2][16][2]. */
INLINE void round_beside(const float *x, uint16_t *rounded, int64_t row, int64_t width) {
  uint16_t *to = rounded + row / TILE_ROWS * TILE_ROWS * padded(width) + row % TILE_ROWS * 2;
  for (int64_t i = 0; i < width; i += STEP, to += STEP * TILE_ROWS) {
    uint16_t here[STEP] = {0};
    round_row(x + i, here, width - i < STEP ? width - i : STEP);
    for (int j = 0; j < STEP; j += 2) memcpy(to + j * TILE_ROWS, here + j, 2 * sizeof(uint16_t));
  }
}

/* Outputs `first` to `first` + `outputs`, and inputs `start` to `end`, for `count` tiles of rows, of
 * which the last one has `last`; callers pass `count` and `is_scaled` as constants. The values of
 * outputs are `width` apart. */
INLINE void multiply_in_tiles(const FloatWeight *w, const uint16_t *values, int64_t width,
                              const uint16_t *x, float *y, int64_t first, int64_t outputs,
                              int64_t start, int64_t end, const int count, int64_t last,
                              const int is_scaled) {
  const int64_t whole = width / STEP * STEP, tile = TILE_ROWS * padded(width);
  uint16_t rest[TILE_ROWS * STEP] = {0};
  if (whole < width)
    for (int64_t o = 0; o < outputs; o++)
      memcpy(rest + o * STEP, values + o * width + whole, (size_t)(width - whole) * sizeof(uint16_t));
  shape_tiles(outputs, STEP / 2);
  for (int64_t i = start; i < end; i += STEP) {
    if (i < whole) LOAD_ROWS(values + i, width * (int64_t)sizeof(uint16_t));
    else LOAD_ROWS(rest, sizeof(uint16_t) * STEP);
    const uint16_t *columns = x + i * TILE_ROWS;
    ADD_PAIRS(0, columns);
    if (count > 1) ADD_PAIRS(1, columns + tile);
    if (count > 2) ADD_PAIRS(2, columns + 2 * tile);
    if (count > 3) ADD_PAIRS(3, columns + 3 * tile);
  }
  float sums[TILES * TILE_ROWS * TILE_ROWS];
  TAKE_SUMS(0, sums);
  if (count > 1) TAKE_SUMS(1, sums + TILE_ROWS * TILE_ROWS);
  if (count > 2) TAKE_SUMS(2, sums + 2 * TILE_ROWS * TILE_ROWS);
  if (count > 3) TAKE_SUMS(3, sums + 3 * TILE_ROWS * TILE_ROWS);
  for (int64_t r = 0; r < (count - 1) * TILE_ROWS + last; r++) {
    const float *own = sums + r / TILE_ROWS * TILE_ROWS * TILE_ROWS + r % TILE_ROWS;
    float *to = y + r * w->width_out + first;
    for (int64_t o = 0; o < outputs; o++) {
      const float scale = is_scaled ? scales_of(w, first + o)[start / w->block_inputs] : 1.0f;
      const float sum = own[o * TILE_ROWS] * scale;
      to[o] = sum + (start > 0 ? to[o] : w->bias ? w->bias[first + o] : 0.0f);
    }
  }
}

/* All inputs, of e4m3 block by block. */
INLINE void multiply_tiles(const FloatWeight *w, const uint16_t *unpacked, const uint16_t *x, float *y,
                           int64_t first, int64_t outputs, const int count, int64_t last) {
  const int64_t width = w->width_in;
  if (!unpacked) {
    const uint16_t *values = (const uint16_t *)w->values + first * width;
    multiply_in_tiles(w, values, width, x, y, first, outputs, 0, width, count, last, 0);
    return;
  }
  const int64_t all = padded(width), block = block_of(w);
  for (int64_t start = 0; start < all; start += block) {
    const int64_t end = start + block < all ? start + block : all;
    multiply_in_tiles(w, unpacked, all, x, y, first, outputs, start, end, count, last, 1);
  }
}

static void team_multiply_in_tiles(const Team *team, const FloatWeight *w, const float *x, float *y,
                                   int64_t rows, uint16_t *rounded) {
  CodeTable table = {0};
  if (w->scales) table = code_table(KV_FP8);
  TEAM_FOR(team, row, rows) round_beside(x + row * w->width_in, rounded, row, w->width_in);
  team_meet(team);
  TEAM_FOR(team, block, (w->width_out + TILE_ROWS - 1) / TILE_ROWS) {
    const int64_t first = block * TILE_ROWS, left = w->width_out - first;
    const int64_t outputs = left < TILE_ROWS ? left : TILE_ROWS;
    uint16_t memory[w->scales ? TILE_ROWS * padded(w->width_in) : 1] ALIGNED;
    const uint16_t *unpacked = w->scales ? memory : NULL;
    if (unpacked) unpack_outputs(w, &table, first, outputs, memory);
    for (int64_t row = 0; row < rows;) {
      const uint16_t *from = rounded + row * padded(w->width_in);
      float *to = y + row * w->width_out;
      const int64_t behind = rows - row;
      if (behind > (TILES - 1) * TILE_ROWS) {
        const int64_t last = behind - (TILES - 1) * TILE_ROWS;
        multiply_tiles(w, unpacked, from, to, first, outputs, TILES,
                       last < TILE_ROWS ? last : TILE_ROWS);
        row += TILES * TILE_ROWS;
      } else {
        multiply_tiles(w, unpacked, from, to, first, outputs, 1,
                       behind < TILE_ROWS ? behind : TILE_ROWS);
        row += TILE_ROWS;
      }
    }
  }
  _tile_release();
  team_meet(team);
}
#endif

INLINE int64_t rows_together(void) { return HAS_TILES && tiles_are_allowed() ? TILE_ROWS : ROWS; }

static int64_t panel_rows(const FloatWeight *w, int64_t rows) {
  const int64_t each = rows_together();
  int64_t most = PANEL_BYTES / (padded(w->width_in) * (int64_t)sizeof(uint16_t)) / each * each;
  if (most < each) most = each;
  if (each == TILE_ROWS) rows = (rows + each - 1) / each * each;
  return rows < most ? rows : most;
}

int64_t bfloat16_scratch_bytes(const FloatWeight *w, int64_t rows) {
  return panel_rows(w, rows) * padded(w->width_in) * (int64_t)sizeof(uint16_t);
}

static void team_multiply_panel(const Team *team, const FloatWeight *w, const float *x, float *y,
                                int64_t rows, uint16_t *rounded) {
#if HAS_TILES
  if (rows_together() == TILE_ROWS) {
    team_multiply_in_tiles(team, w, x, y, rows, rounded);
    return;
  }
#endif
  const int64_t width = w->width_in, stride = padded(width);
  CodeTable table = {0};
  if (w->scales) table = code_table(KV_FP8);
  TEAM_FOR(team, row, rows) {
    uint16_t *to = rounded + row * stride;
    round_row(x + row * width, to, width);
    memset(to + width, 0, (size_t)(stride - width) * sizeof(uint16_t));
  }
  team_meet(team);
  const int64_t blocks = (w->width_out + OUTPUTS - 1) / OUTPUTS;
  TEAM_FOR(team, block, blocks) {
    const int64_t first = block * OUTPUTS;
    if (w->scales) {
      multiply_e4m3(w, &table, rounded, stride, y, first, rows);
      continue;
    }
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
