/* One thread for each way to wait, with a time limit and without, counting what ended as it should and what did not.
 *
 * Asked over descriptor 0; the main thread's poll(2) has a time limit too. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT_MS = 20 };

struct wait {
    const char *name;
    long (*once)(int limited);
    int limited;
    volatile long good, bad, number;
};

static struct timespec *limit(struct timespec *time, int limited) {
    *time = (struct timespec){0, LIMIT_MS * 1000000L};
    return limited ? time : NULL;
}

static struct timespec later(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_nsec += LIMIT_MS * 1000000L;
    if (time.tv_nsec >= 1000000000L) {
        time.tv_nsec -= 1000000000L;
        time.tv_sec++;
    }
    return time;
}

static long in_poll(int limited) { return poll(NULL, 0, limited ? LIMIT_MS : -1); }

static long in_ppoll(int limited) {
    struct timespec time;
    return ppoll(NULL, 0, limit(&time, limited), NULL);
}

static long in_select(int limited) {
    struct timeval time = {0, LIMIT_MS * 1000};
    return select(0, NULL, NULL, NULL, limited ? &time : NULL);
}

static long in_pselect(int limited) {
    struct timespec time;
    return pselect(0, NULL, NULL, NULL, limit(&time, limited), NULL);
}

static long in_nanosleep(int limited) {
    struct timespec time;
    (void)limited;
    return syscall(SYS_nanosleep, limit(&time, 1), NULL);
}

static long in_clock_nanosleep(int limited) {
    struct timespec time = later();
    (void)limited;
    return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static long in_futex(int limited) {
    static int word;
    struct timespec time;
    long value = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, limit(&time, limited), NULL, 0);
    return value < 0 && errno == ETIMEDOUT ? 0 : value;
}

static long in_futex_until(int limited) {
    static int word;
    struct timespec time = later();
    long value = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, limited ? &time : NULL, NULL, ~0u);
    return value < 0 && errno == ETIMEDOUT ? 0 : value;
}

static long in_epoll_wait(int limited) {
    static __thread int set;
    struct epoll_event event;
    if (!set) set = epoll_create1(0);
    return epoll_wait(set, &event, 1, limited ? LIMIT_MS : -1);
}

static long in_epoll_pwait(int limited) {
    static __thread int set;
    struct epoll_event event;
    if (!set) set = epoll_create1(0);
    return epoll_pwait(set, &event, 1, limited ? LIMIT_MS : -1, NULL);
}

static struct wait waits[] = {
    {.name = "poll", .once = in_poll, .limited = 1},
    {.name = "ppoll", .once = in_ppoll, .limited = 1},
    {.name = "select", .once = in_select, .limited = 1},
    {.name = "pselect", .once = in_pselect, .limited = 1},
    {.name = "nanosleep", .once = in_nanosleep, .limited = 1},
    {.name = "clock_nanosleep", .once = in_clock_nanosleep, .limited = 1},
    {.name = "futex", .once = in_futex, .limited = 1},
    {.name = "futex-until", .once = in_futex_until, .limited = 1},
    {.name = "epoll_wait", .once = in_epoll_wait, .limited = 1},
    {.name = "epoll_pwait", .once = in_epoll_pwait, .limited = 1},
    {.name = "poll-for-ever", .once = in_poll},
    {.name = "ppoll-for-ever", .once = in_ppoll},
    {.name = "select-for-ever", .once = in_select},
    {.name = "pselect-for-ever", .once = in_pselect},
    {.name = "futex-for-ever", .once = in_futex},
    {.name = "futex-until-for-ever", .once = in_futex_until},
    {.name = "epoll_wait-for-ever", .once = in_epoll_wait},
    {.name = "epoll_pwait-for-ever", .once = in_epoll_pwait},
    {.name = "main", .limited = 1},
};
enum { WAITS = sizeof waits / sizeof *waits };

static void count(struct wait *each, long value) {
    if (value == 0 && each->limited) {
        each->good++;
    } else {
        each->number = value < 0 ? errno : value;
        each->bad++;
    }
}

static void *run(void *argument) {
    struct wait *each = argument;
    for (;;) count(each, each->once(each->limited));
    return NULL;
}

int main(void) {
    struct pollfd control = {.fd = 0, .events = POLLIN};
    char message[64], answer[4096];
    pthread_t thread;
    for (int i = 0; i < WAITS - 1; i++) pthread_create(&thread, NULL, run, &waits[i]);
    for (;;) {
        int ready = poll(&control, 1, LIMIT_MS);
        if (ready <= 0) {
            count(&waits[WAITS - 1], ready);
            continue;
        }
        ssize_t size = recv(0, message, sizeof message, 0);
        if (size <= 0) return size < 0;
        size_t at = 0;
        for (int i = 0; i < WAITS; i++)
            at += (size_t)snprintf(answer + at, sizeof answer - at, "%s %ld %ld %ld\n", waits[i].name, waits[i].good,
                                   waits[i].bad, waits[i].number);
        send(0, answer, at, MSG_NOSIGNAL);
    }
}
