"""Firecracker's own filters, for its forks: each thread of a fork gets the one that Firecracker has for it.

They are read once, from a Firecracker that runs as it always does, with a guest of three bytes.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Phases
from forkd.engines.firecracker.api import Api
from forkd.engines.firecracker.jail import API_SOCKET, VMM_LOG, Slot, render_arguments
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.engines.firecracker.plan import render_tiny
from forkd.engines.machine import CONSOLE, made_directory
from forkd.errors import EngineFailed, GuestDied, NotForkable
from forkd.host.filters import join_filters, read_filters, render_install
from forkd.host.firecracker import Binaries
from forkd.host.marked import render_environment
from forkd.host.process import spawn
from forkd.host.procfork.program import Call
from forkd.host.procfork.seed_page import NAME as SEED
from forkd.host.procfork.source import Thread
from forkd.host.threads import in_thread

_API, _VCPU = "fc_api", "fc_vcpu"
_TINY = "tiny"
_LOADED_AT = 0x1000000  # where a kernel of 64 bits is expected
_PAGE = 4096
_WAIT_FOR_EVER = b"\xf4\xeb\xfd"  # hlt; jmp back to it


@dataclass(frozen=True)
class Filters:
    vmm: bytes
    api: bytes
    vcpu: bytes

    @functools.cached_property
    def seed(self) -> bytes:
        """What any of them allows: from a copy of the seed all threads of the next fork are made."""
        return join_filters([self.api, self.vcpu, self.vmm])

    def choose(self, name: str, *, main: bool) -> bytes:
        """Raises NotForkable for a thread that Firecracker does not have. Pure."""
        if main:
            return self.vmm
        if name == _API:
            return self.api
        if name.startswith(_VCPU):
            return self.vcpu
        raise NotForkable(f"Firecracker has a thread that is not known: {name}")


def render_settle(filters: Filters, thread: Thread, *, main: bool, confined: bool) -> Sequence[Call]:
    """What a thread of a fork does before it runs. `confined`: its source is, so its seed is already. Pure."""
    name = thread.name.decode("utf-8", "replace")
    if not main and thread.name == SEED:
        return () if confined else render_install(filters.seed)
    return render_install(filters.choose(name, main=main))


async def find_filters(binaries: Binaries, directory: Path) -> Filters:
    """Takes a moment; the directory is gone afterwards. Raises NotForkable."""
    with made_directory(directory):
        slot = Slot(directory, None)
        (directory / VMM_LOG).touch()
        (directory / _TINY).write_bytes(render_tiny_kernel())
        process = spawn(
            [str(binaries.firecracker), *render_arguments(directory)],
            output=directory / CONSOLE,
            env=render_environment(directory),
            cwd=directory,
        )
    machine = FirecrackerMachine(slot, process, Phases(time.monotonic()), Api(directory / API_SOCKET), group=None)
    try:
        await machine.reach_api()
        for call in render_tiny(_TINY):
            await machine.ask(call)
        found = await in_thread(lambda: read_filters(machine.pid))
    except (EngineFailed, GuestDied) as error:
        raise NotForkable(f"Firecracker's filters cannot be read: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise NotForkable(f"Firecracker's filters cannot be read: {error.strerror}") from error
    finally:
        await machine.kill()
    return parse_filters(found, binaries.firecracker.name)


def parse_filters(found: dict[str, bytes], program: str) -> Filters:
    """By the names of its threads; the main one has that of the program. Raises NotForkable. Pure."""
    vcpu = next((found[name] for name in sorted(found) if name.startswith(_VCPU)), None)
    vmm, api = found.get(program[:15]), found.get(_API)
    if vmm is None or api is None or vcpu is None:
        raise NotForkable(
            f"Firecracker's filters are not as they are known: threads {', '.join(sorted(found)) or 'without any'}",
            hint="Is its filter turned off, or the version a new one?",
        )
    return Filters(vmm, api, vcpu)


def render_tiny_kernel() -> bytes:
    """An ELF file that does nothing. Pure."""
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 62, 1, _LOADED_AT, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = len(_WAIT_FOR_EVER)
    segment = struct.pack("<IIQQQQQQ", 1, 5, _PAGE, _LOADED_AT, _LOADED_AT, size, size, _PAGE)
    return (head + segment).ljust(_PAGE, b"\0") + _WAIT_FOR_EVER
