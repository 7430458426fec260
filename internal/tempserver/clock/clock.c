// A time of day that can be set, for one program: this goes in front of the C library
// (LD_PRELOAD). The file that MYSQLLOCK_CLOCK names holds how many nanoseconds the clock
// is ahead of the machine's, as an int64_t. It is mapped, so what is written there counts
// at once. Clocks that only run on, such as CLOCK_MONOTONIC, are left alone.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)

// A wait until a time of day ends early, as it may at any time ("spuriously"), so that
// the program looks again after a while: the clock may have been set.
#define SLICE (SECOND / 4)

static int64_t none;
static int64_t *ahead = &none;

__attribute__((constructor)) static void map_clock(void) {
	const char *name = getenv("MYSQLLOCK_CLOCK");
	int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return;
	void *at = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (at != MAP_FAILED)
		ahead = at;
}

static int is_time_of_day(clockid_t id) {
	return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
}

static struct timespec shifted(struct timespec t, int64_t by) {
	int64_t ns = t.tv_nsec + by % SECOND;
	t.tv_sec += by / SECOND;
	if (ns >= SECOND) {
		ns -= SECOND;
		t.tv_sec++;
	} else if (ns < 0) {
		ns += SECOND;
		t.tv_sec--;
	}
	t.tv_nsec = ns;
	return t;
}

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int real_gettime(clockid_t id, struct timespec *t) {
	static int (*f)(clockid_t, struct timespec *);
	if (!f && !(f = real("clock_gettime")))
		return syscall(SYS_clock_gettime, id, t);
	return f(id, t);
}

int clock_gettime(clockid_t id, struct timespec *t) {
	int err = real_gettime(id, t);
	if (!err && is_time_of_day(id))
		*t = shifted(*t, __atomic_load_n(ahead, __ATOMIC_RELAXED));
	return err;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
	struct timespec t;
	(void)zone;
	if (clock_gettime(CLOCK_REALTIME, &t))
		return -1;
	tv->tv_sec = t.tv_sec;
	tv->tv_usec = t.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *at) {
	struct timespec t;
	if (clock_gettime(CLOCK_REALTIME, &t))
		return -1;
	if (at)
		*at = t.tv_sec;
	return t.tv_sec;
}

int timespec_get(struct timespec *t, int base) {
	return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, t) ? base : 0;
}

// until waits until a time of day. wait waits by the machine's clock.
static int until(const struct timespec *end, int (*wait)(void *, const struct timespec *), void *with) {
	struct timespec now, machine = shifted(*end, -__atomic_load_n(ahead, __ATOMIC_RELAXED));
	real_gettime(CLOCK_REALTIME, &now);
	struct timespec slice = shifted(now, SLICE);
	int later = machine.tv_sec > slice.tv_sec || (machine.tv_sec == slice.tv_sec && machine.tv_nsec > slice.tv_nsec);
	int err = wait(with, later ? &slice : &machine);
	return later && err == ETIMEDOUT ? 0 : err;
}

struct cond_wait {
	pthread_cond_t *cond;
	pthread_mutex_t *mutex;
};

static int timed(void *with, const struct timespec *end) {
	static int (*f)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
	struct cond_wait *w = with;
	if (!f)
		f = real("pthread_cond_timedwait");
	return f(w->cond, w->mutex, end);
}

static int clocked(void *with, const struct timespec *end, clockid_t id) {
	static int (*f)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
	struct cond_wait *w = with;
	if (!f)
		f = real("pthread_cond_clockwait");
	return f(w->cond, w->mutex, id, end);
}

static int clocked_by_day(void *with, const struct timespec *end) { return clocked(with, end, CLOCK_REALTIME); }

// Only the C library knows what clock the condition was made for, and each version of it
// keeps that elsewhere. No machine has been up since before 2001, though.
static int is_by_day(const struct timespec *end) { return end->tv_sec > 1000000000; }

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict end) {
	struct cond_wait w = {cond, mutex};
	return is_by_day(end) ? until(end, timed, &w) : timed(&w, end);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t id, const struct timespec *restrict end) {
	struct cond_wait w = {cond, mutex};
	return id == CLOCK_REALTIME ? until(end, clocked_by_day, &w) : clocked(&w, end, id);
}
