/* The short convolution, by stretches of channels, which know nothing of each other: a thread takes
 * whole stretches, row after row, so that the inputs of a request's last rows stay in its cache. */

#include "short_conv.h"

#include <string.h>

#define STRETCH 256

/* One row of channels from `first` on; `position`: the row's. */
static void conv_row(const ShortConv *a, const float *row, float *ring, float *out,
                     int64_t position, int64_t first, int64_t count) {
  const int64_t taps = a->taps, width = a->width;
  const float *before = row + first, *after = before + width, *values = after + width;
  float total[STRETCH], input[STRETCH];
  for (int64_t i = 0; i < count; i++) {
    input[i] = before[i] * values[i];
    total[i] = a->bias ? a->bias[first + i] : 0.0f;
  }
  for (int64_t tap = 0; tap < taps; tap++) {
    const int64_t at = position - taps + 1 + tap;
    if (at < 0) continue;
    const float *x = at == position ? input : ring + at % a->ring * width + first;
    const float *weight = a->weight + tap * width + first;
    for (int64_t i = 0; i < count; i++) total[i] += x[i] * weight[i];
  }
  for (int64_t i = 0; i < count; i++) out[first + i] = after[i] * total[i];
  /* Last, since the oldest input may have had this place. */
  memcpy(ring + position % a->ring * width + first, input, (size_t)count * sizeof(float));
}

static void copy_stretch(const ShortConv *a, int64_t from, int64_t to, int64_t first,
                         int64_t count) {
  for (int64_t place = 0; place < a->ring; place++) {
    float *target = a->kept + (to * a->ring + place) * a->width + first;
    const float *source = a->kept + (from * a->ring + place) * a->width + first;
    memcpy(target, source, (size_t)count * sizeof(float));
  }
}

static void conv_stretch(const ShortConv *a, const StateSlots *s, int64_t first) {
  const int64_t left = a->width - first, count = left < STRETCH ? left : STRETCH;
  const StateSave *save = s->saves, *last = s->saves + s->num_saves;
  for (int64_t i = 0; i < s->num_requests; i++) {
    float *ring = a->kept + s->slots[i] * a->ring * a->width;
    for (int64_t row = s->bounds[i]; row < s->bounds[i + 1]; row++) {
      const int64_t done = row - s->bounds[i];
      conv_row(a, a->rows + row * 3 * a->width, ring, a->out + row * a->width, s->starts[i] + done,
               first, count);
      for (; save < last && save->request == i && save->num_rows == done + 1; save++)
        copy_stretch(a, s->slots[i], save->slot, first, count);
    }
  }
}

typedef struct {
  const ShortConv *conv;
  const StateSlots *states;
} Both;

static void conv_all(const Team *team, void *arguments) {
  const Both *both = arguments;
  const int64_t stretches = (both->conv->width + STRETCH - 1) / STRETCH;
  TEAM_FOR(team, i, stretches) conv_stretch(both->conv, both->states, i * STRETCH);
  team_meet(team);
}

void short_conv(const ShortConv *conv, const StateSlots *states, int64_t threads) {
  run_team(conv->width > STRETCH ? threads : 1, conv_all, &(Both){conv, states});
}
