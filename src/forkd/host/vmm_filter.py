"""The system calls of a QEMU that has started: the allow-list that it and its forks run under. Pure.

Measured from runs: boot, load, fork, branch, save, block and network I/O, pause, a client of the agent that comes
again, the end; with one and two vCPUs. A forbidden call ends the VM and no other one. What only we have it do, while we
trace it, is TRACED: to be forked, and to make a fork's own set-up. A QEMU that was broken into cannot have that.

Not on it: whatever opens a file or a socket, starts a program, or reaches another process. Under KVM a thread wakes
another one by a signal: there it may signal itself, and such a VM is never forked.
"""

from __future__ import annotations

from collections.abc import Mapping

from forkd.host.procfork.program import Call
from forkd.host.seccomp import Among, HasBits, Rule, Verdict, render_filter, render_install

_ALLOW, _TRACED = Verdict.ALLOW, Verdict.TRACED

_IOCTL, _SOCKETPAIR, _CLONE, _FCNTL, _UNLINK, _SETRESUID, _SETRESGID, _CAPSET, _PRCTL = (
    *(16, 53, 56, 72, 87),
    *(117, 119, 126, 157),
)
_TGKILL, _OPENAT, _UNSHARE, _PRLIMIT64, _CLONE3 = 234, 257, 272, 302, 435
_CLONE_THREAD = 0x10000

_ALLOWED = {
    "read": 0,
    "write": 1,
    "close": 3,
    "fstat": 5,
    "poll": 7,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "select": 23,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "dup": 32,
    "dup2": 33,
    "nanosleep": 35,
    "getitimer": 36,
    "setitimer": 38,
    "getpid": 39,
    "sendto": 44,
    "recvfrom": 45,
    "sendmsg": 46,
    "recvmsg": 47,
    "shutdown": 48,
    "getsockname": 51,
    "getpeername": 52,
    "setsockopt": 54,
    "getsockopt": 55,
    "exit": 60,
    "fsync": 74,
    "fdatasync": 75,
    "gettimeofday": 96,
    "getppid": 110,
    "rt_sigpending": 127,
    "rt_sigtimedwait": 128,
    "sigaltstack": 131,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "restart_syscall": 219,
    "fadvise64": 221,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "epoll_wait": 232,
    "epoll_ctl": 233,
    "pselect6": 270,
    "ppoll": 271,
    "set_robust_list": 273,
    "epoll_pwait": 281,
    "timerfd_create": 283,
    "timerfd_settime": 286,
    "timerfd_gettime": 287,
    "accept4": 288,
    "signalfd4": 289,
    "eventfd2": 290,
    "epoll_create1": 291,
    "dup3": 292,
    "pipe2": 293,
    "preadv": 295,
    "pwritev": 296,
    "getrandom": 318,
    "membarrier": 324,
    "rseq": 334,
}
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not whom to signal.
_FCNTLS = (0, 1, 2, 3, 4, 1030)
# Of names and bounds of its own: PR_SET_NAME, PR_CAPBSET_DROP (to have none is as far as it goes), PR_SET_VMA.
_PRCTLS = (15, 24, 0x53564D41)
# PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS.
_TRACED_PRCTLS = (1, 2, 4, 38)
# TIOCOUTQ and FIONREAD; of a tap TUNGETIFF, TUNSETOFFLOAD, TUNGETVNETHDRSZ, TUNSETVNETHDRSZ; TFD_IOC_SET_TICKS.
_IOCTLS = (0x5411, 0x541B, 0x5421, 0x800454D2, 0x400454D0, 0x800454D7, 0x400454D8, 0x40085400)
# All that KVM has: bits 8 to 15 of a request are its subsystem.
_KVM_REQUESTS, _SUBSYSTEM = 0xAE00, 0xFF00


def render_rules(kvm_pid: int | None = None) -> Mapping[int, Rule]:
    """`kvm_pid`: the process itself, under KVM."""
    rules: dict[int, Rule] = dict.fromkeys(_ALLOWED.values(), _ALLOW)
    rules |= dict.fromkeys((_SOCKETPAIR, _SETRESUID, _SETRESGID, _CAPSET, _UNSHARE, _PRLIMIT64), _TRACED)
    rules[_CLONE] = HasBits(0, _CLONE_THREAD, _ALLOW, _TRACED)
    rules[_CLONE3] = Verdict.ABSENT  # its flags cannot be seen; the C library takes clone then
    # The C library looks for files now and then, as for the number of processors, and goes on without.
    rules[_OPENAT] = Verdict.REFUSED
    rules[_UNLINK] = Verdict.REFUSED  # of its sockets, when it ends: it cannot see them
    rules[_FCNTL] = Among(1, dict.fromkeys(_FCNTLS, _ALLOW))
    rules[_PRCTL] = Among(0, dict.fromkeys(_PRCTLS, _ALLOW) | dict.fromkeys(_TRACED_PRCTLS, _TRACED))
    # QEMU tries what its files and devices can do, and goes on when they cannot.
    rules[_IOCTL] = Among(1, dict.fromkeys(_IOCTLS, _ALLOW), otherwise=Verdict.UNSUPPORTED)
    if kvm_pid is not None:
        rules[_IOCTL] = Among(1, {_KVM_REQUESTS: _ALLOW}, mask=_SUBSYSTEM, otherwise=Verdict.UNSUPPORTED)
        rules[_TGKILL] = Among(0, {kvm_pid: _ALLOW})
    return rules


def render_calls(kvm_pid: int | None = None) -> list[Call]:
    """What a QEMU calls to be under its filter, all its threads included."""
    return render_install(render_filter(render_rules(kvm_pid)))
