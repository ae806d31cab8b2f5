/* A causal convolution of few taps between two gates; see short_conv.py for the formula. */

#pragma once

#include "common.h"
#include "team.h"

/* A copy in `slot` of the state of request `request` after `num_rows` of its new rows. */
typedef struct {
  int64_t request, num_rows, slot;
} StateSave;

/* The slots of a batch's requests; see StateSlots in state_cache.py. saves: in order of rows. */
typedef struct {
  const int64_t *slots, *bounds, *starts;
  const StateSave *saves;
  int64_t num_requests, num_saves;
} StateSlots;

/* rows: [., 3 * width], the first gate, the second, and the values; weight: [taps, width];
 * bias: [width] or NULL; kept: [slots, ring, width]; out: [., width]. */
typedef struct {
  const float *rows, *weight, *bias;
  float *kept, *out;
  int64_t width, taps, ring;
} ShortConv;
