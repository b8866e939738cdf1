"""Watches a VMM make a VM: every KVM ioctl of its main thread, with its argument and what it returned.

The VMM is traced by a thread of ours and by nothing else. Whatever ends that thread, the kernel lets the VMM go on from
where it is.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import NotForkable
from forkd.host.kvmfork import watch
from forkd.host.kvmfork.fold import fold
from forkd.host.kvmfork.ioctls import Effect, Request, effect_of, head_bytes, is_kvm, total_bytes
from forkd.host.kvmfork.record import MAX_IOCTLS, Ioctl, Record
from forkd.host.kvmfork.run_pages import find_kernel_pages
from forkd.host.procfork import ptrace
from forkd.host.procfork.ptrace import Gone
from forkd.host.procfork.registers import called_again, needs_help
from forkd.host.procfork.rest import understood

_IOCTL, _CLONE, _CLONE3 = 16, 56, 435
_CLEAR_TID = 0x00200000
_OPTIONS = ptrace.TRACE_CLONE | ptrace.TELL_CALLS
_START_DEADLINE_S = 5.0
_KVM_DEVICE = (10, 232)
_32_BITS = 2**32 - 1


class Recorder:
    """`start` and `finish` may be called from any thread; `close` ends it in every case, and is safe to repeat."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._notes = Notes(lambda: _count_kernel_pages(pid))
        self._started = threading.Event()
        self._ending = threading.Event()
        self._deadline = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"record-{pid}", daemon=True)

    def start(self) -> None:
        """Returns when the VMM's main thread is watched. Raises NotForkable."""
        self._thread.start()
        self._started.wait(_START_DEADLINE_S + 1)
        self._raise_error()
        if not self._started.is_set():
            self.close()
            raise NotForkable(f"Process {self._pid} could not be watched: it did not stop")

    def finish(self, deadline_s: float) -> Record:
        """Let it go, whatever it is doing. Raises NotForkable for a VM that cannot be made once more."""
        self.close(deadline_s)
        self._raise_error()
        return self._notes.make_record(_read_links(self._pid))

    def close(self, deadline_s: float = _START_DEADLINE_S) -> None:
        self._deadline = deadline = time.monotonic() + deadline_s / 2
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
            deadline += deadline_s / 2
            # The kernel lets it go when our thread is really over, a moment later.
            while self._thread.is_alive() or _is_traced(self._pid, self._thread.native_id):
                if time.monotonic() > deadline:
                    raise NotForkable(f"Process {self._pid} is still watched")
                time.sleep(0.0005)

    def _raise_error(self) -> None:
        if self._error is not None:
            with understood(self._pid):
                raise self._error

    def _run(self) -> None:
        try:
            _seize(self._pid)
            self._started.set()
            with _opened_memory(self._pid) as memory:
                self._watch(memory)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def _watch(self, memory: int) -> None:
        """Until it is to be let go, and has stopped for that; or until the deadline, and then only we end."""
        stops = watch.Stops()
        interrupted = False
        while not (self._ending.is_set() and time.monotonic() > self._deadline):
            if self._ending.is_set() and not interrupted:
                ptrace.interrupt(self._pid)
                interrupted = True
            if (found := stops.find_next()) is None:
                continue
            tid, stop = found
            if tid != self._pid:
                _let_go(tid)  # a thread that it just made
                continue
            begins_call = False
            if watch.is_in_call(stop):
                call = watch.get_call(tid)
                self._notes.see(call, memory)
                begins_call = call.entered
            # Where a call begins we would break it off; and of a new thread it is told when its call is over.
            if interrupted and not begins_call and stop.event != ptrace.EVENT_CLONE:
                _hide_interruption(tid, stop)
                watch.detach(tid, stop)
                return
            interrupted = False
            watch.go_on(tid, stop)


def _seize(pid: int) -> None:
    ptrace.seize(pid, _OPTIONS)
    ptrace.interrupt(pid)
    stop = ptrace.wait_bounded(pid, time.monotonic() + _START_DEADLINE_S)
    _hide_interruption(pid, stop)
    watch.go_on(pid, stop)


def _hide_interruption(pid: int, stop: ptrace.Stop) -> None:
    """Some waits end when the kernel stops a thread for us; these it makes again."""
    if watch.is_signal(stop):
        return  # this is what ended it
    registers = ptrace.get_registers(pid)
    if needs_help(registers):
        ptrace.set_registers(pid, called_again(registers, in_duplicate=False))


def _let_go(tid: int) -> None:
    try:
        ptrace.detach(tid)
    except Gone:
        ptrace.reap(tid)


@contextmanager
def _opened_memory(pid: int) -> Iterator[int]:
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Gone from error
    try:
        yield fd
    finally:
        os.close(fd)


def _is_traced(pid: int, tid: int | None) -> bool:
    """Whether the thread `tid` of ours still traces the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return f"\nTracerPid:\t{tid}\n" in status


def _read_links(pid: int) -> dict[int, str]:
    """Of its descriptors; "kvm" for the device."""
    try:
        numbers = list(map(int, os.listdir(f"/proc/{pid}/fd")))
        return {number: _read_link(f"/proc/{pid}/fd/{number}") for number in numbers}
    except OSError as error:
        raise NotForkable(f"The descriptors of process {pid} cannot be looked at: {error.strerror}") from error


def _read_link(place: str) -> str:
    try:
        link = os.readlink(place)
        if link.startswith("/"):
            seen = os.stat(place)
            if stat.S_ISCHR(seen.st_mode) and (os.major(seen.st_rdev), os.minor(seen.st_rdev)) == _KVM_DEVICE:
                return "kvm"
    except FileNotFoundError:  # just closed
        return ""
    return link


@dataclass(frozen=True)
class Begun:
    """A call that has not returned yet; the memory of its argument is as it was passed."""

    fd: int
    request: int
    arg: int
    data: bytes


@dataclass(frozen=True)
class ThreadBegun:
    """A thread is made; the kernel will clear this place when it ends."""

    cleared: int


def _makes_vcpu(begun: Begun | ThreadBegun | None) -> bool:
    return isinstance(begun, Begun) and begun.request == Request.CREATE_VCPU


def _count_kernel_pages(pid: int) -> int:
    try:
        return len(find_kernel_pages(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Gone from error


def read_begun(memory: int, number: int, args: Sequence[int]) -> Begun | ThreadBegun | None:
    """What is to be noted of a call."""
    if number == _IOCTL and is_kvm(args[1] & _32_BITS):
        fd, request, arg = args[0] & _32_BITS, args[1] & _32_BITS, args[2]
        if effect_of(request) in (Effect.SET_UP, Effect.UNKNOWN):
            return Begun(fd, request, arg, _read_argument(memory, request, arg))
    elif number == _CLONE and args[0] & _CLEAR_TID:
        return ThreadBegun(args[3])
    elif number == _CLONE3:
        flags, _, child_tid = struct.unpack("<3Q", _read(memory, args[0], 24).ljust(24, b"\0"))
        if flags & _CLEAR_TID:
            return ThreadBegun(child_tid)
    return None


def _read_argument(memory: int, request: int, arg: int) -> bytes:
    head = _read(memory, arg, head_bytes(request))
    if len(head) < head_bytes(request) or not head:
        return head
    total = total_bytes(request, head)
    return head if total is None else head + _read(memory, arg + len(head), total - len(head))


def _read(memory: int, address: int, size: int) -> bytes:
    try:
        return os.pread(memory, size, address) if size else b""
    except OSError:
        return b""  # the call will fail just so


class Notes:
    """What was seen, in order."""

    def __init__(self, count_kernel_pages: Callable[[], int] = lambda: 0) -> None:
        self._count_kernel_pages = count_kernel_pages
        self._kernel_pages = self._kernel_pages_before = 0
        self._ioctls: list[Ioctl] = []
        self._cleared: set[int] = set()
        self._begun: Begun | ThreadBegun | None = None

    def see(self, call: watch.SystemCall, memory: int) -> None:
        if call.entered:
            self._begun = read_begun(memory, call.number, call.args)
            if _makes_vcpu(self._begun):
                self._kernel_pages_before = self._count_kernel_pages()
        elif self._begun is not None:
            if _makes_vcpu(self._begun):
                self._kernel_pages += self._count_kernel_pages() - self._kernel_pages_before
            begun, self._begun = self._begun, None
            self.add(begun, call.result)

    def add(self, begun: Begun | ThreadBegun, result: int) -> None:
        if result < 0:
            return
        if isinstance(begun, ThreadBegun):
            self._cleared.add(begun.cleared)
            return
        if len(self._ioctls) >= MAX_IOCTLS:
            raise NotForkable(f"The VM was set up by more than {MAX_IOCTLS} calls")
        self._ioctls.append(Ioctl(begun.fd, begun.request, begun.arg, begun.data, result))

    def make_record(self, links: dict[int, str]) -> Record:
        """`links`: what the VMM's descriptors are now. Raises NotForkable."""
        if isinstance(self._begun, Begun):
            raise NotForkable("The VM was still being made when it was no longer watched")
        if not links:
            raise NotForkable("The process ended while it was watched")
        vms = [number for number, link in links.items() if link == "anon_inode:kvm-vm"]
        if len(vms) > 1:
            raise NotForkable(f"The process has {len(vms)} VMs; only one can be forked")
        made = [index for index, each in enumerate(self._ioctls) if each.request == Request.CREATE_VM]
        if not vms or not made or self._ioctls[made[-1]].result != vms[0]:
            raise NotForkable("The process made no VM while it was watched")
        create, *others = self._ioctls[made[-1] :]
        fds = {each.arg: each.result for each in others if each.request == Request.CREATE_VCPU}
        mine = {create.result, *fds.values()}
        record = Record(
            kvm_fd=create.fd,
            vm_fd=create.result,
            vcpu_fds=tuple(fds[index] for index in sorted(fds)),
            ioctls=(create, *fold(each for each in others if each.fd in mine)),
            clear_tid=next(iter(self._cleared)) if len(self._cleared) == 1 else None,
            kernel_pages=self._kernel_pages,
        )
        record.check()
        _check_links(record, links)
        return record


def _check_links(record: Record, links: dict[int, str]) -> None:
    """The descriptors are where they were, and there is no vCPU that another thread has made."""
    vcpus = {number: link for number, link in links.items() if link.startswith("anon_inode:kvm-vcpu")}
    wanted = {fd: f"anon_inode:kvm-vcpu:{index}" for index, fd in enumerate(record.vcpu_fds)}
    if links.get(record.kvm_fd) != "kvm" or vcpus != wanted:
        raise NotForkable("The VM's descriptors are not those that it was made with")
    strange = [link for link in links.values() if link.startswith("anon_inode:kvm-") and link not in wanted.values()]
    if strange != ["anon_inode:kvm-vm"]:
        raise NotForkable(f"The VM has a descriptor that cannot be made once more: {', '.join(strange)}")
