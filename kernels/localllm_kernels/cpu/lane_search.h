/* The greatest of many values and its first index, a vector at a time. */

#pragma once

#include "common.h"

typedef struct {
  float value;
  int64_t index;
} Best;

/* For each lane, the greatest value so far and its index. */
typedef struct {
  f32v value;
  i32v index, lane;
} BestLanes;

INLINE BestLanes start_search(int64_t from) {
  BestLanes best = {splat(-INFINITY), (i32v){0} + (int32_t)from, (i32v){0}};
  for (int i = 0; i < LANES; i++) best.lane[i] = i;
  return best;
}

/* Takes more values, with indices from `at` on; of equal values the first is kept. */
INLINE void look_at(BestLanes *best, f32v value, int64_t at) {
  const i32v is_better = value > best->value;
  const i32v index = best->lane + (int32_t)at;
  best->value = selectv(is_better, value, best->value);
  best->index = (i32v)selectv(is_better, (f32v)index, (f32v)best->index);
}

INLINE Best best_of_lanes(const BestLanes *lanes) {
  Best best = {lanes->value[0], lanes->index[0]};
  for (int i = 1; i < LANES; i++) {
    const Best other = {lanes->value[i], lanes->index[i]};
    if (other.value > best.value || (other.value == best.value && other.index < best.index))
      best = other;
  }
  return best;
}
