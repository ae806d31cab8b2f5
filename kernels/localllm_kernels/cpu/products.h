/* A product with a weight of any kind. */

#pragma once

#include "operators.h"

/* Scratch memory that it needs. */
INLINE int64_t product_bytes(const Product *p, int64_t rows) {
  if (p->kind == INTEGER) return integer_scratch_bytes(p->weight, rows);
  if (p->kind == BLOCKS) return blocks_scratch_bytes(p->weight, rows);
  return p->kind == BFLOAT16 ? bfloat16_scratch_bytes(p->weight, rows) : 0;
}

/* The parts of a product whose inputs are rounded to integers, see operators.h. Of others a row has
 * 0 bytes. */
INLINE int64_t product_row_bytes(const Product *p) {
  if (p->kind == INTEGER) return integer_row_bytes(p->weight);
  return p->kind == BLOCKS ? blocks_row_bytes(p->weight) : 0;
}
INLINE void product_quantize_row(const Product *p, const float *x, int64_t row, int64_t rows,
                                 char *memory) {
  if (p->kind == INTEGER)
    integer_quantize_row(p->weight, x, row, rows, memory);
  else
    blocks_quantize_row(p->weight, x, row, rows, memory);
}
INLINE int64_t product_panels(const Product *p) {
  return p->kind == INTEGER ? integer_blocks(p->weight) : blocks_panels(p->weight);
}
INLINE void product_multiply_panel(const Product *p, int64_t panel, char *memory, float *y,
                                   int64_t rows) {
  if (p->kind == INTEGER)
    integer_multiply_block(p->weight, panel, memory, y, rows);
  else
    blocks_multiply_panel(p->weight, panel, memory, y, rows);
}

/* rounded: product_bytes(p, rows). */
INLINE void team_product(const Team *team, const Product *p, const float *x, float *y, int64_t rows,
                         char *rounded) {
  switch (p->kind) {
    case FLOAT32: team_float32_linear(team, p->weight, x, y, rows); break;
    case BFLOAT16: team_bfloat16_linear(team, p->weight, x, y, rows, rounded); break;
    case INTEGER: team_integer_linear(team, p->weight, x, y, rows, rounded); break;
    case BLOCKS: team_blocks_linear(team, p->weight, x, y, rows, rounded); break;
  }
}
