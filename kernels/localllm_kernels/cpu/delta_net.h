/* The gated delta rule behind a short convolution; see delta_net.py for the formulas. */

#pragma once

#include "state_slots.h"

/* Channels of the convolution: queries and keys of all key heads, then the values. The second inputs
 * are b and a of all value heads. */
typedef struct {
  ConvWeights conv;
  const float *decay, *bias; /* [values] */
  const float *norm;         /* [value_width] */
  int64_t keys, values, key_width, value_width;
  float eps; /* of the norm */
} DeltaNet;

typedef struct {
  const DeltaNet *net;
  Inputs inputs;
  const float *gate; /* [rows, values * value_width], rows inputs.first_stride apart */
  float *matrices;   /* [slots, values, key_width, value_width] */
  float *out;        /* [rows, values * value_width] */
} DeltaCall;

/* scratch: delta_net_scratch_bytes(net) for each thread of the team. */
int64_t delta_net_scratch_bytes(const DeltaNet *net);
void team_delta_net(const Team *team, const DeltaCall *call, const StateSlots *states,
                    char *scratch);
