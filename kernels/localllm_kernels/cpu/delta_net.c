/* The gated delta rule, token by token. A thread takes a key head of a request with the value heads
 * that share it. It computes the operands of a tile of tokens, then takes a stripe of a matrix's
 * columns, which know nothing of each other, through all of them: a stripe fits the first cache. */

#include "delta_net.h"

#define TILE 16
#define STRIPE (2 * LANES)

/* Of the tokens of a tile: [TILE, width]; `stripe`: [key_width, STRIPE]; `drafted`: the matrices of
 * a key head behind drafted tokens, [values, key_width, value_width]. */
typedef struct {
  float *queries, *keys, *values, *found, *stripe, *drafted;
  float decay[TILE], beta[TILE];
} Scratch;

static int64_t divide(const DeltaNet *net, char *memory, Scratch *parts) {
  const int64_t share = net->values / net->keys, key = net->key_width, value = net->value_width;
  float **floats[] = {&parts->queries, &parts->keys,   &parts->values,
                      &parts->found,   &parts->stripe, &parts->drafted};
  const int64_t sizes[] = {TILE * key,   TILE * key,   TILE * value,
                           TILE * value, key * STRIPE, share * key * value};
  int64_t taken = 0;
  for (int i = 0; i < 6; i++) {
    if (memory) *floats[i] = (float *)(memory + taken);
    taken += (sizes[i] * (int64_t)sizeof(float) + 63) / 64 * 64;
  }
  return taken;
}

int64_t delta_net_scratch_bytes(const DeltaNet *net) {
  Scratch parts;
  return divide(net, NULL, &parts);
}

static float sum_squares(const float *x, int64_t width) {
  f32x16 total = splat(0.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    const f32x16 v = load_part(x + i, width - i < LANES ? width - i : LANES, 0.0f);
    total = fma16(v, v, total);
  }
  return sum_lanes(total);
}

static void scale(float *x, float factor, int64_t width) {
  for (int64_t i = 0; i < width; i++) x[i] *= factor;
}

static void unit_heads(const DeltaCall *c, const Request *r, int64_t head, int64_t from,
                       int64_t count, const Scratch *s) {
  const DeltaNet *net = c->net;
  const int64_t width = net->key_width, all = net->keys * width;
  const float shrink = 1.0f / sqrtf((float)width);
  for (int64_t t = 0; t < count; t++) {
    float *query = s->queries + t * width, *key = s->keys + t * width;
    convolve(&c->inputs, &net->conv, r, from + t, head * width, width, query);
    convolve(&c->inputs, &net->conv, r, from + t, all + head * width, width, key);
    scale(query, shrink / sqrtf(sum_squares(query, width) + 1e-6f), width);
    scale(key, 1.0f / sqrtf(sum_squares(key, width) + 1e-6f), width);
  }
}

static void values_of_head(const DeltaCall *c, const Request *r, int64_t head, int64_t from,
                           int64_t count, Scratch *s) {
  const DeltaNet *net = c->net;
  const int64_t width = net->value_width, first = 2 * net->keys * net->key_width;
  for (int64_t t = 0; t < count; t++) {
    convolve(&c->inputs, &net->conv, r, from + t, first + head * width, width,
             s->values + t * width);
    const float *factors = second_at(&c->inputs, r, from + t, head);
    const float a = factors[net->values] + net->bias[head];
    const float grown = (a > 0.0f ? a : 0.0f) + log1pf(expf(-fabsf(a)));
    s->decay[t] = expf(net->decay[head] * grown);
    s->beta[t] = 1.0f / (1.0f + expf(-factors[0]));
  }
}

/* Columns of a matrix, from `source` (NULL: zeros) to `target`, through `count` tokens. */
static void take_stripe(const DeltaNet *net, const Scratch *s, const float *source, float *target,
                        int64_t column, int64_t count) {
  const int64_t keys = net->key_width, width = net->value_width, left = width - column;
  const int64_t low = left < LANES ? left : LANES;
  const int64_t high = left - low < LANES ? left - low : LANES;
  f32x16 seen[2] = {splat(0.0f), splat(0.0f)}; /* what the matrix holds for the next key */
  for (int64_t i = 0; i < keys; i++) {
    const float *row = source + i * width + column;
    const f32x16 key = splat(s->keys[i]);
    const f32x16 values[2] = {source ? load_part(row, low, 0.0f) : splat(0.0f),
                              source ? load_part(row + low, high, 0.0f) : splat(0.0f)};
    for (int j = 0; j < 2; j++) {
      store(s->stripe + i * STRIPE + j * LANES, values[j]);
      seen[j] = fma16(values[j], key, seen[j]);
    }
  }
  for (int64_t t = 0; t < count; t++) {
    const float *query = s->queries + t * keys, *key = s->keys + t * keys;
    const float *next = t + 1 < count ? key + keys : key, *value = s->values + t * width + column;
    const f32x16 keep = splat(s->decay[t]);
    const f32x16 values[2] = {load_part(value, low, 0.0f), load_part(value + low, high, 0.0f)};
    f32x16 delta[2], out[2] = {splat(0.0f), splat(0.0f)};
    for (int j = 0; j < 2; j++) {
      delta[j] = s->beta[t] * (values[j] - keep * seen[j]);
      seen[j] = splat(0.0f);
    }
    for (int64_t i = 0; i < keys; i++) {
      const f32x16 k = splat(key[i]), q = splat(query[i]), n = splat(next[i]);
      for (int j = 0; j < 2; j++) {
        float *at = s->stripe + i * STRIPE + j * LANES;
        const f32x16 now = fma16(k, delta[j], load(at) * keep);
        store(at, now);
        out[j] = fma16(now, q, out[j]);
        seen[j] = fma16(now, n, seen[j]);
      }
    }
    store_part(s->found + t * width + column, out[0], low);
    store_part(s->found + t * width + column + low, out[1], high);
  }
  for (int64_t i = 0; i < keys; i++)
    memcpy(target + i * width + column, s->stripe + i * STRIPE,
           (size_t)(low + high) * sizeof(float));
}

/* What was found for a head, normed and gated, for the tokens that are rows of the batch. */
static void gate_rows(const DeltaCall *c, const Request *r, int64_t head, int64_t from,
                      int64_t count, const Scratch *s) {
  const DeltaNet *net = c->net;
  const int64_t width = net->value_width, all = net->values * width;
  for (int64_t t = r->start > from ? r->start - from : 0; t < count; t++) {
    const int64_t row = r->row + from + t - r->start;
    const float *found = s->found + t * width;
    const float *gate = c->gate + row * c->inputs.first_stride + head * width;
    const float factor = 1.0f / sqrtf(sum_squares(found, width) / (float)width + net->eps);
    float *out = c->out + row * all + head * width;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t here = width - i < LANES ? width - i : LANES;
      const f32x16 g = load_part(gate + i, here, 0.0f);
      const f32x16 normed = load_part(found + i, here, 0.0f) * factor;
      const f32x16 weighed = normed * load_part(net->norm + i, here, 0.0f);
      store_part(out + i, weighed * (g / (1.0f + exp16(-g))), here);
    }
  }
}

/* The inputs of a key head, with those of its value heads, at positions from `from` to `to`. */
static void keep_head(const DeltaCall *c, const Request *r, int64_t head, int64_t slot,
                      int64_t from, int64_t to) {
  const DeltaNet *net = c->net;
  const int64_t share = net->values / net->keys, width = net->key_width;
  const int64_t keys = net->keys * width, value = net->value_width;
  const Inputs *x = &c->inputs;
  keep_inputs(x, r, slot, from, to, head * width, width);
  keep_inputs(x, r, slot, from, to, keys + head * width, width);
  keep_inputs(x, r, slot, from, to, 2 * keys + head * share * value, share * value);
  keep_second(x, r, slot, from, to, head * share, share);
  keep_second(x, r, slot, from, to, net->values + head * share, share);
}

static void take_head(const DeltaCall *c, const StateSlots *states, int64_t index, int64_t head,
                      Scratch *s) {
  const DeltaNet *net = c->net;
  const Request r = request_at(states, index);
  const int64_t share = net->values / net->keys, size = net->key_width * net->value_width;
  const int64_t of_slot = net->values * size, of_head = head * share * size;
  const StateSave *save = states->saves, *last = save + states->num_saves;
  while (save < last && save->request < index) save++;
  float *own = c->matrices + r.slot * of_slot + of_head;
  const float *source = r.stands ? own : NULL;
  int64_t from = r.stands;
  while (from < r.end) {
    int64_t to = from + TILE < r.end ? from + TILE : r.end;
    if (from < r.settled && to > r.settled) to = r.settled;
    if (save < last && save->request == index && to > r.start + save->num_rows)
      to = r.start + save->num_rows;
    float *target = to > r.settled ? s->drafted : own;
    unit_heads(c, &r, head, from, to - from, s);
    for (int64_t i = 0; i < share; i++) {
      values_of_head(c, &r, head * share + i, from, to - from, s);
      for (int64_t column = 0; column < net->value_width; column += STRIPE)
        take_stripe(net, s, source ? source + i * size : NULL, target + i * size, column,
                    to - from);
      gate_rows(c, &r, head * share + i, from, to - from, s);
    }
    for (; save < last && save->request == index && r.start + save->num_rows == to; save++) {
      memcpy(c->matrices + save->slot * of_slot + of_head, target,
             (size_t)(share * size) * sizeof(float));
      keep_head(c, &r, head, save->slot, to - net->conv.taps + 1, to);
    }
    source = target, from = to;
  }
  keep_head(c, &r, head, r.slot, r.start, r.end);
}

void team_delta_net(const Team *team, const DeltaCall *call, const StateSlots *states,
                    char *scratch) {
  const DeltaNet *net = call->net;
  const int64_t units = states->num_requests * net->keys;
  Scratch parts;
  divide(net, scratch + team->index * delta_net_scratch_bytes(net), &parts);
  for (int64_t i = team_next(team); i < units; i = team_next(team))
    take_head(call, states, i / net->keys, i % net->keys, &parts);
  team_meet(team);
}

typedef struct {
  const DeltaCall *call;
  const StateSlots *states;
  char *scratch;
} Arguments;

static void delta_net_alone(const Team *team, void *arguments) {
  const Arguments *a = arguments;
  team_delta_net(team, a->call, a->states, a->scratch);
}

/* Returns 1 if memory runs out. */
int delta_net(const DeltaCall *call, const StateSlots *states, int64_t threads) {
  char *scratch = aligned_alloc(64, (size_t)(threads * delta_net_scratch_bytes(call->net)));
  if (!scratch) return 1;
  run_team(threads, delta_net_alone, &(Arguments){call, states, scratch});
  free(scratch);
  return 0;
}

/* For structs.py, which describes the same structures in this order. */
const int64_t delta_net_struct_bytes[] = {sizeof(StateSlots), sizeof(Inputs), sizeof(ConvWeights),
                                          sizeof(DeltaNet), sizeof(DeltaCall)};
