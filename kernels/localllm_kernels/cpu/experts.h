/* A mixture of experts; see experts.c. */

#pragma once

#include "products.h"
#include "route.h"

typedef struct {
  Product gate_up, down;
} Expert;

typedef struct {
  const Expert *experts;
  int64_t count, hidden, inner;
  int64_t gate; /* a GATE_ */
} Experts;

/* x: [rows, hidden]; chosen, factors: [rows, top_k], experts and the factors on their outputs; y:
 * [rows, hidden]. */
typedef struct {
  const float *x;
  const int32_t *chosen;
  const float *factors;
  float *y;
  int64_t rows, top_k;
} Routed;

/* With its router. `routing`: all but the rows. */
typedef struct {
  Product router;
  Routing routing;
  Experts experts;
} Mixture;

int64_t experts_scratch_bytes(const Experts *e, int64_t rows, int64_t top_k);
void team_experts(const Team *team, const Experts *e, const Routed *r, char *scratch);
/* y: [rows, hidden]; rounded: product_bytes of the router. */
int64_t mixture_scratch_bytes(const Mixture *m, int64_t rows);
void team_mixture(const Team *team, const Mixture *m, const float *x, float *y, int64_t rows,
                  char *scratch, char *rounded);
