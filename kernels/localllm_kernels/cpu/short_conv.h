/* A causal convolution of few taps between two gates; see short_conv.py for the formula. */

#pragma once

#include "state_slots.h"

/* rows: [., 3 * width], the first gate, the second, and the values; weight: [taps, width];
 * bias: [width] or NULL; kept: [slots, ring, width]; out: [., width]. */
typedef struct {
  const float *rows, *weight, *bias;
  float *kept, *out;
  int64_t width, taps, ring;
} ShortConv;
