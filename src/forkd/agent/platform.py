"""What the fork contract changes about the machine: entropy, names, the network, the wall clock.

`Platform` is the guest; `Rehearsal` is what tests and the fake engine use on a host: it records what would change the
machine and keeps its files under a directory of its own.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import mmap
import os
import time
from struct import Struct

from forkd.agent.network import Network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

    from forkd.agent.changes import Roots
    from forkd.agent.network import Outcome

_MACHINE_ID_BYTES = 33
# By the kernel's part for all such devices, and by the driver: a buffer each, of a line of the cache.
_DRAWN_AHEAD_BYTES = 2 * 64
_MAX_STEPS = 100
RNDADDENTROPY = 0x40085203
RNDRESEEDCRNG = 0x5207
_POOL_INFO = Struct("ii")  # entropy in bits, bytes that follow


def render_pool_info(entropy: bytes) -> bytes:
    """`struct rand_pool_info`, every byte credited in full."""
    return _POOL_INFO.pack(len(entropy) * 8, len(entropy)) + entropy


def write_line(path: str, text: str) -> str:
    """Make `text` the only line of a file and read it back. In place: the file may be a bind mount."""
    line = text.encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))
        return os.pread(fd, 4096, 0).decode("utf-8", "replace").rstrip("\n")
    finally:
        os.close(fd)


class MachineIdFile:
    """Always 33 bytes. Mapped before the freeze: a fork changes it with a store instead of cold system calls."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._fresh = False

    def prepare(self) -> None:
        """Map the file as it is now: user code may have replaced it since. Gives it an id where it has none."""
        self.close()
        try:
            with open(self._path, "rb") as file:
                found = file.read(_MACHINE_ID_BYTES + 1)
        except OSError:
            found = b""
        if len(found) != _MACHINE_ID_BYTES:
            write_line(self._path, os.urandom(16).hex())
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, _MACHINE_ID_BYTES)
        finally:
            os.close(fd)
        self._map[0] = self._map[0]  # fault the page in, writable
        self._fresh = True

    def replace(self, machine_id: str) -> str:
        # Once per preparation: user code may replace the file later.
        mapped, fresh, self._fresh = self._map, self._fresh, False
        if not fresh or mapped is None or len(machine_id) != _MACHINE_ID_BYTES - 1:
            return write_line(self._path, machine_id)
        mapped[:-1] = machine_id.encode()
        return mapped[:-1].decode("ascii", "replace")

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class Platform:
    def __init__(self, root: str = "", roots: Roots | None = None) -> None:
        self._roots = roots
        self._began_ns = 0
        self._born_ns = 0
        self._steps: List[Tuple[int, int]] = []  # of the clock, since this fork: what it said then, and by how much
        self._scripts_directory = root + "/etc/forkd/on-fork.d"
        self._scripts: List[str] | None = None
        self._hostname_file = root + "/etc/hostname"
        self._hostname_linked = False
        self._machine_id = MachineIdFile(root + "/etc/machine-id")
        self._random = -1
        self._network = Network()

    def prepare(self) -> None:
        """Before the freeze: find, open and map what a fork will need, so that it does not have to."""
        if self._random < 0:
            self._random = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        self._hostname_linked = link_hostname(self._hostname_file)
        self._network.prepare()
        self._machine_id.prepare()
        self._scripts = find_scripts(self._scripts_directory)

    def add_entropy(self, entropy: bytes) -> None:
        if self._random < 0:
            self._random = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        fcntl.ioctl(self._random, RNDADDENTROPY, render_pool_info(entropy))
        fcntl.ioctl(self._random, RNDRESEEDCRNG)
        discard_drawn()

    def set_hostname(self, name: str) -> str:
        _socket.sethostname(name)
        if not self._hostname_linked:
            write_line(self._hostname_file, name)
        self._hostname_linked = False
        return _socket.gethostname()

    def set_machine_id(self, machine_id: str) -> str:
        return self._machine_id.replace(machine_id)

    def set_network(self, up: bool, forked: bool = False) -> Outcome:
        return self._network.switch(up, forked)

    def list_scripts(self) -> List[str]:
        """As found by the preparation, if there was one since the last fork."""
        scripts, self._scripts = self._scripts, None
        return find_scripts(self._scripts_directory) if scripts is None else scripts

    def set_clock(self, unix_ns: int) -> int:
        before_ns = time.time_ns()
        time.clock_settime_ns(time.CLOCK_REALTIME, unix_ns)
        if len(self._steps) < _MAX_STEPS:
            self._steps.append((unix_ns, unix_ns - before_ns))
        return time.time_ns()

    def begin(self) -> None:
        """We are a fork, and take a new identity: the clock is still that of where we come from."""
        self._began_ns = time.time_ns()
        self._born_ns = 0

    def finish(self, now_ns: int) -> None:
        """The clock is ours now. How it came to that is none of our changes."""
        self._born_ns = now_ns
        self._steps = []

    def describe(self) -> Dict[str, Any]:
        """What tells which files were written since the fork."""
        times = {"began_ns": self._began_ns, "born_ns": self._born_ns, "steps": self._steps}
        return dict(times, roots=self._roots)

    def sync(self) -> None:
        os.sync()

    def close(self) -> None:
        self._machine_id.close()
        self._network.close()


class Rehearsal(Platform):
    """Touches nothing of the machine it runs on but files under `root`."""

    def __init__(self, root: str) -> None:
        os.makedirs(root + "/etc", exist_ok=True)
        super().__init__(root)

    def prepare(self) -> None:
        self._machine_id.prepare()
        self._scripts = find_scripts(self._scripts_directory)

    def add_entropy(self, entropy: bytes) -> None:
        render_pool_info(entropy)

    def set_hostname(self, name: str) -> str:
        return write_line(self._hostname_file, name)

    def set_network(self, up: bool, forked: bool = False) -> Outcome:
        return up, "127.0.0.1", 0

    def set_clock(self, unix_ns: int) -> int:
        offset_ns = unix_ns - time.time_ns()
        return time.time_ns() + offset_ns

    def sync(self) -> None:
        pass


def discard_drawn(path: str = "/dev/hwrng") -> None:
    """What the kernel has drawn ahead from a device for random numbers, which all forks have: nobody is to get it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        left = _DRAWN_AHEAD_BYTES
        while left > 0:
            left -= len(os.read(fd, left)) or left
    except BlockingIOError:
        pass  # no more is there, and what comes is the fork's own
    except OSError as error:
        if error.errno != errno.ENODEV:  # the device is gone
            raise
    finally:
        os.close(fd)


def link_hostname(path: str, target: str = "/proc/sys/kernel/hostname") -> bool:
    """Link the file to the kernel's name, so that a fork need not write it. False when it cannot be replaced."""
    try:
        if os.path.islink(path) and os.readlink(path) == target:
            return True
        temporary = path + ".forkd"
        if os.path.lexists(temporary):
            os.unlink(temporary)
        os.symlink(target, temporary)
        os.rename(temporary, path)
    except OSError:
        return False
    return True


def find_scripts(directory: str) -> List[str]:
    """Executable files, in the order of their names."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = [directory + "/" + name for name in names]
    return [path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)]
