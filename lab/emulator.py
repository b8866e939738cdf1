"""The QEMU that emulates the lab machine: this host's, or a newer one of Debian where that is too old for it."""

from __future__ import annotations

from pathlib import Path

from forkd.engines.qemu.args import Binary, ask_binary, find_binary
from forkd.errors import BuildFailed
from forkd.host.files import staged_directory
from forkd.host.tools import parse_version, run_tool
from forkd.image import Progress
from forkd.image.debian import run_mmdebstrap
from forkd.image.pieces import digest_request
from lab.packs import write_program

# Older ones keep code that a processor has patched while another one was translating it (docs/explanation/lab.md).
_OLDEST = (8, 1)
_SUITE = "trixie"
# Raise when the same suite is to give another result than before.
_VERSION = 1
_DEADLINE_S = 900.0

_PROGRAM = "qemu-system-x86_64"
_PARTS = ("usr/bin/" + _PROGRAM, "usr/lib", "usr/lib64", "usr/share/qemu", "usr/share/seabios")
# With the libraries that it was built for; this host's may be older.
_START = f"""\
#!/bin/sh
usr=${{0%/*}}/usr
exec "$usr/lib64/ld-linux-x86-64.so.2" --library-path "$usr/lib/x86_64-linux-gnu" "$usr/bin/{_PROGRAM}" \\
    -L "$usr/share/qemu" -L "$usr/share/seabios" "$@"
"""


def find_emulator(kept: Path, progress: Progress) -> Binary:
    """The caller holds the lock under which machines are made."""
    found = find_binary()
    if is_recent(found.version):
        return found
    directory = kept / f"qemu-{digest_request(version=_VERSION, suite=_SUITE, parts=_PARTS, start=_START)}"
    if not directory.is_dir():
        progress.stage(f"Fetching a QEMU of Debian {_SUITE}: {found.version} is too old to emulate the lab machine")
        with staged_directory(directory) as staging:
            _fetch(staging, progress)
    return ask_binary(str(directory / _PROGRAM))


def is_recent(version: str) -> bool:
    return (parse_version(version) or ()) >= _OLDEST


def _fetch(into: Path, progress: Progress) -> None:
    work = into / "work"
    work.mkdir()
    packed = work / "root.tar"
    doing = "Fetching QEMU for the lab machine"
    run_mmdebstrap(
        render_mmdebstrap(packed),
        work=work,
        doing=doing,
        deadline_s=_DEADLINE_S,
        progress=progress,
    )
    run_tool(
        ["tar", "--extract", f"--file={packed}", f"--directory={into}", "--no-same-owner", *(f"./{p}" for p in _PARTS)],
        doing=doing,
        failure=BuildFailed,
        deadline_s=_DEADLINE_S,
        disk=into,
    )
    packed.unlink()
    work.rmdir()
    write_program(into / _PROGRAM, _START.encode())


def render_mmdebstrap(out: Path) -> list[str]:
    """Unpacked and no more: nothing of it is installed, or run, before it is started as a program."""
    return [
        "--variant=extract",
        "--format=tar",
        '--aptopt=APT::Install-Recommends "false"',
        "--include=qemu-system-x86",
        _SUITE,
        str(out),
    ]
