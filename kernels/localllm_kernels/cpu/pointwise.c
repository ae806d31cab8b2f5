/* Norms, rotary embedding with the KV write, and the gate of the feed-forward, in float32; the
 * formulas are given with the torch references of the same names. */

#include "kv_rows.h"


INLINE float mean_of_squares(const float *x, int64_t width) {
  f32v sum = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const f32v v = load(x + i);
    sum = fmav(v, v, sum);
  }
  if (i < width) {
    const f32v v = load_part(x + i, width - i, 0.0f);
    sum = fmav(v, v, sum);
  }
  return sum_lanes(sum) / (float)width;
}

INLINE void norm_row(const float *x, const float *weight, float eps, float *y, int64_t width) {
  const float scale = 1.0f / sqrtf(mean_of_squares(x, width) + eps);
  for (int64_t i = 0; i < width; i++) y[i] = weight[i] * (x[i] * scale);
}

/* Each row of x by itself; all [rows, width]. */
void team_rms_norm(const Team *team, const float *x, const float *weight, float eps, float *y,
                   int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows) norm_row(x + row * width, weight, eps, y + row * width, width);
  team_meet(team);
}

void team_norm_stretches(const Team *team, float *x, const float *weight, float eps, int64_t rows,
                         int64_t stride, int64_t count, int64_t width) {
  TEAM_FOR(team, row, rows)
    for (float *y = x + row * stride; y < x + row * stride + count * width; y += width)
      norm_row(y, weight, eps, y, width);
  team_meet(team);
}

typedef struct {
  const float *x, *residual, *weight;
  float eps, *total, *y;
  int64_t rows, width;
} Norm;

static void norm_all(const Team *team, void *arguments) {
  const Norm *a = arguments;
  team_rms_norm(team, a->x, a->weight, a->eps, a->y, a->rows, a->width);
}
void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows,
              int64_t width, int64_t threads) {
  run_team(rows > 1 ? threads : 1, norm_all, &(Norm){x, NULL, weight, eps, NULL, y, rows, width});
}

/* total = residual + x, y = its norm; all [rows, width]. */
void team_add_rms_norm(const Team *team, const float *x, const float *residual, const float *weight,
                       float eps, float *total, float *y, int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows) {
    const int64_t at = row * width;
    for (int64_t i = 0; i < width; i++) total[at + i] = residual[at + i] + x[at + i];
    norm_row(total + at, weight, eps, y + at, width);
  }
  team_meet(team);
}
static void add_norm_all(const Team *team, void *arguments) {
  const Norm *a = arguments;
  team_add_rms_norm(team, a->x, a->residual, a->weight, a->eps, a->total, a->y, a->rows, a->width);
}
void add_rms_norm(const float *x, const float *residual, const float *weight, float eps,
                  float *total, float *y, int64_t rows, int64_t width, int64_t threads) {
  run_team(rows > 1 ? threads : 1, add_norm_all,
           &(Norm){x, residual, weight, eps, total, y, rows, width});
}

void team_add(const Team *team, const float *y, float *x, int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows)
    for (int64_t i = row * width; i < (row + 1) * width; i++) x[i] += y[i];
  team_meet(team);
}
void team_scale(const Team *team, float *y, float factor, int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows)
    for (int64_t i = row * width; i < (row + 1) * width; i++) y[i] *= factor;
  team_meet(team);
}

void team_scale_rows(const Team *team, float *x, const float *factors, int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows)
    for (int64_t i = row * width; i < (row + 1) * width; i++) x[i] *= factors[row];
  team_meet(team);
}

/* See gate.py for the formulas. Comparisons with NaN are false, so that it passes. */
INLINE f32v gated(f32v g, f32v u, int64_t kind) {
  f32v steep = g;
  if (kind == GATE_RELU2) {
    const f32v zero = splat(0.0f), positive = selectv(g < zero, zero, g);
    return positive * positive;
  }
  if (kind == GATE_GELU) steep = 1.5957691216f * (g + 0.044715f * g * g * g);
  if (kind == GATE_CLAMPED) {
    const f32v limit = splat(7.0f);
    g = selectv(g > limit, limit, g);
    u = selectv(u > limit, limit, selectv(u < -limit, -limit, u)) + 1.0f;
    steep = 1.702f * g;
  }
  return g / (1.0f + expv(-steep)) * u;
}

/* Callers pass `kind` as a constant. */
INLINE void gate_row(const float *gate, const float *up, float *y, int64_t width, int64_t kind) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(y + i, gated(load(gate + i), load(up + i), kind));
  if (i < width) {
    const int64_t count = width - i;
    const f32v g = load_part(gate + i, count, 0.0f), u = load_part(up + i, count, 0.0f);
    store_part(y + i, gated(g, u, kind), count);
  }
}

/* The gate first, if there is one. */
void team_gate(const Team *team, const float *gate_up, float *y, int64_t rows, int64_t width,
               int64_t kind) {
  TEAM_FOR(team, row, rows) {
    const float *gate = gate_up + gate_parts(kind) * row * width;
    const float *up = kind == GATE_RELU2 ? gate : gate + width;
    float *to = y + row * width;
    switch (kind) {
      case GATE_SILU: gate_row(gate, up, to, width, GATE_SILU); break;
      case GATE_GELU: gate_row(gate, up, to, width, GATE_GELU); break;
      case GATE_RELU2: gate_row(gate, up, to, width, GATE_RELU2); break;
      case GATE_CLAMPED: gate_row(gate, up, to, width, GATE_CLAMPED); break;
    }
  }
  team_meet(team);
}

typedef struct {
  const float *gate_up;
  float *y;
  int64_t rows, width, kind;
} Gate;

static void gate_all(const Team *team, void *arguments) {
  const Gate *a = arguments;
  team_gate(team, a->gate_up, a->y, a->rows, a->width, a->kind);
}
void gate(const float *gate_up, float *y, int64_t rows, int64_t width, int64_t kind,
          int64_t threads) {
  run_team(rows > 1 ? threads : 1, gate_all, &(Gate){gate_up, y, rows, width, kind});
}

void team_sigmoid_gate(const Team *team, const float *x, const float *gate, int64_t stride, float *y,
                       int64_t rows, int64_t width) {
  TEAM_FOR(team, row, rows) {
    const float *from = x + row * width, *gates = gate + row * stride;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t count = width - i < LANES ? width - i : LANES;
      const f32v steep = expv(-load_part(gates + i, count, 0.0f));
      store_part(y + row * width + i, load_part(from + i, count, 0.0f) / (1.0f + steep), count);
    }
  }
  team_meet(team);
}

typedef struct {
  const float *x, *gate;
  int64_t stride;
  float *y;
  int64_t rows, width;
} SigmoidGate;

static void sigmoid_gate_all(const Team *team, void *arguments) {
  const SigmoidGate *a = arguments;
  team_sigmoid_gate(team, a->x, a->gate, a->stride, a->y, a->rows, a->width);
}
void sigmoid_gate(const float *x, const float *gate, int64_t stride, float *y, int64_t rows,
                  int64_t width, int64_t threads) {
  run_team(rows > 1 ? threads : 1, sigmoid_gate_all,
           &(SigmoidGate){x, gate, stride, y, rows, width});
}

/* Rotates a head by its position, after a norm if there is a weight; y may be x without a norm. */
INLINE void turn_head(const float *x, const float *norm, float eps, const float *cos_row,
                      const float *sin_row, float *y, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  if (!cos_row) {
    memcpy(y, x, (size_t)head_dim * sizeof(float));
    return;
  }
  const float scale = norm ? 1.0f / sqrtf(mean_of_squares(x, head_dim) + eps) : 1.0f;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t count = half - i < LANES ? half - i : LANES;
#define PART(p) (count == LANES ? load(p) : load_part(p, count, 0.0f))
    f32v first = PART(x + i), second = PART(x + half + i);
    if (norm) first = PART(norm + i) * (first * scale), second = PART(norm + half + i) * (second * scale);
    const f32v cosine = PART(cos_row + i), sine = PART(sin_row + i);
#undef PART
    store_part(y + i, first * cosine - second * sine, count);
    store_part(y + half + i, second * cosine + first * sine, count);
  }
}

void team_rotate(const Team *team, const Rotation *r, float *x, int64_t stride, int64_t heads) {
  const int64_t dim = r->cache.head_dim;
  TEAM_FOR(team, row, r->rows)
    for (float *y = x + row * stride; y < x + row * stride + heads * dim; y += dim)
      turn_head(y, NULL, 0.0f, r->cos + row * (dim / 2), r->sin + row * (dim / 2), y, dim);
  team_meet(team);
}

static void write_both(const KVCache *c, int64_t slot, int64_t head, const float *key,
                       const float *value) {
  const int64_t block = slot / c->block_size, offset = slot % c->block_size;
  const int64_t to = (block * c->kv_heads + head) * c->block_size + offset;
  write_key(c, to, offset, key);
  write_value(c, to, offset, value);
}

/* qkv: the heads of queries, keys, and values, unless keys are values. */
void team_rotate_and_store(const Team *team, const Rotation *r, const float *qkv, float *query) {
  const KVCache *cache = &r->cache;
  const int64_t dim = cache->head_dim, heads = r->heads, kv_heads = cache->kv_heads;
  TEAM_FOR(team, row, r->rows) {
    const float *x = qkv + row * r->stride;
    const float *cos_row = r->cos ? r->cos + row * (dim / 2) : NULL;
    const float *sin_row = r->cos ? r->sin + row * (dim / 2) : NULL;
    for (int64_t head = 0; head < heads; head++, x += dim)
      turn_head(x, r->query_norm, r->eps, cos_row, sin_row, query + (row * heads + head) * dim, dim);
    if (row >= r->num_stored || r->slots[row] < 0) continue;
    for (int64_t head = 0; head < kv_heads; head++, x += dim) {
      const float *value = r->has_values ? x + kv_heads * dim : x;
      float key[STORED_DIM], normed[STORED_DIM];
      turn_head(x, r->key_norm, r->eps, cos_row, sin_row, key, dim);
      if (r->norms_values) {
        const float scale = 1.0f / sqrtf(mean_of_squares(value, dim) + r->eps);
        for (int64_t i = 0; i < dim; i++) normed[i] = value[i] * scale;
        value = normed;
      }
      write_both(cache, r->slots[row], head, key, value);
      if (r->uncoded.kv_heads) write_both(&r->uncoded, r->uncoded_slots[row], head, key, value);
    }
  }
  team_meet(team);
}

typedef struct {
  const Rotation *rotation;
  const float *qkv;
  float *query;
} Turn;

static void turn_all(const Team *team, void *arguments) {
  const Turn *a = arguments;
  team_rotate_and_store(team, a->rotation, a->qkv, a->query);
}
/* Returns 1 if a head is too wide. */
int rotate_and_store(const Rotation *r, const float *qkv, float *query, int64_t threads) {
  if (r->cache.head_dim > STORED_DIM) return 1;
  run_team(r->rows > 1 ? threads : 1, turn_all, &(Turn){r, qkv, query});
  return 0;
}
