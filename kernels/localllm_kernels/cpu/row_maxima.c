/* The greatest value of each row and its first index, see row_maxima.py. */

#include "common.h"

#define MIN_PART 16384 /* values that are worth a thread */

typedef struct {
  float value;
  int64_t index;
} Maximum;

static Maximum search(const float *values, int64_t from, int64_t to) {
  f32x16 most = splat(-INFINITY);
  i32x16 where = (i32x16){0} + (int32_t)from, lane, is_nan = (i32x16){0};
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int64_t i = from; i < to; i += LANES) {
    const int64_t count = to - i < LANES ? to - i : LANES;
    const f32x16 value = load_part(values + i, count, -INFINITY);
    const i32x16 is_better = value > most;
    is_nan |= value != value;
    most = select16(is_better, value, most);
    where = (i32x16)select16(is_better, (f32x16)(lane + (int32_t)i), (f32x16)where);
  }
  Maximum best = {most[0], where[0]};
  for (int i = 0; i < LANES; i++) {
    if (most[i] > best.value || (most[i] == best.value && where[i] < best.index))
      best = (Maximum){most[i], where[i]};
    if (is_nan[i]) return (Maximum){NAN, from};
  }
  return best;
}

/* values: [rows, width]; maxima, indices: [rows]. Returns 1 if there is no memory. */
int row_maxima(const float *values, float *maxima, int64_t *indices, int64_t rows, int64_t width,
               int64_t threads) {
  int64_t parts = width / MIN_PART < threads ? width / MIN_PART : threads;
  if (parts < 1 || rows >= threads) parts = 1;
  const int64_t share = (width + parts * LANES - 1) / (parts * LANES) * LANES;
  Maximum *found = malloc((size_t)(rows * parts) * sizeof(Maximum));
  if (!found) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * parts > 1)
  for (int64_t i = 0; i < rows * parts; i++) {
    const int64_t from = i % parts * share, to = from + share < width ? from + share : width;
    found[i] = search(values + i / parts * width, from, to);
  }
  for (int64_t row = 0; row < rows; row++) {
    Maximum best = found[row * parts];
    for (int64_t i = 1; i < parts; i++) {
      const Maximum other = found[row * parts + i];
      if (other.value > best.value || other.value != other.value) best = other;
    }
    maxima[row] = best.value, indices[row] = best.index;
  }
  free(found);
  return 0;
}
