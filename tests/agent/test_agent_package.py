"""What the agent needs of a guest: Python 3.8 and its standard library."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsed import Guest

import forkd
from forkd.agent.main import parse_arguments
from forkd.agent.platform import (
    MachineIdFile,
    Rehearsal,
    discard_drawn,
    link_hostname,
    render_pool_info,
    write_line,
)
from forkd.guest.identity import become
from forkd.image.initramfs import GUEST_WIRE
from forkd.model.names import new_identity

_PACKAGE = Path(forkd.__file__).parent
_WIRE = [_PACKAGE / "wire" / name for name in GUEST_WIRE]
_FILES = [*sorted((_PACKAGE / "agent").glob("*.py")), *_WIRE]


def test_the_agent_needs_no_more_than_python_3_8() -> None:
    vermin = str(Path(sys.executable).with_name("vermin"))
    command = [vermin, "-t=3.8-", "--violations", "--no-tips", *map(str, _FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_the_agent_imports_the_standard_library_and_the_wire_format(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            ours = name == "forkd.agent" or name.startswith("forkd.agent.")
            ours = ours or name in [f"forkd.wire.{wire.stem}" for wire in _WIRE]
            assert ours or name.split(".")[0] in {*sys.stdlib_module_names, "_sha2", "_sha256"}, name


def test_the_agent_loads_little(guest_lib: Path) -> None:
    heavy = {"asyncio", "subprocess", "logging", "typing", "dataclasses", "socket", "hashlib", "random", "ctypes"}
    script = "import sys, forkd.agent.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(guest_lib)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert heavy & set(done.stdout.split()) == set()


@pytest.mark.parametrize("name", ["python3.8", "python3.13"])
async def test_the_agent_works_on_old_and_new_pythons(name: str, guest_lib: Path, tmp_path: Path) -> None:
    python = find_python(name)
    if python is None:
        pytest.skip(f"no {name} here")
    guest = Guest(guest_lib, tmp_path / "root", python)
    try:
        async with guest.connected() as agent:
            assert (await agent.eval("x = 1\nx + 1")).value == 2
            error = (await agent.eval("def f():\n    return 1 / 0\nf()")).error
            assert error is not None and "return 1 / 0" in error.traceback
            assert (await agent.run(["cat"], input=b"abc")).stdout == b"abc"
            await agent.prepare_freeze()
            assert (await become(agent, new_identity("old"))).hostname == "old"
            await agent.write_file(str(tmp_path / "file"), b"1")
            assert (await agent.list_dir(str(tmp_path))).entries
    finally:
        assert guest.end() == ""


def find_python(name: str) -> str | None:
    """On PATH, or beside the interpreter we run on, as version managers keep them."""
    versions = Path(sys.base_prefix).parent
    beside = sorted(versions.glob(f"{name.removeprefix('python')}*/bin/{name}"))
    found = str(beside[0]) if beside else shutil.which(name)
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, timeout=30).returncode != 0:
        return None
    return found


def test_entropy_is_credited_in_full() -> None:
    assert (
        render_pool_info(b"\1" * 64) == (512).to_bytes(4, sys.byteorder) + (64).to_bytes(4, sys.byteorder) + b"\1" * 64
    )


def test_a_one_line_file_is_rewritten_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.write_text("a long line\nand another\n")
    for name in ("short", "longer-than-that", "x"):
        assert write_line(str(path), name) == name
        assert path.read_text() == name + "\n"


@pytest.mark.parametrize("before", [None, "", "uninitialized\n", "ab" * 16 + "\n"])
def test_a_machine_id_is_replaced_in_the_file_that_is_there_now(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "machine-id"
    if before is not None:
        path.write_text(before)
    file = MachineIdFile(str(path))
    file.prepare()
    assert len(path.read_text()) == 33
    for machine_id in ("12" * 16, "34" * 16):
        assert file.replace(machine_id) == machine_id
        assert path.read_text() == machine_id + "\n"
        path.write_text("something else\n")
    file.prepare()
    assert file.replace("56" * 16) == "56" * 16 and path.read_text() == "56" * 16 + "\n"
    file.close()


def test_the_hostname_file_is_made_to_say_what_the_kernel_says(tmp_path: Path) -> None:
    path, target = tmp_path / "hostname", tmp_path / "kernel"
    path.write_text("old\n")
    target.write_text("new\n")
    assert link_hostname(str(path), str(target)) and link_hostname(str(path), str(target))
    assert path.read_text() == "new\n" and len(list(tmp_path.iterdir())) == 2
    assert not link_hostname(str(tmp_path / "none/hostname"), str(target))


def test_a_rehearsal_touches_only_its_directory(tmp_path: Path) -> None:
    before = os.uname().nodename
    rehearsal = Rehearsal(str(tmp_path))
    rehearsal.prepare()
    rehearsal.add_entropy(bytes(64))
    assert rehearsal.list_scripts() == []
    assert rehearsal.set_hostname("rehearsed") == "rehearsed"
    assert rehearsal.set_machine_id("ab" * 16) == "ab" * 16
    assert abs(rehearsal.set_clock(10**18) - 10**18) < 10**9
    assert os.uname().nodename == before
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == ["hostname", "machine-id"]
    rehearsal.close()


def test_arguments_come_from_the_command_line_or_the_environment() -> None:
    assert parse_arguments([], {}) == (None, "")
    assert parse_arguments(["--fd", "5", "--root", "/r"], {}) == (5, "/r")
    assert parse_arguments([], {"FORKD_AGENT_FD": "6", "FORKD_AGENT_ROOT": "/e"}) == (6, "/e")
    for wrong in (["--fd"], ["--fd", "5"], ["what"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong, {})


@pytest.mark.parametrize(("there", "left"), [(300, 172), (128, 0), (5, 0), (0, 0)])
def test_what_a_device_has_drawn_ahead_is_thrown_away_and_nothing_is_waited_for(
    tmp_path: Path, there: int, left: int
) -> None:
    os.mkfifo(tmp_path / "hwrng")
    device = os.open(tmp_path / "hwrng", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(device, bytes(there))
        discard_drawn(str(tmp_path / "hwrng"))
        os.write(device, b"end")
        assert len(os.read(device, 1000)) == left + len(b"end")
    finally:
        os.close(device)


def test_without_such_a_device_nothing_is_thrown_away(tmp_path: Path) -> None:
    discard_drawn(str(tmp_path / "absent"))
