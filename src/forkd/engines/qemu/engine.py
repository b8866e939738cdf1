"""The `qemu` engine: a QEMU process each, the parent's memory file mapped privately. Runs on any Linux."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from forkd.engines.base import BootSpec, Frozen, Machine, Phases, record_pid
from forkd.engines.qemu.args import Ram, Seat, render_args
from forkd.engines.qemu.binary import find_binary, read_cpuinfo, render_platform
from forkd.engines.qemu.machine import QemuMachine
from forkd.engines.qemu.monitor import Monitor, connected_socket, listening_socket
from forkd.errors import EngineFailed, SnapshotIncompatible
from forkd.host.process import spawn

MEMORY_FILE = "memory"
STATE_FILE = "state"

# A guest that floods its console fills this much of the runtime directory and no more.
_MAX_CONSOLE_BYTES = 1024 * 1024
# A parent also writes its device state, about 0.4 MiB and more with more vCPUs.
_MAX_PARENT_FILE_BYTES = 16 * 1024 * 1024


class QemuEngine:
    name = "qemu"

    def __init__(self, accelerator: str, *, die_with_parent: bool = True) -> None:
        self._binary = find_binary()
        self._accelerator = accelerator
        self._die_with_parent = die_with_parent
        self._platform = render_platform(self._binary, accelerator, read_cpuinfo())
        self.isolation = "qemu-tcg" if accelerator == "tcg" else "qemu-kvm"

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        memory = memory_in / MEMORY_FILE
        # Sized here, so that QEMU need not write it and the limit on its console file can be tight.
        with memory.open("xb") as file:
            file.truncate(spec.machine.memory_mib * 1024 * 1024)
        return self._start(spec, directory, Ram(memory, shared=True), state=None)

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, QemuMachine)
        await machine.running()
        await machine.monitor.execute("stop")
        with (into / STATE_FILE).open("xb") as state:
            await machine.monitor.save_state(state.fileno())
        await machine.kill()
        return self._platform

    def check(self, frozen: Frozen) -> None:
        for key, wanted in frozen.platform.items():
            found = self._platform.get(key)
            if found != wanted:
                raise SnapshotIncompatible(
                    f"The snapshot was made with {key} {wanted}, this host has {found}",
                    hint="Make the snapshot again on this host: forkd snapshot create",
                )

    async def fork(self, frozen: Frozen, directory: Path) -> Machine:
        ram = Ram(frozen.directory / MEMORY_FILE, shared=False)
        return self._start(frozen.boot, directory, ram, state=frozen.directory / STATE_FILE)

    def _start(self, spec: BootSpec, directory: Path, ram: Ram, state: Path | None) -> QemuMachine:
        phases = Phases(time.monotonic())
        directory.mkdir(mode=0o700)
        try:
            return self._spawn(spec, directory, ram, state, phases)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise EngineFailed(f"Could not prepare a VM in {directory}: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _spawn(self, spec: BootSpec, directory: Path, ram: Ram, state: Path | None, phases: Phases) -> QemuMachine:
        agent_path, qmp_path = str(directory / "agent.sock"), str(directory / "qmp.sock")
        with listening_socket(agent_path) as agent, listening_socket(qmp_path) as qmp:
            channel, control = connected_socket(agent_path), connected_socket(qmp_path)
            state_fd = os.open(state, os.O_RDONLY | os.O_CLOEXEC) if state else None
            try:
                seat = Seat(directory.name, directory / "console.log", agent.fileno(), qmp.fileno())
                incoming = state_fd is not None
                args = render_args(self._binary.path, self._accelerator, spec, seat, ram, incoming=incoming)
                inherited = [agent.fileno(), qmp.fileno(), *([state_fd] if state_fd is not None else [])]
                process = spawn(
                    args,
                    output=directory / "qemu.log",
                    inherited_fds=inherited,
                    max_file_bytes=_MAX_CONSOLE_BYTES if incoming else _MAX_PARENT_FILE_BYTES,
                    die_with_parent=self._die_with_parent,
                )
                record_pid(directory, process)
            except BaseException:
                channel.close()
                control.close()
                raise
            finally:
                if state_fd is not None:
                    os.close(state_fd)
        monitor = Monitor(directory.name)
        # Ours is closed by now; QEMU has inherited the descriptor under the same number.
        return QemuMachine(directory, process, monitor, control, channel, state_fd=state_fd, phases=phases)
