/* Norms, rotary embedding with the KV write, and the gate of the feed-forward, in float32; the
 * formulas stand with the torch references of the same names. */

#include "common.h"

#define MAX_DIM 1024

INLINE float mean_of_squares(const float *x, int64_t width) {
  f32x16 sum = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const f32x16 v = load(x + i);
    sum = fma16(v, v, sum);
  }
  if (i < width) {
    const f32x16 v = load_part(x + i, width - i, 0.0f);
    sum = fma16(v, v, sum);
  }
  return sum_lanes(sum) / (float)width;
}

INLINE void norm_row(const float *x, const float *weight, float eps, float *y, int64_t width) {
  const float scale = 1.0f / sqrtf(mean_of_squares(x, width) + eps);
  for (int64_t i = 0; i < width; i++) y[i] = weight[i] * (x[i] * scale);
}

/* Each row of x by itself; all [rows, width]. */
void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows,
              int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t row = 0; row < rows; row++)
    norm_row(x + row * width, weight, eps, y + row * width, width);
}

/* total = residual + x, y = its norm; all [rows, width]. */
void add_rms_norm(const float *x, const float *residual, const float *weight, float eps,
                  float *total, float *y, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * width;
    for (int64_t i = 0; i < width; i++) total[at + i] = residual[at + i] + x[at + i];
    norm_row(total + at, weight, eps, y + at, width);
  }
}

/* silu(gate) · up; gate_up: [rows, 2 · width], gate first. */
void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = gate_up + 2 * row * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t count = width - i < LANES ? width - i : LANES;
      const f32x16 g = load_part(gate + i, count, 0.0f), u = load_part(up + i, count, 0.0f);
      store_part(y + row * width + i, g / (1.0f + exp16(-g)) * u, count);
    }
  }
}

/* Turn a head by its position, normed if there is a weight. */
INLINE void turn_head(const float *x, const float *norm, float eps, const float *cos_row,
                      const float *sin_row, float *y, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  const float scale = norm ? 1.0f / sqrtf(mean_of_squares(x, head_dim) + eps) : 1.0f;
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[half + i];
    if (norm) first = norm[i] * (first * scale), second = norm[half + i] * (second * scale);
    y[i] = first * cos_row[i] - second * sin_row[i];
    y[half + i] = second * cos_row[i] + first * sin_row[i];
  }
}

INLINE void write_head(const float *x, void *cache, int64_t row, int64_t dim, int is_bfloat16) {
  if (!is_bfloat16) {
    memcpy((float *)cache + row * dim, x, (size_t)dim * sizeof(float));
    return;
  }
  uint16_t *to = (uint16_t *)cache + row * dim;
  for (int64_t i = 0; i < dim; i++) to[i] = to_bf16(x[i]);
}

/* qkv: [rows, heads + 2 · kv_heads, head_dim]; cos, sin: [rows, head_dim / 2]; norms: [head_dim]
 * each, or NULL; slots: [num_stored]; caches: [blocks, kv_heads, block_size, head_dim]; query:
 * [rows, heads, head_dim]. The rows behind `num_stored` are padding, and are turned but not stored.
 * Returns 1 if a head is too wide. */
int rotate_and_store(const float *qkv, const float *cos, const float *sin, const float *query_norm,
                     const float *key_norm, float eps, const int64_t *slots, void *key_cache,
                     void *value_cache, int is_bfloat16, float *query, int64_t rows,
                     int64_t num_stored, int64_t heads, int64_t kv_heads, int64_t head_dim,
                     int64_t block_size, int64_t threads) {
  if (head_dim > MAX_DIM) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    const float *x = qkv + row * (heads + 2 * kv_heads) * head_dim;
    const float *cos_row = cos + row * (head_dim / 2), *sin_row = sin + row * (head_dim / 2);
    for (int64_t head = 0; head < heads; head++, x += head_dim)
      turn_head(x, query_norm, eps, cos_row, sin_row, query + (row * heads + head) * head_dim,
                head_dim);
    if (row >= num_stored) continue;
    const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
    for (int64_t head = 0; head < kv_heads; head++, x += head_dim) {
      const int64_t to = (block * kv_heads + head) * block_size + offset;
      float key[MAX_DIM];
      turn_head(x, key_norm, eps, cos_row, sin_row, key, head_dim);
      write_head(key, key_cache, to, head_dim, is_bfloat16);
      write_head(x + kv_heads * head_dim, value_cache, to, head_dim, is_bfloat16);
    }
  }
  return 0;
}
