"""From what was found on the host to which engine runs here, and why."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from forkd.errors import InvalidInput
from forkd.host.finding import Finding, Status
from forkd.host.probe import probe_host

ENGINES = ("firecracker", "qemu", "fake")
AUTO = "auto"

# Without these no VM runs, whatever the engine; the rest is needed for building images, or is comfort.
_NEEDED = ("system", "architecture", "python", "setpriv", "home", "runtime directory")

_JAILED = "a virtual machine each, under KVM, in a jail of Firecracker's"
_NOT_JAILED = "a virtual machine each, under KVM, confined by Firecracker's seccomp but by no jail"
_UNDER_KVM = "a virtual machine each, under KVM"
_EMULATED = "a virtual machine each, the processor emulated by QEMU"


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    engine: str | None
    accelerator: str | None
    isolation: str | None
    reason: str
    ok: bool


def diagnose(wanted: str | None = None) -> Diagnosis:
    """Look at this machine. Raises InvalidInput when `wanted`, or FORKD_ENGINE, names no engine of ours."""
    engine = parse_engine(os.environ.get("FORKD_ENGINE") if wanted is None else wanted)
    return choose(probe_host(), engine)


def parse_engine(name: str | None) -> str | None:
    """The engine asked for, None when the choice is ours."""
    if not name or name == AUTO:
        return None
    if name not in ENGINES:
        raise InvalidInput(f"There is no engine '{name}'", hint=f"Engines: {', '.join(ENGINES)}")
    return name


def choose(findings: Iterable[Finding], wanted: str | None = None) -> Diagnosis:
    """Pure: the same findings give the same engine. Never something weaker than a VM unless it was asked for."""
    seen = tuple(findings)
    if wanted == "fake":
        reason = "asked for; it is for tests and runs no VM"
        return Diagnosis(seen, "fake", None, "none", reason, True)
    by_name = {finding.name: finding for finding in seen}
    lacking = [name for name in _NEEDED if _status(by_name, name) in (Status.FAIL, None)]
    if lacking:
        return _none(seen, f"No engine can run here: see {', '.join(lacking)}")
    if wanted == "qemu":
        return _choose_qemu(seen, by_name, "asked for")
    lack = _find_lack(by_name, asked=wanted is not None)
    if lack is None:
        why = "asked for" if wanted else "the first choice"
        isolation = _JAILED if _status(by_name, "jailer") is Status.OK else _NOT_JAILED
        return Diagnosis(seen, "firecracker", "kvm", isolation, f"{why}, and KVM runs guests at speed", True)
    if wanted:
        found = by_name[lack].found if lack in by_name else "was not looked at"
        return _none(seen, f"The engine firecracker cannot run here: {lack}: {found}")
    return _choose_qemu(
        seen, by_name, "the best that runs here" if lack == "kvm" else f"firecracker cannot run (see {lack})"
    )


def _find_lack(by_name: dict[str, Finding], *, asked: bool) -> str | None:
    """What keeps Firecracker from running, if anything; what is only doubtful does not when it was asked for."""
    doubtful = (Status.OK, Status.WARN)
    wanted = {"kvm": (Status.OK,), "firecracker": doubtful if asked else (Status.OK,), "jailer": doubtful}
    return next((name for name, enough in wanted.items() if _status(by_name, name) not in enough), None)


def _choose_qemu(seen: tuple[Finding, ...], by_name: dict[str, Finding], why: str) -> Diagnosis:
    if _status(by_name, "qemu") in (Status.FAIL, None):
        return _none(seen, "No engine can run here: see qemu")
    usable = _status(by_name, "kvm") is Status.OK
    if usable and _status(by_name, "qemu with kvm") is Status.OK:
        return Diagnosis(seen, "qemu", "kvm", _UNDER_KVM, f"{why}, and KVM runs guests at speed", True)
    kvm = "this QEMU cannot use KVM" if usable else _why_not(by_name.get("kvm"))
    if _status(by_name, "tcg") is Status.OK:
        return Diagnosis(seen, "qemu", "tcg", _EMULATED, f"{why}; it emulates the processor, as {kvm}", True)
    return _none(seen, f"No engine can run here: QEMU cannot emulate, and {kvm}")


def _status(by_name: dict[str, Finding], name: str) -> Status | None:
    finding = by_name.get(name)
    return finding.status if finding else None


def _why_not(kvm: Finding | None) -> str:
    return f"KVM is not usable ({kvm.found.partition(':')[0]})" if kvm else "KVM was not looked at"


def _none(findings: tuple[Finding, ...], reason: str) -> Diagnosis:
    return Diagnosis(findings, None, None, None, reason, False)
