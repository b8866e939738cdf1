"""What a plan to fork a VMM says of its VM: see ForkPlan, whose parts have these names."""

from __future__ import annotations

from forkd.host.kvmfork.record import Record
from forkd.host.kvmfork.restore import render_restore
from forkd.host.kvmfork.run_pages import KERNEL_PAGE_NAME, is_run_page
from forkd.host.kvmfork.state import Saver, State
from forkd.host.procfork.descriptors import Action, Descriptor, Keep
from forkd.host.procfork.program import Call
from forkd.host.procfork.source import Source


def is_remade(name: str) -> bool:
    """Of a shared mapping, by its name: KVM's own, and made anew in a duplicate. Which they are, `Saver` checks."""
    return is_run_page(name) or name == KERNEL_PAGE_NAME


class VmPlan:
    """For one VMM, and any number of forks. The state is that of the last time it was looked at."""

    def __init__(self, record: Record, *, answers_all: bool = False) -> None:
        """`answers_all`: see Saver."""
        self._record = record
        self._saver = Saver(record, answers_all=answers_all)
        self._state: State | None = None

    def choose(self, descriptor: Descriptor) -> Action | None:
        """The VM's descriptors are there until they are replaced: the VM is made by one of them."""
        return Keep() if descriptor.number in self._record.descriptors else None

    def replaced(self, name: str) -> bool:
        return is_remade(name)

    def look(self, source: Source, stood_ns: int = 0) -> None:
        """Raises NotForkable. `stood_ns`: see Saver.save."""
        self._state = self._saver.save(source, stood_ns)

    def set_up(self, free: int) -> list[Call]:
        assert self._state is not None
        return render_restore(self._record, self._state, free, self._saver.run_pages, self._saver.kernel_pages)
