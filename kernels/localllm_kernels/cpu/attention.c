/* Causal attention over the paged cache; see paged_attention.py for the formula.
 *
 * A task is one key/value head of one request with up to QUERY_ROWS rows (queries times the heads
 * that share it). Keys are taken in tiles at absolute positions with a running maximum (Milakov and
 * Gimelshein 2018, "Online normalizer calculation for softmax"), so that a row's arithmetic is the
 * same whatever other rows there are. A tile that a row does not see leaves the row unchanged. */

#include "attention_few.h"
#include "attention_many.h"

/* From so many rows on it pays to transpose the keys: never where eight rows' sums fit into registers. */
#define MIN_MANY_ROWS (LANES == 16 ? QUERY_ROWS + 1 : 8)

static void attend(const AttentionShape *s, const AttentionTask *task, const float *query, float *out) {
  const int64_t rows = task->num_queries * (s->heads / s->cache.kv_heads);
  if (rows < MIN_MANY_ROWS && has_few(s->cache.head_dim)) {
    attend_few(s, task, query, out);
    return;
  }
  /* Constants for the sizes that models have, so that the sums stay in registers. */
  const int vectors = (int)((s->cache.head_dim + LANES - 1) / LANES);
  switch (vectors) {
    case 4: attend_many(s, task, query, out, 4); break;
    case 8: attend_many(s, task, query, out, 8); break;
    default: attend_many(s, task, query, out, vectors);
  }
}

/* query, out: [tokens, heads, head_dim]. */
void team_attention(const Team *team, const AttentionShape *s, const AttentionTask *tasks,
                    int64_t count, const float *query, float *out) {
  /* Tasks take different times, so a thread that is done takes the next one. */
  for (int64_t i; (i = team_next(team)) < count;) attend(s, tasks + i, query, out);
  team_meet(team);
}

AttentionTask *attention_tasks(const int32_t *tables, const int32_t *starts, const int64_t *lengths,
                               int64_t seqs, int64_t max_blocks, const AttentionShape *s,
                               int64_t *count) {
  const int64_t per_task = QUERY_ROWS / (s->heads / s->cache.kv_heads);
  if (s->cache.head_dim > MAX_DIM || per_task < 1) return NULL;
  *count = 0;
  for (int64_t i = 0; i < seqs; i++)
    *count += s->cache.kv_heads * ((starts[i + 1] - starts[i] + per_task - 1) / per_task);
  AttentionTask *tasks = malloc((size_t)(*count + 1) * sizeof(AttentionTask)), *next = tasks;
  if (!tasks) return NULL;
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t queries = starts[i + 1] - starts[i];
    for (int64_t head = 0; head < s->cache.kv_heads; head++)
      for (int64_t q = 0; q < queries; q += per_task)
        *next++ = (AttentionTask){tables + i * max_blocks, head, starts[i] + q,
                                  queries - q < per_task ? queries - q : per_task,
                                  lengths[i] - queries + q};
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
                    const int32_t *starts, const int64_t *lengths, float *out, int64_t seqs,
                    int64_t max_blocks, int64_t threads) {
  int64_t count;
  AttentionTask *tasks = attention_tasks(tables, starts, lengths, seqs, max_blocks, s, &count);
  if (!tasks) return 1;
  run_team(threads, attend_all, &(Attention){s, tasks, count, query, out});
  free(tasks);
  return 0;
}
