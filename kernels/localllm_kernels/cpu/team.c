/* See team.h. */

#define _GNU_SOURCE
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MOST_THREADS 256
#define ALIGNED __attribute__((aligned(64)))
/* How long a thread spins before it sleeps, in nanoseconds: within an operator, where the others
 * are microseconds behind; and between two calls, while Python prepares the next step. */
#define SPIN_NS 60000
#define IDLE_SPIN_NS 1000000

/* A counter whose change threads wait for, and how many of them sleep. */
typedef struct {
  atomic_uint value ALIGNED;
  atomic_uint sleeping;
} Signal;

struct Meeting {
  Signal over ALIGNED;
  atomic_uint arrived ALIGNED;
  atomic_llong next ALIGNED; /* see team_next */
};

/* A thread other than the caller. */
typedef struct {
  Signal start ALIGNED;
  unsigned seen; /* the value of `start` at its last work */
} Worker;

static struct {
  pthread_mutex_t mutex;
  Worker workers[MOST_THREADS];
  int64_t num_workers;
  /* The current work. */
  TeamWork work;
  void *arguments;
  int64_t count;
  Meeting meeting;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void sleep_while(Signal *signal, unsigned old) {
#if defined(__linux__)
  syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
#else
  (void)signal, (void)old;
  sched_yield();
#endif
}

static void change(Signal *signal) {
  atomic_fetch_add(&signal->value, 1);
  if (atomic_load(&signal->sleeping) == 0) return;
#if defined(__linux__)
  syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

static void wait_for_change(Signal *signal, unsigned old, int64_t spin_ns) {
  int64_t end = 0;
  for (int i = 1; atomic_load_explicit(&signal->value, memory_order_acquire) == old; i++) {
    relax();
    if (i % 32) continue;
    const int64_t now = now_ns();
    if (end == 0) end = now + spin_ns;
    if (now >= end) break;
  }
  if (atomic_load_explicit(&signal->value, memory_order_acquire) != old) return;
  atomic_fetch_add(&signal->sleeping, 1);
  while (atomic_load(&signal->value) == old) sleep_while(signal, old);
  atomic_fetch_sub(&signal->sleeping, 1);
}

void team_meet(const Team *team) {
  Meeting *m = team->meeting;
  if (team->count == 1) {
    atomic_store_explicit(&m->next, 0, memory_order_relaxed);
    return;
  }
  const unsigned before = atomic_load_explicit(&m->over.value, memory_order_relaxed);
  if (atomic_fetch_add(&m->arrived, 1) + 1 == (unsigned)team->count) {
    atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&m->next, 0, memory_order_relaxed);
    change(&m->over);
  } else {
    wait_for_change(&m->over, before, SPIN_NS);
  }
}

int64_t team_next(const Team *team) {
  return atomic_fetch_add_explicit(&team->meeting->next, 1, memory_order_relaxed);
}

static void *serve(void *argument) {
  Worker *worker = argument;
  for (;;) {
    wait_for_change(&worker->start, worker->seen, IDLE_SPIN_NS);
    worker->seen++;
    const Team team = {worker - pool.workers + 1, pool.count, &pool.meeting};
    pool.work(&team, pool.arguments);
    team_meet(&team);
  }
  return NULL;
}

/* A forked child has none of its parent's threads. */
static void forget_workers(void) {
  memset(&pool, 0, sizeof pool);
  pthread_mutex_init(&pool.mutex, NULL);
}

/* Starts workers until there are `count`, or as many as possible. The mutex is held. */
static void hire(int64_t count) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
  if (pool.num_workers == 0 && count > 0) {
    static int is_registered;
    if (!is_registered) is_registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
  }
  while (pool.num_workers < count) {
    Worker *worker = pool.workers + pool.num_workers;
    worker->seen = atomic_load(&worker->start.value);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, worker)) break;
    pthread_detach(thread);
    pool.num_workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void run_team(int64_t threads, TeamWork work, void *arguments) {
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (threads <= 1 || pthread_mutex_trylock(&pool.mutex)) {
    Meeting alone;
    memset(&alone, 0, sizeof alone);
    const Team team = {0, 1, &alone};
    work(&team, arguments);
    return;
  }
  if (pool.num_workers < threads - 1) hire(threads - 1);
  pool.count = pool.num_workers + 1 < threads ? pool.num_workers + 1 : threads;
  pool.work = work, pool.arguments = arguments;
  for (int64_t i = 0; i + 1 < pool.count; i++) change(&pool.workers[i].start);
  const Team team = {0, pool.count, &pool.meeting};
  work(&team, arguments);
  team_meet(&team);
  pthread_mutex_unlock(&pool.mutex);
}
