"""Cold starts of containers: what is rendered, by value; real ones, small, of each runtime that is installed."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench import containers
from bench.__main__ import print_report
from bench.containers import (
    ANSWER,
    COMMAND,
    RUNTIMES,
    Start,
    Way,
    compose_round,
    find_complaint,
    install,
    list_ways,
    measure_containers,
    mounted_root,
    render_config,
    render_delete,
    render_start,
    run_starts,
)
from bench.figures import Round, Run, by_name, joined
from bench.report import SECTIONS, render_report, render_run
from forkd.errors import HostLacks
from forkd.host.tools import find_program
from forkd.image import Image
from forkd.image.spec import Silent

SCRATCH = Path("/s")
PTRACE = ("-ignore-cgroups", "-network=none", "-platform=ptrace")
SYSTRAP = ("-ignore-cgroups", "-network=none", "-platform=systrap")
SYSTRAP_NOTE = "runsc -ignore-cgroups -network=none -platform=systrap, 4 at once: exit status 128: no"
# Others may run this test at the same time.
SLEEP = ("/bin/sleep", f"86399.{os.getpid()}")
DEADLINE_S = 20.0


def needs(runtime: str) -> None:
    if find_program(runtime) is None:
        pytest.skip(f"{runtime} is not installed: apt install {RUNTIMES[runtime]}")
    if os.geteuid() != 0 and runtime != "bwrap":
        pytest.skip(f"{runtime} is run as root here")


def section_of(*parts: Round) -> dict[str, Any]:
    settings = {"n": 2, "root": "mounted", "runtimes": {"runc": {"at_once": 4}}, "notes": [SYSTRAP_NOTE]}
    run = Run("2024-01-01T00:00:00+0000", {"cpu": "Example 1"}, settings, [joined(parts)])
    section = json.loads(json.dumps(render_run("containers", run)))
    assert isinstance(section, dict)
    return section


def find_using(scratch: Path) -> list[str]:
    """Processes that speak of the scratch directory, mounts in it, what runs in its containers, their groups."""
    found = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(scratch) in line]
    for bundle in scratch.glob("forkd-bench-*"):
        found += map(str, Path("/sys/fs/cgroup").glob(f"**/{bundle.name}"))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(scratch) in words or " ".join(SLEEP) in words:
            found.append(words)
    return found


def wait_for(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def fake_program(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_a_bundle_runs_our_command_on_the_image_read_only_in_namespaces_of_its_own() -> None:
    config = render_config(Path("/s/root"), "forkd-bench-1")
    assert config["root"] == {"path": "/s/root", "readonly": True}
    assert config["process"] == {
        "user": {"uid": 0, "gid": 0},
        "args": ["/usr/bin/python3", "-c", "import numpy; print(numpy.zeros(5).tolist())"],
        "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"],
        "cwd": "/",
        "capabilities": {},
        "noNewPrivileges": True,
    }
    assert config["mounts"][0] == {"destination": "/proc", "type": "proc", "source": "proc"}
    assert [mount["destination"] for mount in config["mounts"]] == ["/proc", "/dev", "/sys", "/tmp"]
    assert config["linux"]["cgroupsPath"] == "/forkd-bench-1"
    assert [space["type"] for space in config["linux"]["namespaces"]] == ["pid", "network", "ipc", "uts", "mount"]


@pytest.mark.parametrize("runtime, flags", [("runc", ()), ("runsc", PTRACE)])
def test_an_oci_runtime_is_given_its_state_and_the_bundle(runtime: str, flags: tuple[str, ...]) -> None:
    way = Way(runtime, SCRATCH, 4, flags)
    begin = [runtime, "--root=/s/state", *flags]
    assert render_start(way, "one") == [*begin, "run", "--bundle=/s/one", "one"]
    assert render_delete(way, "one") == [*begin, "delete", "--force", "one"]


def test_bwrap_is_given_everything_by_its_command_line() -> None:
    way = Way("bwrap", SCRATCH, 4)
    words = "bwrap --unshare-all --hostname bench --die-with-parent --new-session --clearenv"
    words += " --setenv PATH /usr/sbin:/usr/bin:/sbin:/bin --setenv LC_ALL C.UTF-8"
    words += " --ro-bind /s/root / --proc /proc --dev /dev --tmpfs /tmp --chdir / --"
    assert render_start(way, "one") == [*words.split(), *COMMAND]
    assert render_delete(way, "one") == []


def test_as_many_at_once_as_two_for_each_core_are_tried_before_one_at_a_time() -> None:
    assert [(way.at_once, way.flags) for way in list_ways("bwrap", SCRATCH, 2)] == [(4, ()), (1, ())]
    tried = [(way.at_once, way.flags) for way in list_ways("runsc", SCRATCH, 2)]
    assert tried == [(4, SYSTRAP), (4, PTRACE), (1, SYSTRAP), (1, PTRACE)]


def test_only_the_right_answer_with_a_good_end_is_right() -> None:
    assert ANSWER == b"[0.0, 0.0, 0.0, 0.0, 0.0]\n"
    assert find_complaint(ANSWER, b"", 0) == ""
    assert find_complaint(ANSWER, b"", 1) == "exit status 1: [0.0, 0.0, 0.0, 0.0, 0.0]"
    assert find_complaint(b"[0.0]\n", b"", 0) == "exit status 0: [0.0]"
    assert find_complaint(b"", b"one\ntwo\n", 128) == "exit status 128: two"
    assert find_complaint(b"", b"", -9) == "exit status -9: nothing printed"


def test_a_round_has_the_time_of_all_and_of_each() -> None:
    done = compose_round("runc", [Start(10.0, ""), Start(30.0, "")], 0.5)
    values = by_name(done.readings)
    assert values["containers.runc.2.wall"] == 0.5 and values["containers.runc.2.ok"] == 2
    assert 10 <= values["containers.runc.2.p50"] <= values["containers.runc.2.p99"] <= 30
    assert done.failures == ()


def test_a_wrong_answer_is_a_failure_and_no_time() -> None:
    done = compose_round("runc", [Start(10.0, ""), Start(99.0, "exit status 1: no")], 0.5)
    assert by_name(done.readings) == {
        f"containers.runc.2.{key}": size for key, size in {"p50": 10, "p99": 10, "ok": 1}.items()
    }
    assert done.failures == ("containers, runc: 1 of 2 starts failed: exit status 1: no",)
    none = compose_round("runc", [Start(99.0, "exit status 1: no")], 0.5)
    assert by_name(none.readings) == {"containers.runc.1.ok": 0}


def test_the_table_says_what_was_measured_how_and_why_some_was_not() -> None:
    done = compose_round("runc", [Start(10.0, ""), Start(10.0, "")], 0.5)
    text = render_report({"containers": section_of(done, Round({}, ("containers, runsc: not here",)))})
    assert text.startswith("### Containers with the same image and code\n\n| 2 cold starts | all of them |")
    assert "| runc | 0.500 s | 10 ms | 10 ms | 2 starts | 4 |\n| runsc | - | - | - | - | - |\n" in text
    assert f"- did not work: {SYSTRAP_NOTE}\n- containers, runsc: not here\n" in text


def test_a_runtime_that_cannot_be_used_fails_the_run_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert "containers" in SECTIONS
    good = section_of(compose_round("runc", [Start(9999.0, "")] * 2, 99.0))
    assert print_report({"containers": good}, {"containers"}, []) == 0, "slow is not a failure"
    bad = section_of(Round({}, ("containers, runsc: not here",)))
    assert print_report({"containers": bad}, {"containers"}, []) == 1
    assert capsys.readouterr().err == "failed: containers, runsc: not here\n"


def test_what_is_not_installed_is_asked_of_apt_and_a_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    fake_program(tmp_path, "apt-get", f"echo $* >> {tmp_path}/asked; echo 'E: no such package'; exit 100", monkeypatch)
    with pytest.raises(HostLacks) as caught:
        install("no-such-program", "no-such-package")
    assert caught.value.message.startswith("Installing no-such-package failed")
    assert caught.value.details == "E: no such package"
    assert (tmp_path / "asked").read_text().splitlines() == [
        "update",
        "install --yes --no-install-recommends no-such-package",
    ]


def test_who_is_not_root_installs_nothing_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostLacks, match="only root"):
        install("no-such-program", "no-such-package")
    install("sh", "dash")


def test_what_cannot_be_mounted_is_unpacked(
    python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    fake_program(tmp_path / "bin", "mount", "echo 'unknown filesystem type'; exit 32", monkeypatch)
    with mounted_root(python_image.root, tmp_path) as how:
        assert (tmp_path / "root/usr/bin/python3").exists()
    assert how.startswith("unpacked: host_lacks: Mounting the image failed") and "unknown filesystem type" in how


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_runtime_starts_the_image_and_leaves_nothing(
    runtime: str, python_image: Image, tmp_path: Path, nothing_left: None
) -> None:
    needs(runtime)
    run = asyncio.run(measure_containers(python_image.root, tmp_path, 2, Silent(), [runtime]))
    [done] = run.rounds
    assert done.failures == ()
    readings = by_name(done.readings)
    assert readings[f"containers.{runtime}.2.ok"] == 2
    assert all(readings[f"containers.{runtime}.2.{name}"] > 0 for name in ("wall", "p50", "p99"))
    assert run.settings["runtimes"][runtime]["version"]
    assert str(tmp_path) not in json.dumps(run.settings["runtimes"])
    assert find_using(tmp_path) == []


def test_a_runtime_that_is_missing_is_a_failure_and_the_others_are_measured(
    python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("bwrap")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setitem(RUNTIMES, "no-such", "no-such-package")
    run = asyncio.run(measure_containers(python_image.root, tmp_path, 1, Silent(), ["no-such", "bwrap"]))
    [done] = run.rounds
    assert len(done.failures) == 1 and done.failures[0].startswith("containers, no-such: host_lacks: no-such is not")
    assert [each.name for each in done.readings if "no-such" in each.name] == []
    assert by_name(done.readings)["containers.bwrap.1.ok"] == 1


def run_on_image(image: Image, scratch: Path, work: Callable[[], Awaitable[None]]) -> None:
    """And nothing of it is left."""

    async def run() -> None:
        with mounted_root(image.root, scratch):
            await work()

    asyncio.run(run())
    assert wait_for(lambda: find_using(scratch) == []), find_using(scratch)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_does_not_end_is_killed_and_put_away(
    runtime: str, python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    needs(runtime)
    monkeypatch.setattr(containers, "COMMAND", SLEEP)
    monkeypatch.setattr(containers, "_START_DEADLINE_S", 2.0)
    monkeypatch.setattr(containers, "_END_DEADLINE_S", 1.0)

    async def work() -> None:
        starts, _ = await run_starts(list_ways(runtime, tmp_path, 1)[-1], 1)
        assert [start.complaint for start in starts] == ["no end within 2 s"]

    run_on_image(python_image, tmp_path, work)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_interrupted_run_leaves_nothing(
    runtime: str, python_image: Image, tmp_path: Path, nothing_left: None
) -> None:
    needs(runtime)

    async def work() -> None:
        way = Way(runtime, tmp_path, 2, PTRACE if runtime == "runsc" else ())
        task = asyncio.create_task(run_starts(way, 50))
        # Beside the mount, which is there all the time.
        await asyncio.to_thread(wait_for, lambda: len(find_using(tmp_path)) > 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_on_image(python_image, tmp_path, work)
