"""The engine `qemu`: when it runs on a host, and how it is opened."""

from __future__ import annotations

from forkd.engines.base import Engine, Entry, Findings, Opening, Verdict
from forkd.host.finding import Status
from forkd.host.user_ids import DEFAULT_USERS

_UNDER_KVM = "a virtual machine each, under KVM"
_EMULATED = "a virtual machine each, the processor emulated by QEMU"


def judge(found: Findings, asked: bool) -> Verdict:
    """With KVM where that is usable, else emulated."""
    if found.status("qemu") in (Status.FAIL, None):
        return Verdict(f"qemu: {found.text('qemu')}", lack="qemu")
    usable = found.status("kvm") is Status.OK
    if usable and found.status("qemu with kvm") is Status.OK:
        return Verdict(", and KVM runs guests at speed", "kvm", _UNDER_KVM)
    state = found.text("kvm").partition(":")[0]
    no_kvm = "this QEMU cannot use KVM" if usable else f"KVM is not usable ({state})"
    if found.status("tcg") is not Status.OK:
        return Verdict(f"QEMU cannot emulate, and {no_kvm}", lack="tcg")
    return Verdict(f"; it emulates the processor, as {no_kvm}", "tcg", _EMULATED)


def _open(accelerator: str | None, opening: Opening) -> Engine:
    from forkd.engines.qemu.engine import QemuEngine

    assert accelerator is not None
    users = opening.users or DEFAULT_USERS
    return QemuEngine(accelerator, outlive=opening.outlive, cell=opening.cell, users=users)


ENTRY = Entry("qemu", ("qemu", "kvm", "qemu with kvm", "tcg"), judge, _open)
