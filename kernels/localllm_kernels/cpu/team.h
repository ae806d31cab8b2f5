/* Threads that compute an operator together: each does its share, then all meet.
 *
 * A waiting thread spins for a short while and then sleeps, so that on a machine with other work
 * it gives its core to the thread it waits for. (Threads that spin until the last one arrives took
 * four to five times as long for a step beside one busy process, with two of them on two cores.) No
 * result depends on the number of threads. */

#pragma once

#include <stdint.h>

typedef struct Meeting Meeting;

/* A thread's view of its team: it is number `index` of `count`. */
typedef struct {
  int64_t index, count;
  Meeting *meeting;
} Team;

typedef void (*TeamWork)(const Team *team, void *arguments);

/* Runs `work` on the caller and on `threads` - 1 others; on the caller alone if they are busy with
 * another engine's work, or cannot be started. */
void run_team(int64_t threads, TeamWork work, void *arguments);

/* Waits for all threads of the team. Whatever they wrote before is visible to all afterwards. */
void team_meet(const Team *team);

/* The next number that no thread of the team has taken since they last met: 0, 1, 2, … */
int64_t team_next(const Team *team);

/* The thread's share of 0 to `count`: a contiguous range, for data that lies together. */
typedef struct {
  int64_t from, to;
} Share;
static inline Share team_share(const Team *team, int64_t count) {
  const int64_t each = count / team->count, more = count % team->count, i = team->index;
  const int64_t from = i * each + (i < more ? i : more);
  return (Share){from, from + each + (i < more)};
}

/* for (i in the thread's share of 0 to count) */
#define TEAM_FOR(team, i, count)                                     \
  for (Share i##_share = team_share(team, count), *i##_once = &i##_share; i##_once; i##_once = 0) \
    for (int64_t i = i##_share.from; i < i##_share.to; i++)
