/* Causal attention over the paged cache; see paged_attention.py for the formula.
 *
 * A task is one key/value head of one request with up to QUERY_ROWS rows (queries times the heads
 * that share it). Keys are taken in tiles at absolute positions with a running maximum (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), so that a row's arithmetic is the
 * same whatever other rows there are. A tile that a row does not see leaves the row unchanged. After
 * each stretch of keys its part is added to that of the stretches before, so that threads may share
 * the stretches of a few rows. Over a cache in 4 bits, queries' own keys are read from another one: a
 * task of its own, whose part is added last. */

#include "attention_codes.h"

/* Products with keys side by side, `stride` words apart, and with values one below the other. */
#define MULTIPLY(name, kind, is_strided)                                                          \
  static void name(const float *rows, int64_t row_stride, int64_t count, const Columns *columns,  \
                   int64_t vectors, int64_t depth, const float *keep, float *y, int64_t stride) { \
    multiply_words(rows, row_stride, count, columns, vectors, depth, keep, y, stride, kind,       \
                   is_strided);                                                                   \
  }
MULTIPLY(score_floats, FLOATS, 1)
MULTIPLY(score_pairs, PAIRS, 1)
MULTIPLY(add_floats, FLOATS, 0)
MULTIPLY(add_pairs, PAIRS, 0)

/* `kind`, `is_turned`: constants; of the cache. */
INLINE void attend(const AttentionShape *s, const AttentionTask *task, const float *query, float *out,
                   const int kind, const int is_turned) {
  const KVCache *cache = &s->cache;
  /* Words of two numbers have what these caches hold exactly. */
  const int words = kind == KV_FLOAT32 ? FLOATS : PAIRS;
  const int is_in_bytes = kind == KV_INT4 && is_turned;
  const int has_table = is_turned && (kind == KV_INT8 || kind == KV_FP8);
  const int is_in_place = is_turned && !has_table;
  Rows state;
  Parts both[2], scratch;
  int64_t rows[2 * KEY_TILE];
  start_rows(s, task, query, words, is_turned, &state);
  scratch_parts(&state, &scratch);
  CodeTable table = {0};
  if (has_table) table = code_table(kind);
  const Part here = {state.most, state.sum, state.total}, before = part_in(state.before, state.rows);
  start_part(s, task, state.rows, state.dim, &before, !task->part);
  start_stretch(&state);
  Span span = seen_keys(s, task);
  if (task->stretch >= 0) cut_span(&span, task->stretch);
  if (span.start >= span.end) span = (Span){0};
  int64_t first = down_to(span.start, KEY_TILE);
  if (is_turned && first < span.end) find_parts(cache, task, &span, first, both, kind);
  for (int64_t number = 0; first < span.end; first += KEY_TILE, number ^= 1) {
    Parts *found = both + number, *next = both + !number;
    move_to(&span, first);
    if (first % STRETCH == 0 && task->stretch < 0) {
      add_part(&before, &here, state.rows, state.dim);
      start_stretch(&state);
    }
    if (is_turned) find_parts(cache, task, &span, first + KEY_TILE, next, kind);
    if (span.low >= span.high) continue; /* all of its keys are hidden */
    if (is_in_bytes) {
      copy_scales(cache->key_scales, &span, found, state.key_scales, kind);
      copy_scales(cache->value_scales, &span, found, state.value_scales, kind);
    } else if (is_in_place) {
      end_values(&span, &state, found, kind);
    } else if (is_turned) {
      unpack_tile(cache, &span, found, next, &state, &table, kind);
    } else {
      find_rows(cache, task, &span, 2 * KEY_TILE, rows);
      fill_tile(cache, &span, rows, &state, kind, words);
    }
    const Parts *parts = is_in_place ? found : &scratch;
    const int64_t step = words == PAIRS ? 2 : 1, from = span.low / LANES;
    const int64_t vectors = (span.high + LANES - 1) / LANES - from;
    const int64_t low = span.low / step;
    const int64_t depth = (span.high + step - 1) / step - low;
    for (int64_t r = 0; r < state.rows; r += LANES) {
      const int64_t count = state.rows - r < LANES ? state.rows - r : LANES;
      const int is_asking = is_in_place && r == 0;
      const Columns keys = {parts->keys + from, is_asking ? next->keys + from : NULL,
                            is_in_place ? cache->block_size : KEY_TILE};
      const Columns values = {parts->values + low, is_asking ? next->values + low : NULL, 0};
      if (is_in_bytes) {
        const Columns own = {found->keys + from, keys.ahead, 4 * cache->block_size};
        const Columns fours = {found->values, is_asking ? next->values : NULL, 0};
        score_codes(&state, r, count, &own, vectors, state.scores + from * LANES);
        weigh_rows(s, task, &span, r, &state, kind, words, 1);
        add_codes(&state, r, count, &fours, span.low / 4, (span.high + 3) / 4);
        continue;
      }
      (words == PAIRS ? score_pairs : score_floats)(
          state.q + r * state.q_stride, state.q_stride, count, &keys, vectors, state.depth, NULL,
          state.scores + from * LANES, KEY_TILE);
      weigh_rows(s, task, &span, r, &state, kind, words, 0);
      (words == PAIRS ? add_pairs : add_floats)(
          state.weights + low * row_word(words), state.weight_stride, count, &values,
          state.dim / LANES, depth, state.keep, state.total + r * state.dim, state.dim);
    }
  }
  if (task->stretch < 0) add_part(&before, &here, state.rows, state.dim);
  if (!task->part) {
    finish_rows(s, task, &before, state.rows, state.dim, out);
    return;
  }
  const Part to = part_in(task->part, state.rows), *found = task->stretch < 0 ? &before : &here;
  memcpy(to.most, found->most, (size_t)state.rows * sizeof(float));
  memcpy(to.sum, found->sum, (size_t)state.rows * sizeof(float));
  memcpy(to.total, found->total, (size_t)(state.rows * state.dim) * sizeof(float));
}

/* Adds the part of the queries' own keys to that of the others, and both to the sinks. */
static void join_uncoded(const AttentionShape *s, const AttentionTask *task, const Part *others,
                        const Part *uncoded, int64_t rows, int64_t dim) {
  float memory[QUERY_ROWS * (MAX_DIM + 2)];
  const Part all = part_in(memory, rows);
  for (int64_t r = 0; r < rows; r++)
    turn_found(&s->cache, task->kv_head, others->total + r * dim, others->sum[r]);
  start_part(s, task, rows, dim, &all, 1);
  add_part(&all, others, rows, dim);
  add_part(&all, uncoded, rows, dim);
  memcpy(others->most, all.most, (size_t)part_floats(rows, dim) * sizeof(float));
}

/* Joins the parts of a task and of those that follow it, as `attend` does one after another. */
static void join_parts(const AttentionShape *s, const AttentionTask *task, float *out) {
  const int64_t rows = task->num_queries * (s->heads / s->cache.kv_heads);
  const int64_t dim = up_to(s->cache.head_dim, LANES);
  float memory[QUERY_ROWS * (MAX_DIM + 2)];
  const Part all = part_in(memory, rows);
  start_part(s, task, rows, dim, &all, !s->own_keys);
  for (int64_t i = 0; i < task->num_joined; i++) {
    const Part next = part_in(task[i].part, rows);
    if (task[i].is_uncoded) join_uncoded(s, task, &all, &next, rows, dim);
    else add_part(&all, &next, rows, dim);
  }
  finish_rows(s, task, &all, rows, dim, out);
}

#define ATTEND(name, kind, is_turned)                                                          \
  static void name(const AttentionShape *s, const AttentionTask *task, const float *query,     \
                   float *out) {                                                               \
    attend(s, task, query, out, kind, is_turned);                                              \
  }
ATTEND(attend_float32, KV_FLOAT32, 0)
ATTEND(attend_float32_turned, KV_FLOAT32, 1)
ATTEND(attend_bfloat16, KV_BFLOAT16, 0)
ATTEND(attend_bfloat16_turned, KV_BFLOAT16, 1)
ATTEND(attend_int8, KV_INT8, 0)
ATTEND(attend_int8_turned, KV_INT8, 1)
ATTEND(attend_fp8, KV_FP8, 0)
ATTEND(attend_fp8_turned, KV_FP8, 1)
ATTEND(attend_int4, KV_INT4, 0)
ATTEND(attend_int4_turned, KV_INT4, 1)

/* query, out: [tokens, heads, head_dim]. */
void team_attention(const Team *team, const AttentionShape *s, const AttentionTask *tasks,
                    int64_t count, const float *query, float *out) {
  void (*const attend_one[][2])(const AttentionShape *, const AttentionTask *, const float *,
                                float *) = {
      [KV_FLOAT32] = {attend_float32, attend_float32_turned},
      [KV_BFLOAT16] = {attend_bfloat16, attend_bfloat16_turned},
      [KV_INT8] = {attend_int8, attend_int8_turned},
      [KV_FP8] = {attend_fp8, attend_fp8_turned},
      [KV_INT4] = {attend_int4, attend_int4_turned}};
  AttentionShape uncoded = *s;
  uncoded.cache = s->uncoded;
  /* Tasks take different times, so a thread that is done takes the next one. */
  for (int64_t i; (i = team_next(team)) < count;) {
    const AttentionShape *own = tasks[i].is_uncoded ? &uncoded : s;
    attend_one[own->cache.kind][own->cache.is_turned](own, tasks + i, query, out);
  }
  team_meet(team);
  int has_parts = 0;
  for (int64_t i = 0; i < count; i++) has_parts |= tasks[i].num_joined > 0;
  if (!has_parts) return;
  TEAM_FOR(team, i, count)
    if (tasks[i].num_joined) join_parts(s, tasks + i, out);
  team_meet(team);
}

/* How many stretches the keys of a few rows are shared out in, so that all threads have work. */
INLINE int64_t stretches(int64_t rows, int64_t length) {
  return rows <= FEW_ROWS && length > STRETCH ? (length + STRETCH - 1) / STRETCH : 1;
}

AttentionTask *attention_tasks(Tables tables, Tables uncoded, const int32_t *starts,
                               const int64_t *lengths, int64_t seqs, const AttentionShape *s,
                               int64_t *count) {
  const int64_t group = s->heads / s->cache.kv_heads, per_task = QUERY_ROWS / group;
  const int64_t dim = up_to(s->cache.head_dim, LANES), has_uncoded = s->own_keys > 0;
  if (s->cache.head_dim > MAX_DIM || per_task < 1) return NULL;
  int64_t floats = 0;
  *count = 0;
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t queries = starts[i + 1] - starts[i];
    const int64_t parts = stretches(queries * group, lengths[i]) + has_uncoded;
    *count += s->cache.kv_heads * ((queries + per_task - 1) / per_task) * parts;
    if (parts > 1) floats += s->cache.kv_heads * parts * part_floats(queries * group, dim);
  }
  AttentionTask *tasks = malloc((size_t)(*count + 1) * sizeof(AttentionTask) +
                                (size_t)floats * sizeof(float)), *next = tasks;
  if (!tasks) return NULL;
  float *memory = (float *)(tasks + *count + 1);
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t queries = starts[i + 1] - starts[i];
    const int64_t shared = stretches(queries * group, lengths[i]), parts = shared + has_uncoded;
    for (int64_t head = 0; head < s->cache.kv_heads; head++)
      for (int64_t q = 0; q < queries; q += per_task) {
        const int64_t taken = queries - q < per_task ? queries - q : per_task;
        for (int64_t n = 0; n < parts; n++, next++) {
          *next = (AttentionTask){.table = tables.blocks + i * tables.max_blocks,
                                  .kv_head = head, .first_query = starts[i] + q,
                                  .num_queries = taken, .first_position = lengths[i] - queries + q,
                                  .stretch = shared > 1 ? n : -1, .is_uncoded = n == shared,
                                  .num_joined = parts > 1 && n == 0 ? parts : 0};
          if (n == shared) {
            next->table = uncoded.blocks + i * uncoded.max_blocks, next->stretch = -1;
          }
          if (parts > 1) next->part = memory, memory += part_floats(taken * group, dim);
        }
      }
  }
  return tasks;
}

typedef struct {
  const AttentionShape *shape;
  const AttentionTask *tasks;
  int64_t count;
  const float *query;
  float *out;
} Attention;

static void attend_all(const Team *team, void *arguments) {
  const Attention *a = arguments;
  team_attention(team, a->shape, a->tasks, a->count, a->query, a->out);
}

/* Returns 1 if there are no tasks; see attention_tasks. */
int paged_attention(const AttentionShape *s, const float *query, const int32_t *tables,
                    int64_t max_blocks, const int32_t *uncoded, int64_t max_uncoded,
                    const int32_t *starts, const int64_t *lengths, float *out, int64_t seqs,
                    int64_t threads) {
  int64_t count;
  const Tables own = {tables, max_blocks}, other = {uncoded, max_uncoded};
  AttentionTask *tasks = attention_tasks(own, other, starts, lengths, seqs, s, &count);
  if (!tasks) return 1;
  run_team(threads, attend_all, &(Attention){s, tasks, count, query, out});
  free(tasks);
  return 0;
}
