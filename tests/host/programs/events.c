/* A thread that waits in an epoll set, in which there is another one, in which there are a timer that runs out all the
 * time and a counter; and one that waits in a futex.
 *
 * Told what to do over descriptor 0, one message at a time; the main thread waits for it in poll(2). */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

static int inner, timer, counter;
static volatile int word;
static volatile long ticks, counted, woken;

static void *wait_for_events(void *argument) {
    int outer = *(int *)argument;
    struct epoll_event events[2];
    uint64_t value;
    for (;;) {
        if (epoll_pwait(outer, events, 1, -1, NULL) != 1 || events[0].data.fd != inner) continue;
        int found = epoll_wait(inner, events, 2, 0);
        for (int i = 0; i < found; i++) {
            if (read(events[i].data.fd, &value, sizeof value) != sizeof value) continue;
            if (events[i].data.fd == timer) {
                ticks += (long)value;
            } else {
                counted += (long)value;
            }
        }
    }
    return NULL;
}

static void *wait_for_word(void *argument) {
    (void)argument;
    for (;;) {
        int last = word;
        while (word == last) syscall(SYS_futex, &word, FUTEX_WAIT, last, NULL, NULL, 0);
        woken++;
    }
    return NULL;
}

static void *end_at_once(void *argument) { return argument; }

static void watch(int set, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
}

int main(void) {
    struct pollfd control = {.fd = 0, .events = POLLIN};
    struct itimerspec often = {{0, 5000000}, {0, 5000000}};
    int outer = epoll_create1(EPOLL_CLOEXEC);
    pthread_t thread;
    char message[64], answer[64];
    inner = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    counter = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    timerfd_settime(timer, 0, &often, NULL);
    watch(inner, timer);
    watch(inner, counter);
    watch(outer, inner);
    pthread_create(&thread, NULL, wait_for_events, &outer);
    pthread_create(&thread, NULL, wait_for_word, NULL);
    for (;;) {
        if (poll(&control, 1, -1) < 0) continue;
        ssize_t size = recv(0, message, sizeof message - 1, 0);
        if (size <= 0) return size < 0;
        message[size] = 0;
        if (!strcmp(message, "count")) {
            eventfd_write(counter, 3);
        } else if (!strcmp(message, "wake")) {
            __atomic_add_fetch(&word, 1, __ATOMIC_SEQ_CST);
            syscall(SYS_futex, &word, FUTEX_WAKE, 1, NULL, NULL, 0);
        } else if (!strcmp(message, "threads")) {
            for (int i = 0; i < 50; i++) {
                void *value = NULL;
                if (pthread_create(&thread, NULL, end_at_once, &i) || pthread_join(thread, &value) || value != &i) abort();
            }
        } else if (!strcmp(message, "fork")) {
            pid_t pid = fork();
            if (pid == 0) _exit(0);
            if (pid < 0) abort();
        } else if (!strcmp(message, "exit")) {
            exit(7);
        }
        send(0, answer, (size_t)snprintf(answer, sizeof answer, "%ld %ld %ld", ticks, counted, woken), MSG_NOSIGNAL);
    }
}
