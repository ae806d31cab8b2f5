/* All layers of a decoder in one call: the operators of the other files, one after another, by one
 * team of threads. At batch 1 a layer is ten operators of microseconds each, and a call from Python
 * takes microseconds too. */

#include "experts.h"

/* How queries and keys are normed: each head before it is rotated, or after, or all heads of a row
 * as one. */
enum { NORM_HEADS, NORM_TURNED, NORM_ROWS };

typedef struct {
  /* Norms before and after attention, and before and after the feed-forward: [hidden], or NULL. */
  const float *input_norm, *attention_after, *mlp_norm, *mlp_after;
  const float *query_norm, *key_norm; /* [head_dim] each, all heads' with NORM_ROWS, or NULL */
  const float *sinks;                 /* [heads], or NULL */
  Product qkv, output, gate_up, down;
  const Mixture *mixture; /* in place of gate_up and down, or NULL */
  int64_t window; /* 0: none */
  int64_t group, place; /* of its keys and values: the cache group, and the place in it */
  int64_t rotation;     /* which of the batch's */
} Layer;

typedef struct {
  const Layer *layers;
  const float *last_norm;
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim;
  float eps, scale; /* of the norms; of the attention's scores */
  float cap;        /* of the scores; 0: none */
  float share;      /* of a block's output that joins the residual stream */
  int64_t gate;     /* a GATE_ */
  int64_t norm_kind; /* of queries and keys */
} Decoder;

/* Angles of the batch's positions, [rows, head_dim / 2]. */
typedef struct {
  const float *cos, *sin;
} Angles;

typedef struct {
  const Angles *rotations;
  const float *growth; /* factors on the queries, [rows], or NULL */
  const int32_t *starts;
  const int64_t *lengths;
  int64_t rows, num_stored, seqs;
} Batch;

/* A cache group: where the batch's keys and values are in it, the cache of its first layer, and the
 * distance from one layer to the next, in bytes and in scales. */
typedef struct {
  const int64_t *slots;
  const int32_t *tables;
  int64_t max_blocks;
  KVCache first;
  int64_t layer_bytes, layer_scales;
} Group;

typedef struct {
  float *normed, *qkv, *query, *attended, *projected, *gate_up, *inner;
  char *rounded; /* inputs of a product */
  char *mixture;
} Scratch;

/* Places the parts in `memory`, unless it is NULL; returns the bytes they take. */
static int64_t divide(const Decoder *d, int64_t rows, char *memory, Scratch *parts) {
  const int64_t q_width = d->heads * d->head_dim, kv_width = d->kv_heads * d->head_dim;
  float **floats[] = {&parts->normed,    &parts->qkv,     &parts->query, &parts->attended,
                      &parts->projected, &parts->gate_up, &parts->inner};
  const int64_t widths[] = {d->hidden, q_width + 2 * kv_width, q_width, q_width,
                            d->hidden, 2 * d->inner,           d->inner};
  int64_t taken = 0, rounded = 0, mixture = 0;
  for (int i = 0; i < 7; i++) {
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
  }
  rounded = (rounded + 63) / 64 * 64;
  if (memory) parts->rounded = memory + taken, parts->mixture = parts->rounded + rounded;
  return taken + rounded + mixture;
}

int64_t decoder_scratch_bytes(const Decoder *d, int64_t rows) {
  Scratch parts;
  return divide(d, rows, NULL, &parts);
}

static KVCache cache_of_layer(const Group *group, int64_t place) {
  KVCache cache = group->first;
  cache.keys = (char *)cache.keys + place * group->layer_bytes;
  cache.values = (char *)cache.values + place * group->layer_bytes;
  if (cache.key_scales) {
    cache.key_scales += place * group->layer_scales;
    cache.value_scales += place * group->layer_scales;
  }
  return cache;
}

typedef struct {
  const Decoder *decoder;
  const Batch *batch;
  const Group *groups;
  AttentionTask **tasks; /* for each group; all groups have `num_tasks` */
  int64_t num_tasks;
  float *const *taps;
  float *x;
  Scratch scratch;
} Forward;

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
  const int64_t width = q_width + 2 * d->kv_heads * dim;
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

static void team_forward(const Team *team, void *arguments) {
  const Forward *f = arguments;
  const Decoder *d = f->decoder;
  const Batch *b = f->batch;
  const Scratch *s = &f->scratch;
  float *x = f->x;
  AttentionShape shape = {f->groups->first, d->heads, 0, d->scale, d->cap, NULL};
  Rotation rotation = {.eps = d->eps, .rows = b->rows, .num_stored = b->num_stored,
                       .heads = d->heads, .has_values = 1};
  const float *first = d->layers[0].input_norm, *input = first ? s->normed : x;
  if (first) team_rms_norm(team, x, first, d->eps, s->normed, b->rows, d->hidden);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Layer *layer = d->layers + i;
    const int is_last = i + 1 == d->num_layers;
    const float *next = is_last ? d->last_norm : layer[1].input_norm;
    const Group *group = f->groups + layer->group;
    const Angles *angles = b->rotations + layer->rotation;
    rotation.cos = angles->cos, rotation.sin = angles->sin;
    rotation.slots = group->slots, rotation.cache = cache_of_layer(group, layer->place);
    shape.cache = rotation.cache, shape.window = layer->window, shape.sinks = layer->sinks;
    team_product(team, &layer->qkv, input, s->qkv, b->rows, s->rounded);
    rotate(team, f, layer, rotation);
    team_attention(team, &shape, f->tasks[layer->group], f->num_tasks, s->query, s->attended);
    team_product(team, &layer->output, s->attended, s->projected, b->rows, s->rounded);
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
  divide(d, b->rows, memory, &forward.scratch);
  int failed = 0;
  for (int64_t i = 0; i < num_groups && !failed; i++) {
    const AttentionShape shape = {groups[i].first, d->heads, 0, d->scale, 0.0f, NULL};
    tasks[i] = attention_tasks(groups[i].tables, b->starts, b->lengths, b->seqs,
                               groups[i].max_blocks, &shape, &forward.num_tasks);
    failed = !tasks[i];
  }
  /* Padding rows attend to nothing; their values must be finite. */
  if (!failed) {
    memset(forward.scratch.attended, 0,
           (size_t)(b->rows * d->heads * d->head_dim) * sizeof(float));
    run_team(threads, team_forward, &forward);
  }
  for (int64_t i = 0; i < num_groups; i++) free(tasks[i]);
  free(tasks);
  return failed;
}

/* For structs.py, which describes the same structures in this order. */
const int64_t struct_bytes[] = {
    sizeof(IntegerWeight), sizeof(FloatWeight), sizeof(Product), sizeof(KVCache),
    sizeof(AttentionShape), sizeof(Rotation), sizeof(Layer), sizeof(Decoder),
    sizeof(Angles), sizeof(Batch), sizeof(Group),
};
