"""Starting a program in a session of its own.

Two ways. Most programs go by posix_spawn: it does not copy the agent's page tables, which under emulation takes longer
than the program's own start. Other users and terminals need more than it offers, and go by fork and exec.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import signal
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, NoReturn, Tuple

_NOT_STARTED = 127
_SHOWN = 300
# The agent, or Python for it, ignores or handles these.
_DEFAULT_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)


class Plan:
    """What to start, and as which user. `fds` become 0, 1 and 2."""

    def __init__(self, argv: List[str], env: Dict[str, str], fds: Tuple[int, int, int]) -> None:
        self.argv = argv
        self.env = env
        self.fds = fds
        self.cwd: str | None = None
        self.user: User | None = None
        self.terminal = False
        self.task: Callable[[], int] | None = None  # in place of a program: what a fork of the agent does
        self.keep: Tuple[int, ...] = ()  # descriptors that it needs


class User:
    """To run as. A number without an entry in passwd is allowed."""

    def __init__(self, uid: int, gid: int, name: str | None, home: str) -> None:
        self.uid = uid
        self.gid = gid
        self.name = name
        self.home = home


def find_user(wanted: str | int) -> User | None:
    try:
        if isinstance(wanted, int) or wanted.isdigit():
            try:
                entry = pwd.getpwuid(int(wanted))
            except KeyError:
                return User(int(wanted), int(wanted), None, "/")
        else:
            entry = pwd.getpwnam(wanted)
    except (KeyError, OverflowError):
        return None
    return User(entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir)


class NotStarted(Exception):
    def __init__(self, errno_name: str, stage: str, plan: Plan) -> None:
        if stage == "cwd":
            what = "The working directory %s cannot be used" % (plan.cwd or "/")[:_SHOWN]
        elif stage == "user":
            what = "The user cannot be switched to"
        else:
            what = "The program %s cannot be executed" % plan.argv[0][:_SHOWN]
        super().__init__("%s: %s" % (what, os.strerror(getattr(errno, errno_name, 0))))
        self.errno_name = errno_name


def spawn(plan: Plan) -> Tuple[int, int]:
    """The child's pid, and -1: it runs; or a pipe that ends when it does, or says why not (`parse_report`)."""
    if plan.user is None and not plan.terminal and plan.task is None:
        return _spawn_plain(plan), -1
    return _spawn_forked(plan)


def find_program(name: str, search: str) -> str:
    """Where exec would find it; the kernel refuses the path that stands for a name not found."""
    if "/" in name:
        return name
    for directory in search.split(":"):
        path = (directory or ".") + "/" + name
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return "/nonexistent/" + name


def _spawn_plain(plan: Plan) -> int:
    stage = "cwd"
    try:
        # We change our own directory for a moment: nothing else depends on it.
        _enter(plan)
        stage = "exec"
        return os.posix_spawn(
            find_program(plan.argv[0], plan.env.get("PATH", os.defpath)),
            plan.argv,
            plan.env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(plan.fds)],
            setsid=True,
            setsigdef=_DEFAULT_SIGNALS,
        )
    except OSError as error:
        raise NotStarted(errno.errorcode.get(error.errno or 0, ""), stage, plan) from error
    finally:
        os.chdir("/")


def _spawn_forked(plan: Plan) -> Tuple[int, int]:
    report, child_report = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _become_program(plan, child_report)
    except OSError:
        os.close(report)
        raise
    finally:
        os.close(child_report)
    return pid, report


def parse_report(report: bytes, plan: Plan) -> NotStarted | None:
    """None: it runs."""
    if not report:
        return None
    number, _, stage = report.decode("ascii", "replace").partition(" ")
    return NotStarted(errno.errorcode.get(int(number), number), stage, plan)


def _become_program(plan: Plan, report: int) -> NoReturn:
    stage = "start"
    try:
        os.setsid()
        for number, fd in enumerate(plan.fds):
            os.dup2(fd, number)
        if plan.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _reset_signals()
        stage = "user"
        if plan.user is not None:
            _switch_user(plan.user)
        stage = "cwd"
        _enter(plan)
        if plan.task is not None:
            _do_task(plan.task, plan.keep)
        stage = "exec"
        os.execvpe(plan.argv[0], plan.argv, plan.env)
    except OSError as error:
        os.write(report, b"%d %s" % (error.errno or 0, stage.encode()))
    except BaseException:
        os.write(report, b"%d %s" % (errno.EINVAL, stage.encode()))
    finally:
        os._exit(_NOT_STARTED)


def _do_task(task: Callable[[], int], keep: Tuple[int, ...]) -> NoReturn:
    """Without an exec nothing is closed by itself: not the report, whose end says that we run, nor the agent's port."""
    code = 1
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # that of the listing
        code = task()
    finally:
        os._exit(code)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _enter(plan: Plan) -> None:
    if plan.cwd is not None:
        os.chdir(plan.cwd)
        return
    try:
        os.chdir(plan.env.get("HOME", "/"))
    except OSError:
        os.chdir("/")


def _switch_user(user: User) -> None:
    if user.uid == os.geteuid() and user.uid != 0:
        return  # we are this user, and may not change groups
    if user.name is not None:
        os.initgroups(user.name, user.gid)
    else:
        os.setgroups([])
    os.setgid(user.gid)
    os.setuid(user.uid)
