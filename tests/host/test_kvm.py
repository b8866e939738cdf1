"""The KVM probe: one real trial on whatever machine this is, and its judgement by value."""

import dataclasses
import errno
import os
import sys
import time
from pathlib import Path

import pytest
from support_processes import is_reaped

from forkd.host import kvm
from forkd.host.kvm import KvmHints, KvmState, Trial, judge_open_error, judge_trial, observe, probe_kvm
from forkd.host.kvm_trial import COUNT_LOOP, render_guest

AMD = KvmHints(("kvm_amd",), "svm")
NESTED_PAGING = Trial("user", host_ns=4.3, exit_ns=142000, guest_ns=5.2, kernel_ns=6300, user_ns=78)
SHADOW_PAGING = Trial("user", host_ns=5.0, exit_ns=137000, guest_ns=4.2, kernel_ns=350000, user_ns=68)
EMULATED = Trial("kernel", host_ns=0.31, exit_ns=12000, guest_ns=1520, kernel_ns=24600)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


# --- the real thing ---


def test_this_machine_gets_a_consistent_verdict_in_time_and_no_child_is_left() -> None:
    before = children()
    began = time.monotonic()
    verdict = probe_kvm()
    assert time.monotonic() - began < 2.0
    assert children() == before
    assert verdict.explanation
    assert verdict.usable == (verdict.state is KvmState.USABLE)
    assert (verdict.state is KvmState.ABSENT) <= (not Path("/dev/kvm").exists())
    if verdict.usable:
        assert verdict.trial is not None
        assert verdict.trial.user_ns
    if verdict.state is KvmState.TOO_SLOW:
        assert verdict.trial is not None
        assert verdict.trial.guest_ns
        assert verdict.remedy


def test_the_verdict_does_not_change_from_run_to_run() -> None:
    assert len({probe_kvm().state for _ in range(3)}) == 1


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="no /dev/kvm to try")
def test_a_trial_that_never_gives_up_by_itself_is_bounded_too() -> None:
    """Some KVMs never return from a `sysretq`; without the early exit the trial runs right into it."""
    before = children()
    began = time.monotonic()
    trial = observe(kvm.render_command(hopeless=1e18))
    assert time.monotonic() - began < 8.0  # 0.8 s, and what it had to wait for a CPU
    assert children() == before
    assert trial.host_ns
    assert judge_trial(trial, KvmHints()).state is probe_kvm().state


# --- a child that misbehaves ---


def test_a_child_that_hangs_after_its_first_report_is_killed_at_the_deadline() -> None:
    code = 'import os,time; print(\'{"stage":"host","host_ns":0.3}\'); print(os.getpid(), flush=True); time.sleep(60)'
    began = time.monotonic()
    trial = observe(python(code), trial_s=0.2)
    assert time.monotonic() - began < 3.0
    assert trial.hung
    assert is_reaped(int(trial.noise))
    assert judge_trial(trial, AMD).state is KvmState.HANGS


def test_a_child_that_ignores_signals_and_spins_is_killed_too() -> None:
    code = (
        "import os,signal\n"
        "for s in (1,2,15): signal.signal(s, signal.SIG_IGN)\n"
        'print(\'{"stage":"count","host_ns":0.3}\'); print(os.getpid(), flush=True)\n'
        "while True: pass"
    )
    trial = observe(python(code), trial_s=0.2)
    assert trial.hung
    assert is_reaped(int(trial.noise))


def test_a_child_that_says_nothing_is_an_error_and_not_a_hanging_kvm() -> None:
    trial = observe(python("import time; time.sleep(60)"), start_s=0.2)
    assert trial.hung
    assert judge_trial(trial, AMD).state is KvmState.ERROR


def test_a_child_that_closes_its_output_and_stays_is_not_waited_for() -> None:
    code = "import os,time; os.write(1, str(os.getpid()).encode()); os.close(1); os.close(2); time.sleep(60)"
    trial = observe(python(code))
    assert not trial.hung
    assert is_reaped(int(trial.noise))


def test_what_a_broken_child_prints_ends_up_in_the_explanation() -> None:
    verdict = judge_trial(observe(python("raise SystemExit('no such module')")), AMD)
    assert verdict.state is KvmState.ERROR
    assert "no such module" in verdict.explanation


def test_a_slow_host_gets_more_time() -> None:
    code = 'import time; print(\'{"stage":"host","host_ns":6}\', flush=True); time.sleep(0.6)'
    assert not observe(python(code), trial_s=0.2).hung


# --- judgement ---


@pytest.mark.parametrize("trial", [NESTED_PAGING, SHADOW_PAGING])
def test_real_hardware_virtualization_is_usable_with_either_paging(trial: Trial) -> None:
    assert judge_trial(trial, AMD).usable


def test_an_emulated_guest_is_too_slow_whatever_the_module_is_called() -> None:
    for hints in (KvmHints(("kvm_pvm",)), AMD):
        verdict = judge_trial(EMULATED, hints)
        assert verdict.state is KvmState.TOO_SLOW
        assert "4,903 times slower" in verdict.explanation


def test_a_fast_guest_is_usable_whatever_the_module_is_called() -> None:
    assert judge_trial(NESTED_PAGING, KvmHints(("kvm_pvm",))).usable


def test_a_hang_after_a_hopeless_rate_is_still_called_too_slow() -> None:
    assert judge_trial(dataclasses.replace(EMULATED, hung=True), AMD).state is KvmState.TOO_SLOW


def test_kernel_work_alone_can_be_too_slow() -> None:
    trial = dataclasses.replace(NESTED_PAGING, host_ns=0.3, guest_ns=0.3, kernel_ns=200_000)
    verdict = judge_trial(trial, AMD)
    assert verdict.state is KvmState.TOO_SLOW
    assert "200 us" in verdict.explanation


@pytest.mark.parametrize(
    ("trial", "state"),
    [
        (Trial("created", host_ns=0.3, errno=errno.EINVAL), KvmState.NO_LONG_MODE),
        (Trial("created", host_ns=0.3, exit_reason=9), KvmState.NO_LONG_MODE),
        (Trial("open", host_ns=0.3, errno=errno.EBUSY), KvmState.ERROR),
        (Trial("count", host_ns=0.3, guest_ns=0.3, exit_reason=17), KvmState.ERROR),
        (Trial("kernel", host_ns=0.3, guest_ns=0.3, kernel_ns=400), KvmState.ERROR),
        (Trial("long_mode", hung=True, host_ns=0.3), KvmState.HANGS),
    ],
)
def test_each_way_to_fail_has_its_state(trial: Trial, state: KvmState) -> None:
    verdict = judge_trial(trial, AMD)
    assert verdict.state is state
    assert not verdict.usable


def test_a_busy_processor_points_at_the_other_hypervisor() -> None:
    remedy = judge_trial(Trial("open", host_ns=0.3, errno=errno.EBUSY), AMD).remedy
    assert remedy is not None
    assert "hypervisor" in remedy


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (errno.ENOENT, KvmState.ABSENT),
        (errno.ENODEV, KvmState.ABSENT),
        (errno.EACCES, KvmState.NO_PERMISSION),
        (errno.EPERM, KvmState.NO_PERMISSION),
        (errno.EMFILE, KvmState.ERROR),
    ],
)
def test_opening_the_device_fails_by_meaning(number: int, state: KvmState) -> None:
    assert judge_open_error(number, AMD).state is state


def test_the_remedy_for_an_absent_device_depends_on_the_processor() -> None:
    assert "kvm_intel" in (judge_open_error(errno.ENOENT, KvmHints((), "vmx")).remedy or "")
    assert "nested virtualization" in (judge_open_error(errno.ENOENT, KvmHints()).remedy or "")


def test_hints_are_read_where_they_exist(tmp_path: Path) -> None:
    (tmp_path / "kvm_intel").mkdir()
    (tmp_path / "kvm").mkdir()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu vmx sse2\n")
    assert kvm.probe_hints(tmp_path, cpuinfo) == KvmHints(("kvm_intel",), "vmx")
    assert kvm.probe_hints(tmp_path / "no", tmp_path / "neither") == KvmHints()


# --- the guest ---


def test_the_guests_pieces_lie_in_its_memory_and_do_not_overlap() -> None:
    guest = render_guest()
    ends = 0
    for address, data in sorted(guest.chunks.items()):
        assert address >= ends
        ends = address + len(data)
    assert ends <= guest.memory_bytes
    assert all(entry in guest.chunks for entry in guest.entries.values())
    assert guest.chunks[guest.entries["count"]].startswith(COUNT_LOOP)


def test_every_routine_ends_in_a_halt_where_it_is_expected() -> None:
    guest = render_guest()
    for name, entry in guest.entries.items():
        code = guest.chunks[entry]
        assert code[-1:] == b"\xf4"
        assert guest.ends[name] == entry + len(code)


def test_the_special_registers_stop_right_before_apic_base() -> None:
    assert len(render_guest().sregs) == 272
