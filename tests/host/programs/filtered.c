/* Three threads that may make different system calls: the main thread ("filtered"), "api" and "vcpu". Each has a filter
 * of its own, an allow-list, unless the argument is "free".
 *
 * Told over descriptor 0 which thread is to make which call, one message at a time; the main thread waits for it in
 * poll(2). */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 128, API = 0, VCPU = 1 };

struct worker {
    const char *name;
    int own_call;
    unsigned refusal;
    pthread_cond_t woken;
    int asked, done, ready;
    long number, result;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t told = PTHREAD_COND_INITIALIZER;
static struct worker workers[2] = {
    {.name = "api", .own_call = SYS_getgid, .refusal = SECCOMP_RET_TRAP, .woken = PTHREAD_COND_INITIALIZER},
    {.name = "vcpu", .own_call = SYS_geteuid, .refusal = SECCOMP_RET_KILL_PROCESS, .woken = PTHREAD_COND_INITIALIZER},
};
static int filtered;
static const int every[] = {
    SYS_read, SYS_write, SYS_poll, SYS_futex, SYS_recvfrom, SYS_sendto, SYS_exit, SYS_exit_group, SYS_mmap, SYS_munmap,
    SYS_mprotect, SYS_madvise, SYS_gettid, SYS_restart_syscall, SYS_rt_sigprocmask, SYS_rt_sigreturn,
};

static void confine(int own_call, unsigned refusal) {
    struct sock_filter program[MOST];
    struct sock_fprog whole = {.filter = program};
    unsigned short at = 0;
    program[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
    program[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    program[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i <= sizeof every / sizeof *every; i++) {
        unsigned call = (unsigned)(i < sizeof every / sizeof *every ? every[i] : own_call);
        program[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1);
        program[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    program[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, refusal);
    whole.len = at;
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &whole)) _exit(9);
}

static long make(long number) {
    long result = syscall(number);
    return result < 0 ? -errno : result;
}

static void *work(void *argument) {
    struct worker *me = argument;
    prctl(PR_SET_NAME, me->name);
    if (filtered) confine(me->own_call, me->refusal);
    pthread_mutex_lock(&lock);
    me->ready = 1;
    pthread_cond_signal(&told);
    for (;;) {
        while (me->asked == me->done) pthread_cond_wait(&me->woken, &lock);
        me->result = make(me->number);
        me->done = me->asked;
        pthread_cond_signal(&told);
    }
    return NULL;
}

static long have_made(struct worker *by, long number) {
    pthread_mutex_lock(&lock);
    by->number = number;
    by->asked++;
    pthread_cond_signal(&by->woken);
    while (by->done != by->asked) pthread_cond_wait(&told, &lock);
    pthread_mutex_unlock(&lock);
    return by->result;
}

int main(int arguments, char **argument) {
    struct pollfd control = {.fd = 0, .events = POLLIN};
    pthread_t thread;
    char message[64], name[64], answer[32];
    filtered = arguments < 2 || strcmp(argument[1], "free") != 0;
    for (int i = API; i <= VCPU; i++) {
        pthread_create(&thread, NULL, work, &workers[i]);
        pthread_mutex_lock(&lock);
        while (!workers[i].ready) pthread_cond_wait(&told, &lock);
        pthread_mutex_unlock(&lock);
    }
    if (filtered) confine(SYS_getuid, SECCOMP_RET_KILL_PROCESS);
    for (;;) {
        long number = 0, result;
        if (poll(&control, 1, -1) < 0) continue;
        ssize_t size = recv(0, message, sizeof message - 1, 0);
        if (size <= 0) return size < 0;
        message[size] = 0;
        sscanf(message, "%63s %ld", name, &number);
        if (!strcmp(name, "api")) {
            result = have_made(&workers[API], number);
        } else if (!strcmp(name, "vcpu")) {
            result = have_made(&workers[VCPU], number);
        } else {
            result = make(number);
        }
        send(0, answer, (size_t)snprintf(answer, sizeof answer, "%ld", result), MSG_NOSIGNAL);
    }
}
