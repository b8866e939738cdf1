"""Where one Firecracker lives: as root in a jail of its own, else in its directory.

Either way it meets its files under the same short names, in what it takes for its working directory: a snapshot
remembers those names, and in every child they mean the child's own.

    <directory>/console.log                 ours: what the guest and a failing jailer wrote
    <directory>/fstab                       ours: what is bound into the jail
    <directory>/memory                      ours: a link to the memory file it was given
    <directory>/nic                         ours: there when its guest was set up for a network
    <directory>/firecracker/<id>/root/      the jail; without one, all of it is in <directory>
    <directory>/cell/                       of a base (base_vm.py), in place of a jail
        root.erofs memory state             what it is given: bound (in its own mount namespace) or linked
        api.sock agent.sock firecracker.log what it makes; `saved` for a moment

A jailed Firecracker owns its root and may put anything there. Who opens something in it follows no links.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.host.firecracker import Binaries

API_SOCKET = "api.sock"
VMM_LOG = "firecracker.log"
_FSTAB = "fstab"
# In a VM's directory: its guest was set up for a network. Of one that can be forked it has the number of its tap.
NIC_MARK = "nic"
# Of one that can be forked, or is a fork: what it asked of KVM, and where in its cell what is saved of it is written.
RECORD = "kvm.json"
SAVES = "/saves"
_CELL = "cell"
_ARGUMENTS = ("--api-sock", API_SOCKET, "--log-path", VMM_LOG, "--level", "Warn")

# Who runs this stands in front of the jail's namespaces and waits; when it dies, so does the first process in them,
# and with that one (the kernel sees to it) all others.
_UNSHARE = ("unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
_OWN_NETWORK = "--net"
# That first process. What it runs is not its last command, so that it stays, and tells how it ended.
_INSIDE = """\
mount --all --fstab "$1" || exit 1
shift
"$@"
exit $?
"""


@dataclass(frozen=True)
class Given:
    """A file or directory of ours that Firecracker gets to see."""

    path: Path
    writable: bool = False


@dataclass(frozen=True)
class Place:
    """A network namespace that is there already, and a tap in it that nobody has open."""

    namespace: str
    tap: str


@dataclass(frozen=True)
class Slot:
    """`jails` is what the jailer calls the directory of its jails: after the program in them. None: no jail.

    `network`: what it enters, instead of a network namespace of its own. `inside`: in a cell that has a directory for
    what it makes. `user`: whom a jailed one is to run as; only who starts it knows.
    """

    directory: Path
    jails: str | None
    network: Place | None = None
    inside: bool = False
    user: int | None = None

    @property
    def jailed(self) -> bool:
        return self.jails is not None

    @property
    def forked(self) -> bool:
        """It has nothing of its own but what it was given open, and a place for what is saved."""
        return not self.inside and (self.directory / RECORD).exists()

    @property
    def root(self) -> Path:
        """The directory that Firecracker's relative names are in."""
        if self.inside:
            return self.directory / _CELL
        return self.directory / self.jails / self.directory.name / "root" if self.jails else self.directory

    @classmethod
    def found(cls, directory: Path) -> Slot:
        """Of one that was started already."""
        jails = (path.parent.parent.name for path in directory.glob(f"*/{directory.name}/root"))
        return cls(directory, next(jails, None), inside=(directory / _CELL).is_dir())

    @property
    def tap(self) -> str:
        return self.own_tap if self.network is None else self.network.tap

    @property
    def own_tap(self) -> str:
        """Leads nowhere. In a network namespace of its own any name would do; this one tells whose it is."""
        return f"fd{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]}"

    def furnish(self, given: Mapping[str, Given]) -> None:
        """Make a place for each thing: what is bound needs something to be bound over, and a log is not made by it."""
        self.root.mkdir(parents=True, exist_ok=True)
        log = self.root / VMM_LOG
        log.touch()
        if self.jailed:
            self._give(log)
            (self.directory / _FSTAB).write_text(self._render_fstab(given))
        for name, thing in given.items():
            place = self.root / name
            if place == thing.path:
                continue
            if not self.jailed:
                place.symlink_to(thing.path.absolute(), target_is_directory=thing.path.is_dir())
            elif thing.path.is_dir():
                place.mkdir()
            else:
                place.touch()
            if self.jailed and thing.writable:
                self._give(thing.path)

    def _give(self, path: Path) -> None:
        assert self.user is not None
        os.chown(path, self.user, self.user)

    def _render_fstab(self, given: Mapping[str, Given]) -> str:
        # The root over itself first: the devices in it are of no use where its file system allows none, as /run.
        binds = [(self.root, self.root, "bind,nosuid")]
        for name, thing in given.items():
            binds.append((thing.path.absolute(), self.root / name, "bind" if thing.writable else "bind,ro"))
        return "".join(f"{_escaped(of)} {_escaped(at)} none {options} 0 0\n" for of, at, options in binds)

    def render_command(self, binaries: Binaries, max_file_bytes: int) -> list[str]:
        """`max_file_bytes` is the jailer's to set, after it has copied Firecracker; without a jail the caller does."""
        if not self.jailed:
            return [str(binaries.firecracker), *render_arguments(self.directory)]
        assert binaries.jailer is not None and self.user is not None
        jailer = [
            *(str(binaries.jailer), "--id", self.directory.name, "--exec-file", str(binaries.firecracker)),
            *("--uid", str(self.user), "--gid", str(self.user), "--chroot-base-dir", str(self.directory)),
            *("--resource-limit", f"fsize={max_file_bytes}"),
        ]
        inside = ["/bin/sh", "-c", _INSIDE, "forkd-jail", str(self.directory / _FSTAB)]
        namespaces = [*_UNSHARE, _OWN_NETWORK]
        if self.network is not None:
            namespaces = ["nsenter", f"--net={self.network.namespace}", "--", *_UNSHARE]
        return [*namespaces, "--", *inside, *jailer, "--", *_ARGUMENTS]


def render_arguments(directory: Path) -> list[str]:
    """Without a jail."""
    return ["--id", directory.name, *_ARGUMENTS]


def _escaped(path: Path) -> str:
    """A field of an fstab has no white space, and a backslash begins a character's number."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in str(path))
