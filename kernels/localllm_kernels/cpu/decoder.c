/* All layers of a decoder in one call: the operators of the other files, one after another, by one
 * team of threads. At batch 1 a layer is ten operators of microseconds each, and a call from Python
 * takes microseconds too. */

#include "decoder.h"

int64_t divide_scratch(const Decoder *d, int64_t rows, char *memory, Scratch *parts) {
  float **floats[] = {&parts->normed,    &parts->qkv,     &parts->query, &parts->mixed,
                      &parts->projected, &parts->gate_up, &parts->inner, &parts->factors};
  const int64_t widths[] = {d->hidden, d->first_width, d->heads * d->head_dim, d->mixed_width,
                            d->hidden, 2 * d->inner,   d->inner,               d->factors_width};
  int64_t taken = 0, rounded = 0, mixture = 0;
  for (int i = 0; i < 8; i++) {
    if (memory) *floats[i] = (float *)(memory + taken);
    taken += (rows * widths[i] * (int64_t)sizeof(float) + 63) / 64 * 64;
  }
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Layer *layer = d->layers + i;
    const Product *products[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
    if (layer->mixture) {
      const int64_t bytes = mixture_scratch_bytes(layer->mixture, rows);
      if (bytes > mixture) mixture = bytes;
      products[2] = &layer->mixture->router, products[3] = NULL;
    }
    for (int j = 0; j < 4 && products[j]; j++) {
      const int64_t bytes = product_bytes(products[j], rows);
      if (bytes > rounded) rounded = bytes;
    }
    if (layer->recurrence && layer->factors_at < 0) {
      const int64_t bytes = product_bytes(&layer->factors, rows);
      if (bytes > rounded) rounded = bytes;
    }
  }
  rounded = (rounded + 63) / 64 * 64;
  if (memory) parts->rounded = memory + taken, parts->mixture = parts->rounded + rounded;
  return taken + rounded + mixture;
}

int64_t decoder_scratch_bytes(const Decoder *d, int64_t rows) {
  Scratch parts;
  return divide_scratch(d, rows, NULL, &parts);
}

static KVCache cache_of_layer(const Group *group, int64_t place) {
  KVCache cache = group->first;
  cache.keys = (char *)cache.keys + place * group->layer_bytes;
  cache.values = (char *)cache.values + place * group->layer_bytes;
  if (cache.key_scales) {
    cache.key_scales = (char *)cache.key_scales + place * group->layer_scales;
    cache.value_scales = (char *)cache.value_scales + place * group->layer_scales;
  }
  if (cache.key_means) {
    const int64_t numbers = place * cache.kv_heads * cache.head_dim;
    cache.key_means += numbers * (cache.kind == KV_INT4 ? MEANS4 : 1);
    if (cache.kind == KV_INT4)
      cache.key_factors += numbers, cache.key_feedback += numbers * cache.head_dim;
  }
  return cache;
}

/* What a block has projected joins the residual stream x; returns the input of the next block, after
 * the norm `next` or x itself. */
static const float *join(const Team *team, const Forward *f, const float *after,
                         const float *next) {
  const Decoder *d = f->decoder;
  const Scratch *s = &f->scratch;
  const int64_t rows = f->batch->rows;
  float *x = f->x, *y = s->projected;
  if (after) team_rms_norm(team, y, after, d->eps, y, rows, d->hidden);
  if (d->share != 1.0f) team_scale(team, y, d->share, rows, d->hidden);
  if (!next) {
    team_add(team, y, x, rows, d->hidden);
    return x;
  }
  team_add_rms_norm(team, y, x, next, d->eps, x, s->normed, rows, d->hidden);
  return s->normed;
}

/* Queries, in the scratch, and keys and values, in the cache. */
static void rotate(const Team *team, const Forward *f, const Layer *layer, Rotation rotation) {
  const Decoder *d = f->decoder;
  const Scratch *s = &f->scratch;
  const int64_t rows = f->batch->rows, dim = d->head_dim, q_width = d->heads * dim;
  const int64_t width = layer->first_width;
  rotation.stride = width;
  if (d->norm_kind == NORM_HEADS) {
    rotation.query_norm = layer->query_norm, rotation.key_norm = layer->key_norm;
  } else {
    const int is_row = d->norm_kind == NORM_ROWS;
    const int64_t q_count = is_row ? 1 : d->heads, k_count = is_row ? 1 : d->kv_heads;
    if (!is_row) team_rotate(team, &rotation, s->qkv, width, d->heads + d->kv_heads);
    team_norm_stretches(team, s->qkv, layer->query_norm, d->eps, rows, width, q_count,
                        q_width / q_count);
    team_norm_stretches(team, s->qkv + q_width, layer->key_norm, d->eps, rows, width, k_count,
                        d->kv_heads * dim / k_count);
    if (!is_row) rotation.cos = NULL;
  }
  team_rotate_and_store(team, &rotation, s->qkv, s->query);
  if (f->batch->growth) team_scale_rows(team, s->query, f->batch->growth, rows, q_width);
}

/* From the first product's outputs to the second's inputs, or only to the keys and values. */
static void attend(const Team *team, const Forward *f, const Layer *layer, int only_stores) {
  const Decoder *d = f->decoder;
  const Batch *b = f->batch;
  const Scratch *s = &f->scratch;
  const Group *group = f->groups + layer->group;
  const Angles *angles = b->rotations + layer->rotation;
  Rotation rotation = {.cos = angles->cos, .sin = angles->sin, .eps = d->eps,
                       .slots = group->slots, .cache = cache_of_layer(group, layer->place),
                       .rows = b->rows, .num_stored = b->num_stored, .heads = d->heads,
                       .has_values = 1};
  if (group->own_keys) {
    const Group *uncoded = f->groups + group->uncoded;
    rotation.uncoded_slots = uncoded->slots, rotation.uncoded = cache_of_layer(uncoded, layer->place);
  }
  const AttentionShape shape = {rotation.cache, d->heads, layer->window, d->scale, d->cap,
                                layer->sinks, layer->num_hidden, group->own_keys, rotation.uncoded};
  rotate(team, f, layer, rotation);
  if (only_stores) return;
  team_attention(team, &shape, f->tasks[layer->group], f->num_tasks, s->query, s->mixed);
  if (d->has_gate) {
    const int64_t width = d->heads * d->head_dim;
    team_sigmoid_gate(team, s->mixed, s->qkv + layer->first_width - width, layer->first_width,
                      s->mixed, b->rows, width);
  }
}

static void recur(const Team *team, const Forward *f, const Layer *layer, const State *state,
                  const float *input) {
  const Batch *b = f->batch;
  const Scratch *s = &f->scratch;
  const Recurrence *net = layer->recurrence;
  const int64_t width = layer->first_width, count = net->is_delta ? 2 * net->values : net->values;
  const int is_apart = layer->factors_at < 0;
  if (is_apart) team_product(team, &layer->factors, input, s->factors, b->rows, s->rounded);
  const Inputs inputs = {s->qkv + layer->inputs_at,
                         is_apart ? s->factors : s->qkv + layer->factors_at,
                         width, is_apart ? count : width, net->conv.width, count, state->kept,
                         state->ring};
  const RecurrenceCall call = {net, inputs, s->qkv + layer->gate_at, width, state->matrices,
                               state->has_half, s->mixed};
  team_recurrence(team, &call, b->slots, f->of_threads);
}

void team_forward(const Team *team, void *arguments) {
  const Forward *f = arguments;
  const Decoder *d = f->decoder;
  const Batch *b = f->batch;
  const Scratch *s = &f->scratch;
  float *x = f->x;
  const float *first = d->layers[0].input_norm, *input = first ? s->normed : x;
  if (first) team_rms_norm(team, x, first, d->eps, s->normed, b->rows, d->hidden);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Layer *layer = d->layers + i;
    const int is_last = i + 1 == d->num_layers;
    const float *next = is_last ? d->last_norm : layer[1].input_norm;
    team_product(team, &layer->qkv, input, s->qkv, b->rows, s->rounded);
    const int only_stores = f->only_stores && is_last;
    if (layer->recurrence)
      recur(team, f, layer, b->states + i, input);
    else
      attend(team, f, layer, only_stores);
    if (only_stores) return;
    team_product(team, &layer->output, s->mixed, s->projected, b->rows, s->rounded);
    input = join(team, f, layer->attention_after, layer->mlp_norm);
    if (layer->mixture) {
      team_mixture(team, layer->mixture, input, s->projected, b->rows, s->mixture, s->rounded);
    } else {
      team_product(team, &layer->gate_up, input, s->gate_up, b->rows, s->rounded);
      team_gate(team, s->gate_up, s->inner, b->rows, d->inner, d->gate);
      team_product(team, &layer->down, s->inner, s->projected, b->rows, s->rounded);
    }
    input = join(team, f, layer->mlp_after, next);
    if (f->taps && f->taps[i])
      TEAM_FOR(team, row, b->rows)
        memcpy(f->taps[i] + row * d->hidden, x + row * d->hidden,
               (size_t)d->hidden * sizeof(float));
  }
  TEAM_FOR(team, row, b->rows)
    memcpy(x + row * d->hidden, s->normed + row * d->hidden, (size_t)d->hidden * sizeof(float));
}

/* x: [rows, hidden], the embedded tokens, overwritten with the output of the final norm. taps:
 * NULL, or for each layer where its output goes, [rows, hidden], or NULL. Returns 1 if memory runs
 * out or a shape is not supported. */
int decoder_forward(const Decoder *d, const Batch *b, const Group *groups, int64_t num_groups,
                    float *const *taps, float *x, char *memory, int64_t threads) {
  AttentionTask **tasks = calloc((size_t)num_groups, sizeof(AttentionTask *));
  if (!tasks) return 1;
  Forward forward = {.decoder = d, .batch = b, .groups = groups, .tasks = tasks,
                     .taps = taps, .x = x};
  divide_scratch(d, b->rows, memory, &forward.scratch);
  int failed = 0;
  for (int64_t i = 0; i < num_groups && !failed; i++) {
    const Group *own = groups + i;
    if (own->is_uncoded) continue; /* its layers are those of another group */
    const AttentionShape shape = {.cache = own->first, .heads = d->heads, .own_keys = own->own_keys};
    const Group *uncoded = groups + own->uncoded;
    tasks[i] = attention_tasks((Tables){own->tables, own->max_blocks},
                               (Tables){uncoded->tables, uncoded->max_blocks}, b->starts, b->lengths,
                               b->seqs, &shape, &forward.num_tasks);
    failed = !tasks[i];
  }
  int64_t each = 0;
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Recurrence *net = d->layers[i].recurrence;
    const int64_t bytes = net ? recurrence_scratch_bytes(net) : 0;
    if (bytes > each) each = bytes;
  }
  if (each && !failed) {
    forward.of_threads = aligned_alloc(64, (size_t)(threads * each));
    failed = !forward.of_threads;
  }
  /* Padding rows are mixed with nothing; their values must be finite. */
  if (!failed) {
    memset(forward.scratch.mixed, 0, (size_t)(b->rows * d->mixed_width) * sizeof(float));
    run_team(threads, team_forward, &forward);
  }
  free(forward.of_threads);
  for (int64_t i = 0; i < num_groups; i++) free(tasks[i]);
  free(tasks);
  return failed;
}

/* Values in a vector: outputs in a block of packed weights. */
const int64_t lanes = LANES;
