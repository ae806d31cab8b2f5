/* A product with a weight of any kind. */

#pragma once

#include "operators.h"

/* Scratch memory that it needs. */
INLINE int64_t product_bytes(const Product *p, int64_t rows) {
  if (p->kind == INTEGER) return integer_scratch_bytes(p->weight, rows);
  return p->kind == BFLOAT16 ? bfloat16_scratch_bytes(p->weight, rows) : 0;
}

/* rounded: product_bytes(p, rows). */
INLINE void team_product(const Team *team, const Product *p, const float *x, float *y, int64_t rows,
                         char *rounded) {
  switch (p->kind) {
    case FLOAT32: team_float32_linear(team, p->weight, x, y, rows); break;
    case BFLOAT16: team_bfloat16_linear(team, p->weight, x, y, rows, rounded); break;
    case INTEGER: team_integer_linear(team, p->weight, x, y, rows, rounded); break;
  }
}
