/* The state of a task's rows in attention, and the running softmax over tiles of keys. */

#pragma once

#include "kv_rows.h"

#define KEY_TILE 64
#define QUERY_ROWS 32
#define MAX_DIM 576
#define ALIGNED __attribute__((aligned(64)))

/* A row is a query of one head; there are `rows`, padded with zeros. */
typedef struct {
  float q[QUERY_ROWS * MAX_DIM] ALIGNED; /* [padded_rows, dim], scaled */
  float total[QUERY_ROWS * MAX_DIM] ALIGNED;
  float weights[QUERY_ROWS * KEY_TILE] ALIGNED; /* of the current tile; its scores before that */
  float most[QUERY_ROWS], sum[QUERY_ROWS], keep[QUERY_ROWS];
  int64_t rows, padded_rows, dim; /* dim: head_dim in whole vectors */
} Rows;

/* The keys that a task sees, `start` to `end`, and the part of the tile at `first` among these. */
typedef struct {
  int64_t start, end, first, low, high;
} Span;

INLINE Span seen_keys(const AttentionShape *s, const AttentionTask *task) {
  const int64_t start = s->window ? task->first_position - s->window + 1 : 0;
  return (Span){start < s->num_hidden ? s->num_hidden : start, task->first_position + task->num_queries, 0, 0, 0};
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

static void start_rows(const AttentionShape *s, const AttentionTask *task, const float *query,
                       int64_t multiple, int vectors, Rows *state) {
  const int64_t width = s->cache.head_dim;
  state->rows = task->num_queries * (s->heads / s->cache.kv_heads);
  state->padded_rows = (state->rows + multiple - 1) / multiple * multiple;
  state->dim = vectors * LANES;
  memset(state->q, 0, (size_t)(state->padded_rows * state->dim) * sizeof(float));
  memset(state->total, 0, (size_t)(state->padded_rows * state->dim) * sizeof(float));
  for (int64_t r = 0; r < state->rows; r++) {
    const float *from = query + query_of(s, task, r) * width;
    for (int64_t i = 0; i < width; i++) state->q[r * state->dim + i] = from[i] * s->scale;
  }
  const int64_t group = s->heads / s->cache.kv_heads;
  for (int64_t r = 0; r < state->padded_rows; r++) {
    const int has_sink = s->sinks && r < state->rows;
    state->most[r] = has_sink ? s->sinks[task->kv_head * group + r % group] : -INFINITY;
    state->sum[r] = has_sink ? 1.0f : 0.0f;
  }
}

/* cap · tanh(score / cap), tanh written with an exponential. */
INLINE void cap_scores(float *scores, float cap) {
  for (int64_t j = 0; j < KEY_TILE; j += LANES)
    store(scores + j, cap - 2.0f * cap / (1.0f + expv(load(scores + j) * (2.0f / cap))));
}

/* One step of the running softmax: scores become weights. Returns the factor for the weights and
 * sums before it. The row does not see scores outside `from` to `to`. */
INLINE float weigh(float *scores, int64_t from, int64_t to, float *most, float *sum) {
  if (from >= to) {
    memset(scores, 0, KEY_TILE * sizeof(float));
    return 1.0f;
  }
  for (int64_t j = 0; j < from; j++) scores[j] = -INFINITY;
  for (int64_t j = to; j < KEY_TILE; j++) scores[j] = -INFINITY;
  f32v peak = load(scores), part = splat(0.0f);
  for (int64_t j = LANES; j < KEY_TILE; j += LANES) peak = maxv(peak, load(scores + j));
  const float before = *most, peak_here = max_lanes(peak);
  *most = peak_here > before ? peak_here : before;
  for (int64_t j = 0; j < KEY_TILE; j += LANES) {
    const f32v weights = expv(load(scores + j) - *most);
    store(scores + j, weights);
    part += weights;
  }
  const float keep = before > -INFINITY ? expv(splat(before - *most))[0] : 0.0f;
  *sum = *sum * keep + sum_lanes(part);
  return keep;
}

/* Turns the scores of a tile into weights, for each row those that it sees. */
static void weigh_rows(const AttentionShape *s, const AttentionTask *task, const Span *span,
                       Rows *state) {
  const int64_t group = s->heads / s->cache.kv_heads;
  for (int64_t r = 0; r < state->padded_rows; r++) {
    const int64_t position = task->first_position + r / group - span->first;
    const int64_t oldest = s->window ? position - s->window + 1 : 0;
    const int64_t from = oldest > span->low ? oldest : span->low;
    const int64_t to = position + 1 < span->high ? position + 1 : span->high;
    if (s->cap) cap_scores(state->weights + r * KEY_TILE, s->cap);
    state->keep[r] = weigh(state->weights + r * KEY_TILE, from, r < state->rows ? to : 0,
                           state->most + r, state->sum + r);
  }
}

static void finish_rows(const AttentionShape *s, const AttentionTask *task, const Rows *state,
                        float *out) {
  const int64_t width = s->cache.head_dim;
  for (int64_t r = 0; r < state->rows; r++) {
    float *to = out + query_of(s, task, r) * width;
    const float *total = state->total + r * state->dim;
    const float sum = state->sum[r] > 0.0f ? state->sum[r] : 1.0f;
    for (int64_t i = 0; i < width; i++) to[i] = total[i] / sum;
  }
}
