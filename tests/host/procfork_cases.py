"""What the tests of procfork share: programs to fork, which answer over a socket, and proof that nothing is left."""

import ast
import atexit
import contextlib
import ctypes
import enum
import functools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support_processes import DEADLINE_S, renounce_privileges
from support_tracing import counted_calls  # noqa: F401  what code that is run here may call

from forkd.errors import NotForkable
from forkd.host import spawn_filter
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child, Holder
from forkd.host.procfork.descriptors import Action, Choice, Descriptor, Ours
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.seed import find
from forkd.host.procfork.source import Caller, make_calls

NOBODY = 65534
_REFUSED = 3
_KCMP, _KCMP_FILE, _GETPPID = 312, 0, 110
_PROGRAMS = Path(__file__).parent / "programs"
_libc = ctypes.CDLL(None, use_errno=True)

# Evaluates what it is sent, or runs it, and rests in poll(2).
_EVALUATE = """
import ctypes, os, select, socket, threading
control, names = socket.socket(fileno=0), globals()
libc = ctypes.CDLL(None, use_errno=True)
poll = select.poll()
poll.register(0, select.POLLIN)
while True:
    poll.poll()
    code = control.recv(1 << 16).decode()
    if not code:
        break
    try:
        try:
            answer = repr(eval(compile(code, "<asked>", "eval"), names))
        except SyntaxError:
            exec(code, names)
            answer = "None"
    except Exception as error:
        answer = "!" + repr(error)
    control.send(answer.encode())
"""


class Library(enum.Enum):
    """The C library of a program, and how it is compiled."""

    GLIBC = ("gcc",)
    # The kernel's headers are not among musl's.
    MUSL = ("musl-gcc", "-static", "-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu")


@functools.cache
def compiled(name: str, library: Library = Library.GLIBC) -> Path:
    """A program of tests/host/programs, where every user can run it."""
    compiler, *more = library.value
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    program = _program_directory() / library.name.lower() / name
    program.parent.mkdir(mode=0o755, exist_ok=True)
    options = ("-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, _PROGRAMS / f"{name}.c", "-lm")
    subprocess.run([compiler, *more, *options], check=True)
    return program


def find_clear_tid(program: Path) -> int | None:
    """Where a program with musl has the kernel tell that a thread has ended; with glibc each thread has its own."""
    symbols = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    found = [line.split()[0] for line in symbols.splitlines() if line.endswith(" __thread_list_lock")]
    return int(found[0], 16) if found else None


@functools.cache
def _program_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="fkd-programs-", dir="/tmp")
    os.chmod(directory, 0o755)
    atexit.register(shutil.rmtree, directory)
    return Path(directory)


class Subject:
    """A process that answers."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._control = control
        control.settimeout(DEADLINE_S)

    def ask(self, text: str) -> str:
        self._control.send(text.encode())
        return self._control.recv(1 << 16).decode()

    def eval(self, code: str) -> Any:
        """Of a Python program."""
        answer = self.ask(code)
        assert not answer.startswith("!"), answer
        return ast.literal_eval(answer)

    def workers(self) -> int:
        """Of the program `threads`, how many find themselves as they were."""
        return len(self.ask("check").splitlines())

    def tids(self) -> list[int]:
        return sorted(map(int, os.listdir(f"/proc/{self.pid}/task")))

    def descriptors(self) -> list[int]:
        return sorted(map(int, os.listdir(f"/proc/{self.pid}/fd")))

    def maps(self) -> list[str]:
        return Path(f"/proc/{self.pid}/maps").read_text().splitlines()

    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def statuses(self) -> list[str]:
        """Of its threads, as /proc has them."""
        texts = []
        for tid in self.tids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it just ended
                texts.append(Path(f"/proc/{self.pid}/task/{tid}/status").read_text())
        return texts

    def is_free(self) -> bool:
        """No thread of it is traced."""
        return all("TracerPid:\t0\n" in text for text in self.statuses())


@contextlib.contextmanager
def started(
    *argv: str | Path, env: Mapping[str, str] | None = None, user: int | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[Subject]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            process = subprocess.Popen(
                argv,
                stdin=its,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env or {}),
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                pass_fds=pass_fds,
                preexec_fn=renounce_privileges if env else None,
            )
        try:
            yield Subject(process.pid, ours)
        finally:
            process.kill()
            process.wait(DEADLINE_S)


@contextlib.contextmanager
def threads_started(workers: int, user: int | None = None) -> Iterator[Subject]:
    """The program `threads`, with all its workers there."""
    with started(compiled("threads"), str(workers), user=user) as subject:
        assert subject.workers() == workers
        yield subject


def python_started(env: Mapping[str, str] | None = None) -> contextlib.AbstractContextManager[Subject]:
    return started(sys.executable, "-I", "-S", "-c", _EVALUATE, env=env)


def choose_control(each: Descriptor) -> Action | None:
    return Ours("control") if each.number == 0 else None


def planned(choose: Choice = lambda _: None, **more: Any) -> ForkPlan:
    """Its control socket is replaced, and what `choose` says is done with the others."""
    return ForkPlan(lambda each: choose_control(each) or choose(each), **more)


PLAN = planned()


@contextlib.contextmanager
def forked_from(
    source: Subject | Holder,
    plan: ForkPlan = PLAN,
    *,
    ours: Mapping[str, int] | None = None,
    keep: bool = False,
    before: Callable[[Child], None] = lambda _: None,
) -> Iterator[Subject]:
    """A fork that runs and answers, and is gone at the end. `before`: done with it before it runs."""
    holder = source if isinstance(source, Holder) else Holder(source.pid, plan)
    its_end, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with end:
        with its_end:
            with holder.forked({"control": its_end.fileno(), **(ours or {})}, keep=keep) as child:
                before(child)
        try:
            yield Subject(child.pid, end)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def refusal_of(source: Subject, plan: ForkPlan = PLAN, *, ping: str = "1", pong: str = "1", **more: Any) -> NotForkable:
    """Why it is not forked; it runs on as before, nobody traces it, and there is no process more."""
    before, threads = children(), source.tids()
    with pytest.raises(NotForkable) as caught, forked_from(source, plan, **more):
        pytest.fail("It was forked")
    assert children() == before
    assert source.is_free()
    assert source.tids() == threads
    assert source.ask(ping) == pong
    return caught.value


def children() -> list[int]:
    """Ours, dead ones too."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)


def reap_all_but(kept: Sequence[int]) -> dict[int, int]:
    """Wait for every other child of ours to be over by itself: pid and wait status of each."""
    reaped = {}
    deadline = time.monotonic() + DEADLINE_S
    while others := [pid for pid in children() if pid not in kept]:
        for pid in others:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                reaped[pid] = status
        assert time.monotonic() < deadline, f"processes live on: {others}"
        time.sleep(0.001)
    return reaped


def limit(pid: int, what: int, most: int) -> None:
    resource.prlimit(pid, what, (most, resource.prlimit(pid, what)[1]))


def shared_files(one: int, other: int) -> set[tuple[int, int]]:
    """Pairs of descriptors of two processes that are the same open file, as the kernel sees it."""
    numbers = [sorted(map(int, os.listdir(f"/proc/{pid}/fd"))) for pid in (one, other)]
    compared = {(a, b): _libc.syscall(_KCMP, one, other, _KCMP_FILE, a, b) for a in numbers[0] for b in numbers[1]}
    assert -1 not in compared.values()
    return {pair for pair, order in compared.items() if order == 0}


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str

    @property
    def refusal(self) -> NotForkable:
        assert os.waitstatus_to_exitcode(self.status) == _REFUSED, self
        message, hint = ast.literal_eval(self.output)
        return NotForkable(message, hint=hint)


class Elsewhere:
    """Runs code in processes of their own, each forked from one that has imported all this."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        server.settimeout(DEADLINE_S)

    @contextlib.contextmanager
    def forked(self, pid: int, code: str = "{fork}", user: int | None = None) -> Iterator[tuple[Outcome, Subject]]:
        """What came of `code`, which has {fork} in it, and how to talk to the fork, if there is one."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with its:
                outcome = self.run(code.format(fork=f"fork_once({pid}, fds[0])"), its.fileno(), user=user)
            yield outcome, Subject(0, ours)

    def run(self, code: str, *fds: int, user: int | None = None) -> Outcome:
        """In it, `fds` is the list of these, and `tell` a function that adds to the output."""
        socket.send_fds(self._server, [repr((code, user)).encode()], fds)
        return Outcome(*ast.literal_eval(self._server.recv(1 << 16).decode()))


@contextlib.contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            code = "import sys; sys.path[:0] = sys.argv[1:]; import procfork_cases; procfork_cases.serve()"
            process = subprocess.Popen([sys.executable, "-c", code, *Path(__file__).parents[:2]], stdin=its)
        try:
            yield Elsewhere(ours)
        finally:
            process.kill()
            process.wait()


def serve() -> None:
    server = socket.socket(fileno=0)
    while True:
        message, fds, _, _ = socket.recv_fds(server, 1 << 16, 8)
        if not message:
            return
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_code(*ast.literal_eval(message.decode()), fds, write)
        for fd in (*fds, write):
            os.close(fd)
        with open(read, closefd=True) as file:
            output = file.read()
        server.send(repr((os.waitpid(pid, 0)[1], output)).encode())


def _run_code(code: str, user: int | None, fds: list[int], write: int) -> NoReturn:
    status = 1
    try:
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        names = {**globals(), "fds": fds, "tell": lambda text: os.write(write, text.encode())}
        exec(code, names)  # noqa: S102
        status = 0
    except NotForkable as error:
        os.write(write, repr((error.message, error.hint)).encode())
        status = _REFUSED
    except BaseException:
        os.write(write, traceback.format_exc().encode())
    finally:
        os._exit(status)


def put_under_filter(pid: int) -> None:
    make_calls(pid, spawn_filter.render_calls(), POLLS)


def fork_once(pid: int, control: int) -> None:
    """By its seed, whatever filter that is under, if there is one."""
    seed = find(pid)
    caller = None if seed is None else Caller(seed, suspend_filters=True)
    plan = PLAN if caller is None else planned(caller=caller, look=lambda source: source.make_all([Call(_GETPPID)] * 3))
    with Holder(pid, plan).forked({"control": control}):
        pass
