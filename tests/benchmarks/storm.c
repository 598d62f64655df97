/* A storm of orphans for the process that is PID 1 here, and a clock.
 *
 *   storm COUNT IN OUT      IN, OUT: descriptors for the commands and answers of the program that started PID 1
 *
 * Prints "ready", then executes commands of one letter, and answers each with one line:
 *
 *   w   "made": COUNT orphans have died and wait for PID 1, which the caller has stopped before
 *   r   "reaped SECONDS": PID 1 was continued, and that long after it the last of them was gone
 *   l   "reaped SECONDS": COUNT orphans died under a PID 1 that runs, from the first fork to the last reaping
 *   q   ends
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LITTER = 250 }; /* orphans that one parent leaves behind */

static void require(int succeeded, const char *what) {
  if (!succeeded) {
    perror(what);
    exit(1);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Makes count orphans; their pids go where their parents, which are gone then, can write them. */
static void make(pid_t *pids, int count) {
  int alive[2]; /* every orphan holds the writing end until it is dead */
  char nothing;
  require(pipe(alive) == 0, "pipe");
  for (int made = 0; made < count; made += LITTER) {
    pid_t parent = fork();
    require(parent >= 0, "fork");
    if (parent == 0) {
      for (int i = made; i < made + LITTER && i < count; i++) {
        pid_t orphan = fork();
        if (orphan == 0) _exit(i & 0x7f);
        require(orphan > 0, "fork");
        pids[i] = orphan;
      }
      _exit(0);
    }
    int status;
    require(waitpid(parent, &status, 0) == parent && status == 0, "an orphan's parent");
  }
  close(alive[1]);
  require(read(alive[0], &nothing, 1) == 0, "read");
  close(alive[0]);
}

/* Returns when PID 1 has reaped all of them. */
static void await_reaped(const pid_t *pids, int count) {
  const struct timespec pause = {.tv_nsec = 200000};
  for (int i = 0; i < count;) {
    if (kill(pids[i], 0) != 0 && errno == ESRCH)
      i++;
    else
      nanosleep(&pause, NULL);
  }
}

int main(int argc, char **argv) {
  require(argc == 4, "usage: storm COUNT IN OUT");
  int count = atoi(argv[1]), in = atoi(argv[2]), out = atoi(argv[3]);
  size_t size = (size_t)count * sizeof(pid_t);
  pid_t *pids = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(pids != MAP_FAILED, "mmap");
  signal(SIGCONT, SIG_IGN); /* some inits pass on what they get */
  dprintf(out, "ready\n");
  for (char order; read(in, &order, 1) == 1 && order != 'q';) {
    double begun = now();
    if (order == 'w') {
      make(pids, count);
      dprintf(out, "made\n");
      continue;
    }
    if (order == 'r')
      require(kill(1, SIGCONT) == 0, "kill");
    else
      make(pids, count);
    await_reaped(pids, count);
    dprintf(out, "reaped %.6f\n", now() - begun);
  }
  return 0;
}
