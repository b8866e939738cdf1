"""What the tests of kvmfork share: a tiny VMM, watched while it makes its VM, and forked."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from procfork_cases import Subject, forked_from, planned, started
from support_processes import wait_until

from forkd.host.kvmfork.plan import VmPlan
from forkd.host.kvmfork.record import Record
from forkd.host.kvmfork.recorder import Recorder
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Holder

DEADLINE_S = 10.0
_PROGRAM = Path(__file__).parent / "programs" / "vmm.py"


def has_kvm() -> bool:
    return os.access("/dev/kvm", os.R_OK | os.W_OK)


def vmm_started() -> contextlib.AbstractContextManager[Subject]:
    """It has no VM yet."""
    return started(sys.executable, "-I", "-S", _PROGRAM)


class Vm:
    """A VMM with its VM, or a fork of it."""

    def __init__(self, subject: Subject, record: Record) -> None:
        self.subject = subject
        self.record = record
        self.pid = subject.pid

    def tell(self, code: str) -> None:
        assert self.subject.ask(code) == "None"

    def eval(self, code: str) -> Any:
        return self.subject.eval(code)

    def resume(self) -> None:
        self.tell("vmm.resume()")

    def pause(self) -> None:
        self.tell("vmm.pause()")

    def peek(self) -> dict[str, Any]:
        """Counts of its vCPUs, interrupts and notifications so far."""
        found = self.eval("vmm.peek()")
        assert isinstance(found, dict)
        return found

    def counts(self) -> list[int]:
        return list(self.peek()["counts"])

    def dump(self) -> dict[str, Any]:
        found = self.eval("vmm.dump()")
        assert isinstance(found, dict)
        return found

    def counts_on(self) -> None:
        """Each of its vCPUs runs."""
        before = self.counts()
        wait_until(lambda: all(one < other for one, other in zip(before, self.counts(), strict=True)))


@contextlib.contextmanager
def vm_started(vcpus: int = 1, make: str = "vmm = Vmm({vcpus})") -> Iterator[Vm]:
    """It has counted for a while, and stands still."""
    with vmm_started() as subject:
        vm = Vm(subject, recorded(subject, make.format(vcpus=vcpus)))
        vm.resume()
        vm.counts_on()
        vm.pause()
        yield vm


def recorded(subject: Subject, code: str) -> Record:
    """What was asked of KVM while it ran this."""
    recorder = Recorder(subject.pid)
    try:
        recorder.start()
        assert subject.ask(code) == "None"
        return recorder.finish(DEADLINE_S)
    finally:
        recorder.close()


def plan_for(vm: VmPlan) -> ForkPlan:
    return planned(vm.choose, look=vm.look, set_up=vm.set_up, replaced=vm.replaced)


def holder_of(vm: Vm) -> Holder:
    return Holder(vm.pid, plan_for(VmPlan(vm.record)))


@contextlib.contextmanager
def vm_forked(source: Vm, holder: Holder | None = None, *, keep: bool = False) -> Iterator[Vm]:
    with forked_from(holder or holder_of(source), keep=keep) as subject:
        yield Vm(subject, source.record)
