"""The probes under `forkd doctor`: by value where they judge, on this machine where they look."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import forkd
from forkd.host import paths, probe, tools
from forkd.host.finding import Finding, Status
from forkd.host.kvm import KvmHints, KvmState, KvmVerdict
from forkd.host.probe import guarded, judge_kvm, probe_host

GIB = 1 << 30
NAMES = [
    "system", "architecture", "python", "qemu", "tcg", "qemu with kvm", "kvm", "firecracker", "jailer", "setpriv",
    "live forks", "cells", "mmdebstrap", "mkfs.erofs", "busybox", "namespaces", "memory", "home", "runtime directory",
    "open files", "processes", "cgroup v2", "limits", "userfaultfd", "network",
]  # fmt: skip


# --- all of them ---


def test_this_machine_is_looked_at_in_order_and_in_time() -> None:
    began = time.monotonic()
    findings = probe_host()
    assert time.monotonic() - began < 10.0
    assert [each.name for each in findings] == NAMES
    assert all(each.found for each in findings)
    assert all(each.remedy for each in findings if each.status is Status.FAIL)


def test_looking_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path / "home"))
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as place:  # as short as it has to be
        monkeypatch.setenv("FORKD_RUNTIME_DIR", f"{place}/absent")
        findings = {each.name: each for each in probe_host()}
        assert not list(Path(place).iterdir())
    assert not list(tmp_path.iterdir())
    assert str(tmp_path / "home") in findings["home"].found
    assert findings["runtime directory"].status is Status.OK


def test_a_probe_that_breaks_is_a_finding() -> None:
    def broken() -> tuple[Finding, ...]:
        raise ValueError("odd machine")

    (finding,) = guarded("memory", broken)
    assert finding.status is Status.WARN
    assert "odd machine" in finding.found


def test_an_empty_path_lacks_the_tools_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(tools, "_SBIN", "/nonexistent")
    findings = {each.name: each for each in probe_host()}
    for name in ("qemu", "tcg", "setpriv", "mmdebstrap", "mkfs.erofs", "busybox", "namespaces"):
        assert findings[name].status is Status.FAIL, name
        assert "install" in (findings[name].remedy or "").lower(), name


def test_another_user_than_root_gets_findings_and_no_crash() -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv to become someone else")
    someone = [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups", "--", sys.executable, "-B"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(forkd.__file__).parents[1])}
    if subprocess.run([*someone, "-c", "import forkd"], env=environment, check=False, capture_output=True).returncode:
        pytest.skip("the interpreter or the package is closed to other users")
    code = "from forkd.host.probe import probe_host; print(*(f.name for f in probe_host()), sep='|')"
    done = subprocess.run(
        [*someone, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip().split("|") == NAMES
    assert not done.stderr


# --- programs ---


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)", (7, 2, 22)),
        ("QEMU emulator version 10.0", (10, 0)),
        ("mkfs.erofs 1.5", (1, 5)),
        ("nothing here", None),
        ("", None),
    ],
)
def test_versions_are_read_from_what_programs_print(text: str, version: tuple[int, ...] | None) -> None:
    assert tools.parse_version(text) == version


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ((7, 2), Status.OK),
        ((10, 0, 1), Status.OK),
        ((7, 1, 9), Status.FAIL),
        ((6, 2), Status.FAIL),
        (None, Status.FAIL),
    ],
)
def test_qemu_must_be_new_enough(version: tuple[int, ...] | None, status: Status) -> None:
    assert probe.judge_qemu("/usr/bin/qemu-system-x86_64", version).status is status


def test_accelerators_are_lines_of_their_own() -> None:
    text = "Accelerators supported in QEMU binary:\ntcg\nkvm\nxen\n"
    assert probe.parse_accelerators(text) == {"tcg", "kvm"}
    assert probe.parse_accelerators("tcg is not here") == frozenset()
    assert probe.judge_tcg(frozenset({"kvm"})).status is Status.FAIL


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / probe.QEMU
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "_ANSWER_S", 0.2)
    began = time.monotonic()
    assert probe.probe_qemu().status is Status.FAIL
    assert time.monotonic() - began < 5.0


def test_static_means_that_no_loader_is_asked_for(tmp_path: Path) -> None:
    assert not probe.is_static(Path(sys.executable).read_bytes())
    assert not probe.is_static(b"#!/bin/sh\n")
    assert not probe.is_static(b"\x7fELF\x02\x01" + b"\xff" * 60)
    busybox = shutil.which("busybox")
    if busybox:
        done = subprocess.run(["ldd", busybox], capture_output=True, text=True, check=False)
        assert probe.is_static(Path(busybox).read_bytes()) == (done.returncode != 0)


def test_a_dynamic_busybox_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "busybox").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = probe.probe_busybox()
    assert finding.status is Status.FAIL
    assert "busybox-static" in (finding.remedy or "")


# --- KVM as a finding ---


def test_kvm_is_judged_by_itself_and_qemu_by_what_it_was_built_with() -> None:
    usable = KvmVerdict(KvmState.USABLE, "fast", None, KvmHints(("kvm_amd",), "svm"))
    assert judge_kvm(usable).status is Status.OK
    assert probe.judge_qemu_kvm(frozenset({"tcg", "kvm"})).status is Status.OK
    without = probe.judge_qemu_kvm(frozenset({"tcg"}))
    assert without.status is Status.WARN and without.remedy


@pytest.mark.parametrize("state", [state for state in KvmState if state is not KvmState.USABLE])
def test_kvm_that_cannot_be_used_warns_with_its_state_first(state: KvmState) -> None:
    finding = judge_kvm(KvmVerdict(state, "because"))
    assert finding.status is Status.WARN
    assert finding.found.startswith(f"{state.value}: ")


# --- the machine ---


def test_only_one_architecture_runs() -> None:
    assert probe.judge_architecture("x86_64").status is Status.OK
    assert probe.judge_architecture("aarch64").status is Status.FAIL


def test_python_must_be_new_enough() -> None:
    assert probe.judge_python((3, 13, 1), "python").status is Status.OK
    assert probe.judge_python((3, 10, 9), "python").status is Status.FAIL


# --- places ---


def test_a_home_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = paths.probe_home(tmp_path / "file" / "home")
    assert finding.status is Status.FAIL
    assert "FORKD_HOME" in (finding.remedy or "")


def test_a_runtime_path_that_is_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_RUNTIME_DIR", "/tmp/" + "x" * 100)
    (runtime,) = guarded("runtime directory", paths.probe_runtime)
    assert runtime.status is Status.FAIL
    assert "FORKD_RUNTIME_DIR" in (runtime.remedy or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_runtime_directory_of_someone_else_is_a_failure(tmp_path: Path) -> None:
    theirs = tmp_path / "run"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    assert paths.probe_runtime(theirs).status is Status.FAIL


# --- namespaces and devices ---


def test_only_another_user_than_root_needs_a_user_namespace() -> None:
    assert "--map-auto" in tools.render_namespaced(["true"], unshare="unshare", as_root=False)
    assert "--user" not in tools.render_namespaced(["true"], unshare="unshare", as_root=True)


def test_refused_namespaces_say_what_to_allow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "subuid" in tools.namespace_hint(as_root=False)
    assert "CAP_SYS_ADMIN" in tools.namespace_hint(as_root=True)
    (tmp_path / "unshare").write_text("#!/bin/sh\necho not permitted; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    (tmp_path / "newuidmap").symlink_to("unshare")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = guarded("namespaces", probe.probe_image_building)
    assert finding.status is Status.FAIL
    assert finding.found.endswith("not permitted")
    assert finding.remedy == tools.namespace_hint(as_root=os.geteuid() == 0)


def test_missing_devices_are_only_worth_a_note(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert probe.probe_userfaultfd(nothing, nothing, nothing).found == "not in this kernel"
