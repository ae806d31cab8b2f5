/* The state of a task's rows in attention, and the running softmax over tiles of keys. */

#pragma once

#include "kv_rows.h"

#define KEY_TILE 64
#define STRETCH 1024   /* keys; whole tiles */
#define QUERY_ROWS 128 /* of a task: each tile is read once for all of them */
#define FEW_ROWS 16    /* up to which threads share the stretches */
#define LOG2_E 1.44269504f

/* What rows have of some keys: the greatest score times log2(e), since powers of two are cheaper than
 * those of e, the sum of the weights, and that of weights times
 * values. */
typedef struct {
  float *most, *sum, *total; /* [rows], [rows], [rows, dim] */
} Part;

INLINE int64_t part_floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
INLINE Part part_in(float *memory, int64_t rows) {
  return (Part){memory, memory + rows, memory + 2 * rows};
}

/* A row is a query of one head. Keys and values are those of the current tile as words, where the
 * cache has them in another way. */
typedef struct {
  float q[QUERY_ROWS * MAX_DIM] ALIGNED;            /* [rows, q_stride], scaled */
  float total[QUERY_ROWS * MAX_DIM] ALIGNED;        /* [rows, dim], of the current stretch of keys */
  float before[QUERY_ROWS * (MAX_DIM + 2)] ALIGNED; /* a part: of the stretches before it */
  float scores[LANES * KEY_TILE] ALIGNED;           /* of LANES rows at a time */
  float weights[LANES * KEY_TILE] ALIGNED;          /* [LANES, weight_stride] */
  float keys[KEY_TILE * MAX_DIM] ALIGNED;           /* [depth, KEY_TILE] */
  float values[KEY_TILE * MAX_DIM] ALIGNED;         /* [KEY_TILE or half of it, dim] */
  float key_scales[KEY_TILE], value_scales[KEY_TILE];
  float most[QUERY_ROWS], sum[QUERY_ROWS], keep[LANES];
  float offsets[QUERY_ROWS * MEANS4];                /* of a row's scores with keys in 4 bits */
  float q_scale[QUERY_ROWS], weight_scale[LANES];    /* of rows of bytes, four in a word */
  int32_t q_sum[QUERY_ROWS], weight_sum[LANES];
  int64_t rows, dim, depth; /* dim: head_dim in whole vectors; depth: words of a key */
  int64_t q_stride, weight_stride;
} Rows;

/* The keys that a task sees, `start` to `end`, and the part of the tile at `first` among these. */
typedef struct {
  int64_t start, end, first, low, high;
} Span;

INLINE int64_t down_to(int64_t i, int64_t multiple) { return i / multiple * multiple; }
INLINE int64_t up_to(int64_t i, int64_t multiple) { return (i + multiple - 1) / multiple * multiple; }
INLINE Span seen_keys(const AttentionShape *s, const AttentionTask *task) {
  int64_t start = s->window ? task->first_position - s->window + 1 : 0;
  int64_t end = task->first_position + task->num_queries;
  if (s->own_keys && task->is_uncoded) {
    const int64_t own = down_to(task->first_position, s->own_keys);
    if (start < own) start = own;
  } else if (s->own_keys) {
    end = down_to(end - 1, s->own_keys);
  }
  if (start < s->num_hidden) start = s->num_hidden;
  return start < end ? (Span){.start = start, .end = end} : (Span){0};
}

/* To the keys of one stretch. */
INLINE void cut_span(Span *span, int64_t stretch) {
  const int64_t start = stretch * STRETCH, end = start + STRETCH;
  if (span->start < start) span->start = start;
  if (span->end > end) span->end = end;
}
INLINE void move_to(Span *span, int64_t first) {
  span->first = first;
  span->low = first < span->start ? span->start - first : 0;
  span->high = first + KEY_TILE < span->end ? KEY_TILE : span->end - first;
}

/* The index of the task's row `r` in [tokens, heads]. */
INLINE int64_t query_of(const AttentionShape *s, const AttentionTask *task, int64_t r) {
  const int64_t group = s->heads / s->cache.kv_heads;
  return (task->first_query + r / group) * s->heads + task->kv_head * group + r % group;
}

/* The index of a position's key or value, in rows of head_dim. */
INLINE int64_t row_of(const KVCache *c, const AttentionTask *task, int64_t position) {
  const int64_t block = task->table[position / c->block_size];
  return (block * c->kv_heads + task->kv_head) * c->block_size + position % c->block_size;
}

/* `rows`: the indices of the keys or values of `count` positions from the tile's first one on; outside
 * the span, of the nearest ones within it. There is one division for each block, not for each key. */
static void find_rows(const KVCache *c, const AttentionTask *task, const Span *span, int64_t count,
                      int64_t *rows) {
  const int64_t end = span->end - span->first < count ? span->end - span->first : count;
  for (int64_t j = span->low; j < end;) {
    const int64_t position = span->first + j, row = row_of(c, task, position);
    const int64_t left = c->block_size - position % c->block_size;
    const int64_t next = j + left < end ? j + left : end;
    for (int64_t i = j; i < next; i++) rows[i] = row + i - j;
    j = next;
  }
  for (int64_t j = 0; j < span->low; j++) rows[j] = rows[span->low];
  for (int64_t j = end; j < count; j++) rows[j] = rows[end - 1];
}

/* `count` floats, of which there are whole vectors, as signed bytes, four in a word: x ≈ scale · byte;
 * returns the sum of the bytes. */
INLINE int32_t round_bytes(const float *x, int64_t count, int32_t *words, float *scale) {
  f32v most = splat(0.0f), poison = splat(0.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    const f32v v = load(x + i);
    most = maxv(most, maxv(v, -v)), poison += v * 0.0f;
  }
  *scale = max_lanes(most) / 127.0f + sum_lanes(poison);
  const f32v inverse = splat(*scale > 0.0f ? 1.0f / *scale : 0.0f), magic = splat(12582912.0f);
  i32v sums = (i32v){0};
  for (int64_t i = 0; i < count; i += LANES) {
    const i32v codes = (i32v)fmav(load(x + i), inverse, magic) - (i32v)magic;
    const s8v bytes = __builtin_convertvector(codes, s8v);
    memcpy(words + i / 4, &bytes, sizeof bytes);
    sums += codes;
  }
  int32_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum;
}

static void start_rows(const AttentionShape *s, const AttentionTask *task, const float *query,
                       const int words, const int is_turned, Rows *state) {
  const int64_t group = s->heads / s->cache.kv_heads, width = s->cache.head_dim;
  const int64_t step = words == PAIRS ? 2 * LANES : LANES;
  const int is_coded = s->cache.kind == KV_INT4, is_in_bytes = is_coded && is_turned;
  state->rows = task->num_queries * group;
  state->dim = up_to(width, LANES);
  state->depth = is_turned ? width * LANES / step : up_to(width, step) / step * LANES;
  state->q_stride = state->depth * row_word(words);
  state->weight_stride = KEY_TILE / (words == PAIRS ? 2 : 1) * row_word(words);
  if (is_in_bytes) state->depth = width / 8, state->q_stride = width / 4, state->weight_stride = KEY_TILE / 4;
  for (int64_t r = 0; r < state->rows; r++) {
    const float *from = query + query_of(s, task, r) * width;
    float row[MAX_DIM + 2 * LANES] = {0};
    for (int64_t i = 0; i < width; i++) row[i] = from[i] * s->scale;
    if (is_coded) turn_query(&s->cache, task->kv_head, row, state->offsets + r * MEANS4);
    if (is_in_bytes) {
      state->q_sum[r] = round_bytes(row, width, (int32_t *)state->q + r * state->q_stride,
                                    state->q_scale + r);
      continue;
    }
    as_row(row, state->q + r * state->q_stride, state->depth, words);
  }
}

/* cap · tanh(score / cap); tanh from an exponential of at most 1, so that no two numbers as large as
 * cap are subtracted. */
INLINE f32v cap_score(f32v score, float cap) {
  const f32v size = maxv(-score, score), less = expv(size * (-2.0f / cap));
  const f32v capped = cap * ((1.0f - less) / (1.0f + less));
  return selectv(score < splat(0.0f), -capped, capped);
}

/* The keys of the tile that a row sees, `from` to `to`. */
INLINE void hide_others(float *scores, int64_t from, int64_t to) {
  for (int64_t j = 0; j < from; j++) scores[j] = -INFINITY;
  for (int64_t j = to > from ? to : from; j < KEY_TILE; j++) scores[j] = -INFINITY;
}

/* One step of the running softmax for LANES rows from `first` on, of which there may be fewer: scores
 * become weights, as words, and `keep` what the weights and sums before them are multiplied by. */
INLINE void weigh_rows(const AttentionShape *s, const AttentionTask *task, const Span *span,
                       int64_t first, Rows *state, const int kind, const int words,
                       const int is_in_bytes) {
  const int has_scales = kind == KV_INT8 || kind == KV_FP8 || kind == KV_INT4;
  const int64_t group = s->heads / s->cache.kv_heads;
  const int64_t count = state->rows - first < LANES ? state->rows - first : LANES;
  f32v parts[LANES];
  for (int64_t i = 0; i < LANES; i++) parts[i] = splat(-INFINITY);
  for (int64_t i = 0; i < count; i++) {
    float *scores = state->scores + i * KEY_TILE;
    if (has_scales || s->cap)
      for (int64_t j = 0; j < KEY_TILE; j += LANES) {
        f32v score = load(scores + j);
        const f32v scales = load(state->key_scales + j);
        if (has_scales) score *= scales;
        if (kind == KV_INT4) score += offsets_of(state->offsets + (first + i) * MEANS4, scales);
        store(scores + j, s->cap ? cap_score(score, s->cap) : score);
      }
    const int64_t position = task->first_position + (first + i) / group - span->first;
    int64_t oldest = s->window ? position - s->window + 1 : 0, end = position + 1;
    if (s->own_keys) {
      const int64_t own = down_to(position + span->first, s->own_keys) - span->first;
      if (!task->is_uncoded) end = own;
      else if (oldest < own) oldest = own;
    }
    const int64_t from = oldest > span->low ? oldest : span->low;
    const int64_t to = end < span->high ? end : span->high;
    if (from > 0 || to < KEY_TILE) hide_others(scores, from < KEY_TILE ? from : KEY_TILE, to);
    for (int64_t j = 0; j < KEY_TILE; j += LANES) parts[i] = maxv(parts[i], load(scores + j));
  }
  float found[LANES];
  max_lanes_of_each(parts, found);
  const f32v before = load(state->most + first), most = maxv(before, load(found) * LOG2_E);
  const f32v keep = selectv(before == most, splat(1.0f), exp2v(before - most));
  store(state->most + first, most), store(state->keep, keep);
  /* A row that has seen no key yet has nothing to compare with. */
  store(found, selectv(most == splat(-INFINITY), splat(0.0f), -most));
  for (int64_t i = 0; i < count; i++) {
    f32v row[KEY_TILE / LANES];
    parts[i] = splat(0.0f);
    for (int j = 0; j < KEY_TILE / LANES; j++) {
      const f32v score = load(state->scores + i * KEY_TILE + j * LANES);
      row[j] = exp2v(fmav(score, splat(LOG2_E), splat(found[i])));
      parts[i] += row[j];
      if (has_scales) row[j] *= load(state->value_scales + j * LANES);
    }
    float numbers[KEY_TILE] ALIGNED;
    for (int j = 0; j < KEY_TILE / LANES; j++) store(numbers + j * LANES, row[j]);
    if (is_in_bytes) {
      state->weight_sum[i] = round_bytes(numbers, KEY_TILE,
                                         (int32_t *)state->weights + i * state->weight_stride,
                                         state->weight_scale + i);
      continue;
    }
    as_row(numbers, state->weights + i * state->weight_stride,
           words == PAIRS ? KEY_TILE / 2 : KEY_TILE, words);
  }
  sum_lanes_of_each(parts, found);
  store(state->sum + first, load(state->sum + first) * keep + load(found));
}

/* A new stretch of keys. */
INLINE void start_stretch(Rows *state) {
  for (int64_t r = 0; r < state->rows; r++) state->most[r] = -INFINITY, state->sum[r] = 0.0f;
  memset(state->total, 0, (size_t)(state->rows * state->dim) * sizeof(float));
}

/* A part without keys: at most a sink, which has a weight and no value. */
INLINE void start_part(const AttentionShape *s, const AttentionTask *task, int64_t rows, int64_t dim,
                       const Part *part, int with_sinks) {
  const int64_t group = s->heads / s->cache.kv_heads;
  const float *sinks = with_sinks ? s->sinks : NULL;
  for (int64_t r = 0; r < rows; r++) {
    part->most[r] = sinks ? LOG2_E * sinks[task->kv_head * group + r % group] : -INFINITY;
    part->sum[r] = sinks ? 1.0f : 0.0f;
  }
  memset(part->total, 0, (size_t)(rows * dim) * sizeof(float));
}

/* Adds the part of the keys that follow. */
INLINE void add_part(const Part *part, const Part *next, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; r++) {
    const float before = part->most[r], here = next->most[r], most = here > before ? here : before;
    const float keep = before == most ? 1.0f : exp2v(splat(before - most))[0];
    const float share = here == most ? 1.0f : exp2v(splat(here - most))[0];
    part->most[r] = most;
    part->sum[r] = part->sum[r] * keep + next->sum[r] * share;
    float *total = part->total + r * dim;
    for (int64_t i = 0; i < dim; i += LANES)
      store(total + i, fmav(load(next->total + r * dim + i), splat(share), load(total + i) * keep));
  }
}

INLINE void finish_rows(const AttentionShape *s, const AttentionTask *task, const Part *part,
                        int64_t rows, int64_t dim, float *out) {
  const int64_t width = s->cache.head_dim;
  for (int64_t r = 0; r < rows; r++) {
    float *to = out + query_of(s, task, r) * width;
    const float sum = part->sum[r] > 0.0f ? part->sum[r] : 1.0f;
    if (s->cache.kind == KV_INT4 && !s->own_keys)
      turn_found(&s->cache, task->kv_head, part->total + r * dim, part->sum[r]);
    for (int64_t i = 0; i < width; i++) to[i] = part->total[r * dim + i] / sum;
  }
}
