/* Recurrences with a matrix for each head behind a short convolution; see recurrence.py. */

#pragma once

#include "state_slots.h"

/* query, key, value: the first channel of each in the convolution. The second inputs are the factors
 * of all value heads. */
typedef struct {
  ConvWeights conv;
  const float *decay, *bias; /* [values] */
  const float *skip;         /* [values], or NULL */
  const float *norm;         /* [value_width], or [values * value_width] */
  int64_t keys, values, key_width, value_width; /* heads, and widths of theirs */
  int64_t query, key, value;
  int64_t is_delta;
  float eps;  /* of the norm */
  float most; /* how much of a correction is written */
} Recurrence;

typedef struct {
  const Recurrence *net;
  Inputs inputs;
  const float *gate; /* [rows, values * value_width], rows `gate_stride` apart */
  int64_t gate_stride;
  void *matrices;   /* [slots, values, key_width, value_width], float or half */
  int64_t has_half; /* whether these are half */
  float *out;       /* [rows, values * value_width] */
} RecurrenceCall;

/* scratch: recurrence_scratch_bytes(net) for each thread of the team. */
int64_t recurrence_scratch_bytes(const Recurrence *net);
void team_recurrence(const Team *team, const RecurrenceCall *call, const StateSlots *states,
                     char *scratch);
