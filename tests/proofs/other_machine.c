/* What two machines do not share although their files are on one disk, for LD_PRELOAD: RL_CLOCK_S, seconds by which the clock is off;
   RL_NO_LOCKS, the disk of status/ knows no flock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off(void) {
  const char *text = getenv("RL_CLOCK_S");
  return text ? atol(text) : 0;
}

static struct timespec back(const struct timespec *when) {
  struct timespec real = *when;
  real.tv_sec -= off();
  return real;
}

/* By version: without one, dlsym may find the conditions of 2002, of another layout. */
#define NEXT(name, version) ((__typeof__(&name))(dlvsym(RTLD_NEXT, #name, version) ?: dlsym(RTLD_NEXT, #name)))

int clock_gettime(clockid_t clock, struct timespec *now) {
  long code = syscall(SYS_clock_gettime, clock, now);
  if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += off();
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

/* Waits until a time by that clock. */
int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict when) {
  struct timespec real = back(when);
  return NEXT(sem_timedwait, "GLIBC_2.34")(sem, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict when) {
  struct timespec real = back(when);
  return NEXT(pthread_mutex_timedlock, "GLIBC_2.34")(mutex, &real);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict when) {
  struct timespec now, real = back(when);
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now); /* a condition by the monotonic clock, which is not off: months from the epoch */
  if (when->tv_sec < now.tv_sec + 86400L * 365 * 10) real = *when;
  return NEXT(pthread_cond_timedwait, "GLIBC_2.3.2")(cond, mutex, &real);
}

int flock(int fd, int how) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  if (getenv("RL_NO_LOCKS") && strstr(path, "/status/")) {
    errno = ENOLCK;
    return -1;
  }
  return syscall(SYS_flock, fd, how);
}
