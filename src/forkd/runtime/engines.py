"""The engine to use: the one asked for, or the best that this machine was proved to run."""

from __future__ import annotations

from forkd.engines.base import Engine
from forkd.engines.fake import FakeEngine
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import HostLacks
from forkd.runtime.doctor import diagnose


def open_engine(name: str | None = None, *, outlive: bool = False) -> Engine:
    """Raises HostLacks, with what doctor found, where no VM can run. `outlive`: forks go on when we end."""
    diagnosis = diagnose(name)
    if diagnosis.engine == "fake":
        return FakeEngine(outlive=outlive)
    if diagnosis.accelerator is None:
        raise HostLacks(diagnosis.reason, hint="See: forkd doctor")
    if diagnosis.engine == "firecracker":
        return FirecrackerEngine(outlive=outlive)
    return QemuEngine(diagnosis.accelerator, outlive=outlive)
