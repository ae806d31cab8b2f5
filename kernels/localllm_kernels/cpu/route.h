/* The choice of experts; see route.c. */

#pragma once

#include "common.h"
#include "team.h"

/* logits: [rows, experts]; correction, scales: [experts], or NULL; chosen, factors: [rows, top_k]. */
typedef struct {
  const float *logits, *correction, *scales;
  int32_t *chosen;
  float *factors;
  int64_t rows, experts, top_k, is_sigmoid, renormalises, groups, chosen_groups, group_best;
  float factor;
} Routing;

/* Bytes of scratch memory for that many rows. */
INLINE int64_t route_scratch_bytes(const Routing *r, int64_t rows) {
  return 3 * rows * r->experts * (int64_t)sizeof(float);
}
void team_route(const Team *team, const Routing *r, float *scratch);
