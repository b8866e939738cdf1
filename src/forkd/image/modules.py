"""Which kernel modules are needed and in which order they load.

The kernel package carries no modules.dep (its install script makes one), so an index of the needs is read from
the modules themselves: the .modinfo section of each says what it depends on.
"""

from __future__ import annotations

import gzip
import lzma
import posixpath
import struct
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed

# The kinds of machine an image may meet: PCI (QEMU) and MMIO (Firecracker, ours), a root on virtio-blk, the
# agent's channel on virtio-serial or vsock.
BOOT_MODULES = (
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "erofs",
    "overlay",
)

_SUFFIXES = (".ko", ".ko.xz", ".ko.gz", ".ko.zst")
_ELF64_LITTLE = b"\x7fELF\x02\x01"


@dataclass(frozen=True)
class Module:
    """One module: where it is in the archive, what it cannot load without, what it likes to be loaded first."""

    member: str
    needs: tuple[str, ...]
    likes: tuple[str, ...]


@dataclass(frozen=True)
class ModuleIndex:
    modules: Mapping[str, Module]
    builtin: frozenset[str]

    def as_json(self) -> dict[str, Any]:
        modules = {
            name: {"member": module.member, "needs": module.needs, "likes": module.likes}
            for name, module in sorted(self.modules.items())
        }
        return {"builtin": sorted(self.builtin), "modules": modules}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModuleIndex:
        modules = {
            name: Module(entry["member"], tuple(entry["needs"]), tuple(entry["likes"]))
            for name, entry in value["modules"].items()
        }
        return cls(modules, frozenset(value["builtin"]))


def module_name(path: str) -> str:
    """'kernel/drivers/char/hw_random/virtio-rng.ko.xz' is the module virtio_rng."""
    return posixpath.basename(path).split(".ko")[0].replace("-", "_")


def load_order(wanted: Iterable[str], index: ModuleIndex) -> list[str]:
    """`wanted` with all they need, each after what it needs; what is built into the kernel is left out."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in order or name in index.builtin:
            return
        if name in above:
            raise BuildFailed(f"The kernel modules {' -> '.join((*above, name))} need each other")
        if name not in index.modules:
            raise BuildFailed(
                f"The kernel has no module {name}",
                hint="Use a Debian suite with a cloud kernel of 6.1 or newer",
            )
        module = index.modules[name]
        for need in (*(like for like in module.likes if like in index.modules), *module.needs):
            visit(need, (*above, name))
        order.append(name)

    for name in wanted:
        visit(name, ())
    return order


def index_modules(archive: Path) -> ModuleIndex:
    """Read what every module in a tar of /lib/modules/<version> says about itself."""
    modules: dict[str, Module] = {}
    builtin: frozenset[str] = frozenset()
    with tarfile.open(archive) as tar:
        for member in tar:
            base = posixpath.basename(member.name)
            if member.isfile() and base.endswith(_SUFFIXES):
                needs, likes = parse_modinfo(find_modinfo(_unpacked(base, _content(tar, member))))
                modules[module_name(base)] = Module(member.name, needs, likes)
            elif base == "modules.builtin":
                builtin = frozenset(module_name(line) for line in _content(tar, member).decode().split())
    return ModuleIndex(modules, builtin)


def read_modules(archive: Path, names: Iterable[str], index: ModuleIndex) -> list[tuple[str, bytes]]:
    """The modules' bytes, ready to be loaded, in the order given."""
    with tarfile.open(archive) as tar:
        members = [(name, index.modules[name].member) for name in names]
        return [(name, _unpacked(path, _content(tar, tar.getmember(path)))) for name, path in members]


def parse_modinfo(section: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names after `depends=`, and those a `softdep=` wants before."""
    needs: list[str] = []
    likes: list[str] = []
    for raw in section.split(b"\0"):
        key, _, value = raw.decode(errors="replace").partition("=")
        if key == "depends":
            needs += [module_name(name) for name in value.split(",") if name]
        elif key == "softdep":
            likes += _before(value)
    return tuple(needs), tuple(likes)


def find_modinfo(elf: bytes) -> bytes:
    """The .modinfo section of an ELF object."""
    if not elf.startswith(_ELF64_LITTLE):
        raise BuildFailed("A kernel module is not an ELF file for this machine")
    try:
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
        sections = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
        names = sections[names_index][4]
        for name, _type, _flags, _address, offset, size in sections:
            if elf.startswith(b".modinfo\0", names + name):
                return elf[offset : offset + size]
    except (struct.error, IndexError, OverflowError) as error:
        raise BuildFailed("A kernel module is damaged") from error
    return b""


def _before(softdep: str) -> list[str]:
    """Of 'pre: a b post: c' the names a and b."""
    names: list[str] = []
    taking = False
    for word in softdep.split():
        if word.endswith(":"):
            taking = word == "pre:"
        elif taking:
            names.append(module_name(word))
    return names


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise BuildFailed(f"The kernel package's {member.name} is not a file")
    with file:
        return file.read()


def _unpacked(name: str, data: bytes) -> bytes:
    try:
        if name.endswith(".xz"):
            return lzma.decompress(data)
        if name.endswith(".gz"):
            return gzip.decompress(data)
    except (lzma.LZMAError, OSError, EOFError) as error:
        raise BuildFailed(f"The kernel module {name} is damaged") from error
    if name.endswith(".zst"):
        raise BuildFailed(
            f"The kernel module {name} is packed with zstd, which is not supported",
            hint="Use another Debian suite",
        )
    return data
