"""`forkd doctor` as a command: what it prints and how it exits."""

import json
from collections.abc import Callable

import pytest

from forkd.cli import doctor
from forkd.cli.parser import build_parser
from forkd.errors import HostLacks, InvalidInput
from forkd.host.finding import Finding, Status
from forkd.runtime.doctor import Diagnosis

Report = Callable[..., tuple[int, str]]

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
    args = build_parser("doctor").parse_args(["doctor", *words])
    status: int = args.func(args)
    return status


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """The exit status and the output for a diagnosis, or for this machine's own."""

    def run_with(diagnosis: Diagnosis | None, *words: str) -> tuple[int, str]:
        monkeypatch.delenv("FORKD_ENGINE", raising=False)
        if diagnosis is not None:
            monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
        return run(*words), capsys.readouterr().out

    return run_with


def test_the_report_has_every_finding_the_remedies_and_the_engine_last(report: Report) -> None:
    status, text = report(USABLE)
    assert status == 0
    assert max(map(len, text.splitlines())) <= 100
    assert all(each.name in text for each in USABLE.findings)
    assert "Use [another] machine" in text
    assert text.splitlines()[-1] == "Engine: qemu on tcg: KVM is not usable (too slow)"


def test_without_an_engine_the_exit_status_says_what_kind_of_problem_it_is(report: Report) -> None:
    status, text = report(NOTHING)
    assert status == HostLacks.exit_code == 5
    assert text.splitlines()[-1] == "No engine"
    status, text = report(NOTHING, "--json")
    assert (status, json.loads(text)["ok"]) == (5, False)


def test_json_has_these_keys(report: Report) -> None:
    status, text = report(USABLE, "--json")
    assert status == 0
    data = json.loads(text)
    assert set(data) == {"ok", "engine", "accelerator", "isolation", "reason", "findings"}
    assert (data["ok"], data["engine"], data["accelerator"]) == (True, "qemu", "tcg")
    assert [each["name"] for each in data["findings"]] == ["qemu", "kvm", "tun"]
    for each in data["findings"]:
        assert set(each) == {"name", "status", "found", "remedy"}
        assert each["status"] in {"ok", "warn", "fail", "info"}


def test_on_this_machine_the_command_and_its_json_agree(report: Report) -> None:
    status, text = report(None, "--json")
    data = json.loads(text)
    assert status == (0 if data["ok"] else 5)
    assert (data["engine"] is not None) == data["ok"]


def test_an_engine_nobody_knows_is_an_error_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_ENGINE", "warp")
    with pytest.raises(InvalidInput):
        run()
