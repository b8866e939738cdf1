"""The initramfs: busybox, the modules, /init and the guest agent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import PurePosixPath

from forkd.errors import HostLacks
from forkd.image import cpio
from forkd.image.boot import AGENT_SOURCE, START, render_init

INITRD_FILE = "initrd.img"

_DIRECTORIES = ("bin", "dev", "lower", "modules", "newroot", "proc", "sys", "upper")
_APPLETS = (
    "cp",
    "ifconfig",
    "insmod",
    "ln",
    "mkdir",
    "mount",
    "reboot",
    "rm",
    "sh",
    "sleep",
)


def render_initramfs(
    busybox: bytes, modules: Sequence[tuple[str, bytes]], agent: Mapping[str, bytes], python: str
) -> bytes:
    """Not compressed: the kernel's unpacking under emulation costs more than reading the bytes."""
    return cpio.render_cpio(_entries(busybox, modules, agent, python))


def read_agent_sources() -> dict[str, bytes]:
    """The agent as a package tree for the guest, by path; there `import forkd` is what user code sees."""
    package = files("forkd")
    agent = {
        f"forkd/agent/{entry.name}": entry.read_bytes()
        for entry in package.joinpath("agent").iterdir()
        if entry.name.endswith(".py")
    }
    tree = {
        **agent,
        "forkd/__init__.py": package.joinpath("agent", "guest_api.py").read_bytes(),
        "forkd/wire/__init__.py": b"",
        "forkd/wire/agent.py": package.joinpath("wire", "agent.py").read_bytes(),
        "start.py": START.encode(),
    }
    return dict(sorted(tree.items()))


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_sources(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(sources.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def check_static(busybox: bytes) -> bytes:
    """There is no C library in the initramfs, so busybox must not ask for one."""
    if not busybox.startswith(b"\x7fELF") or b"/ld-linux" in busybox:
        raise HostLacks("The host's busybox is not a static program", hint="Install it: apt install busybox-static")
    return busybox


def _entries(
    busybox: bytes, modules: Sequence[tuple[str, bytes]], agent: Mapping[str, bytes], python: str
) -> Iterator[cpio.Entry]:
    yield from map(cpio.directory, _DIRECTORIES)
    # The kernel opens it for /init before anything is mounted.
    yield cpio.character_device("dev/console", 5, 1)
    yield cpio.file("init", render_init([name for name, _ in modules], python).encode(), 0o755)
    yield cpio.file("bin/busybox", busybox, 0o755)
    for applet in _APPLETS:
        yield cpio.symlink(f"bin/{applet}", "busybox")
    for name, data in modules:
        yield cpio.file(f"modules/{name}.ko", data)
    home = AGENT_SOURCE.lstrip("/")
    yield from map(cpio.directory, _parents(f"{home}/{name}" for name in agent))
    for name, data in agent.items():
        yield cpio.file(f"{home}/{name}", data)


def _parents(names: Iterator[str]) -> list[str]:
    found = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return sorted(found - {"."})
