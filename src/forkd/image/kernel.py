"""The guest's kernel: Debian's stock cloud kernel with all its modules, taken out of its package.

The package carries no modules.dep (its install script makes one), so we read an index from the modules themselves: the
.modinfo section of each says what it depends on.
"""

from __future__ import annotations

import gzip
import json
import lzma
import posixpath
import shlex
import struct
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed
from forkd.image.debian import run_mmdebstrap
from forkd.image.spec import Progress

KERNEL_PACKAGE = "linux-image-cloud-amd64"
KERNEL_FILE = "vmlinuz"
MODULES_FILE = "modules.tar"
INDEX_FILE = "modules.json"
_DEADLINE_S = 1800.0

# For every machine an image may run on: PCI (QEMU) or MMIO (Firecracker), a root on virtio-blk, the agent's
# channel on virtio-serial or vsock; and what ends the connections of a fork.
BOOT_MODULES = (
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "tcp_diag",
    "udp_diag",
    "vmw_vsock_virtio_transport",
    "erofs",
    "overlay",
)

_SUFFIXES = (".ko", ".ko.xz", ".ko.gz", ".ko.zst")
_ELF64_LITTLE = b"\x7fELF\x02\x01"

# The named package only depends on the real one, which carries the version in its name.
_FETCH = """\
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
depends=$(apt-cache depends --important "$FORKD_PACKAGE")
real=$(echo "$depends" | sed -n 's/^ *Depends: \\(linux-image-[0-9].*\\)$/\\1/p' | head -n 1)
[ -n "$real" ] || { echo "E: $FORKD_PACKAGE depends on no kernel package"; exit 1; }
mkdir "$1/kernel"
cd "$1/kernel"
apt-get download "$real"
dpkg-deb -x ./*.deb .
rm ./*.deb
[ -d lib/modules ] || mv usr/lib lib
set -- lib/modules/*
version=${1##*/}
cp "boot/vmlinuz-$version" "$FORKD_OUT/vmlinuz"
tar --create --file="$FORKD_OUT/modules.tar" --directory="lib/modules/$version" \\
  --sort=name --owner=0 --group=0 --numeric-owner --format=gnu \\
  --exclude=./build --exclude=./source --transform='s,^\\./,,' .
echo "$version" > "$FORKD_WORK/version"
"""


def render_fetch(hook: Path, suite: str, mirror: str | None) -> list[str]:
    return [
        # Nothing is installed: mmdebstrap gives us a trusted package index of the suite.
        "--variant=custom",
        "--format=null",
        '--aptopt=Acquire::Languages "none"',
        f'--customize-hook=sh {shlex.quote(str(hook))} "$1"',
        suite,
        "-",
        *([mirror] if mirror is not None else []),
    ]


def build_kernel(suite: str, mirror: str | None, out: Path, work: Path, progress: Progress) -> dict[str, Any]:
    """Make vmlinuz and the modules' archive and index in `out`; returns the kernel's version."""
    progress.stage(f"Fetching the kernel {KERNEL_PACKAGE} of Debian {suite}")
    hook = work / "fetch.sh"
    hook.write_text(_FETCH)
    run_mmdebstrap(
        render_fetch(hook, suite, mirror),
        work=work,
        doing="Fetching the kernel",
        deadline_s=_DEADLINE_S,
        progress=progress,
        FORKD_OUT=str(out),
        FORKD_PACKAGE=KERNEL_PACKAGE,
    )
    version = _read_version(work)
    index_kernel(out)
    return {"kernel_version": version}


def read_index(directory: Path) -> ModuleIndex:
    return ModuleIndex.from_json(json.loads((directory / INDEX_FILE).read_text()))


def index_kernel(out: Path) -> None:
    index = index_modules(out / MODULES_FILE)
    (out / INDEX_FILE).write_text(json.dumps(index.as_json(), indent=1))


def _read_version(work: Path) -> str:
    try:
        return (work / "version").read_text().strip()
    except OSError as error:
        raise BuildFailed("mmdebstrap ended without the kernel") from error


@dataclass(frozen=True)
class Module:
    """Where it is in the archive, what it cannot load without, and what should be loaded before it if present."""

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
    """`wanted` and all they need, each after what it needs; modules built into the kernel are left out."""
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
