"""The initramfs: a cpio archive with busybox, the kernel modules, /init and the guest agent.

/init is a shell script that assembles the root and hands over to the agent. When a step fails, it prints one line with
`forkd-init:` on the console and resets the machine at once: the host runs it with "no reboot", so it sees a dead guest.
"""

from __future__ import annotations

import hashlib
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from forkd.errors import HostLacks
from forkd.model.network import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_INTERFACE, GUEST_PREFIX
from forkd.wire.agent import IMAGE_FD, UPPER_FD

INITRD_FILE = "initrd.img"
AGENT_SOURCE = "/forkd-agent"
AGENT_HOME = "/run/forkd/lib"
GUEST_WIRE = ("agent.py", "archive.py", "tar.py")  # what of forkd.wire the agent needs
_DEVICE_WAIT_TENTHS = 100

_DIRECTORIES = ("bin", "dev", "lower", "modules", "newroot", "proc", "sys", "upper")
_APPLETS = ("arp", "cp", "ifconfig", "insmod", "ip", "ln", "mkdir", "mount", "reboot", "rm", "sh", "sleep")
_CPIO_MAGIC = b"070701"
_CPIO_TRAILER = "TRAILER!!!"
_CPIO_BLOCK = 512

_ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LANG=C.UTF-8",
)

START = f"""\
import sys
sys.path.insert(0, "{AGENT_HOME}")
from forkd.agent.main import main
main()
"""

_INIT = """\
#!/bin/sh
# Made by forkd. Commands are busybox's.
export PATH=/bin

fail() {
    # Through the kernel's log: that is on the console before the reset, a terminal's buffer may not be.
    echo "<0>forkd-init: $*" > /dev/kmsg || echo "forkd-init: $*" > /dev/console
    reboot -f
    sleep 5
    exit 1
}

try() {
    what=$1
    shift
    said=$("$@" 2>&1) || fail "$what failed: $said"
}

mount_point() {
    # A link here would lead out of the new root.
    if [ -L "$1" ] || [ ! -d "$1" ]; then
        rm -f "$1"
        try "making $1" mkdir -p "$1"
    fi
}

try "mounting /dev" mount -t devtmpfs -o mode=0755,nosuid devtmpfs /dev
try "mounting /proc" mount -t proc -o nosuid,nodev,noexec proc /proc
try "mounting /sys" mount -t sysfs -o nosuid,nodev,noexec sysfs /sys

for module in @MODULES@; do
    try "loading the module $module" insmod "/modules/$module.ko"
done

tenths=0
while [ ! -b /dev/vda ]; do
    [ "$tenths" -lt @WAIT@ ] || fail "no disk appeared as /dev/vda"
    tenths=$((tenths + 1))
    sleep 0.1
done

try "mounting the image /dev/vda" mount -t erofs -o ro /dev/vda /lower
# Of what the kernel left: full it is to be told as full, before the rest of the guest has no memory to work in.
while read -r name kib unit; do
    [ "$name" != MemAvailable: ] || available=$kib
done < /proc/meminfo
try "mounting memory for changes" mount -t tmpfs -o "mode=0755,size=$((available * 3 / 4))k" tmpfs /upper
try "making the overlay's directories" mkdir /upper/changes /upper/work
try "mounting the overlay" mount -t overlay \\
    -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work,redirect_dir=off,metacopy=off overlay /newroot

for name in dev proc sys run tmp; do
    mount_point "/newroot/$name"
done
try "mounting /run" mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs /newroot/run
try "mounting /tmp" mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /newroot/tmp
try "copying the agent" mkdir -p /newroot@HOME@
try "copying the agent" cp -r @SOURCE@/. /newroot@HOME@/
[ -x "/newroot"@PYTHON@ ] || [ -L "/newroot"@PYTHON@ ] || fail "the image has no "@PYTHON@

try "preparing /dev" mkdir -p /dev/pts /dev/shm
try "mounting /dev/pts" mount -t devpts -o mode=0620,gid=5,ptmxmode=0666 devpts /dev/pts
try "mounting /dev/shm" mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
for name in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
    [ -e "/dev/${name%%:*}" ] || ln -s "${name#*:}" "/dev/${name%%:*}"
done
try "bringing up the loopback" ifconfig lo 127.0.0.1 netmask 255.0.0.0 up

# An address, but no route: the agent adds that in a fork that has a network, all others are told at once that they have
# none. The gateway's hardware address is known, so that nothing has to be asked for before the first packet.
if [ -d /sys/class/net/@NIC@ ]; then
    echo 1 > /proc/sys/net/ipv6/conf/@NIC@/disable_ipv6 || fail "IPv6 cannot be switched off on @NIC@"
    try "bringing up @NIC@" ip link set @NIC@ up
    try "giving @NIC@ its address" ip addr add @ADDRESS@ dev @NIC@ noprefixroute
    try "naming the gateway" arp -i @NIC@ -s @GATEWAY@ @GATEWAY_MAC@
fi
mount_point /newroot/etc
rm -f /newroot/etc/resolv.conf
echo "nameserver @GATEWAY@" > /newroot/etc/resolv.conf || fail "/etc/resolv.conf cannot be written"

for name in dev sys proc; do
    try "moving /$name" mount --move "/$name" "/newroot/$name"
done

# What was written, and what over: for the agent, by number. They have no path in the new root.
exec @IMAGE_FD@</lower @UPPER_FD@</upper/changes
exec busybox env -i @ENVIRONMENT@ /bin/busybox switch_root /newroot @PYTHON@ -I -B -u @HOME@/start.py
"""


def render_init(modules: Sequence[str], python: str) -> str:
    words = {
        "@MODULES@": " ".join(map(shlex.quote, modules)) or "''",
        "@WAIT@": str(_DEVICE_WAIT_TENTHS),
        "@IMAGE_FD@": str(IMAGE_FD),
        "@UPPER_FD@": str(UPPER_FD),
        "@SOURCE@": AGENT_SOURCE,
        "@HOME@": AGENT_HOME,
        "@PYTHON@": shlex.quote(python),
        "@NIC@": GUEST_INTERFACE,
        "@ADDRESS@": f"{GUEST_ADDRESS}/{GUEST_PREFIX}",
        "@GATEWAY@": GATEWAY_ADDRESS,
        "@GATEWAY_MAC@": GATEWAY_MAC,
        "@ENVIRONMENT@": " ".join(map(shlex.quote, _ENVIRONMENT)),
    }
    script = _INIT
    for word, value in words.items():
        script = script.replace(word, value)
    return script


@dataclass(frozen=True)
class Entry:
    """One member of the archive. `mode` has the type bits; all belong to root and have no time."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(name: str) -> Entry:
    return Entry(name, stat.S_IFDIR | 0o755)


def file(name: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | mode, data)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def character_device(name: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(name, stat.S_IFCHR | mode, device=(major, minor))


def render_cpio(entries: Iterable[Entry]) -> bytes:
    """In the format "newc", which the kernel unpacks as its first root."""
    out = bytearray()
    for inode, entry in enumerate(entries, start=1):
        _append(out, entry, inode)
    _append(out, Entry(_CPIO_TRAILER, 0), 0)
    out += bytes(-len(out) % _CPIO_BLOCK)
    return bytes(out)


def _append(out: bytearray, entry: Entry, inode: int) -> None:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    out += _CPIO_MAGIC + b"".join(b"%08X" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += entry.data
    out += bytes(-len(out) % 4)


def render_initramfs(
    busybox: bytes, modules: Sequence[tuple[str, bytes]], agent: Mapping[str, bytes], python: str
) -> bytes:
    """Not compressed: the kernel's unpacking under emulation costs more than reading the bytes."""
    return render_cpio(_entries(busybox, modules, agent, python))


def read_agent_sources() -> dict[str, bytes]:
    """The agent as a package tree for the guest, by path; user code there sees guest_api.py as `forkd`."""
    package = files("forkd")
    agent = {
        f"forkd/agent/{entry.name}": entry.read_bytes()
        for entry in package.joinpath("agent").iterdir()
        if entry.name.endswith(".py")
    }
    wire = {f"forkd/wire/{name}": package.joinpath("wire", name).read_bytes() for name in GUEST_WIRE}
    tree = {
        **agent,
        **wire,
        "forkd/__init__.py": package.joinpath("agent", "guest_api.py").read_bytes(),
        "forkd/wire/__init__.py": b"",
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
) -> Iterator[Entry]:
    yield from map(directory, _DIRECTORIES)
    # The kernel opens it for /init before anything is mounted.
    yield character_device("dev/console", 5, 1)
    yield file("init", render_init([name for name, _ in modules], python).encode(), 0o755)
    yield file("bin/busybox", busybox, 0o755)
    for applet in _APPLETS:
        yield symlink(f"bin/{applet}", "busybox")
    for name, data in modules:
        yield file(f"modules/{name}.ko", data)
    home = AGENT_SOURCE.lstrip("/")
    yield from map(directory, _parents(f"{home}/{name}" for name in agent))
    for name, data in agent.items():
        yield file(f"{home}/{name}", data)


def _parents(names: Iterator[str]) -> list[str]:
    found = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return sorted(found - {"."})
