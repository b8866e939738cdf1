"""From findings to an engine, by value."""

import pytest

from forkd.errors import InvalidInput
from forkd.host.finding import Finding, Status
from forkd.runtime.doctor import Diagnosis, choose, diagnose, parse_engine

GOOD = {
    name: Finding(name, Status.OK, "fine")
    for name in (
        "system", "architecture", "python", "qemu", "tcg", "qemu with kvm", "kvm", "firecracker", "jailer", "setpriv",
        "mmdebstrap", "memory", "home", "runtime directory",
    )
}  # fmt: skip
NO_FIRECRACKER = Finding("firecracker", Status.INFO, "not installed")
NO_JAIL = Finding("jailer", Status.WARN, "no jail", "Run forkd as root")
DOUBTFUL = Finding("firecracker", Status.WARN, "1.7.0: has no ACPI", "Install another")
SLOW_KVM = Finding("kvm", Status.WARN, "too slow: guest code runs 4,900 times slower (module kvm_pvm)")


def choose_with(*changed: Finding, wanted: str | None = None) -> Diagnosis:
    return choose({**GOOD, **{each.name: each for each in changed}}.values(), wanted)


def failed(name: str) -> Finding:
    return Finding(name, Status.FAIL, "not there", "Get it")


@pytest.mark.parametrize(
    ("found", "wanted", "engine", "accelerator", "reason", "isolation"),
    [
        ((), None, "firecracker", "kvm", "", "in a jail"),
        ((failed("qemu"), failed("tcg"), failed("qemu with kvm")), None, "firecracker", "kvm", "", ""),
        ((NO_JAIL,), None, "qemu", "kvm", "firecracker is not chosen (see jailer)", "KVM"),
        ((NO_JAIL, failed("qemu with kvm")), None, "qemu", "tcg", "this QEMU cannot use KVM", "emulated"),
        ((NO_JAIL,), "firecracker", "firecracker", "kvm", "asked for", "no jail"),
        ((DOUBTFUL,), "firecracker", "firecracker", "kvm", "", ""),
        ((NO_FIRECRACKER, failed("qemu with kvm")), None, "qemu", "tcg", "this QEMU cannot use KVM", ""),
        ((SLOW_KVM,), None, "qemu", "tcg", "KVM is not usable (too slow)", "emulated"),
        ((NO_FIRECRACKER, failed("tcg")), None, "qemu", "kvm", "", ""),
    ],
    ids=[
        "all is there",
        "firecracker needs no qemu",
        "without a jail there is no cell, and qemu has one",
        "nor for speed",
        "without a jail when it is asked for",
        "a doubtful firecracker when it is asked for",
        "a qemu without kvm emulates",
        "unusable kvm is not used",
        "kvm is enough without emulation",
    ],
)
def test_the_engine_follows_from_what_is_found(
    found: tuple[Finding, ...], wanted: str | None, engine: str, accelerator: str, reason: str, isolation: str
) -> None:
    diagnosis = choose_with(*found, wanted=wanted)
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.ok) == (engine, accelerator, True)
    assert reason in diagnosis.reason
    assert isolation in (diagnosis.isolation or "")


@pytest.mark.parametrize(
    "lack", [NO_FIRECRACKER, failed("firecracker"), DOUBTFUL, failed("jailer"), Finding("jailer", Status.INFO, "?")]
)
def test_where_firecracker_cannot_run_qemu_uses_kvm_and_the_reason_names_the_check(lack: Finding) -> None:
    diagnosis = choose_with(lack)
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.ok) == ("qemu", "kvm", True)
    assert "KVM" in (diagnosis.isolation or "")
    assert f"see {lack.name}" in diagnosis.reason


@pytest.mark.parametrize("lack", [SLOW_KVM, NO_FIRECRACKER, failed("firecracker"), failed("jailer")])
def test_firecracker_asked_for_where_it_cannot_run_is_refused_with_what_was_found(lack: Finding) -> None:
    diagnosis = choose_with(lack, wanted="firecracker")
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.ok) == (None, None, False)
    assert lack.found in diagnosis.reason


def test_a_firecracker_without_a_jail_is_never_chosen() -> None:
    diagnosis = choose_with(NO_JAIL, failed("qemu"))
    assert (diagnosis.engine, diagnosis.ok) == (None, False)
    assert "no jail" in diagnosis.reason


def test_with_neither_there_is_no_engine() -> None:
    diagnosis = choose_with(failed("tcg"), SLOW_KVM)
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.isolation, diagnosis.ok) == (None, None, None, False)
    assert "too slow" in diagnosis.reason


@pytest.mark.parametrize("name", ["system", "architecture", "qemu", "setpriv", "home", "runtime directory"])
def test_each_thing_every_vm_needs_is_named_when_it_lacks(name: str) -> None:
    diagnosis = choose_with(failed(name), NO_FIRECRACKER)
    assert not diagnosis.ok
    assert name in diagnosis.reason


def test_what_only_image_building_needs_does_not_stop_an_engine() -> None:
    assert choose_with(failed("mmdebstrap"), failed("memory")).ok


def test_something_needed_that_was_not_looked_at_is_not_taken_for_granted() -> None:
    findings = [each for name, each in GOOD.items() if name != "runtime directory"]
    assert not choose(findings).ok


def test_the_engine_asked_for_is_the_reason() -> None:
    for engine in ("qemu", "firecracker"):
        diagnosis = choose_with(wanted=engine)
        assert diagnosis.engine == engine and "asked for" in diagnosis.reason


def test_asking_for_an_engine_does_not_make_it_run() -> None:
    assert not choose_with(failed("qemu"), wanted="qemu").ok


def test_the_fake_engine_runs_only_when_asked_for_and_claims_no_isolation() -> None:
    diagnosis = choose((), "fake")
    assert (diagnosis.engine, diagnosis.accelerator, diagnosis.isolation, diagnosis.ok) == ("fake", None, "none", True)
    assert not choose(()).ok


@pytest.mark.parametrize("name", ["Firecracker", "kvm", "QEMU", "docker"])
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
