"""What a QEMU has to find in its cell: its program, its libraries and modules, its firmware.

Seen from one that runs: what it was started as (a wrapper may stand before it), and which files it has mapped.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks

_DEADLINE_S = 30.0
_OPTIONS = ("-nodefaults", "-no-user-config", "-display", "none", "-machine", "none", "-S", "-qmp", "stdio")
# Its greeting may come before its accelerator is loaded; an answer comes when all of it is.
_ASK = b'{"execute": "qmp_capabilities"}\n'
_LISTED = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)
_LOADER_CACHE = Path("/etc/ld.so.cache")
_HINT = "Reinstall the package qemu-system-x86"


@dataclass(frozen=True)
class Needs:
    """`argv`: how it is started, without options."""

    argv: tuple[str, ...]
    files: tuple[str, ...]


@functools.cache
def find_needs(program: str, accelerator: str) -> Needs:
    """Takes a moment, once for a program. Raises HostLacks."""
    try:
        argv, mapped = _look_at_running(program, accelerator)
        loader = _find_loader(mapped)
        listed = parse_listed(_output(render_listing(argv, loader)))
        directories = [os.path.realpath(line) for line in _output([*argv, "-L", "help"]).splitlines()]
        return render_needs(argv, loader, listed, mapped, [path for path in directories if Path(path).is_dir()])
    except (OSError, subprocess.SubprocessError) as error:
        raise HostLacks(f"What {program} needs cannot be found out: {error}", hint=_HINT) from error


def render_needs(
    argv: Sequence[str], loader: str, listed: Sequence[str], mapped: Sequence[str], directories: Sequence[str]
) -> Needs:
    """A library under the name it is looked for by; a module is only mapped, under its own."""
    files = dict.fromkeys([*(word for word in argv if Path(word).is_file()), loader, *listed])
    known = {os.path.realpath(path) for path in files}
    files |= dict.fromkeys(path for path in mapped if path not in known)
    if _LOADER_CACHE.exists():
        files[str(_LOADER_CACHE)] = None
    return Needs(tuple(argv), (*files, *dict.fromkeys(directories)))


def render_listing(argv: Sequence[str], loader: str) -> list[str]:
    """The command that lists what the loader would load."""
    if Path(argv[0]).name.startswith("ld-"):
        program = next(at for at, word in enumerate(argv) if Path(word).name.startswith("qemu"))
        return [*argv[:program], "--list", argv[program]]
    return [loader, "--list", argv[0]]


def parse_listed(text: str) -> list[str]:
    return list(dict.fromkeys(_LISTED.findall(text)))


def parse_mapped(maps: str) -> list[str]:
    return list(dict.fromkeys(path for path in _MAPPED.findall(maps) if not path.endswith(" (deleted)")))


def _find_loader(mapped: Sequence[str]) -> str:
    """Under the name that programs have in them."""
    for path in mapped:
        if Path(path).name.startswith("ld-"):
            usual = "/lib64/" + Path(path).name
            return usual if os.path.realpath(usual) == path else path
    raise HostLacks("QEMU has no dynamic loader", hint=_HINT)


def _look_at_running(program: str, accelerator: str) -> tuple[list[str], list[str]]:
    command = [program, *_OPTIONS, "-accel", accelerator]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        late = threading.Timer(_DEADLINE_S, process.kill)
        late.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(_ASK)
            process.stdin.flush()
            if b'"return"' not in process.stdout.readline() + process.stdout.readline():
                raise HostLacks(f"{program} does not start with the accelerator {accelerator}", hint=_HINT)
            place = Path(f"/proc/{process.pid}")
            words = [os.fsdecode(word) for word in (place / "cmdline").read_bytes().split(b"\0")]
            return words[: words.index(_OPTIONS[0])], parse_mapped((place / "maps").read_text())
        finally:
            late.cancel()
            process.kill()


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout
