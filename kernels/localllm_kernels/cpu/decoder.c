/* All layers of a decoder in one call: the operators of the other files, one after the other, by
 * one team of threads. At batch 1 a layer is ten operators of microseconds each, and a call
 * from Python takes microseconds too. */

#include "operators.h"

typedef struct {
  const float *input_norm, *post_attention_norm; /* [hidden] */
  const float *query_norm, *key_norm;            /* [head_dim] each, or NULL */
  Product qkv, output, gate_up, down;
  int64_t window; /* 0: none */
  int64_t group, place; /* of its keys and values: which cache group, and where in it */
} Layer;

typedef struct {
  const Layer *layers;
  const float *last_norm;
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim;
  float eps, scale; /* of the norms; of the attention's scores */
} Decoder;

typedef struct {
  const float *cos, *sin;
  const int32_t *starts;
  const int64_t *lengths;
  int64_t rows, num_stored, seqs;
} Batch;

/* A cache group: where the batch's keys and values stand in it, the cache of its first layer, and
 * what lies from one layer to the next: bytes, and scales. */
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
} Scratch;

static int64_t product_bytes(const Product *p, int64_t rows) {
  if (p->kind == INTEGER) return integer_scratch_bytes(p->weight, rows);
  return p->kind == BFLOAT16 ? bfloat16_scratch_bytes(p->weight, rows) : 0;
}

/* Places the parts in `memory`, if there is any; returns the bytes they take. */
static int64_t divide(const Decoder *d, int64_t rows, char *memory, Scratch *parts) {
  const int64_t q_width = d->heads * d->head_dim, kv_width = d->kv_heads * d->head_dim;
  float **floats[] = {&parts->normed,    &parts->qkv,     &parts->query, &parts->attended,
                      &parts->projected, &parts->gate_up, &parts->inner};
  const int64_t widths[] = {d->hidden, q_width + 2 * kv_width, q_width, q_width,
                            d->hidden, 2 * d->inner,           d->inner};
  int64_t taken = 0, rounded = 0;
  for (int i = 0; i < 7; i++) {
    if (memory) *floats[i] = (float *)(memory + taken);
    taken += (rows * widths[i] * (int64_t)sizeof(float) + 63) / 64 * 64;
  }
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Product *products[] = {&d->layers[i].qkv, &d->layers[i].output, &d->layers[i].gate_up,
                                 &d->layers[i].down};
    for (int j = 0; j < 4; j++) {
      const int64_t bytes = product_bytes(products[j], rows);
      if (bytes > rounded) rounded = bytes;
    }
  }
  if (memory) parts->rounded = memory + taken;
  return taken + rounded;
}

int64_t decoder_scratch_bytes(const Decoder *d, int64_t rows) {
  Scratch parts;
  return divide(d, rows, NULL, &parts);
}

INLINE void team_product(const Team *team, const Product *p, const float *x, float *y, int64_t rows,
                         char *rounded) {
  switch (p->kind) {
    case FLOAT32: team_float32_linear(team, p->weight, x, y, rows); break;
    case BFLOAT16: team_bfloat16_linear(team, p->weight, x, y, rows, rounded); break;
    case INTEGER: team_integer_linear(team, p->weight, x, y, rows, rounded); break;
  }
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
  AttentionTask **tasks; /* of each group; as many in all */
  int64_t num_tasks;
  float *const *taps;
  float *x;
  Scratch scratch;
} Forward;

static void team_forward(const Team *team, void *arguments) {
  const Forward *f = arguments;
  const Decoder *d = f->decoder;
  const Batch *b = f->batch;
  const Scratch *s = &f->scratch;
  float *x = f->x;
  AttentionShape shape = {f->groups->first, d->heads, 0, d->scale};
  Rotation rotation = {b->cos, b->sin,           NULL,    NULL,          d->eps,
                       NULL,   f->groups->first, b->rows, b->num_stored, d->heads};
  team_rms_norm(team, x, d->layers[0].input_norm, d->eps, s->normed, b->rows, d->hidden);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Layer *layer = d->layers + i;
    const int is_last = i + 1 == d->num_layers;
    const float *next = is_last ? d->last_norm : layer[1].input_norm;
    const Group *group = f->groups + layer->group;
    rotation.query_norm = layer->query_norm, rotation.key_norm = layer->key_norm;
    rotation.slots = group->slots, rotation.cache = cache_of_layer(group, layer->place);
    shape.cache = rotation.cache, shape.window = layer->window;
    team_product(team, &layer->qkv, s->normed, s->qkv, b->rows, s->rounded);
    team_rotate_and_store(team, &rotation, s->qkv, s->query);
    team_attention(team, &shape, f->tasks[layer->group], f->num_tasks, s->query, s->attended);
    team_product(team, &layer->output, s->attended, s->projected, b->rows, s->rounded);
    team_add_rms_norm(team, s->projected, x, layer->post_attention_norm, d->eps, x, s->normed,
                      b->rows, d->hidden);
    team_product(team, &layer->gate_up, s->normed, s->gate_up, b->rows, s->rounded);
    team_silu_mul(team, s->gate_up, s->inner, b->rows, d->inner);
    team_product(team, &layer->down, s->inner, s->projected, b->rows, s->rounded);
    team_add_rms_norm(team, s->projected, x, next, d->eps, x, s->normed, b->rows, d->hidden);
    if (f->taps && f->taps[i])
      TEAM_FOR(team, row, b->rows)
        memcpy(f->taps[i] + row * d->hidden, x + row * d->hidden,
               (size_t)d->hidden * sizeof(float));
  }
  TEAM_FOR(team, row, b->rows)
    memcpy(x + row * d->hidden, s->normed + row * d->hidden, (size_t)d->hidden * sizeof(float));
}

/* x: [rows, hidden], the embedded tokens, which becomes the output of the last norm; taps: NULL, or
 * of each layer where its output goes, [rows, hidden], if anywhere. Returns 1 if there is no memory
 * or a shape is not meant. */
int decoder_forward(const Decoder *d, const Batch *b, const Group *groups, int64_t num_groups,
                    float *const *taps, float *x, char *memory, int64_t threads) {
  AttentionTask **tasks = calloc((size_t)num_groups, sizeof(AttentionTask *));
  if (!tasks) return 1;
  Forward forward = {.decoder = d, .batch = b, .groups = groups, .tasks = tasks,
                     .taps = taps, .x = x};
  divide(d, b->rows, memory, &forward.scratch);
  int failed = 0;
  for (int64_t i = 0; i < num_groups && !failed; i++) {
    const AttentionShape shape = {groups[i].first, d->heads, 0, d->scale};
    tasks[i] = attention_tasks(groups[i].tables, b->starts, b->lengths, b->seqs,
                               groups[i].max_blocks, &shape, &forward.num_tasks);
    failed = !tasks[i];
  }
  /* Rows of padding attend to nothing; what stands there must be finite. */
  if (!failed) {
    memset(forward.scratch.attended, 0,
           (size_t)(b->rows * d->heads * d->head_dim) * sizeof(float));
    run_team(threads, team_forward, &forward);
  }
  for (int64_t i = 0; i < num_groups; i++) free(tasks[i]);
  free(tasks);
  return failed;
}

/* For structs.py, which describes the same structures in its order. */
const int64_t struct_bytes[] = {
    sizeof(IntegerWeight), sizeof(FloatWeight), sizeof(Product), sizeof(KVCache),
    sizeof(AttentionShape), sizeof(Rotation), sizeof(Layer), sizeof(Decoder),
    sizeof(Batch), sizeof(Group),
};
