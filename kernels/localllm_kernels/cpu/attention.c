/* Causal attention over the paged cache, see paged_attention.py for the formula.
 *
 * A task is one key/value head of one request with up to QUERY_ROWS rows (queries times the heads
 * that share it). Keys are taken in tiles at absolute positions with a running maximum (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), so that a row's arithmetic is the
 * same whatever rows are beside it; a tile that it does not see leaves it as it is. */

#include "operators.h"

#define KEY_TILE 64
#define QUERY_ROWS 32
#define MIN_TURNED_ROWS 8 /* from here on it pays to turn the keys */
#define MAX_DIM 256
#define ALIGNED __attribute__((aligned(64)))

/* Keys or values `first + low` to `first + high` as floats, [high, padded_dim] from row `low`. */
INLINE void fetch(const AttentionShape *s, const void *cache, const AttentionTask *task, int64_t first,
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

#if defined(__AVX512F__)
/* Sixteen by sixteen floats, rows to columns: in four rounds halves, quarters, … change places. The
 * orders are written out: as constants they stay in registers. */
#define EXCHANGE(half, low, high)                                                     \
  for (int i = 0; i < LANES; i++)                                                     \
    if (!(i & half)) {                                                                \
      const f32x16 a = m[i], b = m[i + half];                                         \
      m[i] = __builtin_shuffle(a, b, (i32x16)low);                                    \
      m[i + half] = __builtin_shuffle(a, b, (i32x16)high);                            \
    }
#define ORDER(...) {__VA_ARGS__}
INLINE void transpose16(f32x16 m[LANES]) {
  EXCHANGE(8, ORDER(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           ORDER(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  EXCHANGE(4, ORDER(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
           ORDER(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  EXCHANGE(2, ORDER(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           ORDER(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  EXCHANGE(1, ORDER(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           ORDER(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}
#undef EXCHANGE
#undef ORDER
#endif

/* Keys [KEY_TILE, dim] -> [KEY_TILE / 16, dim, 16]: sixteen keys side by side. */
INLINE void turn_tile(const float *tile, float *turned, const int vectors) {
  const int64_t dim = vectors * LANES;
  for (int64_t j = 0; j < KEY_TILE; j += LANES)
    for (int64_t i = 0; i < dim; i += LANES) {
      const float *from = tile + j * dim + i;
      float *to = turned + j * dim + i * LANES;
#if defined(__AVX512F__)
      f32x16 m[LANES];
      for (int k = 0; k < LANES; k++) m[k] = load(from + k * dim);
      transpose16(m);
      for (int k = 0; k < LANES; k++) store(to + k * LANES, m[k]);
#else
      for (int k = 0; k < LANES; k++)
        for (int l = 0; l < LANES; l++) to[l * LANES + k] = from[k * dim + l];
#endif
    }
}

/* For four rows and sixteen keys that lie side by side: what score_two adds up in one lane. */
INLINE void lane_sums(const float *q, const float *k, const int vectors, int lane, f32x16 sums[4]) {
  for (int r = 0; r < 4; r++) sums[r] = splat(0.0f);
  for (int i = 0; i < vectors; i++) {
    const f32x16 keys = load(k + (i * LANES + lane) * LANES);
    for (int r = 0; r < 4; r++)
      sums[r] = fma16(splat(q[(r * vectors + i) * LANES + lane]), keys, sums[r]);
  }
}
/* And the lanes in the order of sum_lanes, by twos: those that are 8 apart first. */
#define ADD_LANES(name, part, stride)                                                           \
  INLINE void name(const float *q, const float *k, const int vectors, int lane, f32x16 sums[4]) { \
    f32x16 others[4];                                                                           \
    part(q, k, vectors, lane, sums);                                                            \
    part(q, k, vectors, lane + stride, others);                                                 \
    for (int r = 0; r < 4; r++) sums[r] += others[r];                                           \
  }
ADD_LANES(add_2_lanes, lane_sums, 8)
ADD_LANES(add_4_lanes, add_2_lanes, 4)
ADD_LANES(add_8_lanes, add_4_lanes, 2)
ADD_LANES(add_16_lanes, add_8_lanes, 1)

/* The scores of score_two, bit by bit, for a multiple of four rows and the first `high` of a tile of
 * turned keys. Sixteen keys at a time, for all rows: those stay in the first cache. */
INLINE void score_turned(const float *q, const float *turned, float *scores, int64_t rows,
                         int64_t high, const int vectors) {
  const int64_t dim = vectors * LANES;
  for (int64_t j = 0; j < high; j += LANES)
    for (int64_t r = 0; r < rows; r += 4) {
      f32x16 sums[4];
      add_16_lanes(q + r * dim, turned + j * dim, vectors, 0, sums);
      for (int i = 0; i < 4; i++) store(scores + (r + i) * KEY_TILE + j, sums[i]);
    }
}

/* total[r] = total[r] · keep[r] + weights[r] · v for `rows` rows and `count` vectors of their width,
 * whose sums stay in registers; both are constants where the width is. */
INLINE void add_values(const float *weights, const float *v, const float *keep, float *total,
                       int64_t low, int64_t high, int64_t dim, const int rows, const int count) {
  f32x16 sums[MAX_DIM / LANES * 2];
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < count; i++) sums[r * count + i] = load(total + r * dim + i * LANES) * keep[r];
  for (int64_t j = low; j < high; j++)
    for (int i = 0; i < count; i++) {
      const f32x16 value = load(v + j * dim + i * LANES);
      for (int r = 0; r < rows; r++)
        sums[r * count + i] = fma16(splat(weights[r * KEY_TILE + j]), value, sums[r * count + i]);
    }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < count; i++) store(total + r * dim + i * LANES, sums[r * count + i]);
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

INLINE void attend(const AttentionShape *s, const AttentionTask *task, const float *query, float *out,
                   const int vectors) {
  const int64_t group = s->heads / s->kv_heads, rows = task->num_queries * group;
  const int64_t dim = vectors * LANES, width = s->head_dim;
  float q[QUERY_ROWS * MAX_DIM] ALIGNED, total[QUERY_ROWS * MAX_DIM] ALIGNED;
  float tile[KEY_TILE * MAX_DIM] ALIGNED, turned[KEY_TILE * MAX_DIM] ALIGNED;
  float weights[QUERY_ROWS * KEY_TILE] ALIGNED;
  float most[QUERY_ROWS], sum[QUERY_ROWS], keep[QUERY_ROWS];
  const int turns = rows >= MIN_TURNED_ROWS;
  const int64_t together = turns ? 4 : 2; /* rows that share a pass over the tile */
  const int64_t padded_rows = (rows + together - 1) / together * together;
  memset(q, 0, (size_t)(padded_rows * dim) * sizeof(float));
  memset(total, 0, (size_t)(padded_rows * dim) * sizeof(float));
  if (dim > width || turns)
    memset(tile, 0, (size_t)(KEY_TILE * dim) * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    const float *from =
        query + ((task->first_query + r / group) * s->heads + task->kv_head * group + r % group) * width;
    for (int64_t i = 0; i < width; i++) q[r * dim + i] = from[i] * s->scale;
  }
  for (int64_t r = 0; r < padded_rows; r++) most[r] = -INFINITY, sum[r] = 0.0f;
  const int64_t end = task->first_position + task->num_queries;
  int64_t start = s->window ? task->first_position - s->window + 1 : 0;
  if (start < 0) start = 0;
  for (int64_t first = start / KEY_TILE * KEY_TILE; first < end; first += KEY_TILE) {
    const int64_t low = first < start ? start - first : 0;
    const int64_t high = first + KEY_TILE < end ? KEY_TILE : end - first;
    fetch(s, s->keys, task, first, low, high, tile, dim);
    if (turns) {
      turn_tile(tile, turned, vectors);
      score_turned(q, turned, weights, padded_rows, high, vectors);
    } else {
      for (int64_t r = 0; r < rows; r += 2)
        score_two(q + r * dim, tile, weights + r * KEY_TILE, low, high, vectors);
    }
    for (int64_t r = 0; r < padded_rows; r++) {
      const int64_t position = task->first_position + r / group - first;
      const int64_t from = s->window && position - s->window + 1 > low ? position - s->window + 1 : low;
      const int64_t to = position + 1 < high ? position + 1 : high;
      keep[r] = weigh(weights + r * KEY_TILE, from, r < rows ? to : 0, most + r, sum + r);
    }
    fetch(s, s->values, task, first, low, high, tile, dim);
    if (turns && vectors % 2 == 0) {
      const int half = vectors / 2;
      for (int64_t i = 0; i < dim; i += half * LANES)
        for (int64_t r = 0; r < rows; r += 4)
          add_values(weights + r * KEY_TILE, tile + i, keep + r, total + r * dim + i, low, high,
                     dim, 4, half);
    } else {
      for (int64_t r = 0; r < rows; r += 2)
        add_values(weights + r * KEY_TILE, tile, keep + r, total + r * dim, low, high, dim, 2,
                   vectors);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float *to =
        out + ((task->first_query + r / group) * s->heads + task->kv_head * group + r % group) * width;
    for (int64_t i = 0; i < width; i++) to[i] = total[r * dim + i] / sum[r];
  }
}

static void attend_any(const AttentionShape *s, const AttentionTask *task, const float *query, float *out) {
  /* Constants for the sizes that models have: then the sums stay in registers. */
  const int vectors = (int)((s->head_dim + LANES - 1) / LANES);
  switch (vectors) {
    case 4: attend(s, task, query, out, 4); break;
    case 8: attend(s, task, query, out, 8); break;
    default: attend(s, task, query, out, vectors);
  }
}

/* query, out: [tokens, heads, head_dim]. */
void team_attention(const AttentionShape *s, const AttentionTask *tasks, int64_t count,
                    const float *query, float *out) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; i++) attend_any(s, tasks + i, query, out);
}

AttentionTask *attention_tasks(const int32_t *tables, const int32_t *starts, const int64_t *lengths,
                               int64_t seqs, int64_t max_blocks, const AttentionShape *s,
                               int64_t *count) {
  const int64_t per_task = QUERY_ROWS / (s->heads / s->kv_heads);
  if (s->head_dim > MAX_DIM || per_task < 1) return NULL;
  *count = 0;
  for (int64_t i = 0; i < seqs; i++)
    *count += s->kv_heads * ((starts[i + 1] - starts[i] + per_task - 1) / per_task);
  AttentionTask *tasks = malloc((size_t)(*count + 1) * sizeof(AttentionTask)), *next = tasks;
  if (!tasks) return NULL;
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t queries = starts[i + 1] - starts[i];
    for (int64_t head = 0; head < s->kv_heads; head++)
      for (int64_t q = 0; q < queries; q += per_task)
        *next++ = (AttentionTask){tables + i * max_blocks, head, starts[i] + q,
                                  queries - q < per_task ? queries - q : per_task,
                                  lengths[i] - queries + q};
  }
  return tasks;
}

/* Returns 1 where there are no tasks, see attention_tasks. */
int paged_attention(const AttentionShape *s, const float *query, const int32_t *tables,
                    const int32_t *starts, const int64_t *lengths, float *out, int64_t seqs,
                    int64_t max_blocks, int64_t threads) {
  int64_t count;
  AttentionTask *tasks = attention_tasks(tables, starts, lengths, seqs, max_blocks, s, &count);
  if (!tasks) return 1;
#pragma omp parallel num_threads(threads)
  team_attention(s, tasks, count, query, out);
  free(tasks);
  return 0;
}
