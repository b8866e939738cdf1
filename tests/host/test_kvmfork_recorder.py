"""What a VMM asks of KVM is recorded while it runs, and it does not notice."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvmfork_cases import DEADLINE_S, has_kvm, recorded, vmm_started
from procfork_cases import NOBODY, Subject, compiled, elsewhere, python_started, started
from support_processes import DEADLINE_S as LONG_S
from support_processes import wait_until

from forkd.errors import NotForkable
from forkd.host.kvmfork.ioctls import Request
from forkd.host.kvmfork.record import parse_record
from forkd.host.kvmfork.recorder import Recorder

pytestmark = pytest.mark.usefixtures("nothing_left")

_needs_kvm = pytest.mark.skipif(not has_kvm(), reason="needs /dev/kvm")
_RECORD_FOR_EVER = """
import sys, time
from forkd.host.kvmfork.recorder import Recorder
Recorder(int(sys.argv[1])).start()
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture
def program() -> Iterator[Subject]:
    with python_started() as subject:
        assert subject.eval("1") == 1
        yield subject


@pytest.fixture
def recorder(program: Subject) -> Iterator[Recorder]:
    recorder = Recorder(program.pid)
    recorder.start()
    yield recorder
    recorder.close()


def is_watched(subject: Subject) -> bool:
    return not subject.is_free()


def record_of(recorder: Recorder) -> str:
    """Why there is none: the program has made no VM."""
    with pytest.raises(NotForkable) as caught:
        recorder.finish(DEADLINE_S)
    return caught.value.message


# What is recorded


@_needs_kvm
@pytest.mark.parametrize("vcpus", [1, 3])
def test_what_makes_the_vm_is_recorded_with_its_arguments_and_nothing_else(vcpus: int) -> None:
    with vmm_started() as subject:
        record = recorded(subject, f"vmm = Vmm({vcpus})")
        assert [Request(each.request) for each in record.ioctls] == [
            *(Request.CREATE_VM, Request.SET_TSS_ADDR, Request.SET_IDENTITY_MAP_ADDR, Request.CREATE_IRQCHIP),
            *(Request.CREATE_PIT2, Request.SET_USER_MEMORY_REGION, Request.IRQFD, Request.IOEVENTFD),
            *[Request.CREATE_VCPU] * vcpus,
        ]
        numbers = subject.eval("(vmm.kvm, vmm.vm, tuple(vcpu.fd for vcpu in vmm.vcpus))")
        assert (record.kvm_fd, record.vm_fd, record.vcpu_fds) == numbers
        memory = next(each for each in record.ioctls if each.request == Request.SET_USER_MEMORY_REGION)
        place = subject.eval("ctypes.addressof(ctypes.c_char.from_buffer(vmm.memory))")
        assert memory.data == struct.pack("<IIQQQ", 0, 0, 0, 2 << 20, place)
        assert parse_record(record.to_json()) == record
        assert subject.is_free()


@_needs_kvm
def test_of_two_vms_one_after_the_other_the_one_that_is_there_is_recorded() -> None:
    code = "first = os.open('/dev/kvm', os.O_RDWR)\nvm = fcntl.ioctl(first, CREATE_VM, 0)\nos.close(vm)\nvmm = Vmm(1)"
    with vmm_started() as subject:
        record = recorded(subject, code)
        assert subject.eval("vmm.vm") == record.vm_fd
        assert len(record.ioctls) == 9


@_needs_kvm
def test_a_vm_that_was_there_before_cannot_be_recorded() -> None:
    with vmm_started() as subject:
        subject.ask("vmm = Vmm(1)")
        with pytest.raises(NotForkable, match="made no VM while it was watched"):
            recorded(subject, "pass")


@_needs_kvm
def test_a_call_that_failed_is_not_recorded() -> None:
    failing = "try: fcntl.ioctl(vmm.vm, CREATE_VCPU, 0)\nexcept OSError: pass\nelse: raise SystemError"
    with vmm_started() as subject:
        assert len(recorded(subject, f"vmm = Vmm(1)\n{failing}").ioctls) == 9


# It does not notice


def test_only_the_main_thread_is_watched_and_only_until_it_is_finished(program: Subject, recorder: Recorder) -> None:
    program.ask("threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(5)]")
    program.ask("for each in threads: each.start()")
    main, *others = [Path(f"/proc/{program.pid}/task/{tid}/status").read_text() for tid in program.tids()]
    assert len(others) == 5
    assert "TracerPid:\t0\n" not in main
    assert all("TracerPid:\t0\n" in each for each in others)
    assert "made no VM" in record_of(recorder)
    assert program.is_free()
    assert program.eval("1") == 1


def test_a_wait_is_not_broken_off_by_the_beginning_or_the_end() -> None:
    """An epoll set is waited for once; the kernel would end that wait by EINTR."""
    code = (
        "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True); set_ = libc.epoll_create1(0);"
        "events = ctypes.create_string_buffer(12); os.write(1, b'x');"
        "sys.exit(libc.epoll_wait(set_, events, 1, 1500) != 0 or ctypes.get_errno())"
    )
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        wait_until(lambda: Path(f"/proc/{process.pid}/syscall").read_text().startswith("232 "))
        for _ in range(3):
            recorder = Recorder(process.pid)
            recorder.start()
            assert "made no VM" in record_of(recorder)
        assert process.wait(LONG_S) == 0


def test_signals_arrive_while_it_is_watched(program: Subject, recorder: Recorder) -> None:
    program.ask("import signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append(1))")
    for count in range(1, 21):
        os.kill(program.pid, signal.SIGUSR1)
        wait_until(lambda count=count: program.eval("len(seen)") == count)
    recorder.close()
    assert program.eval("len(seen)") == 20


def test_it_is_stopped_and_goes_on_as_it_is_told(program: Subject, recorder: Recorder) -> None:
    os.kill(program.pid, signal.SIGSTOP)
    wait_until(lambda: program.state() in "tT")
    time.sleep(0.1)
    assert program.state() in "tT"
    os.kill(program.pid, signal.SIGCONT)
    assert program.eval("1") == 1
    recorder.close()
    assert program.eval("2") == 2


@pytest.mark.parametrize("work", ["while True: pass", "while True: os.getppid()", "import time\ntime.sleep(60)"])
def test_whatever_it_is_doing_it_is_let_go(program: Subject, work: str) -> None:
    recorder = Recorder(program.pid)
    recorder.start()
    asking = threading.Thread(target=lambda: program.ask(work))
    asking.start()
    time.sleep(0.1)
    begun = time.monotonic()
    assert "made no VM" in record_of(recorder)
    assert time.monotonic() - begun < DEADLINE_S
    assert program.is_free()
    assert program.state() in "RS"
    os.kill(program.pid, signal.SIGKILL)
    asking.join()


@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_it_goes_on_when_the_one_who_watches_is_killed(program: Subject, wait_s: float) -> None:
    program.ask("def work():\n    for _ in range(20000): os.getppid()")
    with subprocess.Popen(
        [sys.executable, "-c", _RECORD_FOR_EVER, str(program.pid)], stdout=subprocess.PIPE
    ) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == b"started\n"
        assert is_watched(program)
        asking = threading.Thread(target=lambda: program.ask("work()"))
        asking.start()
        time.sleep(wait_s)
        watcher.kill()
        watcher.wait()
        asking.join(LONG_S)
        assert not asking.is_alive()
    assert program.is_free()
    assert program.eval("1") == 1


# What cannot be recorded


def test_one_that_ends_meanwhile_is_reported(program: Subject, recorder: Recorder) -> None:
    os.kill(program.pid, signal.SIGKILL)
    assert "ended" in record_of(recorder)


def test_one_that_is_gone_or_watched_already_is_refused(program: Subject, recorder: Recorder) -> None:
    second = Recorder(program.pid)
    with pytest.raises(NotForkable, match="may not be traced"):
        second.start()
    recorder.close()
    assert program.eval("1") == 1
    with started(compiled("threads")) as gone:
        gone.ask("check")
    third = Recorder(gone.pid)
    with pytest.raises(NotForkable, match="ended"):
        third.start()


def test_one_of_another_user_is_refused(program: Subject) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    with elsewhere() as run:
        code = f"from forkd.host.kvmfork.recorder import Recorder; Recorder({program.pid}).start()"
        assert "may not be traced" in run.run(code, user=NOBODY).refusal.message
    assert program.is_free()


def test_an_error_of_ours_lets_it_go_and_is_told(program: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("forkd.host.kvmfork.recorder.read_begun", broken)
    recorder = Recorder(program.pid)
    with pytest.raises(ValueError, match="broken"):
        recorder.start()
        assert program.eval("1") == 1
        wait_until(program.is_free)
        recorder.finish(DEADLINE_S)
    assert program.eval("2") == 2
