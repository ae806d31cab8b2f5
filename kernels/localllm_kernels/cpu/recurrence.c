/* Token by token. A thread takes a few value heads of a request that share a key head. It computes
 * the operands of a tile of tokens, then takes a stripe of a matrix's columns, which know nothing
 * of each other, through all of them: a stripe fits the first cache. */

#include "recurrence.h"

#define TILE 16
#define STRIPE (2 * LANES)
#define ROWS_AHEAD 16
#define MOST_HEADS 4

/* Of the tokens of a tile: [TILE, width]; `stripe`: [key_width, STRIPE]; `drafted`: the matrices
 * behind drafted tokens, [heads of a unit, key_width, value_width]. */
typedef struct {
  float *queries, *keys, *values, *found, *stripe, *drafted;
  float decay[TILE], beta[TILE];
} Scratch;

/* A thread's work at a time: value heads of a request. */
typedef struct {
  int64_t request, first, count;
} Unit;

static int64_t heads_of_unit(const Recurrence *net) {
  const int64_t share = net->values / net->keys;
  return share < MOST_HEADS ? share : MOST_HEADS;
}
static int64_t units_of_key(const Recurrence *net) {
  const int64_t share = net->values / net->keys, most = heads_of_unit(net);
  return (share + most - 1) / most;
}
static Unit unit_at(const Recurrence *net, int64_t i) {
  const int64_t each = units_of_key(net), share = net->values / net->keys;
  const int64_t most = heads_of_unit(net), head = i / each % net->keys, part = i % each * most;
  const int64_t left = share - part;
  return (Unit){i / each / net->keys, head * share + part, left < most ? left : most};
}

static int64_t divide(const Recurrence *net, char *memory, Scratch *parts) {
  const int64_t heads = heads_of_unit(net), key = net->key_width, value = net->value_width;
  float **floats[] = {&parts->queries, &parts->keys,   &parts->values,
                      &parts->found,   &parts->stripe, &parts->drafted};
  const int64_t sizes[] = {TILE * key,   TILE * key,   TILE * value,
                           TILE * value, key * STRIPE, heads * key * value};
  int64_t taken = 0;
  for (int i = 0; i < 6; i++) {
    if (memory) *floats[i] = (float *)(memory + taken);
    taken += (sizes[i] * (int64_t)sizeof(float) + 63) / 64 * 64;
  }
  return taken;
}

int64_t recurrence_scratch_bytes(const Recurrence *net) {
  Scratch parts;
  return divide(net, NULL, &parts);
}

static float sum_squares(const float *x, int64_t width) {
  f32v total = splat(0.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    const f32v v = load_part(x + i, width - i < LANES ? width - i : LANES, 0.0f);
    total = fmav(v, v, total);
  }
  return sum_lanes(total);
}

/* Values of a matrix, from the `i`th on. Callers pass `has_half` as a constant. */
INLINE f32v load_state(const void *m, int64_t i, int64_t count, int has_half) {
  if (!has_half) return load_part((const float *)m + i, count, 0.0f);
  uint16_t part[LANES] = {0};
  const uint16_t *at = (const uint16_t *)m + i;
  if (count == LANES) return load_f16(at);
  memcpy(part, at, (size_t)count * sizeof *at);
  return load_f16(part);
}
INLINE void store_state(void *m, int64_t i, f32v v, int64_t count, int has_half) {
  if (!has_half) {
    store_part((float *)m + i, v, count);
    return;
  }
  const u16v rounded = round_f16(v);
  memcpy((uint16_t *)m + i, &rounded, (size_t)count * sizeof(uint16_t));
}
static char *value_at(const void *m, int64_t i, int64_t has_half) {
  return (char *)m + i * (has_half ? 2 : 4);
}

static void scale(float *x, float factor, int64_t width) {
  for (int64_t i = 0; i < width; i++) x[i] *= factor;
}

static void keys_and_queries(const RecurrenceCall *c, const Request *r, int64_t head, int64_t from,
                             int64_t count, const Scratch *s) {
  const Recurrence *net = c->net;
  const int64_t width = net->key_width;
  const float shrink = 1.0f / sqrtf((float)width);
  for (int64_t t = 0; t < count; t++) {
    float *query = s->queries + t * width, *key = s->keys + t * width;
    convolve(&c->inputs, &net->conv, r, from + t, net->query + head * width, width, query);
    convolve(&c->inputs, &net->conv, r, from + t, net->key + head * width, width, key);
    if (!net->is_delta) continue;
    scale(query, shrink / sqrtf(sum_squares(query, width) + 1e-6f), width);
    scale(key, 1.0f / sqrtf(sum_squares(key, width) + 1e-6f), width);
  }
}

static void values_of_head(const RecurrenceCall *c, const Request *r, int64_t head, int64_t from,
                           int64_t count, Scratch *s) {
  const Recurrence *net = c->net;
  const int64_t width = net->value_width;
  for (int64_t t = 0; t < count; t++) {
    convolve(&c->inputs, &net->conv, r, from + t, net->value + head * width, width,
             s->values + t * width);
    const float *factors = second_at(&c->inputs, r, from + t, head);
    const float a = factors[net->is_delta ? net->values : 0] + net->bias[head];
    const float grown = (a > 0.0f ? a : 0.0f) + log1pf(expf(-fabsf(a)));
    s->decay[t] = expf(net->decay[head] * grown);
    s->beta[t] = net->is_delta ? net->most / (1.0f + expf(-factors[0])) : grown;
  }
}

/* What a token finds in two vectors of columns, and what the next key would. Rows with even and odd
 * numbers are added up apart, so that an addition does not wait for the last one. */
typedef struct {
  f32v out[2][2], seen[2][2];
} Sums;

/* Row `i` of a stripe: fades, takes its part of `delta`, is rounded, and is added to the sums. */
INLINE void take_row(float *stripe, int64_t i, const float *key, const float *query,
                     const float *next, f32v keep, const f32v *delta, Sums *sums,
                     int odd, int is_delta, int has_half) {
  const f32v k = splat(key[i]), q = splat(query[i]), n = splat(next[i]);
  for (int j = 0; j < 2; j++) {
    float *at = stripe + i * STRIPE + j * LANES;
    f32v now = fmav(k, delta[j], load(at) * keep);
    if (has_half) {
      const u16v rounded = round_f16(now);
      now = load_f16((const uint16_t *)&rounded);
    }
    store(at, now);
    sums->out[odd][j] = fmav(now, q, sums->out[odd][j]);
    if (is_delta) sums->seen[odd][j] = fmav(now, n, sums->seen[odd][j]);
  }
}

/* Columns of a matrix, from `source` (NULL: zeros) to `target`, through `count` tokens. Callers pass
 * `is_delta` and `has_half` as constants. */
INLINE void take_stripe_of(const Recurrence *net, const Scratch *s, const void *source,
                           void *target, int64_t column, int64_t count, int is_delta,
                           int has_half) {
  const int64_t keys = net->key_width, width = net->value_width, left = width - column;
  const int64_t low = left < LANES ? left : LANES;
  const int64_t high = left - low < LANES ? left - low : LANES;
  Sums sums;
  memset(&sums, 0, sizeof sums);
  for (int64_t i = 0; i < keys; i++) {
    const int64_t at = i * width + column;
    const f32v key = splat(s->keys[i]);
    /* The other stripes' columns too: whole rows come faster than parts of them. */
    if (source && column == 0)
      for (int64_t each = 0; each < width; each += has_half ? 2 * LANES : LANES)
        __builtin_prefetch(value_at(source, at + ROWS_AHEAD * width + each, has_half));
    const f32v values[2] = {
        source ? load_state(source, at, low, has_half) : splat(0.0f),
        source ? load_state(source, at + low, high, has_half) : splat(0.0f)};
    for (int j = 0; j < 2; j++) {
      store(s->stripe + i * STRIPE + j * LANES, values[j]);
      if (is_delta) sums.seen[i & 1][j] = fmav(values[j], key, sums.seen[i & 1][j]);
    }
  }
  for (int64_t t = 0; t < count; t++) {
    const float *query = s->queries + t * keys, *key = s->keys + t * keys;
    const float *next = t + 1 < count ? key + keys : key, *value = s->values + t * width + column;
    const f32v keep = splat(s->decay[t]);
    const f32v values[2] = {load_part(value, low, 0.0f), load_part(value + low, high, 0.0f)};
    f32v delta[2];
    for (int j = 0; j < 2; j++) {
      const f32v held = keep * (sums.seen[0][j] + sums.seen[1][j]);
      delta[j] = s->beta[t] * (is_delta ? values[j] - held : values[j]);
    }
    memset(&sums, 0, sizeof sums);
    int64_t i = 0;
    for (; i + 2 <= keys; i += 2) {
      take_row(s->stripe, i, key, query, next, keep, delta, &sums, 0, is_delta, has_half);
      take_row(s->stripe, i + 1, key, query, next, keep, delta, &sums, 1, is_delta, has_half);
    }
    if (i < keys)
      take_row(s->stripe, i, key, query, next, keep, delta, &sums, 0, is_delta, has_half);
    store_part(s->found + t * width + column, sums.out[0][0] + sums.out[1][0], low);
    store_part(s->found + t * width + column + low, sums.out[0][1] + sums.out[1][1], high);
  }
  for (int64_t i = 0; i < keys; i++) {
    const float *row = s->stripe + i * STRIPE;
    store_state(target, i * width + column, load(row), low, has_half);
    if (high) store_state(target, i * width + column + low, load(row + LANES), high, has_half);
  }
}

static void take_stripe(const RecurrenceCall *c, const Scratch *s, const void *source, void *target,
                        int64_t column, int64_t count) {
  if (c->net->is_delta && c->has_half)
    take_stripe_of(c->net, s, source, target, column, count, 1, 1);
  else if (c->net->is_delta)
    take_stripe_of(c->net, s, source, target, column, count, 1, 0);
  else if (c->has_half)
    take_stripe_of(c->net, s, source, target, column, count, 0, 1);
  else
    take_stripe_of(c->net, s, source, target, column, count, 0, 0);
}

INLINE f32v siluv(f32v x) { return x / (1.0f + expv(-x)); }

/* y = x, normed as one and weighed, times `gates`, if there are any; y may be x. */
static void norm_row(const float *x, const float *weight, const float *gates, float eps, float *y,
                     int64_t width) {
  const float factor = 1.0f / sqrtf(sum_squares(x, width) / (float)width + eps);
  for (int64_t i = 0; i < width; i += LANES) {
    const int64_t here = width - i < LANES ? width - i : LANES;
    f32v normed = load_part(x + i, here, 0.0f) * factor * load_part(weight + i, here, 0.0f);
    if (gates) normed *= siluv(load_part(gates + i, here, 0.0f));
    store_part(y + i, normed, here);
  }
}

/* What was found for a head, for the tokens that are rows of the batch: the delta rule's outputs,
 * or Mamba's before their norm, which is of several heads. */
static void finish_rows(const RecurrenceCall *c, const Request *r, int64_t head, int64_t from,
                        int64_t count, const Scratch *s) {
  const Recurrence *net = c->net;
  const int64_t width = net->value_width, all = net->values * width;
  for (int64_t t = r->start > from ? r->start - from : 0; t < count; t++) {
    const int64_t row = r->row + from + t - r->start;
    const float *found = s->found + t * width, *values = s->values + t * width;
    const float *gates = c->gate + row * c->gate_stride + head * width;
    float *out = c->out + row * all + head * width;
    if (net->is_delta) {
      norm_row(found, net->norm, gates, net->eps, out, width);
      continue;
    }
    const f32v skip = splat(net->skip ? net->skip[head] : 0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t here = width - i < LANES ? width - i : LANES;
      const f32v value = load_part(values + i, here, 0.0f);
      const f32v both = fmav(skip, value, load_part(found + i, here, 0.0f));
      store_part(out + i, both * siluv(load_part(gates + i, here, 0.0f)), here);
    }
  }
}

static void take_unit(const RecurrenceCall *c, const StateSlots *states, Unit unit, Scratch *s) {
  const Recurrence *net = c->net;
  const Request r = request_at(states, unit.request);
  const int64_t size = net->key_width * net->value_width;
  const int64_t head = unit.first / (net->values / net->keys);
  const int64_t of_slot = net->values * size, of_unit = unit.first * size;
  const StateSave *save = states->saves, *last = save + states->num_saves;
  while (save < last && save->request < unit.request) save++;
  void *own = value_at(c->matrices, r.slot * of_slot + of_unit, c->has_half);
  const void *source = r.stands ? own : NULL;
  int64_t from = r.stands;
  while (from < r.end) {
    int64_t to = from + TILE < r.end ? from + TILE : r.end;
    if (from < r.settled && to > r.settled) to = r.settled;
    if (save < last && save->request == unit.request && to > r.start + save->num_rows)
      to = r.start + save->num_rows;
    void *target = to > r.settled ? s->drafted : own;
    keys_and_queries(c, &r, head, from, to - from, s);
    for (int64_t i = 0; i < unit.count; i++) {
      values_of_head(c, &r, unit.first + i, from, to - from, s);
      for (int64_t column = 0; column < net->value_width; column += STRIPE)
        take_stripe(c, s, source ? value_at(source, i * size, c->has_half) : NULL,
                    value_at(target, i * size, c->has_half), column, to - from);
      finish_rows(c, &r, unit.first + i, from, to - from, s);
    }
    for (; save < last && save->request == unit.request && r.start + save->num_rows == to; save++)
      memcpy(value_at(c->matrices, save->slot * of_slot + of_unit, c->has_half), target,
             (size_t)(unit.count * size * (c->has_half ? 2 : 4)));
    source = target, from = to;
  }
}

/* The inputs of a request's new tokens, in its ring and in those of the copies. */
static void keep_request(const RecurrenceCall *c, const StateSlots *states, int64_t request) {
  const Request r = request_at(states, request);
  const int64_t taps = c->net->conv.taps;
  for (const StateSave *save = states->saves; save < states->saves + states->num_saves; save++) {
    const int64_t to = r.start + save->num_rows;
    if (save->request == request) keep_inputs(&c->inputs, &r, save->slot, to - taps + 1, to);
  }
  keep_inputs(&c->inputs, &r, r.slot, r.start, r.end);
}

void team_recurrence(const Team *team, const RecurrenceCall *call, const StateSlots *states,
                    char *scratch) {
  const Recurrence *net = call->net;
  const int64_t units = states->num_requests * net->keys * units_of_key(net);
  const int64_t requests = states->num_requests, rows = states->bounds[requests];
  const int64_t width = net->values / net->keys * net->value_width;
  Scratch parts;
  divide(net, scratch + team->index * recurrence_scratch_bytes(net), &parts);
  for (int64_t i = team_next(team); i < units; i = team_next(team))
    take_unit(call, states, unit_at(net, i), &parts);
  team_meet(team);
  TEAM_FOR(team, i, requests) keep_request(call, states, i);
  if (!net->is_delta) {
    TEAM_FOR(team, i, rows * net->keys) {
      float *out = call->out + i * width;
      norm_row(out, net->norm + i % net->keys * width, NULL, net->eps, out, width);
    }
  }
  team_meet(team);
}

typedef struct {
  const RecurrenceCall *call;
  const StateSlots *states;
  char *scratch;
} Arguments;

static void recurrence_alone(const Team *team, void *arguments) {
  const Arguments *a = arguments;
  team_recurrence(team, a->call, a->states, a->scratch);
}

/* Returns 1 if memory runs out. */
int recurrence(const RecurrenceCall *call, const StateSlots *states, int64_t threads) {
  char *scratch = aligned_alloc(64, (size_t)(threads * recurrence_scratch_bytes(call->net)));
  if (!scratch) return 1;
  run_team(threads, recurrence_alone, &(Arguments){call, states, scratch});
  free(scratch);
  return 0;
}
