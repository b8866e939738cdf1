"""Everything `forkd doctor` looks at, in the order it is told. Looking changes nothing and ends within seconds."""

from __future__ import annotations

from collections.abc import Callable

from forkd.host.capacity import probe_memory, probe_open_files, probe_processes
from forkd.host.cgroup_probe import probe_cgroup, probe_enforcement
from forkd.host.devices import probe_tun, probe_userfaultfd
from forkd.host.finding import Finding, Status
from forkd.host.firecracker import probe_firecracker
from forkd.host.kvm_probe import KvmVerdict, probe_kvm
from forkd.host.places import probe_places
from forkd.host.procfork.trial import probe_live_forks
from forkd.host.programs import (
    judge_qemu_kvm,
    judge_tcg,
    probe_accelerators,
    probe_busybox,
    probe_erofs,
    probe_mmdebstrap,
    probe_optional,
    probe_qemu,
    probe_setpriv,
)
from forkd.host.system import probe_architecture, probe_python, probe_system
from forkd.host.userns import probe_image_building

Probe = Callable[[], tuple[Finding, ...]]


def probe_host() -> tuple[Finding, ...]:
    return tuple(finding for name, probe in _PROBES.items() for finding in guarded(name, probe))


def guarded(name: str, probe: Probe) -> tuple[Finding, ...]:
    """A probe that breaks on an odd machine is a finding too, not the end of the others."""
    try:
        return probe()
    except Exception as error:
        return (Finding(name, Status.WARN, f"could not be looked at: {type(error).__name__}: {error}"),)


def _probe_acceleration() -> tuple[Finding, ...]:
    accelerators = probe_accelerators()
    return judge_tcg(accelerators), judge_qemu_kvm(accelerators), judge_kvm(probe_kvm())


def judge_kvm(verdict: KvmVerdict) -> Finding:
    """Without it guests run slower and not at all in Firecracker, so its lack is never a failure.

    What is found begins with the state in a word or two and a colon.
    """
    found = f"{verdict.state.value}: {verdict.explanation} ({verdict.hints})"
    return Finding("kvm", Status.OK if verdict.usable else Status.WARN, found, verdict.remedy)


def _alone(probe: Callable[[], Finding]) -> Probe:
    return lambda: (probe(),)


_PROBES: dict[str, Probe] = {
    "system": _alone(probe_system),
    "architecture": _alone(probe_architecture),
    "python": _alone(probe_python),
    "qemu": _alone(probe_qemu),
    "kvm": _probe_acceleration,
    "firecracker": probe_firecracker,
    "setpriv": _alone(probe_setpriv),
    "live forks": _alone(probe_live_forks),
    "mmdebstrap": _alone(probe_mmdebstrap),
    "mkfs.erofs": _alone(probe_erofs),
    "busybox": _alone(probe_busybox),
    "namespaces": _alone(probe_image_building),
    "memory": _alone(probe_memory),
    "home": probe_places,
    "open files": _alone(probe_open_files),
    "processes": _alone(probe_processes),
    "cgroup v2": _alone(probe_cgroup),
    "limits": _alone(probe_enforcement),
    "userfaultfd": _alone(probe_userfaultfd),
    "tun": _alone(probe_tun),
    "nft": _alone(lambda: probe_optional("nft", "for networks of sandboxes, later")),
}
