"""A program: writes the id maps of processes from the user namespace of another one.

It reads requests, a line of JSON each, and answers each with a line, "ok" or what went wrong:

    {"source": PID, "pid": PID, "maps": {"uid_map": TEXT, "gid_map": TEXT}}

It ends when its input does. Run by path with `-I -S`, so it imports nothing of forkd. A process cannot come back from a
user namespace: a child of its own goes there for each request.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_CLONE_NEWUSER = 0x10000000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        print(_ask_child(request["source"], request["pid"], request["maps"]), flush=True)


def _ask_child(source: int, pid: int, maps: dict[str, str]) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, _write(source, pid, maps).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said or "its writer ended"


def _write(source: int, pid: int, maps: dict[str, str]) -> str:
    try:
        namespace = os.open(f"/proc/{source}/ns/user", os.O_RDONLY)
        if _libc.setns(namespace, _CLONE_NEWUSER) != 0:
            return os.strerror(ctypes.get_errno())
        for name, text in maps.items():
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
            os.write(fd, text.encode())
    except OSError as error:
        return error.strerror or "failed"
    return "ok"


if __name__ == "__main__":
    main()
