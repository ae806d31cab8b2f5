/* y = x · wᵀ + bias for weights in the blocks of GGUF files, which stay as they lie in the file; see
 * BlockWeight in operators.h.
 *
 * LANES rows are unpacked side by side, some inputs at a time, into memory of the first-level cache,
 * and multiplied with all rows of x from there. The inputs are rounded to int8 with one scale for
 * 16 of them (for 32, as the blocks have them, the divergence from exact products is twice as large:
 * 0.0031 instead of 0.0016 for SmolLM2 135M), so that the products of a group add up as integers, in
 * any order; what follows is in floats, group by group, so a row has the same bits in any batch. */

#include "block_unpack.h"

#define TILE 8             /* rows that share a pass over the codes */
#define PANEL_BYTES 262144 /* rounded rows that stay in the second-level cache */
#define CHUNK 1024         /* inputs that are unpacked at a time */

/* Rows of x as int8, those of a tile interleaved: words [width / 4][rows]; by groups of ROUNDED
 * inputs, [width / ROUNDED][rows], scales, sums of the codes, and the products of both. */
#define ROUNDED 16
typedef struct {
  int32_t *words, *sums;
  float *scales, *values;
} RoundedRows;

int64_t blocks_row_bytes(const BlockWeight *w) { return w->width_in + w->width_in / ROUNDED * 12; }

INLINE RoundedRows rounded_rows(char *memory, int64_t rows, int64_t width) {
  int32_t *words = (int32_t *)memory, *sums = words + width / 4 * rows;
  float *scales = (float *)(sums + width / ROUNDED * rows);
  return (RoundedRows){words, sums, scales, scales + width / ROUNDED * rows};
}

static int64_t panel_rows(const BlockWeight *w, int64_t num_rows) {
  const int64_t rows = PANEL_BYTES / blocks_row_bytes(w) / TILE * TILE;
  if (rows < TILE) return num_rows < TILE ? num_rows : TILE;
  return num_rows < rows ? num_rows : rows;
}

int64_t blocks_scratch_bytes(const BlockWeight *w, int64_t rows) {
  return (panel_rows(w, rows) + TILE) * blocks_row_bytes(w);
}

void blocks_quantize_row(const BlockWeight *w, const float *x, int64_t row, int64_t rows,
                         char *memory) {
  const int64_t width = w->width_in, tile = row / TILE, left = rows - tile * TILE;
  const int64_t count = left < TILE ? left : TILE, own = row % TILE;
  const RoundedRows to = rounded_rows(memory + tile * TILE * blocks_row_bytes(w), count, width);
  const f32v magic = splat(12582912.0f); /* adding it rounds to a whole number */
  for (int64_t group = 0; group < width / ROUNDED; group++, x += ROUNDED) {
    f32v most = splat(0.0f), poison = splat(0.0f);
    for (int i = 0; i < ROUNDED; i += LANES) {
      const f32v v = load(x + i);
      most = maxv(most, maxv(v, -v));
      poison += v * 0.0f; /* NaN if anything is not finite, which no code can express */
    }
    const float scale = max_lanes(most) / 127.0f + sum_lanes(poison);
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t words[ROUNDED / 4], sum = 0;
    for (int i = 0; i < ROUNDED; i += LANES) {
      const i32v codes = (i32v)(load(x + i) * inverse + magic) - (i32v)magic;
      const s8v bytes = __builtin_convertvector(codes, s8v);
      memcpy(words + i / 4, &bytes, sizeof bytes);
      for (int lane = 0; lane < LANES; lane++) sum += codes[lane];
    }
    const int64_t at = group * count + own;
    for (int i = 0; i < ROUNDED / 4; i++) to.words[(group * ROUNDED / 4 + i) * count + own] = words[i];
    to.sums[at] = sum, to.scales[at] = scale, to.values[at] = scale * (float)sum;
  }
}

/* LANES outputs: rows of a part from `first` on, of which `count` are there. */
typedef struct {
  const BlockWeight *weight;
  const BlockRows *part;
  int64_t first, count; /* in the part */
  int64_t place;        /* of the first one among all rows of the weight */
} Panel;

static Panel find_panel(const BlockWeight *w, int64_t number) {
  int64_t place = 0;
  const BlockRows *part = w->parts;
  for (; number >= (part->count + LANES - 1) / LANES; part++) {
    number -= (part->count + LANES - 1) / LANES;
    place += part->count;
  }
  const int64_t first = number * LANES, left = part->count - first;
  return (Panel){w, part, first, left < LANES ? left : LANES, place + first};
}

int64_t blocks_panels(const BlockWeight *w) {
  int64_t count = 0;
  for (int64_t i = 0; i < w->num_parts; i++) count += (w->parts[i].count + LANES - 1) / LANES;
  return count;
}

INLINE f32v load_outputs(const Panel *p, const float *y) {
  const int32_t *places = p->weight->places;
  if (!places) return load_part(y + p->place, p->count, 0.0f);
  f32v found = splat(0.0f);
  for (int64_t i = 0; i < p->count; i++) found[i] = y[places[p->place + i]];
  return found;
}
INLINE void store_outputs(const Panel *p, float *y, f32v v) {
  const int32_t *places = p->weight->places;
  if (!places) {
    store_part(y + p->place, v, p->count);
    return;
  }
  for (int64_t i = 0; i < p->count; i++) y[places[p->place + i]] = v[i];
}

typedef struct {
  u8x4v codes[CHUNK / 4];
  f32v scales[CHUNK / 16], offsets[CHUNK / 16];
} Chunk;

INLINE void unpack_chunk(int64_t type, const BlockLanes *lanes, int64_t first, int64_t inputs,
                         Chunk *c) {
  const BlockForm form = block_form(type);
  for (int64_t i = 0; i < inputs / form.values; i++) {
    const Sink to = {.codes = c->codes + form.values / 4 * i};
    const int64_t group = form.values / form.group * i;
    unpack_block(type, lanes, (first + i) * form.bytes, &to, c->scales + group, c->offsets + group);
  }
}

/* Adds the products of `inputs` inputs to `rows` rows of y; callers pass the rows, the group, and what
 * codes stand for as constants. x: the rows of a tile, from the chunk's first input on. */
INLINE void multiply_chunk(const Panel *p, const Chunk *c, int64_t inputs, const RoundedRows *x,
                           float *y, int rows, int is_first, int middle, int group, int bits,
                           int has_offsets) {
  const int64_t width_out = p->weight->width_out;
  f32v total[TILE];
  for (int r = 0; r < rows; r++)
    total[r] = is_first ? splat(0.0f) : load_outputs(p, y + r * width_out);
  const u8x4v *codes = c->codes;
  const int32_t *from = x->words, *sums = x->sums;
  const float *own = x->scales, *values = x->values;
  for (int64_t g = 0; g < inputs / group; g++) {
    f32v both[TILE]; /* sums of the products, before the weights' scale */
    float of_inputs[TILE];
    for (int r = 0; r < rows; r++) both[r] = splat(0.0f), of_inputs[r] = 0.0f;
    for (int part = 0; part < group / ROUNDED; part++) {
      i32v sum[TILE];
      for (int r = 0; r < rows; r++) {
        sum[r] = (i32v){0};
        if (!has_offsets && !is_signed(bits)) sum[r] -= middle * sums[r];
      }
      for (int i = 0; i < ROUNDED / 4; i++, codes++, from += rows) {
        const u8x4v four = is_signed(bits) ? *codes ^ 128 : *codes;
        for (int r = 0; r < rows; r++) sum[r] = dot4(sum[r], four, from[r], bits);
      }
      for (int r = 0; r < rows; r++) {
        both[r] = fmav(__builtin_convertvector(sum[r], f32v), splat(own[r]), both[r]);
        if (has_offsets) of_inputs[r] += values[r];
      }
      sums += rows, own += rows, values += rows;
    }
    for (int r = 0; r < rows; r++) {
      total[r] = fmav(both[r], c->scales[g], total[r]);
      if (has_offsets) total[r] = fmav(c->offsets[g], splat(of_inputs[r]), total[r]);
    }
  }
  for (int r = 0; r < rows; r++) store_outputs(p, y + r * width_out, total[r]);
}

/* All products of one row of x, without a place for the codes; bit for bit what multiply_chunk gives. */
INLINE f32v multiply_row(int64_t type, const Panel *p, const BlockLanes *lanes,
                         const RoundedRows *x) {
  const BlockForm form = block_form(type);
  const int bits = form.middle == 128 ? 8 : 4, parts = form.group / ROUNDED;
  const int middle = is_signed(bits) ? 0 : form.middle;
  f32v total = splat(0.0f);
  for (int64_t start = 0; start < p->weight->width_in; start += form.values) {
    const int64_t at = start / ROUNDED;
    i32v sums[256 / ROUNDED];
    f32v scales[256 / 16], offsets[256 / 16];
    const Sink to = {NULL, sums, x->words + start / 4, x->sums + at, middle, bits};
    unpack_block(type, lanes, start / form.values * form.bytes, &to, scales, offsets);
    for (int g = 0; g < form.values / form.group; g++) {
      f32v both = splat(0.0f);
      float of_inputs = 0.0f;
      for (int i = g * parts; i < (g + 1) * parts; i++) {
        both = fmav(__builtin_convertvector(sums[i], f32v), splat(x->scales[at + i]), both);
        if (form.has_offsets) of_inputs += x->values[at + i];
      }
      total = fmav(both, scales[g], total);
      if (form.has_offsets) total = fmav(offsets[g], splat(of_inputs), total);
    }
  }
  return total;
}

static void multiply_tile(const Panel *p, const Chunk *c, int64_t inputs, const RoundedRows *x,
                          float *y, int64_t rows, int is_first, const BlockForm *form) {
  const int middle = form->middle;
#define ROWS(n, group, bits, has_offsets) \
  case n: multiply_chunk(p, c, inputs, x, y, n, is_first, middle, group, bits, has_offsets); break;
#define FORM(...) \
  switch (rows) { \
    ROWS(1, __VA_ARGS__) ROWS(2, __VA_ARGS__) ROWS(3, __VA_ARGS__) ROWS(4, __VA_ARGS__) \
    ROWS(5, __VA_ARGS__) ROWS(6, __VA_ARGS__) ROWS(7, __VA_ARGS__) ROWS(TILE, __VA_ARGS__) \
  }
  if (form->group == 16) {
    if (form->has_offsets) FORM(16, 4, 1) else FORM(16, 4, 0)
  } else if (middle == 128) {
    FORM(32, 8, 0)
  } else if (form->has_offsets) {
    FORM(32, 4, 1)
  } else {
    FORM(32, 4, 0)
  }
#undef FORM
#undef ROWS
}

INLINE void multiply_panel(int64_t type, const Panel *p, const BlockLanes *lanes, char *memory,
                           float *y, int64_t rows) {
  const BlockWeight *w = p->weight;
  if (rows == 1) {
    const RoundedRows x = rounded_rows(memory, 1, w->width_in);
    store_outputs(p, y, multiply_row(type, p, lanes, &x));
    return;
  }
  const BlockForm form = block_form(type);
  Chunk chunk;
  for (int64_t start = 0; start < w->width_in; start += CHUNK) {
    const int64_t left = w->width_in - start, inputs = left < CHUNK ? left : CHUNK;
    unpack_chunk(type, lanes, start / form.values, inputs, &chunk);
    for (int64_t first = 0; first < rows; first += TILE) {
      const int64_t count = rows - first < TILE ? rows - first : TILE;
      RoundedRows x = rounded_rows(memory + first * blocks_row_bytes(w), count, w->width_in);
      const int64_t at = start / ROUNDED * count;
      x.words += start / 4 * count, x.sums += at, x.scales += at, x.values += at;
      multiply_tile(p, &chunk, inputs, &x, y + first * w->width_out, count, start == 0, &form);
    }
  }
}

void blocks_multiply_panel(const BlockWeight *w, int64_t number, char *memory, float *y,
                           int64_t rows) {
  const Panel p = find_panel(w, number);
  BlockLanes lanes = {.next = p.part->rows + (p.first + LANES) * p.part->row_bytes};
  for (int lane = 0; lane < LANES; lane++) {
    const int64_t row = p.first + (lane < p.count ? lane : p.count - 1);
    lanes.row[lane] = p.part->rows + row * p.part->row_bytes;
  }
#define CASE(type) case type: multiply_panel(type, &p, &lanes, memory, y, rows); break;
  switch (p.part->type) {
    CASE(BLOCK_Q4_0) CASE(BLOCK_Q4_1) CASE(BLOCK_Q5_0) CASE(BLOCK_Q5_1) CASE(BLOCK_Q8_0)
    CASE(BLOCK_Q2_K) CASE(BLOCK_Q3_K) CASE(BLOCK_Q4_K) CASE(BLOCK_Q5_K) CASE(BLOCK_Q6_K)
    CASE(BLOCK_IQ4_NL) CASE(BLOCK_IQ4_XS) CASE(BLOCK_MXFP4)
  }
#undef CASE
  if (!w->bias) return;
  for (int64_t r = 0; r < rows; r++) {
    float *own = y + r * w->width_out;
    store_outputs(&p, own, load_outputs(&p, own) + load_outputs(&p, w->bias));
  }
}

void team_blocks_linear(const Team *team, const BlockWeight *w, const float *x, float *y,
                        int64_t rows, char *scratch) {
  const int64_t panel = panel_rows(w, rows), panels = blocks_panels(w);
  for (int64_t first = 0; first < rows; first += panel) {
    const int64_t count = rows - first < panel ? rows - first : panel;
    TEAM_FOR(team, row, count)
      blocks_quantize_row(w, x + (first + row) * w->width_in, row, count, scratch);
    team_meet(team);
    TEAM_FOR(team, number, panels)
      blocks_multiply_panel(w, number, scratch, y + first * w->width_out, count);
    team_meet(team);
  }
}
