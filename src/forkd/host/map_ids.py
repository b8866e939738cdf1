"""A program: writes the id maps of processes from the user namespace of another one, whose pid is its argument.

It goes there for good, says "ok" or what went wrong, and reads requests, a line of JSON each; it answers each with such
a line:

    {"pid": PID, "maps": {"uid_map": TEXT, "gid_map": TEXT}}

It ends when its input does. Run by path with `-I -S`, so it imports nothing of forkd.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_CLONE_NEWUSER = 0x10000000
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    print(_enter(int(sys.argv[1])), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(_write(request["pid"], request["maps"]), flush=True)


def _enter(source: int) -> str:
    try:
        namespace = os.open(f"/proc/{source}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or "failed"
    # Who has rights in that namespace has none over us.
    if _libc.setns(namespace, _CLONE_NEWUSER) != 0 or _libc.prctl(_PR_SET_DUMPABLE, 0) != 0:
        return os.strerror(ctypes.get_errno())
    os.close(namespace)
    return "ok"


def _write(pid: int, maps: dict[str, str]) -> str:
    try:
        for name, text in maps.items():
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    except OSError as error:
        return error.strerror or "failed"
    return "ok"


if __name__ == "__main__":
    main()
