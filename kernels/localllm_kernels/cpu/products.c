/* A product with a weight of any kind, by a team of its own. */

#include "products.h"

typedef struct {
  const Product *product;
  const float *x;
  float *y;
  int64_t rows;
  char *scratch;
} Call;

static void multiply_all(const Team *team, void *arguments) {
  const Call *c = arguments;
  team_product(team, c->product, c->x, c->y, c->rows, c->scratch);
}

/* x: [rows, in]; y: [rows, out]. Returns 1 if there is no memory. */
int multiply(const Product *p, const float *x, float *y, int64_t rows, int64_t threads) {
  const int64_t bytes = product_bytes(p, rows);
  char *scratch = bytes ? malloc((size_t)bytes) : NULL;
  if (bytes && !scratch) return 1;
  run_team(threads, multiply_all, &(Call){p, x, y, rows, scratch});
  free(scratch);
  return 0;
}
