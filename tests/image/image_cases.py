"""Things the tests of images share: small stand-ins for modules and roots, and a look at what is left over."""

import os
import struct
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

from support_processes import find_processes


class Heard:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.lines: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def line(self, text: str) -> None:
        self.lines.append(text)


def make_module(*info: str) -> bytes:
    """An ELF object with nothing but a .modinfo section."""
    modinfo = b"".join(text.encode() + b"\0" for text in info)
    names = b"\0.modinfo\0.shstrtab\0"
    body = modinfo + names
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, 64 + len(body))
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    sections = [
        (0, 0, 0, 0, 0, 0),
        (1, 1, 0, 0, 64, len(modinfo)),
        (10, 3, 0, 0, 64 + len(modinfo), len(names)),
    ]
    table = b"".join(struct.pack("<IIQQQQ", *section).ljust(64, b"\0") for section in sections)
    return bytes(header) + body + table


def write_modules(archive: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(archive, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, BytesIO(data))


def make_python(root: Path, minor: int = 11, prefix: str = "usr") -> None:
    library = root / prefix / f"lib/python3.{minor}"
    (library / "json").mkdir(parents=True)
    (library / "os.py").write_text("")
    (library / "json/__init__.py").write_text("")
    (root / prefix / "bin").mkdir()
    program = root / prefix / f"bin/python3.{minor}"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    (root / prefix / "bin/python3").symlink_to(f"python3.{minor}")


def list_leftovers(where: Path) -> dict[str, list[Any]]:
    """Processes and mounts that still have to do with a directory, and hidden entries below it."""
    processes = [pid for pid in find_processes(command=str(where)) if pid != os.getpid()]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(where) in line]
    staging = [str(path) for path in where.rglob(".staging-*")]
    return {"processes": processes, "mounts": mounts, "staging": staging}


NOTHING: dict[str, list[Any]] = {"processes": [], "mounts": [], "staging": []}
