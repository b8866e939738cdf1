from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from forkd.host.tools import find_tool
from forkd.image.cpio import character_device, directory, file, render_cpio, symlink

ENTRIES = [
    directory("bin"),
    file("bin/tool", b"#!/bin/sh\n", 0o755),
    symlink("bin/other", "tool"),
    file("empty", b""),
    file("odd", b"abc"),
    file("ünïcode name", b"x" * 5000),
]


def run_cpio(archive: bytes, *argv: str, cwd: Path) -> str:
    done = subprocess.run([str(find_tool("busybox")), "cpio", *argv], input=archive, cwd=cwd, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_busybox_lists_every_entry_in_order(tmp_path: Path) -> None:
    listed = run_cpio(render_cpio(ENTRIES), "-t", cwd=tmp_path)
    assert listed.splitlines() == [entry.name for entry in ENTRIES]


def test_what_comes_out_is_what_went_in(tmp_path: Path) -> None:
    run_cpio(render_cpio(ENTRIES), "-i", cwd=tmp_path)
    assert (tmp_path / "bin/tool").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((tmp_path / "bin/tool").stat().st_mode) == 0o755
    assert (tmp_path / "bin/other").readlink() == Path("tool")
    assert (tmp_path / "empty").read_bytes() == b""
    assert (tmp_path / "odd").read_bytes() == b"abc"
    assert (tmp_path / "ünïcode name").read_bytes() == b"x" * 5000


def test_a_device_is_listed_with_its_numbers(tmp_path: Path) -> None:
    listed = run_cpio(render_cpio([character_device("console", 5, 1)]), "-tv", cwd=tmp_path)
    assert listed.startswith("crw-------")
    assert "console" in listed


def test_the_same_entries_give_the_same_bytes_in_whole_blocks() -> None:
    assert render_cpio(ENTRIES) == render_cpio(ENTRIES)
    assert len(render_cpio(ENTRIES)) % 512 == 0


@pytest.mark.parametrize("size", range(8))
def test_content_of_any_length_is_aligned_to_four_bytes(size: int, tmp_path: Path) -> None:
    run_cpio(render_cpio([file("a", b"y" * size), file("b", b"after")]), "-i", cwd=tmp_path)
    assert (tmp_path / "a").read_bytes() == b"y" * size
    assert (tmp_path / "b").read_bytes() == b"after"
