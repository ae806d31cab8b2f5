/* The greatest value of each row and its first index; see row_maxima.py. */

#include "lane_search.h"
#include "team.h"

#define MIN_PART 16384 /* the fewest values that are worth a thread */

static Best search(const float *values, int64_t from, int64_t to) {
  BestLanes best = start_search(from);
  i32v is_nan = (i32v){0};
  for (int64_t i = from; i < to; i += LANES) {
    const f32v value = load_part(values + i, to - i < LANES ? to - i : LANES, -INFINITY);
    is_nan |= value != value;
    look_at(&best, value, i);
  }
  for (int i = 0; i < LANES; i++)
    if (is_nan[i]) return (Best){NAN, from};
  return best_of_lanes(&best);
}

/* Every row is split into `parts`; found: [rows, parts]. */
typedef struct {
  const float *values;
  int64_t rows, width, parts, share;
  Best *found;
} Search;

static void search_all(const Team *team, void *arguments) {
  const Search *a = arguments;
  TEAM_FOR(team, i, a->rows * a->parts) {
    const int64_t from = i % a->parts * a->share;
    const int64_t to = from + a->share < a->width ? from + a->share : a->width;
    a->found[i] = search(a->values + i / a->parts * a->width, from, to);
  }
}

/* values: [rows, width]; maxima, indices: [rows]. Returns 1 if there is no memory. */
int row_maxima(const float *values, float *maxima, int64_t *indices, int64_t rows, int64_t width,
               int64_t threads) {
  int64_t parts = width / MIN_PART < threads ? width / MIN_PART : threads;
  if (parts < 1 || rows >= threads) parts = 1;
  const int64_t share = (width + parts * LANES - 1) / (parts * LANES) * LANES;
  Best *found = malloc((size_t)(rows * parts) * sizeof(Best));
  if (!found) return 1;
  run_team(rows * parts > 1 ? threads : 1, search_all,
           &(Search){values, rows, width, parts, share, found});
  for (int64_t row = 0; row < rows; row++) {
    Best best = found[row * parts];
    for (int64_t i = 1; i < parts; i++) {
      const Best other = found[row * parts + i];
      if (other.value > best.value || other.value != other.value) best = other;
    }
    maxima[row] = best.value, indices[row] = best.index;
  }
  free(found);
  return 0;
}
