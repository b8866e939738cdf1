"""`forkd doctor` as a command: what it prints and how it exits."""

from __future__ import annotations

import argparse
import json

import pytest

from forkd.cli import doctor
from forkd.errors import HostLacks, InvalidInput
from forkd.host.finding import Finding, Status
from forkd.runtime.doctor import Diagnosis

LONG = "too slow: " + "guest code runs far slower than the host's, " * 4
USABLE = Diagnosis(
    findings=(
        Finding("qemu", Status.OK, "7.2.22 at /usr/bin/qemu-system-x86_64"),
        Finding("kvm", Status.WARN, LONG, "Use [another] machine"),
        Finding("tun", Status.INFO, "no /dev/net/tun"),
    ),
    engine="qemu",
    accelerator="tcg",
    isolation="a virtual machine each",
    reason="KVM is not usable (too slow)",
    ok=True,
)
NOTHING = Diagnosis(
    (Finding("qemu", Status.FAIL, "not installed", "apt install"),), None, None, None, "No engine", False
)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", *words])
    status: int = args.func(args)
    return status


def given(monkeypatch: pytest.MonkeyPatch, diagnosis: Diagnosis) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)


def test_the_report_has_every_finding_the_remedies_and_the_engine_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, USABLE)
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert all(each.name in text for each in USABLE.findings)
    assert "Use [another] machine" in text
    assert lines[-1] == "Engine: qemu on tcg: KVM is not usable (too slow)"


def test_without_an_engine_the_exit_status_says_what_kind_of_problem_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, NOTHING)
    assert run() == HostLacks.exit_code == 5
    assert capsys.readouterr().out.splitlines()[-1] == "No engine"
    assert run("--json") == 5
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_json_has_these_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given(monkeypatch, USABLE)
    assert run("--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"ok", "engine", "accelerator", "isolation", "reason", "findings"}
    assert (data["ok"], data["engine"], data["accelerator"]) == (True, "qemu", "tcg")
    assert [each["name"] for each in data["findings"]] == ["qemu", "kvm", "tun"]
    for each in data["findings"]:
        assert set(each) == {"name", "status", "found", "remedy"}
        assert each["status"] in {"ok", "warn", "fail", "info"}


def test_on_this_machine_the_command_and_its_json_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORKD_ENGINE", raising=False)
    status = run("--json")
    data = json.loads(capsys.readouterr().out)
    assert status == (0 if data["ok"] else 5)
    assert (data["engine"] is not None) == data["ok"]


def test_an_engine_nobody_knows_is_an_error_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_ENGINE", "warp")
    with pytest.raises(InvalidInput):
        run()
