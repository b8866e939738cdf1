"""Runs a command with no more of the kernel than the systemd unit allows, without systemd.

    python unit_filter.py packaging/forkd.service -- forkd serve

SystemCallFilter, RestrictNamespaces, RestrictAddressFamilies and NoNewPrivileges become one seccomp filter, made with
libseccomp. What is in a set such as @system-service, the installed systemd says.
"""

import ctypes
import ctypes.util
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_NAMESPACES = {
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_PR_SET_NO_NEW_PRIVS = 38


def parse_unit(text: str) -> dict[str, list[str]]:
    """The values of each key of [Service], in their order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def read_sets() -> dict[str, set[str]]:
    """What systemd means by each @set."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"], capture_output=True, text=True, check=True, timeout=60
    )
    sets: dict[str, set[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            name = word
            sets[name] = set()
        elif word and not word.startswith("#") and name:
            sets[name].add(word)
    return sets


def expand(words: Iterable[str], sets: dict[str, set[str]]) -> set[str]:
    calls: set[str] = set()
    for word in words:
        calls |= expand(sets[word], sets) if word.startswith("@") else {word}
    return calls


def allowed_calls(settings: dict[str, list[str]], sets: dict[str, set[str]]) -> set[str]:
    allowed: set[str] = set()
    for value in settings["SystemCallFilter"]:
        if value.startswith("~"):
            allowed -= expand(value[1:].split(), sets) - sets["@default"]
        else:
            allowed |= expand(value.split(), sets) | sets["@default"]
    return allowed


class _Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class Filter:
    def __init__(self) -> None:
        self._lib = ctypes.CDLL(ctypes.util.find_library("seccomp") or "libseccomp.so.2", use_errno=True)
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(_ERRNO | errno.EPERM))

    def allow(self, name: str) -> None:
        self._add(_ALLOW, name, [])

    def allow_if(self, name: str, *compares: _Compare) -> None:
        self._add(_ALLOW, name, compares)

    def refuse(self, name: str, number: int) -> None:
        self._add(_ERRNO | number, name, [])

    def load(self) -> None:
        result = self._lib.seccomp_load(self._context)
        assert result == 0, f"seccomp_load: {result}"

    def _add(self, action: int, name: str, compares: Iterable[_Compare]) -> None:
        number = self._lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # not of this architecture
        chosen = list(compares)
        array = (_Compare * max(1, len(chosen)))(*chosen)
        result = self._lib.seccomp_rule_add_array(self._context, action, number, len(chosen), array)
        assert result == 0, f"{name}: {result}"


# What root's daemon does to give each VM a user of its own. That of the unit is not root: it has no use for these.
_ROOTS = {"setgroups", "chown", "fchown", "lchown"}


def install(settings: dict[str, list[str]]) -> None:
    made = Filter()
    allowed = allowed_calls(settings, read_sets()) | (_ROOTS if os.geteuid() == 0 else set())
    for name in sorted(allowed - {"clone", "clone3", "unshare", "setns", "socket"}):
        made.allow(name)
    (namespaces,) = settings["RestrictNamespaces"]
    refused = sum(flag for name, flag in _NAMESPACES.items() if name not in namespaces.split())
    # As systemd has it: clone3 hides its flags from a filter, so that libc has to fall back to clone.
    for name in ("clone", "unshare"):
        made.allow_if(name, _Compare(0, _MASKED_EQUAL, refused, 0))
    made.allow_if("setns", _Compare(1, _MASKED_EQUAL, refused, 0))
    made.refuse("clone3", errno.ENOSYS)
    (families,) = settings["RestrictAddressFamilies"]
    for family in families.split():
        made.allow_if("socket", _Compare(0, _EQUAL, getattr(socket, family), 0))
    assert settings["NoNewPrivileges"] == ["yes"]
    assert ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    made.load()


def main(argv: list[str]) -> None:
    unit, dashes, *command = argv
    assert dashes == "--"
    install(parse_unit(Path(unit).read_text()))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
