"""A process with a guest's memory, as a VMM has it: a file mapped privately, parts of it written or mapped over."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forkd.host.pages import LiveMemory, find_memory
from forkd.model.memory import Run

_CODE = """
import base64, ctypes, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PRIVATE, FIXED, ANONYMOUS = 2, 0x10, 0x20
def mapped(address, length, flags, path, offset):
    fd = -1 if path is None else os.open(path, os.O_RDONLY)
    found = libc.mmap(address, length, 3, flags | PRIVATE | (ANONYMOUS if fd < 0 else 0), fd, offset)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    if fd >= 0:
        os.close(fd)
    return found
base = mapped(None, int(sys.argv[2]), 0, sys.argv[1], 0)
print("ready", flush=True)
for line in sys.stdin:
    op, start, *rest = json.loads(line)
    if op == "write":
        data = base64.b64decode(rest[0])
        ctypes.memmove(base + start, data, len(data))
    elif op == "load":
        data = open(rest[0], "rb").read()
        ctypes.memmove(base + start, data, len(data))
    elif op == "read":
        ctypes.string_at(base + start, rest[0])
    elif op == "map":
        mapped(base + start, rest[0], FIXED, rest[1], rest[2])
    elif op == "fork":
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            libc.prctl(1, signal.SIGKILL)
            ctypes.memmove(base + start, b"fork", 4)
            os.write(writing, b"done")
            signal.pause()
        os.read(reading, 4)
        print(pid, flush=True)
    print("done", flush=True)
"""


class Guest:
    def __init__(self, process: subprocess.Popen[str], file: Path, size: int) -> None:
        self.process = process
        self.file = file
        self.size = size

    def write(self, start: int, data: bytes) -> None:
        self._do("write", start, base64.b64encode(data).decode())

    def load(self, start: int, path: Path) -> None:
        """Write what a file has."""
        self._do("load", start, str(path))

    def read(self, start: int, length: int) -> None:
        """As a guest does: nobody is told what was read."""
        self._do("read", start, length)

    def map_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._do("map", run.start, run.length, None if run.file is None else str(run.file), run.at)

    def fork(self, start: int) -> LiveMemory:
        """Of a fork that has written there, and ends with it."""
        self._send("fork", start)
        pid = int(self._answer())
        assert self._answer() == "done"
        return find_memory(pid, self.file, self.size)

    def memory(self) -> LiveMemory:
        return find_memory(self.process.pid, self.file, self.size)

    def _do(self, *command: object) -> None:
        self._send(*command)
        assert self._answer() == "done"

    def _send(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


@contextmanager
def running_guest(file: Path, runs: Sequence[Run] = ()) -> Iterator[Guest]:
    size = file.stat().st_size
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(file), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        guest = Guest(process, file, size)
        guest.map_runs(runs)
        yield guest
    finally:
        process.kill()
        process.communicate()
