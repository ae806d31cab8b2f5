/* The search of a keyed draw from softmax(values / T); see gumbel_argmax.py for the formula. */

#pragma once

#include "lane_search.h"

/* The hash of gumbel_argmax.py. */
INLINE u32v mix32(u32v bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

/* Natural logarithm of positive normal floats, to two units in the last place (Cephes, logf). */
INLINE f32v logv(f32v x) {
  const i32v bits = (i32v)x;
  i32v exponent = (bits >> 23) - 126;
  f32v m = (f32v)((bits & 0x007fffff) | 0x3f000000); /* from a half to one */
  const i32v is_small = m < splat(0.70710678f);
  exponent += is_small; /* -1 where true */
  m = m + selectv(is_small, m, splat(0.0f)) - splat(1.0f);
  const f32v e = __builtin_convertvector(exponent, f32v), square = m * m;
  f32v p = splat(7.0376836292e-2f);
  p = fmav(p, m, splat(-1.1514610310e-1f));
  p = fmav(p, m, splat(1.1676998740e-1f));
  p = fmav(p, m, splat(-1.2420140846e-1f));
  p = fmav(p, m, splat(1.4249322787e-1f));
  p = fmav(p, m, splat(-1.6668057665e-1f));
  p = fmav(p, m, splat(2.0000714765e-1f));
  p = fmav(p, m, splat(-2.4999993993e-1f));
  p = fmav(p, m, splat(3.3333331174e-1f));
  p = p * m * square;
  p = fmav(e, splat(-2.12194440e-4f), p);
  p = fmav(square, splat(-0.5f), p);
  return fmav(e, splat(0.693359375f), m + p);
}

/* -log(-log(u)) for u = (bits + 1/2) / 2^32. Above one half, u is kept as 1 - w, since a float near
 * one has no digits left (log(1 - w) as in Kahan's log1p). */
INLINE f32v gumbelv(u32v bits) {
  const f32v unit = splat(0x1p-32f), half = splat(0.5f);
  const f32v u = (__builtin_convertvector(bits, f32v) + half) * unit;
  const f32v w = (__builtin_convertvector(~bits, f32v) + half) * unit;
  const i32v is_high = (i32v)(bits >> 31) != 0;
  const f32v rest = splat(1.0f) - w, taken = rest - splat(1.0f);
  const f32v log_rest = logv(selectv(is_high, rest, u));
  const i32v is_tiny = taken == splat(0.0f);
  const f32v high = selectv(is_tiny, -w, log_rest * (-w) / selectv(is_tiny, splat(1.0f), taken));
  return -logv(-selectv(is_high, high, log_rest));
}

INLINE Best gumbel_search(const float *values, const int64_t *ids, float temperature, uint32_t low,
                   uint32_t high, int64_t from, int64_t to) {
  BestLanes best = start_search(from);
  for (int64_t i = from; i < to; i += LANES) {
    const int64_t count = to - i < LANES ? to - i : LANES;
    u32v id = (u32v)(best.lane + (int32_t)i);
    if (ids)
      for (int64_t j = 0; j < count; j++) id[j] = (uint32_t)ids[i + j];
    const u32v bits = mix32(mix32(id * 0x9E3779B1u + low) ^ high);
    look_at(&best, load_part(values + i, count, -INFINITY) / temperature + gumbelv(bits), i);
  }
  return best_of_lanes(&best);
}
