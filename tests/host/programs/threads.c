/* Threads that wait: even ones in a condition variable, odd ones in a futex with values in all kinds of registers. How
 * many is the argument. Some descriptors of all kinds are open.
 *
 * Told what to do over descriptor 0, one message at a time; the main thread waits for it in poll(2). */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

/* SIGRTMIN is another one in each C library. */
enum { MOST_WORKERS = 8, HELD_BYTES = 128, FIRST_BLOCKED = 40 };
enum order { REPORT, END, END_WITH_LOCK };

struct worker {
    pthread_t thread;
    pthread_cond_t woken;
    enum order order;
    int asked, done, over;
    char report[200];
};

static struct worker workers[MOST_WORKERS];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, robust;
static pthread_cond_t reported = PTHREAD_COND_INITIALIZER;
static const int rounding[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
static __thread long local = 7;
static volatile long ticks, signals;
static volatile int handled_by, spinning;
static int main_wrong;

static void handle(int number) {
    (void)number;
    handled_by = (int)syscall(SYS_gettid);
    __atomic_add_fetch(&signals, 1, __ATOMIC_SEQ_CST);
}

/* A system call with values in x87, vector and mask registers, as wide as the processor has them: how many of them are
 * other ones afterwards. */
static int call_holding(int seed, long *call, long one, long two, long three) {
    _Alignas(64) unsigned char in[HELD_BYTES], out[HELD_BYTES];
    double pi = 3.25 + seed, pi_back = 0;
    unsigned short mask = (unsigned short)(0x1234 + seed), mask_back = mask;
    int wrong = 0;
    register long four __asm__("r10") = 0;
    for (int i = 0; i < HELD_BYTES; i++) in[i] = (unsigned char)(seed * 37 + i * 3 + 1);
    memcpy(out, in, sizeof in);
    memset(out, 0, 32);
#define HOLD(before, after)                                                                                        \
    __asm__ volatile("fldl %[pi]\n\t" before "syscall\n\t" after "fstpl %[pi_back]\n\t"                            \
                     : "+a"(*call), [pi_back] "=m"(pi_back), [mask_back] "+m"(mask_back)                            \
                     : "D"(one), "S"(two), "d"(three), "r"(four), [in] "r"(in), [out] "r"(out), [pi] "m"(pi),      \
                       [mask] "m"(mask)                                                                            \
                     : "rcx", "r11", "memory", "xmm8", "xmm15")
    if (__builtin_cpu_supports("avx512f")) {
        memset(out, 0, sizeof out);
        mask_back = 0;
        HOLD("vmovdqu64 (%[in]), %%zmm8\n\tvmovdqu64 64(%[in]), %%zmm17\n\tkmovw %[mask], %%k3\n\t",
             "vmovdqu64 %%zmm8, (%[out])\n\tvmovdqu64 %%zmm17, 64(%[out])\n\tkmovw %%k3, %[mask_back]\n\tvzeroupper\n\t");
    } else if (__builtin_cpu_supports("avx")) {
        memset(out, 0, 64);
        HOLD("vmovdqu (%[in]), %%ymm8\n\tvmovdqu 32(%[in]), %%ymm15\n\t",
             "vmovdqu %%ymm8, (%[out])\n\tvmovdqu %%ymm15, 32(%[out])\n\tvzeroupper\n\t");
    } else {
        HOLD("movdqu (%[in]), %%xmm8\n\tmovdqu 16(%[in]), %%xmm15\n\t",
             "movdqu %%xmm8, (%[out])\n\tmovdqu %%xmm15, 16(%[out])\n\t");
    }
    for (int i = 0; i < HELD_BYTES; i++) wrong += in[i] != out[i];
    return wrong + (pi != pi_back) + (mask != mask_back);
}

static void report(struct worker *me, int wrong) {
    sigset_t set;
    unsigned long mask = 0;
    char name[16];
    int taken = pthread_mutex_lock(&robust), freed = pthread_mutex_unlock(&robust);
    pthread_sigmask(SIG_BLOCK, NULL, &set);
    for (int i = 1; i < 64; i++) mask |= (unsigned long)(sigismember(&set, i) == 1) << (i - 1);
    pthread_getname_np(pthread_self(), name, sizeof name);
    snprintf(me->report, sizeof me->report, "%ld %ld %ld %d %d %d %lx %s %d", syscall(SYS_gettid), syscall(SYS_getpid), local,
             wrong, fegetround() == rounding[(me - workers) % 4], pthread_equal(pthread_self(), me->thread) != 0, mask, name,
             taken + freed);
}

static void *work(void *argument) {
    struct worker *me = argument;
    int index = (int)(me - workers), answered = 0;
    char name[16];
    sigset_t set;
    local = 1000 + index;
    snprintf(name, sizeof name, "worker-%d", index);
    pthread_setname_np(pthread_self(), name);
    sigemptyset(&set);
    sigaddset(&set, FIRST_BLOCKED + index);
    pthread_sigmask(SIG_SETMASK, &set, NULL);
    fesetround(rounding[index % 4]);
    for (;;) {
        int wrong = 0;
        if (index % 2) {
            while (__atomic_load_n(&me->asked, __ATOMIC_SEQ_CST) == answered) {
                long call = SYS_futex;
                wrong += call_holding(index, &call, (long)&me->asked, FUTEX_WAIT, answered);
            }
        } else {
            pthread_mutex_lock(&lock);
            while (me->asked == answered) pthread_cond_wait(&me->woken, &lock);
            pthread_mutex_unlock(&lock);
        }
        answered = me->asked;
        if (me->order == END_WITH_LOCK) pthread_mutex_lock(&robust);
        if (me->order != REPORT) return (void *)(2000L + index);
        report(me, wrong);
        pthread_mutex_lock(&lock);
        me->done = answered;
        pthread_cond_broadcast(&reported);
        pthread_mutex_unlock(&lock);
    }
}

static void give(struct worker *to, enum order order) {
    pthread_mutex_lock(&lock);
    to->order = order;
    __atomic_add_fetch(&to->asked, 1, __ATOMIC_SEQ_CST);
    pthread_cond_signal(&to->woken);
    pthread_mutex_unlock(&lock);
    syscall(SYS_futex, &to->asked, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void *tick(void *argument) {
    struct timespec pause = {0, 2000000};
    (void)argument;
    for (;; ticks++) nanosleep(&pause, NULL);
    return NULL;
}

static void *spin(void *argument) {
    (void)argument;
    while (spinning) __asm__ volatile("pause");
    return NULL;
}

static void *tell_tid(void *argument) {
    *(long *)argument = syscall(SYS_gettid);
    return argument;
}

static char answer[4096];

static void say(const char *format, ...) {
    size_t at = strlen(answer);
    va_list values;
    va_start(values, format);
    vsnprintf(answer + at, sizeof answer - at, format, values);
    va_end(values);
}

static void check(void) {
    for (int i = 0; i < count; i++)
        if (!workers[i].over) give(&workers[i], REPORT);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        while (!workers[i].over && workers[i].done != workers[i].asked) pthread_cond_wait(&reported, &lock);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < count; i++)
        if (!workers[i].over) say("%d %s\n", i, workers[i].report);
}

static void end(int index, enum order order) {
    void *value = NULL;
    give(&workers[index], order);
    int failed = pthread_join(workers[index].thread, &value);
    workers[index].over = 1;
    if (order == END_WITH_LOCK) {
        int state = pthread_mutex_lock(&robust);
        say("%s %d", state == EOWNERDEAD ? "EOWNERDEAD" : strerror(state), pthread_mutex_consistent(&robust));
        pthread_mutex_unlock(&robust);
    } else {
        say("%d %ld", failed, (long)value);
    }
}

static void obey(const char *command, int number) {
    static pthread_t spinner;
    long tid = 0;
    pthread_t thread;
    if (!strcmp(command, "check")) {
        check();
    } else if (!strcmp(command, "kill")) {
        handled_by = 0;
        int failed = pthread_kill(workers[number].thread, SIGUSR1);
        while (!failed && !handled_by) usleep(1000);
        say("%d %d", failed, handled_by);
    } else if (!strcmp(command, "end")) {
        end(number, END);
    } else if (!strcmp(command, "end-with-lock")) {
        end(number, END_WITH_LOCK);
    } else if (!strcmp(command, "new")) {
        int failed = pthread_create(&thread, NULL, tell_tid, &tid);
        if (!failed) failed = pthread_join(thread, NULL);
        say("%d %ld", failed, tid);
    } else if (!strcmp(command, "ids")) {
        say("%ld %ld %ld", (long)getpid(), (long)gettid(), (long)getppid());
    } else if (!strcmp(command, "main")) {
        say("%d %ld %d", main_wrong, local, fegetround() == FE_UPWARD);
    } else if (!strcmp(command, "ticks")) {
        say("%ld", ticks);
    } else if (!strcmp(command, "signals")) {
        say("%ld", signals);
    } else if (!strcmp(command, "spin")) {
        spinning = 1;
        say("%d", pthread_create(&spinner, NULL, spin, NULL));
    } else if (!strcmp(command, "rest")) {
        spinning = 0;
        say("%d", pthread_join(spinner, NULL));
    } else {
        say("? %s", command);
    }
}

static void open_some(void) {
    struct itimerspec in_an_hour = {.it_value = {3600, 0}};
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, 0), counter = eventfd(5, 0);
    timerfd_settime(timer, 0, &in_an_hour, NULL);
    epoll_ctl(set, EPOLL_CTL_ADD, timer, &event);
    epoll_ctl(set, EPOLL_CTL_ADD, counter, &event);
}

int main(int arguments, char **argument) {
    struct pollfd control = {.fd = 0, .events = POLLIN};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    pthread_mutexattr_t attributes;
    pthread_t ticker;
    char message[64], command[64];
    count = arguments > 1 ? atoi(argument[1]) : MOST_WORKERS;
    open_some();
    local = 999;
    fesetround(FE_UPWARD);
    sigaction(SIGUSR1, &action, NULL);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&robust, &attributes);
    pthread_create(&ticker, NULL, tick, NULL);
    for (int i = 0; i < count; i++) {
        pthread_cond_init(&workers[i].woken, NULL);
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    }
    for (;;) {
        long call = SYS_poll;
        main_wrong += call_holding(99, &call, (long)&control, 1, -1);
        if (call < 0) continue;
        ssize_t size = recv(0, message, sizeof message - 1, 0);
        if (size <= 0) return size < 0;
        int number = 0;
        message[size] = 0;
        sscanf(message, "%63s %d", command, &number);
        answer[0] = 0;
        obey(command, number);
        send(0, answer, strlen(answer), MSG_NOSIGNAL);
    }
}
