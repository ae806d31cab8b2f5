/* Causal attention over the paged cache, see paged_attention.py for the formula.
 *
 * A task is one key/value head of one request with up to QUERY_ROWS rows (queries times the heads
 * that share it). Keys are taken in tiles at absolute positions with a running maximum (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), so that a row's arithmetic is the
 * same whatever rows are beside it; a tile that it does not see leaves it as it is. */

#include "common.h"

#define KEY_TILE 64
#define QUERY_ROWS 32
#define MAX_DIM 256
#define ALIGNED __attribute__((aligned(64)))

typedef struct {
  const void *keys, *values; /* [blocks, kv_heads, block_size, head_dim] */
  int64_t is_bfloat16;       /* the caches; else float32 */
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t window; /* 0: none */
  float scale;
} AttentionShape;

typedef struct {
  const int32_t *table;
  int64_t kv_head, first_query; /* row of the first query in the batch */
  int64_t num_queries, first_position;
} Task;

/* Keys or values `first + low` to `first + high` as floats, [high, padded_dim] from row `low`. */
INLINE void fetch(const AttentionShape *s, const void *cache, const Task *task, int64_t first,
                  int64_t low, int64_t high, float *tile, int64_t padded_dim) {
  for (int64_t j = low; j < high; j++) {
    const int64_t block = task->table[(first + j) / s->block_size];
    const int64_t offset = (first + j) % s->block_size;
    const int64_t at = ((block * s->kv_heads + task->kv_head) * s->block_size + offset) * s->head_dim;
    float *to = tile + j * padded_dim;
    if (!s->is_bfloat16) {
      memcpy(to, (const float *)cache + at, (size_t)s->head_dim * sizeof(float));
      continue;
    }
    const uint16_t *from = (const uint16_t *)cache + at;
    int64_t i = 0;
    for (; i + LANES <= s->head_dim; i += LANES) store(to + i, load_bf16(from + i));
    for (; i < s->head_dim; i++) {
      const uint32_t bits = (uint32_t)from[i] << 16;
      memcpy(to + i, &bits, sizeof bits);
    }
  }
}

/* scores[r][j] = q[r] · k[j] for two rows, whose vectors stay in registers. */
INLINE void score_two(const float *q, const float *k, float *scores, int64_t low, int64_t high,
                      const int vectors) {
  const int64_t dim = vectors * LANES;
  for (int64_t j = low; j < high; j++) {
    f32x16 first = splat(0.0f), second = splat(0.0f);
    for (int i = 0; i < vectors; i++) {
      const f32x16 key = load(k + j * dim + i * LANES);
      first = fma16(load(q + i * LANES), key, first);
      second = fma16(load(q + dim + i * LANES), key, second);
    }
    scores[j] = sum_lanes(first), scores[KEY_TILE + j] = sum_lanes(second);
  }
}

/* total[r] = total[r] · keep[r] + weights[r] · v for two rows. */
INLINE void add_values(const float *weights, const float *v, const float *keep, float *total,
                       int64_t low, int64_t high, const int vectors) {
  const int64_t dim = vectors * LANES;
  f32x16 first[16], second[16];
  for (int i = 0; i < vectors; i++) {
    first[i] = load(total + i * LANES) * keep[0];
    second[i] = load(total + dim + i * LANES) * keep[1];
  }
  for (int64_t j = low; j < high; j++) {
    const f32x16 a = splat(weights[j]), b = splat(weights[KEY_TILE + j]);
    for (int i = 0; i < vectors; i++) {
      const f32x16 value = load(v + j * dim + i * LANES);
      first[i] = fma16(a, value, first[i]);
      second[i] = fma16(b, value, second[i]);
    }
  }
  for (int i = 0; i < vectors; i++) {
    store(total + i * LANES, first[i]);
    store(total + dim + i * LANES, second[i]);
  }
}

/* One step of the running softmax: scores become weights; returns what remains of the weights and
 * sums before. Scores outside `from` to `to` are not the row's to see. */
INLINE float weigh(float *scores, int64_t from, int64_t to, float *most, float *sum) {
  if (from >= to) {
    memset(scores, 0, KEY_TILE * sizeof(float));
    return 1.0f;
  }
  for (int64_t j = 0; j < from; j++) scores[j] = -INFINITY;
  for (int64_t j = to; j < KEY_TILE; j++) scores[j] = -INFINITY;
  f32x16 peak = load(scores), part = splat(0.0f);
  for (int64_t j = LANES; j < KEY_TILE; j += LANES) peak = max16(peak, load(scores + j));
  const float before = *most, peak_here = max_lanes(peak);
  *most = peak_here > before ? peak_here : before;
  for (int64_t j = 0; j < KEY_TILE; j += LANES) {
    const f32x16 weights = exp16(load(scores + j) - *most);
    store(scores + j, weights);
    part += weights;
  }
  const float keep = before > -INFINITY ? exp16(splat(before - *most))[0] : 0.0f;
  *sum = *sum * keep + sum_lanes(part);
  return keep;
}

INLINE void attend(const AttentionShape *s, const Task *task, const float *query, float *out,
                   const int vectors) {
  const int64_t group = s->heads / s->kv_heads, rows = task->num_queries * group;
  const int64_t dim = vectors * LANES, width = s->head_dim;
  float q[QUERY_ROWS * MAX_DIM] ALIGNED, total[QUERY_ROWS * MAX_DIM] ALIGNED;
  float tile[KEY_TILE * MAX_DIM] ALIGNED, weights[QUERY_ROWS * KEY_TILE] ALIGNED;
  float most[QUERY_ROWS], sum[QUERY_ROWS], keep[QUERY_ROWS];
  const int64_t even_rows = rows + rows % 2;
  memset(q, 0, (size_t)(even_rows * dim) * sizeof(float));
  memset(total, 0, (size_t)(even_rows * dim) * sizeof(float));
  memset(tile, 0, (size_t)(KEY_TILE * dim) * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    const float *from =
        query + ((task->first_query + r / group) * s->heads + task->kv_head * group + r % group) * width;
    for (int64_t i = 0; i < width; i++) q[r * dim + i] = from[i] * s->scale;
  }
  for (int64_t r = 0; r < even_rows; r++) most[r] = -INFINITY, sum[r] = 0.0f;
  const int64_t end = task->first_position + task->num_queries;
  int64_t start = s->window ? task->first_position - s->window + 1 : 0;
  if (start < 0) start = 0;
  for (int64_t first = start / KEY_TILE * KEY_TILE; first < end; first += KEY_TILE) {
    const int64_t low = first < start ? start - first : 0;
    const int64_t high = first + KEY_TILE < end ? KEY_TILE : end - first;
    fetch(s, s->keys, task, first, low, high, tile, dim);
    for (int64_t r = 0; r < rows; r += 2)
      score_two(q + r * dim, tile, weights + r * KEY_TILE, low, high, vectors);
    for (int64_t r = 0; r < even_rows; r++) {
      const int64_t position = task->first_position + r / group - first;
      const int64_t from = s->window && position - s->window + 1 > low ? position - s->window + 1 : low;
      const int64_t to = position + 1 < high ? position + 1 : high;
      keep[r] = weigh(weights + r * KEY_TILE, from, r < rows ? to : 0, most + r, sum + r);
    }
    fetch(s, s->values, task, first, low, high, tile, dim);
    for (int64_t r = 0; r < rows; r += 2)
      add_values(weights + r * KEY_TILE, tile, keep + r, total + r * dim, low, high, vectors);
  }
  for (int64_t r = 0; r < rows; r++) {
    float *to =
        out + ((task->first_query + r / group) * s->heads + task->kv_head * group + r % group) * width;
    for (int64_t i = 0; i < width; i++) to[i] = total[r * dim + i] / sum[r];
  }
}

static void attend_any(const AttentionShape *s, const Task *task, const float *query, float *out) {
  switch ((s->head_dim + LANES - 1) / LANES) {
    case 1: attend(s, task, query, out, 1); break;
    case 2: attend(s, task, query, out, 2); break;
    case 4: attend(s, task, query, out, 4); break;
    case 5: attend(s, task, query, out, 5); break;
    case 6: attend(s, task, query, out, 6); break;
    case 8: attend(s, task, query, out, 8); break;
    case 16: attend(s, task, query, out, 16); break;
  }
}

/* query, out: [tokens, heads, head_dim]; caches: [blocks, kv_heads, block_size, head_dim]; tables:
 * [seqs, max_blocks]; starts: [seqs + 1]; lengths: [seqs]; window: 0 for none. Returns 1 if there
 * is no memory, or the heads have a shape that is not meant. */
int paged_attention(const float *query, const void *keys, const void *values, int is_bfloat16,
                    const int32_t *tables, const int32_t *starts, const int64_t *lengths, float *out,
                    int64_t seqs, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                    int64_t head_dim, int64_t block_size, int64_t window, float scale,
                    int64_t threads) {
  const AttentionShape shape = {keys,     values,     is_bfloat16, heads, kv_heads,
                                head_dim, block_size, window,      scale};
  const int64_t per_task = QUERY_ROWS / (heads / kv_heads);
  if (head_dim > MAX_DIM || per_task < 1) return 1;
  int64_t count = 0;
  for (int64_t i = 0; i < seqs; i++)
    count += kv_heads * ((starts[i + 1] - starts[i] + per_task - 1) / per_task);
  Task *tasks = malloc((size_t)count * sizeof(Task));
  if (!tasks) return 1;
  Task *next = tasks;
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t queries = starts[i + 1] - starts[i];
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t q = 0; q < queries; q += per_task)
        *next++ = (Task){tables + i * max_blocks, head, starts[i] + q,
                         queries - q < per_task ? queries - q : per_task,
                         lengths[i] - queries + q};
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; i++) attend_any(&shape, tasks + i, query, out);
  free(tasks);
  return 0;
}
