// Worker threads that take pieces of one job from a shared ticket.
//
// The caller takes pieces like any worker, so it never waits for a thread that has not started, only for
// pieces that are being worked on. Workers watch the ticket for a short while after each job, since the next
// operator of a step follows within microseconds, and then sleep.
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum { WATCH_NANOSECONDS = 200000, PAUSES_PER_LOOK = 16, PAUSES_BEFORE_YIELD = 2000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

// Rounding and the treatment of denormals: a worker computes as its caller does, or who takes which piece
// would show.
#if defined(__x86_64__)
static uint64_t float_mode(void) { return __builtin_ia32_stmxcsr(); }
static void set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif defined(__aarch64__)
static uint64_t float_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
static uint64_t float_mode(void) { return 0; }
static void set_float_mode(uint64_t mode) { (void)mode; }
#endif

// The ticket holds a job's number, how many workers may help, how many pieces it has and which is next, so
// that one exchange takes a piece of exactly the job that was looked at.
typedef uint64_t ticket;

enum { COUNT_BITS = 12, HELPER_BITS = 8, JOB_SHIFT = 2 * COUNT_BITS + HELPER_BITS };

_Static_assert(MOST_PIECES == (1 << COUNT_BITS) - 1, "the count of pieces is also their mask");
_Static_assert(MOST_THREADS == 1 << HELPER_BITS, "helpers are the threads but the caller");

static ticket ticket_of(uint64_t job, uint64_t helpers, uint64_t count) {
  return job << JOB_SHIFT | helpers << 2 * COUNT_BITS | count << COUNT_BITS;
}

static int64_t next_piece(ticket t) { return (int64_t)(t & MOST_PIECES); }

static int64_t num_pieces(ticket t) { return (int64_t)(t >> COUNT_BITS & MOST_PIECES); }

static int64_t num_helpers(ticket t) { return (int64_t)(t >> 2 * COUNT_BITS & (MOST_THREADS - 1)); }

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;  // one job at a time; others run by themselves
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  pthread_cond_t wake;
  _Atomic int is_asleep;
} beds[MOST_THREADS];  // by worker: a job wakes only those it wants
static _Atomic ticket current;
static _Atomic(piece) current_work;
static _Atomic(const void *) current_context;
static _Atomic uint64_t current_mode;
static _Atomic int64_t finished;
static int64_t num_workers;  // guarded by in_use
static uint64_t num_jobs;    // guarded by in_use

enum { CALLER = -1 };

// Whether worker number `worker` may take a piece.
static int is_wanted(ticket t, int64_t worker) {
  return next_piece(t) < num_pieces(t) && worker < num_helpers(t);
}

static void take_pieces(int64_t worker) {
  for (;;) {
    ticket t = atomic_load(&current);
    piece work = atomic_load_explicit(&current_work, memory_order_relaxed);
    const void *context = atomic_load_explicit(&current_context, memory_order_relaxed);
    uint64_t mode = atomic_load_explicit(&current_mode, memory_order_relaxed);
    if (!is_wanted(t, worker)) return;
    if (!atomic_compare_exchange_strong(&current, &t, t + 1)) continue;
    if (worker != CALLER) set_float_mode(mode);
    work(context, next_piece(t));
    atomic_fetch_add_explicit(&finished, 1, memory_order_release);
  }
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void *work_forever(void *number) {
  int64_t worker = (int64_t)(intptr_t)number, last = now();
  for (;;) {
    if (is_wanted(atomic_load(&current), worker)) {
      take_pieces(worker);
      last = now();
    } else if (now() - last < WATCH_NANOSECONDS) {
      for (int i = 0; i < PAUSES_PER_LOOK; i++) PAUSE();
    } else {
      pthread_mutex_lock(&sleep_lock);
      atomic_store(&beds[worker].is_asleep, 1);
      while (!is_wanted(atomic_load(&current), worker)) pthread_cond_wait(&beds[worker].wake, &sleep_lock);
      atomic_store(&beds[worker].is_asleep, 0);
      pthread_mutex_unlock(&sleep_lock);
    }
  }
  return 0;
}

// A forked child has none of its parent's threads, and perhaps their locks. To initialise a lock that may be
// held is more than POSIX allows and what every C library does well.
static void forget_workers(void) {
  pthread_mutex_init(&in_use, 0);
  pthread_mutex_init(&sleep_lock, 0);
  atomic_store(&current, 0);
  num_workers = 0;
}

static void start_workers(int64_t wanted) {
  static int is_registered;
  sigset_t all, old;
  pthread_attr_t detached;
  if (!is_registered) is_registered = !pthread_atfork(0, 0, forget_workers);
  if (!is_registered || pthread_attr_init(&detached)) return;
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old);  // signals belong to the interpreter's threads
  while (num_workers < wanted) {
    pthread_t thread;
    pthread_cond_init(&beds[num_workers].wake, 0);
    atomic_store(&beds[num_workers].is_asleep, 0);
    if (pthread_create(&thread, &detached, work_forever, (void *)(intptr_t)num_workers)) break;
    num_workers++;
  }
  pthread_sigmask(SIG_SETMASK, &old, 0);
  pthread_attr_destroy(&detached);
}

static void wake_workers(int64_t wanted) {
  for (int64_t i = 0; i < wanted && i < num_workers; i++) {
    if (!atomic_load(&beds[i].is_asleep)) continue;
    pthread_mutex_lock(&sleep_lock);  // between a worker's last look and its sleep nothing may slip by
    pthread_cond_signal(&beds[i].wake);
    pthread_mutex_unlock(&sleep_lock);
  }
}

void run_pieces(piece work, const void *context, int64_t count, int64_t threads) {
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (threads > count) threads = count;
  if (threads < 2 || pthread_mutex_trylock(&in_use)) {
    for (int64_t i = 0; i < count; i++) work(context, i);
    return;
  }
  if (num_workers < threads - 1) start_workers(threads - 1);
  atomic_store_explicit(&current_work, work, memory_order_relaxed);
  atomic_store_explicit(&current_context, context, memory_order_relaxed);
  atomic_store_explicit(&current_mode, float_mode(), memory_order_relaxed);
  atomic_store_explicit(&finished, 0, memory_order_relaxed);
  atomic_store(&current, ticket_of(++num_jobs, (uint64_t)threads - 1, (uint64_t)count));
  wake_workers(threads - 1);
  take_pieces(CALLER);
  for (int64_t pauses = 0; atomic_load_explicit(&finished, memory_order_acquire) < count; pauses++)
    if (pauses < PAUSES_BEFORE_YIELD)
      PAUSE();
    else
      sched_yield();
  pthread_mutex_unlock(&in_use);
}
