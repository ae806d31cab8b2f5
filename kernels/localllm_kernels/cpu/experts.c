/* A mixture of experts in one call. The pairs of a row and one of its experts are put side by side
 * by expert, so that each expert's weights are read once, however many rows chose it. */

#include "products.h"

typedef struct {
  Product gate_up, down;
} Expert;

typedef struct {
  const Expert *experts;
  int64_t count, hidden, inner, top_k;
  int64_t gate; /* a GATE_ */
} Experts;

/* x: [rows, hidden]; chosen, shares: [rows, top_k], experts and the factors on their outputs; y:
 * [rows, hidden]. */
typedef struct {
  const float *x;
  const int32_t *chosen;
  const float *shares;
  float *y;
  int64_t rows;
} Routed;

/* starts: [count + 1], where the pairs of each expert begin; row_of: [pairs], by expert; place_of:
 * [rows, top_k], where a pair is. */
typedef struct {
  int64_t *starts, *row_of, *place_of;
  float *in, *gate_up, *inner, *out;
  char *rounded;
} Scratch;

typedef struct {
  const Experts *experts;
  const Routed *routed;
  Scratch scratch;
} Call;

/* Places the parts in `memory`, unless it is NULL; returns the bytes they take. */
static int64_t divide(const Experts *e, int64_t rows, char *memory, Scratch *parts) {
  const int64_t pairs = rows * e->top_k;
  const int64_t counts[] = {e->count + 1, pairs, pairs};
  int64_t **numbers[] = {&parts->starts, &parts->row_of, &parts->place_of};
  float **floats[] = {&parts->in, &parts->gate_up, &parts->inner, &parts->out};
  const int64_t widths[] = {e->hidden, 2 * e->inner, e->inner, e->hidden};
  int64_t taken = 0, rounded = 0;
  for (int i = 0; i < 3; i++) {
    if (memory) *numbers[i] = (int64_t *)(memory + taken);
    taken += (counts[i] * (int64_t)sizeof(int64_t) + 63) / 64 * 64;
  }
  for (int i = 0; i < 4; i++) {
    if (memory) *floats[i] = (float *)(memory + taken);
    taken += (pairs * widths[i] * (int64_t)sizeof(float) + 63) / 64 * 64;
  }
  for (int64_t i = 0; i < e->count; i++) {
    const int64_t first = product_bytes(&e->experts[i].gate_up, rows);
    const int64_t second = product_bytes(&e->experts[i].down, rows);
    if (first > rounded) rounded = first;
    if (second > rounded) rounded = second;
  }
  if (memory) parts->rounded = memory + taken;
  return taken + rounded;
}

/* Sorts the pairs by expert; those of one expert stay in the order of their rows. */
static void sort_pairs(const Experts *e, const Routed *r, const Scratch *s) {
  const int64_t pairs = r->rows * e->top_k;
  memset(s->starts, 0, (size_t)(e->count + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < pairs; i++) s->starts[r->chosen[i] + 1]++;
  for (int64_t i = 0; i < e->count; i++) s->starts[i + 1] += s->starts[i];
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t place = s->starts[r->chosen[i]]++;
    s->place_of[i] = place, s->row_of[place] = i / e->top_k;
  }
  for (int64_t i = e->count; i > 0; i--) s->starts[i] = s->starts[i - 1];
  s->starts[0] = 0;
}

static void products(const Team *team, const Call *c, int is_down) {
  const Experts *e = c->experts;
  const Scratch *s = &c->scratch;
  const float *x = is_down ? s->inner : s->in;
  float *y = is_down ? s->out : s->gate_up;
  const int64_t width_in = is_down ? e->inner : e->hidden;
  const int64_t width_out = is_down ? e->hidden : 2 * e->inner;
  for (int64_t i = 0; i < e->count; i++) {
    const int64_t from = s->starts[i], rows = s->starts[i + 1] - from;
    const Product *p = is_down ? &e->experts[i].down : &e->experts[i].gate_up;
    if (rows) team_product(team, p, x + from * width_in, y + from * width_out, rows, s->rounded);
  }
}

static void team_experts(const Team *team, void *arguments) {
  const Call *c = arguments;
  const Experts *e = c->experts;
  const Routed *r = c->routed;
  const Scratch *s = &c->scratch;
  const int64_t pairs = r->rows * e->top_k;
  TEAM_FOR(team, i, pairs)
    memcpy(s->in + i * e->hidden, r->x + s->row_of[i] * e->hidden,
           (size_t)e->hidden * sizeof(float));
  team_meet(team);
  products(team, c, 0);
  team_gate(team, s->gate_up, s->inner, pairs, e->inner, e->gate);
  products(team, c, 1);
  TEAM_FOR(team, row, r->rows) {
    float *y = r->y + row * e->hidden;
    for (int64_t j = 0; j < e->top_k; j++) {
      const float *out = s->out + s->place_of[row * e->top_k + j] * e->hidden;
      const float share = r->shares[row * e->top_k + j];
      for (int64_t i = 0; i < e->hidden; i++) y[i] = j ? y[i] + share * out[i] : share * out[i];
    }
  }
  team_meet(team);
}

/* Returns 1 if memory runs out. */
int experts_forward(const Experts *e, const Routed *r, int64_t threads) {
  Call call = {.experts = e, .routed = r};
  char *memory = malloc((size_t)divide(e, r->rows, NULL, &call.scratch));
  if (!memory) return 1;
  divide(e, r->rows, memory, &call.scratch);
  sort_pairs(e, r, &call.scratch);
  run_team(threads, team_experts, &call);
  free(memory);
  return 0;
}

const int64_t expert_struct_bytes[] = {sizeof(Expert), sizeof(Experts), sizeof(Routed)};
