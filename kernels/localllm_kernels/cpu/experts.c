/* A mixture of experts in one call. The pairs of a row and one of its experts are put side by side
 * by expert, so that each expert's weights are read once, however many rows chose it. No result
 * depends on how the pairs lie, or on which thread takes them. */

#include "experts.h"

#define CHUNK 8 /* blocks of outputs that a thread takes at once */

/* starts: [count + 1], where the pairs of each expert begin; row_of, expert_of: [pairs], by expert;
 * place_of: [rows, top_k], where a pair is; taken: [count + 1], the experts that have pairs, and in
 * the end their number. */
typedef struct {
  int64_t *starts, *row_of, *place_of, *expert_of, *taken;
  float *in, *gate_up, *inner, *out;
  char *rounded;
  int64_t row_bytes; /* of a quantized row; 0 where some product is not an integer one */
} Scratch;

/* Of a quantized row of the wider product; 0 where products are not integer ones. */
static int64_t row_bytes(const Expert *expert) {
  const int64_t first = product_row_bytes(&expert->gate_up);
  const int64_t second = product_row_bytes(&expert->down);
  if (!first || !second) return 0;
  return first > second ? first : second;
}

/* Places the parts in `memory`, unless it is NULL; returns the bytes they take. */
static int64_t divide(const Experts *e, int64_t rows, int64_t top_k, char *memory,
                      Scratch *parts) {
  const int64_t pairs = rows * top_k;
  const int64_t counts[] = {e->count + 1, pairs, pairs, pairs, e->count + 1};
  int64_t **numbers[] = {&parts->starts, &parts->row_of, &parts->place_of, &parts->expert_of,
                         &parts->taken};
  float **floats[] = {&parts->in, &parts->gate_up, &parts->inner, &parts->out};
  const int64_t widths[] = {e->hidden, gate_parts(e->gate) * e->inner, e->inner, e->hidden};
  int64_t taken = 0, rounded = 0, widest = 0;
  int are_integers = 1;
  for (int i = 0; i < 5; i++) {
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
    const int64_t each = row_bytes(&e->experts[i]);
    if (each > widest) widest = each;
    if (!each) are_integers = 0;
  }
  parts->row_bytes = are_integers ? widest : 0;
  if (pairs * parts->row_bytes > rounded) rounded = pairs * parts->row_bytes;
  if (memory) parts->rounded = memory + taken;
  return taken + rounded;
}

int64_t experts_scratch_bytes(const Experts *e, int64_t rows, int64_t top_k) {
  Scratch parts;
  return divide(e, rows, top_k, NULL, &parts);
}

/* Sorts the pairs by expert; those of one expert stay in the order of their rows. */
static void sort_pairs(const Experts *e, const Routed *r, const Scratch *s) {
  const int64_t pairs = r->rows * r->top_k;
  memset(s->starts, 0, (size_t)(e->count + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < pairs; i++) s->starts[r->chosen[i] + 1]++;
  for (int64_t i = 0; i < e->count; i++) s->starts[i + 1] += s->starts[i];
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t place = s->starts[r->chosen[i]]++;
    s->place_of[i] = place, s->row_of[place] = i / r->top_k;
    s->expert_of[place] = r->chosen[i];
  }
  for (int64_t i = e->count; i > 0; i--) s->starts[i] = s->starts[i - 1];
  s->starts[0] = 0;
  int64_t taken = 0;
  for (int64_t i = 0; i < e->count; i++)
    if (s->starts[i + 1] > s->starts[i]) s->taken[taken++] = i;
  s->taken[e->count] = taken;
}

static void product_by_product(const Team *team, const Experts *e, const Scratch *s, int is_down) {
  const float *x = is_down ? s->inner : s->in;
  float *y = is_down ? s->out : s->gate_up;
  const int64_t width_in = is_down ? e->inner : e->hidden;
  const int64_t width_out = is_down ? e->hidden : gate_parts(e->gate) * e->inner;
  for (int64_t i = 0; i < e->count; i++) {
    const int64_t from = s->starts[i], rows = s->starts[i + 1] - from;
    const Product *p = is_down ? &e->experts[i].down : &e->experts[i].gate_up;
    if (rows) team_product(team, p, x + from * width_in, y + from * width_out, rows, s->rounded);
  }
}

/* Integer products of all experts, all rows quantized first, so that the threads meet twice. x: the
 * rows of the call, or what is inside. */
static void all_products(const Team *team, const Experts *e, const Scratch *s, const float *x,
                         int is_down, int64_t pairs) {
  float *y = is_down ? s->out : s->gate_up;
  const int64_t width_in = is_down ? e->inner : e->hidden;
  const int64_t width_out = is_down ? e->hidden : gate_parts(e->gate) * e->inner;
#define PRODUCT(i) (is_down ? &e->experts[i].down : &e->experts[i].gate_up)
  TEAM_FOR(team, pair, pairs) {
    const int64_t i = s->expert_of[pair], from = s->starts[i];
    const int64_t row = is_down ? pair : s->row_of[pair];
    product_quantize_row(PRODUCT(i), x + row * width_in, pair - from, s->starts[i + 1] - from,
                         s->rounded + from * s->row_bytes);
  }
  team_meet(team);
  const int64_t blocks = product_panels(PRODUCT(0)), chunks = (blocks + CHUNK - 1) / CHUNK;
  const int64_t tasks = s->taken[e->count] * chunks;
  for (int64_t task = team_next(team); task < tasks; task = team_next(team)) {
    const int64_t i = s->taken[task / chunks], from = s->starts[i], first = task % chunks * CHUNK;
    const int64_t last = first + CHUNK < blocks ? first + CHUNK : blocks;
    for (int64_t block = first; block < last; block++)
      product_multiply_panel(PRODUCT(i), block, s->rounded + from * s->row_bytes,
                             y + from * width_out, s->starts[i + 1] - from);
  }
  team_meet(team);
#undef PRODUCT
}

/* scratch: experts_scratch_bytes. */
void team_experts(const Team *team, const Experts *e, const Routed *r, char *scratch) {
  Scratch parts;
  const Scratch *s = &parts;
  const int64_t pairs = r->rows * r->top_k;
  divide(e, r->rows, r->top_k, scratch, &parts);
  if (team->index == 0) sort_pairs(e, r, s);
  team_meet(team);
  if (s->row_bytes) {
    all_products(team, e, s, r->x, 0, pairs);
    team_gate(team, s->gate_up, s->inner, pairs, e->inner, e->gate);
    all_products(team, e, s, s->inner, 1, pairs);
  } else {
    TEAM_FOR(team, i, pairs)
      memcpy(s->in + i * e->hidden, r->x + s->row_of[i] * e->hidden,
             (size_t)e->hidden * sizeof(float));
    team_meet(team);
    product_by_product(team, e, s, 0);
    team_gate(team, s->gate_up, s->inner, pairs, e->inner, e->gate);
    product_by_product(team, e, s, 1);
  }
  TEAM_FOR(team, row, r->rows) {
    float *y = r->y + row * e->hidden;
    for (int64_t j = 0; j < r->top_k; j++) {
      const float *out = s->out + s->place_of[row * r->top_k + j] * e->hidden;
      const float factor = r->factors[row * r->top_k + j];
      for (int64_t i = 0; i < e->hidden; i++) y[i] = j ? y[i] + factor * out[i] : factor * out[i];
    }
  }
  team_meet(team);
}

typedef struct {
  const Experts *experts;
  const Routed *routed;
  char *scratch;
} Call;

static void experts_all(const Team *team, void *arguments) {
  const Call *c = arguments;
  team_experts(team, c->experts, c->routed, c->scratch);
}

/* Returns 1 if memory runs out. */
int experts_forward(const Experts *e, const Routed *r, int64_t threads) {
  char *scratch = malloc((size_t)experts_scratch_bytes(e, r->rows, r->top_k));
  if (!scratch) return 1;
  run_team(threads, experts_all, &(Call){e, r, scratch});
  free(scratch);
  return 0;
}

/* What a mixture needs besides: logits, the choice, and the factors. */
static int64_t choice_bytes(const Mixture *m, int64_t rows) {
  const int64_t values = rows * (m->routing.experts + 2 * m->routing.top_k);
  return (values * (int64_t)sizeof(float) + route_scratch_bytes(&m->routing, rows) + 63) / 64 * 64;
}

int64_t mixture_scratch_bytes(const Mixture *m, int64_t rows) {
  return choice_bytes(m, rows) + experts_scratch_bytes(&m->experts, rows, m->routing.top_k);
}

void team_mixture(const Team *team, const Mixture *m, const float *x, float *y, int64_t rows,
                  char *scratch, char *rounded) {
  float *logits = (float *)scratch, *factors = logits + rows * m->routing.experts;
  int32_t *chosen = (int32_t *)(factors + rows * m->routing.top_k);
  Routing routing = m->routing;
  routing.logits = logits, routing.chosen = chosen, routing.factors = factors;
  routing.rows = rows;
  const Routed routed = {x, chosen, factors, y, rows, routing.top_k};
  team_product(team, &m->router, x, logits, rows, rounded);
  team_route(team, &routing, (float *)(chosen + rows * routing.top_k));
  team_experts(team, &m->experts, &routed, scratch + choice_bytes(m, rows));
}
