/* The drafts of a head: its layer and its output head for one token after another, by one team of
 * threads in one call. The arithmetic of a token takes less time than a call from Python. */

#include "gumbel.h"
#include "head.h"

/* The rows of one step: those of all requests' new tokens at first, then one for each request that
 * still drafts. */
typedef struct {
  Batch batch;
  Group group;
  Angles angles;
  AttentionTask *tasks;
  int64_t num_tasks, num_sampled; /* requests for which the step samples a token */
} Step;

typedef struct {
  const Head *head;
  const Drafting *requests;
  Step *steps;
  int64_t num_steps;
  Forward forward;
  const float *hidden; /* [rows of the first step, hidden] */
  float *pair;         /* [rows, 2 hidden] */
  float *x, *last;     /* [rows, hidden]; the last row of each request */
  float *logits;       /* [requests, outputs] */
  char *rounded;
  int64_t *found; /* [requests, num_steps] */
} Drafts;

static int64_t outputs_of(const Product *p) {
  return p->kind == INTEGER ? ((const IntegerWeight *)p->weight)->width_out
                            : ((const FloatWeight *)p->weight)->width_out;
}

INLINE float embedded(const Head *h, int64_t token, int64_t i) {
  const int64_t at = token * h->decoder->hidden + i;
  float value;
  if (h->embeddings_kind == VALUES_BFLOAT16) {
    const uint32_t bits = (uint32_t)((const uint16_t *)h->embeddings)[at] << 16;
    memcpy(&value, &bits, sizeof value);
  } else if (h->embeddings_kind == VALUES_INT8) {
    value = (float)((const int8_t *)h->embeddings)[at] * h->embedding_scales[token];
  } else {
    value = ((const float *)h->embeddings)[at];
  }
  return value * h->embedding_scale;
}

/* The embedding of a token, and what stands for its hidden state, each normed. */
static void join_rows(const Team *team, const Drafts *a, int64_t number) {
  const Head *h = a->head;
  const int64_t hidden = h->decoder->hidden, rows = a->steps[number].batch.rows;
  const float *before = number ? a->last : a->hidden;
  const Drafting *request = a->requests;
  int64_t first = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t token;
    if (number) {
      token = a->found[row * a->num_steps + number - 1];
    } else {
      if (row - first == request->end - request->start) first = row, request++;
      token = request->tokens[row - first];
    }
    if (row % team->count != team->index) continue;
    float *to = a->pair + row * 2 * hidden;
    for (int64_t i = 0; i < hidden; i++) to[i] = embedded(h, token, i);
    memcpy(to + hidden, before + row * hidden, (size_t)hidden * sizeof(float));
  }
  team_meet(team);
  team_norm_stretches(team, a->pair, h->embedding_norm, h->decoder->eps, rows, 2 * hidden, 1,
                      hidden);
  team_norm_stretches(team, a->pair + hidden, h->hidden_norm, h->decoder->eps, rows, 2 * hidden, 1,
                      hidden);
}

static void sample_row(const Drafts *a, int64_t number, int64_t request, int64_t count) {
  const Head *h = a->head;
  const Drafting *asked = a->requests + request;
  const float *logits = a->logits + request * count;
  Best best;
  if (asked->temperature > 0.0f) {
    const uint64_t key = asked->keys[number];
    best = gumbel_search(logits, h->drafted, asked->temperature, (uint32_t)key,
                         (uint32_t)(key >> 32), 0, count);
  } else {
    BestLanes lanes = start_search(0);
    for (int64_t i = 0; i < count; i += LANES)
      look_at(&lanes, load_part(logits + i, count - i < LANES ? count - i : LANES, -INFINITY), i);
    best = best_of_lanes(&lanes);
  }
  a->found[request * a->num_steps + number] = h->drafted ? h->drafted[best.index] : best.index;
}

static void team_draft(const Team *team, void *arguments) {
  const Drafts *a = arguments;
  const Head *h = a->head;
  const int64_t hidden = h->decoder->hidden, outputs = outputs_of(&h->output);
  for (int64_t number = 0; number < a->num_steps; number++) {
    const Step *step = a->steps + number;
    join_rows(team, a, number);
    team_product(team, &h->join, a->pair, a->x, step->batch.rows, a->rounded);
    Forward forward = a->forward;
    AttentionTask *tasks[] = {step->tasks};
    forward.batch = &step->batch, forward.groups = &step->group;
    forward.tasks = tasks, forward.num_tasks = step->num_tasks;
    forward.only_stores = !step->num_sampled;
    team_forward(team, &forward);
    team_meet(team);
    if (!step->num_sampled) return;
    TEAM_FOR(team, request, step->num_sampled) {
      const int64_t row = step->batch.starts[request + 1] - 1;
      memcpy(a->last + request * hidden, a->x + row * hidden, (size_t)hidden * sizeof(float));
    }
    team_meet(team);
    team_product(team, &h->output, a->last, a->logits, step->num_sampled, a->rounded);
    TEAM_FOR(team, request, step->num_sampled) sample_row(a, number, request, outputs);
    team_meet(team);
  }
}

/* Memory that is handed out piece by piece; with `memory` NULL it only counts. */
typedef struct {
  char *memory;
  int64_t taken;
} Arena;

static void *take(Arena *arena, int64_t bytes) {
  char *piece = arena->memory ? arena->memory + arena->taken : NULL;
  arena->taken += (bytes + 63) / 64 * 64;
  return piece;
}

/* Places everything that the steps need in `arena`, and fills it in if that has memory. Returns 1 if
 * the tasks of attention find none, or if the shape is not supported. */
static int lay_out(Drafts *a, const Group *group, int64_t count, Arena *arena) {
  const Head *h = a->head;
  const Decoder *d = h->decoder;
  const Drafting *asked = a->requests;
  const int64_t half = d->head_dim / 2, block = group->first.block_size;
  int64_t rows = 0, blocks = 1;
  for (int64_t i = 0; i < count; i++) {
    rows += asked[i].end - asked[i].start;
    if (asked[i].num_blocks > blocks) blocks = asked[i].num_blocks;
  }
  const int64_t join_bytes = product_bytes(&h->join, rows);
  const int64_t output_bytes = product_bytes(&h->output, count);
  a->pair = take(arena, rows * 2 * d->hidden * (int64_t)sizeof(float));
  a->x = take(arena, rows * d->hidden * (int64_t)sizeof(float));
  a->last = take(arena, count * d->hidden * (int64_t)sizeof(float));
  a->logits = take(arena, count * outputs_of(&h->output) * (int64_t)sizeof(float));
  a->rounded = take(arena, join_bytes > output_bytes ? join_bytes : output_bytes);
  char *scratch = take(arena, divide_scratch(d, rows, NULL, &a->forward.scratch));
  if (scratch) divide_scratch(d, rows, scratch, &a->forward.scratch);
  a->steps = take(arena, a->num_steps * (int64_t)sizeof(Step));
  int32_t *tables = take(arena, count * blocks * (int64_t)sizeof(int32_t));
  if (arena->memory)
    for (int64_t i = 0; i < count; i++)
      memcpy(tables + i * blocks, asked[i].table, (size_t)asked[i].num_blocks * sizeof(int32_t));
  for (int64_t number = 0; number < a->num_steps; number++) {
    int64_t sampled = 0;
    while (sampled < count && asked[sampled].num_drafts > number) sampled++;
    const int64_t requests = number ? sampled : count, own = number ? sampled : rows;
    int64_t *slots = take(arena, own * (int64_t)sizeof(int64_t));
    float *cos = take(arena, own * half * (int64_t)sizeof(float));
    float *sin = take(arena, own * half * (int64_t)sizeof(float));
    int32_t *starts = take(arena, (requests + 1) * (int64_t)sizeof(int32_t));
    int64_t *lengths = take(arena, requests * (int64_t)sizeof(int64_t));
    if (!arena->memory) continue;
    int64_t row = 0;
    for (int64_t i = 0; i < requests; i++) {
      const int64_t end = asked[i].end + number;
      starts[i] = (int32_t)row;
      lengths[i] = end;
      for (int64_t p = number ? end - 1 : asked[i].start; p < end; p++, row++) {
        slots[row] = tables[i * blocks + p / block] * block + p % block;
        memcpy(cos + row * half, h->cos + p * half, (size_t)half * sizeof(float));
        memcpy(sin + row * half, h->sin + p * half, (size_t)half * sizeof(float));
      }
    }
    starts[requests] = (int32_t)row;
    Step *step = a->steps + number;
    step->angles = (Angles){cos, sin};
    step->batch = (Batch){.rotations = &step->angles, .starts = starts, .lengths = lengths,
                          .rows = own, .num_stored = own, .seqs = requests};
    step->group = *group;
    step->group.slots = slots, step->group.tables = tables, step->group.max_blocks = blocks;
    step->num_sampled = sampled;
    const AttentionShape shape = {.cache = group->first, .heads = d->heads, .scale = d->scale};
    step->tasks = attention_tasks((Tables){tables, blocks}, (Tables){0}, starts, lengths, requests,
                                  &shape, &step->num_tasks);
    if (!step->tasks) return 1;
  }
  return 0;
}

/* Drafts for `count` requests, of which those with more drafts come first. hidden: what stands before
 * each token of the requests, [rows, hidden]; group: the cache of the head's layer; found: [count,
 * drafts of the first request]. Returns 1 if memory runs out or the
 * shape is not supported. */
int head_draft(const Head *head, const Drafting *requests, int64_t count, const float *hidden,
               const Group *group, int64_t *found, int64_t threads) {
  Drafts a = {.head = head, .requests = requests, .hidden = hidden, .found = found,
              .num_steps = requests[0].num_drafts > 0 ? requests[0].num_drafts : 1, .forward = {.decoder = head->decoder}};
  Arena arena = {NULL, 0};
  lay_out(&a, group, count, &arena);
  arena.memory = aligned_alloc(64, (size_t)arena.taken);
  if (!arena.memory) return 1;
  memset(arena.memory, 0, (size_t)arena.taken);
  arena.taken = 0;
  const int failed = lay_out(&a, group, count, &arena);
  a.forward.x = a.x;
  if (!failed) run_team(threads, team_draft, &a);
  for (int64_t i = 0; i < a.num_steps; i++) free(a.steps[i].tasks);
  free(arena.memory);
  return failed;
}
