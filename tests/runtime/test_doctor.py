"""From findings to an engine, by value."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidInput
from forkd.host.finding import Finding, Status
from forkd.runtime.doctor import Diagnosis, choose, diagnose, parse_engine

GOOD = {
    name: Finding(name, Status.OK, "fine")
    for name in (
        "system", "architecture", "python", "qemu", "tcg", "kvm", "setpriv", "mmdebstrap", "memory", "home",
        "runtime directory",
    )
}  # fmt: skip
SLOW_KVM = Finding("kvm", Status.WARN, "too slow: guest code runs 4,900 times slower (module kvm_pvm)")


def choose_with(*changed: Finding, wanted: str | None = None) -> Diagnosis:
    return choose({**GOOD, **{each.name: each for each in changed}}.values(), wanted)


def failed(name: str) -> Finding:
    return Finding(name, Status.FAIL, "not there", "Get it")


def test_with_usable_kvm_qemu_uses_it() -> None:
    diagnosis = choose_with()
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.ok) == ("qemu", "kvm", True)
    assert "KVM" in (diagnosis.isolation or "")


def test_kvm_that_is_there_and_unusable_falls_back_to_emulation_and_says_so() -> None:
    diagnosis = choose_with(SLOW_KVM)
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.ok) == ("qemu", "tcg", True)
    assert "KVM is not usable (too slow)" in diagnosis.reason
    assert "emulated" in (diagnosis.isolation or "")


def test_without_emulation_usable_kvm_is_enough() -> None:
    assert choose_with(failed("tcg")).accelerator == "kvm"


def test_with_neither_there_is_no_engine() -> None:
    diagnosis = choose_with(failed("tcg"), SLOW_KVM)
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.isolation, diagnosis.ok) == (None, None, None, False)
    assert "too slow" in diagnosis.reason


@pytest.mark.parametrize("name", ["system", "architecture", "qemu", "setpriv", "home", "runtime directory"])
def test_each_thing_every_vm_needs_is_named_when_it_lacks(name: str) -> None:
    diagnosis = choose_with(failed(name))
    assert not diagnosis.ok
    assert name in diagnosis.reason


def test_what_only_image_building_needs_does_not_stop_an_engine() -> None:
    assert choose_with(failed("mmdebstrap"), failed("memory")).ok


def test_something_needed_that_was_not_looked_at_is_not_taken_for_granted() -> None:
    findings = [each for name, each in GOOD.items() if name != "runtime directory"]
    assert not choose(findings).ok


def test_the_engine_asked_for_is_the_reason() -> None:
    assert "asked for" in choose_with(wanted="qemu").reason


def test_asking_for_an_engine_does_not_make_it_run() -> None:
    assert not choose_with(failed("qemu"), wanted="qemu").ok


def test_the_fake_engine_runs_only_when_asked_for_and_claims_no_isolation() -> None:
    diagnosis = choose((), "fake")
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.isolation, diagnosis.ok) == ("fake", None, "none", True)
    assert not choose(()).ok


@pytest.mark.parametrize("name", ["firecracker", "kvm", "QEMU", "docker"])
def test_an_engine_that_does_not_exist_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=name):
        parse_engine(name)
    monkeypatch.setenv("FORKD_ENGINE", name)
    with pytest.raises(InvalidInput):
        diagnose()


def test_an_empty_wish_is_no_wish() -> None:
    assert parse_engine("") is None
    assert parse_engine(None) is None


def test_the_findings_are_handed_on_as_they_are() -> None:
    findings = tuple(GOOD.values())
    assert choose(findings).findings == findings
