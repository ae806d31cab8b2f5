/* A keyed draw from softmax(values / T); see gumbel_argmax.py for the formula. */

#include "gumbel.h"
#include "team.h"

#define MAX_THREADS 64

/* A search of `count` values, split into `parts`. */
typedef struct {
  const float *values;
  const int64_t *ids;
  float temperature;
  uint64_t key;
  int64_t count, share, parts;
  Best *found;
} Search;

static void search_all(const Team *team, void *arguments) {
  const Search *a = arguments;
  TEAM_FOR(team, part, a->parts) {
    const int64_t from = part * a->share;
    const int64_t to = from + a->share < a->count ? from + a->share : a->count;
    a->found[part] = gumbel_search(a->values, a->ids, a->temperature, (uint32_t)a->key,
                            (uint32_t)(a->key >> 32), from, to);
  }
}

/* Index of the greatest values[i] / temperature + noise(key, ids[i]); ids may be NULL: 0, 1, 2, … */
int64_t gumbel_argmax(const float *values, const int64_t *ids, float temperature, uint64_t key,
                      int64_t count, int64_t threads) {
  Best found[MAX_THREADS];
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (count < 16384) threads = 1;
  const int64_t share = (count + threads * LANES - 1) / (threads * LANES) * LANES;
  run_team(threads, search_all,
           &(Search){values, ids, temperature, key, count, share, threads, found});
  Best best = found[0];
  for (int64_t t = 1; t < threads; t++)
    if (found[t].value > best.value) best = found[t];
  return best.index;
}
