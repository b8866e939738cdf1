/* Makes others, all the time (argument "threads" or "processes") or when told "vfork": then one of its threads cannot be
 * stopped until the new process ends. Echoes what comes on descriptor 0; "ended?" is answered by how many of those did. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void *end(void *argument) { return argument; }

static void *make_threads(void *argument) {
    pthread_t thread;
    for (;;) {
        if (!pthread_create(&thread, NULL, end, NULL)) pthread_join(thread, NULL);
        poll(NULL, 0, 1);
    }
    return argument;
}

static void *make_processes(void *argument) {
    for (;;) {
        pid_t pid = fork();
        if (pid == 0) _exit(0);
        if (pid > 0) waitpid(pid, NULL, 0);
        poll(NULL, 0, 1);
    }
    return argument;
}

static volatile int ended;

static void *make_slow_process(void *argument) {
    if (vfork() == 0) {
        poll(NULL, 0, 1000);
        _exit(0);
    }
    wait(NULL);
    ended++;
    return argument;
}

int main(int count, char **arguments) {
    struct pollfd control = {.fd = 0, .events = POLLIN};
    char message[64];
    pthread_t thread;
    for (int i = 1; i < count; i++) {
        int threads = !strcmp(arguments[i], "threads");
        for (int j = 0; j < 2; j++) pthread_create(&thread, NULL, threads ? make_threads : make_processes, NULL);
    }
    for (;;) {
        if (poll(&control, 1, -1) < 0) continue;
        ssize_t size = recv(0, message, sizeof message - 1, 0);
        if (size <= 0) return size < 0;
        message[size] = 0;
        if (!strcmp(message, "vfork")) pthread_create(&thread, NULL, make_slow_process, NULL);
        if (!strcmp(message, "ended?")) size = snprintf(message, sizeof message, "%d", ended);
        send(0, message, (size_t)size, MSG_NOSIGNAL);
    }
}
