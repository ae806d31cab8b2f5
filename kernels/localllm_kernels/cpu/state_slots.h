/* Where the requests of a batch keep recurrent state, and the convolution before a recurrence. */

#pragma once

#include "common.h"
#include "team.h"

/* A copy in `slot` of the state of request `request` after `num_rows` of its new rows. */
typedef struct {
  int64_t request, num_rows, slot;
} StateSave;

/* The slots of a batch's requests; see StateSlots in state_cache.py. saves: in order of rows. */
typedef struct {
  const int64_t *slots, *bounds, *starts, *stands, *settled;
  const StateSave *saves;
  int64_t num_requests, num_saves;
} StateSlots;

/* The inputs of a convolution with what its recurrence needs besides: those of a batch in two
 * parts, and those of earlier tokens in rings, where a row has both. */
typedef struct {
  const float *first, *second;         /* [rows, ...] */
  int64_t first_stride, second_stride; /* between rows */
  int64_t width, second_width;         /* columns of each that belong here */
  float *kept;                         /* [slots, ring, width + second_width] */
  int64_t ring;
} Inputs;

/* conv: [taps, width]; bias: [width] or NULL. */
typedef struct {
  const float *conv, *bias;
  int64_t taps, width;
} ConvWeights;

/* A request of a batch: its slot and first row, and positions as in StateSlots. */
typedef struct {
  int64_t slot, row, start, end, stands, settled;
} Request;

INLINE Request request_at(const StateSlots *s, int64_t i) {
  const int64_t start = s->starts[i];
  return (Request){s->slots[i], s->bounds[i], start, start + s->bounds[i + 1] - s->bounds[i],
                   s->stands[i], s->settled[i]};
}

INLINE float *kept_at(const Inputs *x, int64_t slot, int64_t position) {
  return x->kept + (slot * x->ring + position % x->ring) * (x->width + x->second_width);
}
/* Channel `channel` of the convolution's input, and column `column` of the second part. */
INLINE const float *input_at(const Inputs *x, const Request *r, int64_t position, int64_t channel) {
  if (position < r->start) return kept_at(x, r->slot, position) + channel;
  return x->first + (r->row + position - r->start) * x->first_stride + channel;
}
INLINE const float *second_at(const Inputs *x, const Request *r, int64_t position, int64_t column) {
  if (position < r->start) return kept_at(x, r->slot, position) + x->width + column;
  return x->second + (r->row + position - r->start) * x->second_stride + column;
}

#define MOST_TAPS 64

/* Up to 16 channels, of `count`; `rows`: the inputs at each tap. */
INLINE void convolve_lanes(const float *const *rows, const float *weights, const float *bias,
                           int64_t taps, int64_t width, int64_t count, float *out) {
  f32v total = bias ? load_part(bias, count, 0.0f) : splat(0.0f);
  for (int64_t tap = 0; tap < taps; tap++)
    total = fmav(load_part(rows[tap], count, 0.0f),
                  load_part(weights + tap * width, count, 0.0f), total);
  store_part(out, total / (1.0f + expv(-total)), count);
}

/* silu(bias + the sum over the taps, in order) of `count` channels from `channel` on. */
INLINE void convolve(const Inputs *x, const ConvWeights *w, const Request *r, int64_t position,
                     int64_t channel, int64_t count, float *out) {
  const float *rows[MOST_TAPS], *here[MOST_TAPS];
  const int64_t first = position - w->taps + 1, before = first < 0 ? -first : 0;
  const int64_t taps = w->taps - before;
  const float *weights = w->conv + before * w->width + channel;
  for (int64_t tap = 0; tap < taps; tap++)
    rows[tap] = input_at(x, r, first + before + tap, channel);
  for (int64_t i = 0; i < count; i += LANES) {
    const float *bias = w->bias ? w->bias + channel + i : NULL;
    for (int64_t tap = 0; tap < taps; tap++) here[tap] = rows[tap] + i;
    if (count - i < LANES)
      convolve_lanes(here, weights + i, bias, taps, w->width, count - i, out + i);
    else if (taps == 4)
      convolve_lanes(here, weights + i, bias, 4, w->width, LANES, out + i);
    else
      convolve_lanes(here, weights + i, bias, taps, w->width, LANES, out + i);
  }
}

/* The inputs of positions from `from` to `to` in the ring of `slot`. */
INLINE void keep_inputs(const Inputs *x, const Request *r, int64_t slot, int64_t from, int64_t to) {
  if (from < to - x->ring) from = to - x->ring;
  for (int64_t p = from < 0 ? 0 : from; p < to; p++) {
    float *kept = kept_at(x, slot, p);
    memcpy(kept, input_at(x, r, p, 0), (size_t)x->width * sizeof(float));
    memcpy(kept + x->width, second_at(x, r, p, 0), (size_t)x->second_width * sizeof(float));
  }
}
