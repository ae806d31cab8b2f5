/* The best ways through the states of a trellis; see trellis_ways.py. */

#include "common.h"
#include "team.h"

#define STATES 16
#define MET 8         /* ways that meet in a state */
#define MOST_COLUMNS 64

/* What the states have: vectors of floats, of all states. */
#define PARTS (STATES / LANES)
typedef struct {
  f32v of[PARTS];
} States;
INLINE States load_states(const float *p) {
  States s;
  memcpy(&s, p, sizeof s);
  return s;
}

/* Of the states `first` and `first` + MET, in turns: those that come before each state by one way. */
INLINE States by_way(const float *p, int first) {
  f32v v;
  for (int i = 0; i < LANES; i++) v[i] = p[i % 2 ? first + MET : first];
  States s;
  for (int i = 0; i < PARTS; i++) s.of[i] = v;
  return s;
}

/* Moves what each state has to those that its way goes on to: from[state] is the one before. */
INLINE void follow(float *p, const int32_t *from) {
#if LANES == STATES && defined(__AVX512F__)
  i32v lanes;
  memcpy(&lanes, from, sizeof lanes);
  _mm512_storeu_ps(p, _mm512_permutexvar_ps((__m512i)lanes, _mm512_loadu_ps(p)));
#else
  float moved[STATES];
  for (int i = 0; i < STATES; i++) moved[i] = p[from[i]];
  memcpy(p, moved, sizeof moved);
#endif
}

/* work: [rows, stride]; factor: [columns, columns] of a matrix with rows of `width`; table: [ways that
 * meet][states]; windows, errors: [rows, kept]; states: [rows]. */
typedef struct {
  const float *work, *factor, *table;
  uint8_t *states, *windows;
  float *errors;
  int64_t rows, stride, width, columns, kept;
} Ways;

static void find_row(const Ways *a, int64_t row) {
  float ahead[MOST_COLUMNS][STATES], errors[MOST_COLUMNS][STATES], cost[STATES];
  int32_t from[MOST_COLUMNS][STATES];
  for (int64_t i = 0; i < a->columns; i++)
    for (int s = 0; s < STATES; s++) ahead[i][s] = a->work[row * a->stride + i];
  for (int s = 0; s < STATES; s++) cost[s] = s == a->states[row] ? 0.0f : INFINITY;
  for (int64_t i = 0; i < a->columns; i++) {
    const float *factor = a->factor + i * a->width;
    const f32v inverse = splat(1.0f / factor[i]);
    States best, error;
    i32v way[PARTS];
    for (int p = 0; p < PARTS; p++)
      best.of[p] = splat(INFINITY), error.of[p] = splat(0.0f), way[p] = (i32v){0};
    for (int w = 0; w < MET; w++) {
      const States before = by_way(cost, w), wanted = by_way(ahead[i], w);
      const States values = load_states(a->table + w * STATES);
      for (int p = 0; p < PARTS; p++) {
        const f32v lost = (wanted.of[p] - values.of[p]) * inverse;
        const f32v total = fmav(lost, lost, before.of[p]);
        const i32v is_best = total < best.of[p];
        best.of[p] = selectv(is_best, total, best.of[p]);
        error.of[p] = selectv(is_best, lost, error.of[p]);
        way[p] = (is_best & w) | (~is_best & way[p]);
      }
    }
    memcpy(cost, &best, sizeof cost);
    memcpy(errors[i], &error, sizeof errors[i]);
    memcpy(from[i], way, sizeof from[i]);
    for (int s = 1; s < STATES; s += 2) from[i][s] += MET;
    for (int64_t j = i + 1; j < a->columns; j++) {
      follow(ahead[j], from[i]);
      const f32v by = splat(-factor[j]);
      for (int p = 0; p < STATES; p += LANES)
        store(ahead[j] + p, fmav(load(errors[i] + p), by, load(ahead[j] + p)));
    }
  }
  int state = 0;
  for (int s = 1; s < STATES; s++)
    if (cost[s] < cost[state]) state = s;
  for (int64_t i = a->columns - 1; i >= 0; i--) {
    const int before = from[i][state];
    if (i < a->kept) {
      if (i == a->kept - 1) a->states[row] = (uint8_t)state;
      a->windows[row * a->kept + i] = (uint8_t)(state >> 1 << 4 | before);
      a->errors[row * a->kept + i] = errors[i][state];
    }
    state = before;
  }
}

static void find_all(const Team *team, void *arguments) {
  const Ways *a = arguments;
  TEAM_FOR(team, row, a->rows) find_row(a, row);
}

/* See Ways. Returns 1 if there are too many columns. */
int trellis_ways(const float *work, const float *factor, const float *table, uint8_t *states,
                 uint8_t *windows, float *errors, int64_t rows, int64_t stride, int64_t width,
                 int64_t columns, int64_t kept, int64_t threads) {
  if (columns > MOST_COLUMNS) return 1;
  run_team(threads, find_all,
           &(Ways){work, factor, table, states, windows, errors, rows, stride, width, columns, kept});
  return 0;
}
