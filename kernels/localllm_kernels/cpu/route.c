/* The choice of experts, see route.py for the formulas. torch's sort would leave its own threads
 * spinning on the processors that the products want. */

#include "route.h"

/* scores: the softmax or the sigmoids of a row. */
static void score_row(const Routing *r, const float *logits, float *scores) {
  const int64_t count = r->experts;
  float most = -INFINITY;
  for (int64_t i = 0; i < count; i++) most = logits[i] > most ? logits[i] : most;
  f32v sums = splat(0.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t part = count - i < LANES ? count - i : LANES;
    const f32v x = load_part(logits + i, part, -INFINITY);
    const f32v y = r->is_sigmoid ? 1.0f / (1.0f + expv(-x)) : expv(x - splat(most));
    if (!r->is_sigmoid) sums += y;
    store_part(scores + i, y, part);
  }
  if (r->is_sigmoid) return;
  const float sum = sum_lanes(sums);
  for (int64_t i = 0; i < count; i++) scores[i] /= sum;
}

/* The number of the greatest value that is not taken, the first of equal ones; NaN is never greater.
 * At least one must be left. */
static int64_t find_best(const float *values, const float *taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (taken[i] == 0.0f && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

/* How good a group is: its best value, or its best two. */
static float rate_group(const Routing *r, const float *values, int64_t size) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < size; i++) {
    if (values[i] > first)
      second = first, first = values[i];
    else if (values[i] > second)
      second = values[i];
  }
  return r->group_best == 1 ? first : first + second;
}

/* Takes the experts of all but the best groups. */
static void leave_groups(const Routing *r, const float *ranked, float *taken) {
  const int64_t size = r->experts / r->groups;
  for (int64_t n = r->chosen_groups; n < r->groups; n++) {
    int64_t worst = -1;
    float least = 0.0f;
    for (int64_t g = 0; g < r->groups; g++) {
      if (taken[g * size] != 0.0f) continue;
      const float rated = rate_group(r, ranked + g * size, size);
      /* Of equal groups the first is kept. */
      if (worst < 0 || rated <= least) worst = g, least = rated;
    }
    for (int64_t i = worst * size; i < (worst + 1) * size; i++) taken[i] = 1.0f;
  }
}

static void route_row(const Routing *r, int64_t row, float *scratch) {
  const float *logits = r->logits + row * r->experts, *ranked = logits;
  float *scores = scratch, *sums = scratch + r->experts, *taken = scratch + 2 * r->experts;
  score_row(r, logits, scores);
  if (r->correction || r->groups > 1) {
    for (int64_t i = 0; i < r->experts; i++)
      sums[i] = r->correction ? scores[i] + r->correction[i] : scores[i];
    ranked = sums;
  }
  memset(taken, 0, (size_t)r->experts * sizeof(float));
  if (r->groups > 1) leave_groups(r, ranked, taken);
  int32_t *chosen = r->chosen + row * r->top_k;
  float *factors = r->factors + row * r->top_k, sum = 0.0f;
  for (int64_t k = 0; k < r->top_k; k++) {
    const int64_t best = find_best(ranked, taken, r->experts);
    chosen[k] = (int32_t)best, factors[k] = scores[best], taken[best] = 1.0f;
    sum += factors[k];
  }
  for (int64_t k = 0; k < r->top_k; k++) {
    if (r->renormalises) factors[k] /= sum + 1e-20f;
    if (r->scales) factors[k] *= r->scales[chosen[k]];
    factors[k] *= r->factor;
  }
}

/* scratch: route_scratch_bytes. */
void team_route(const Team *team, const Routing *r, float *scratch) {
  TEAM_FOR(team, row, r->rows) route_row(r, row, scratch + 3 * row * r->experts);
  team_meet(team);
}

typedef struct {
  const Routing *routing;
  float *scratch;
} Call;

static void route_all(const Team *team, void *arguments) {
  const Call *c = arguments;
  team_route(team, c->routing, c->scratch);
}

/* Returns 1 if memory runs out. */
int route(const Routing *r, int64_t threads) {
  float *scratch = malloc((size_t)route_scratch_bytes(r, r->rows));
  if (!scratch && r->rows) return 1;
  run_team(r->rows < threads ? r->rows : threads, route_all, &(Call){r, scratch});
  free(scratch);
  return 0;
}
