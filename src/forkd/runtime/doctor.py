"""From what was found on the host to which engine runs here, and why."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from forkd.engines.base import Engine, Findings, Opening
from forkd.engines.table import ENGINES, get_entry
from forkd.errors import HostLacks, InvalidInput
from forkd.host.finding import Finding, Status
from forkd.host.probe import NEEDED, probe_host

AUTO = "auto"


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    engine: str | None  # which one runs; None for the reason given
    accelerator: str | None
    isolation: str | None
    reason: str
    ok: bool


_OPENING = Opening()


def open_engine(name: str | None = None, opening: Opening = _OPENING) -> Engine:
    """The engine asked for, or the best that this machine was proved to run.

    Raises HostLacks, with what doctor found, where no VM can run.
    """
    engine = _wanted(name)
    # An engine without VMs needs nothing of the host.
    needs_host = engine is None or get_entry(engine).runs_vms
    diagnosis = choose(probe_host() if needs_host else (), engine)
    if diagnosis.engine is None:
        raise HostLacks(diagnosis.reason, hint="See: forkd doctor")
    return get_entry(diagnosis.engine).open(diagnosis.accelerator, opening)


def diagnose(wanted: str | None = None) -> Diagnosis:
    """Look at this machine. Raises InvalidInput when `wanted`, or FORKD_ENGINE, is not an engine of forkd."""
    return choose(probe_host(), _wanted(wanted))


def _wanted(name: str | None) -> str | None:
    return parse_engine(os.environ.get("FORKD_ENGINE") if name is None else name)


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
    found = Findings({finding.name: finding for finding in seen})
    entries = [get_entry(name) for name in ([wanted] if wanted else ENGINES)]
    lacking = [name for name in NEEDED if found.status(name) in (Status.FAIL, None)]
    if lacking and any(entry.runs_vms for entry in entries):
        return _none(seen, f"No engine can run here: see {', '.join(lacking)}")
    why = "asked for" if wanted else "the first choice"
    refused: list[str] = []
    for entry in entries:
        verdict = entry.judge(Findings({name: found[name] for name in entry.checks if name in found}), bool(wanted))
        if verdict.lack is None:
            return Diagnosis(seen, entry.name, verdict.accelerator, verdict.isolation, why + verdict.why, True)
        # That KVM is not usable the next engine says itself.
        why = "the best that runs here" if verdict.lack == "kvm" else f"{entry.name} is not chosen (see {verdict.lack})"
        if entry.runs_vms:
            refused.append(f"{entry.name} cannot run here: {verdict.why}")
    return _none(seen, f"The engine {'; '.join(refused)}")


def _none(findings: tuple[Finding, ...], reason: str) -> Diagnosis:
    return Diagnosis(findings, None, None, None, reason, False)
