"""A VMM with a running VM is forked: kernel objects of its own beneath the fork, in the state of the source's."""

import contextlib
import os
import signal
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from kvmfork_cases import Vm, has_kvm, holder_of, plan_for, recorded, vm_forked, vm_started, vmm_started
from procfork_cases import children, forked_from, refusal_of
from support_processes import wait_until
from support_tracing import counted_calls

from forkd.errors import NotForkable
from forkd.host.kvmfork.plan import VmPlan
from forkd.host.procfork.child import Holder
from forkd.host.procfork.source import Source

pytestmark = pytest.mark.usefixtures("nothing_left")

_LSTAR, _TSC = 0xC0000082, 0x10
_PIC_REQUESTS = slice(2 * (8 + 1), 2 * (8 + 2))  # of the first chip's dump, in hexadecimal


@pytest.fixture(autouse=True)
def machine() -> None:
    """Tiny guests run on KVMs that are of no use for large ones."""
    if not has_kvm():
        pytest.skip("needs /dev/kvm")


# What the KVM of a host may do otherwise than the one in the lab.
on_both = pytest.mark.parametrize("machine", ["host", pytest.param("lab", marks=pytest.mark.lab)], indirect=True)


@pytest.fixture
def source() -> Iterator[Vm]:
    with vm_started() as vm:
        yield vm


def settled(dump: dict[str, Any]) -> dict[str, Any]:
    """Without the interrupts that a fork asks for again."""
    first = dump["chips"][0]
    return {**dump, "chips": [first[: _PIC_REQUESTS.start] + first[_PIC_REQUESTS.stop :], *dump["chips"][1:]]}


@on_both
@pytest.mark.parametrize("vcpus", [1, 2, 4])
def test_source_and_fork_count_on_from_the_same_value_each_for_itself(vcpus: int) -> None:
    with vm_started(vcpus) as source:
        counts, state = source.counts(), source.dump()
        assert len(counts) == vcpus
        with vm_forked(source) as child:
            assert child.counts() == counts
            assert settled(child.dump()) == settled(state)
            child.resume()
            child.counts_on()
            assert source.counts() == counts
            child.pause()
            its = child.counts()
            source.resume()
            source.counts_on()
            assert child.counts() == its


@on_both
def test_each_has_interrupts_and_notifications_of_its_own(source: Vm) -> None:
    with vm_forked(source) as child:
        child.resume()
        wait_until(lambda: child.peek()["interrupts"] == 1)  # each line is signalled once in a fork
        for count in range(2, 5):
            child.tell("os.eventfd_write(vmm.line, 1)")
            wait_until(lambda count=count: child.peek()["interrupts"] == count)
        child.pause()
        seen = child.peek()
        assert seen["notifications"] > source.peek()["notifications"]
        assert 0 <= seen["counts"][0] - seen["notifications"] <= 1
        assert source.peek()["interrupts"] == 0
        source.resume()
        source.tell("os.eventfd_write(vmm.line, 1)")
        wait_until(lambda: source.peek()["interrupts"] == 1)
        assert child.peek()["interrupts"] == seen["interrupts"]


@on_both
def test_an_interrupt_that_was_asked_for_before_arrives_in_both(source: Vm) -> None:
    source.tell("os.eventfd_write(vmm.line, 1)")
    with vm_forked(source) as child:
        for one in (child, source):
            one.resume()
            wait_until(lambda one=one: one.peek()["interrupts"] == 1)


@on_both
@pytest.mark.parametrize("vcpus", [2, 4])
def test_the_times_of_a_forks_vcpus_are_in_step_and_go_on_where_they_were(vcpus: int) -> None:
    with vm_started(vcpus) as source:
        # KVM takes what is nearly the time of a new VM for that, and VMs are not that young.
        source.tell(f"for vcpu in vmm.vcpus: vcpu.set_msr({_TSC}, {10**13})")
        before = source.eval("vmm.times()")
        with vm_forked(source) as child:
            for one in (child, source):
                times = one.eval("vmm.times() + vmm.times()")
                assert times == sorted(times)
            assert before[0] < child.eval("vmm.times()")[0] < source.eval("vmm.times()")[0]


@on_both
def test_what_a_vcpu_rarely_has_is_carried_over_too(source: Vm) -> None:
    source.tell(f"vmm.vcpus[0].set_msr({_LSTAR}, 0x123456)")
    debug = struct.pack("<4QQQ", 0x1000, 0x2000, 0, 0, 0xFFFF0FF0, 0x401).ljust(128, b"\0")
    xcrs = struct.pack("<IIIIQ", 1, 0, 0, 0, 3).ljust(392, b"\0")
    source.tell(f"vmm.vcpus[0].set('debugregs', {debug!r})")
    source.tell(f"vmm.vcpus[0].set('xcrs', {xcrs!r})")
    state = source.dump()
    assert state["vcpus"][0]["debugregs"] == debug.hex()
    assert state["vcpus"][0]["xcrs"] == xcrs.hex()
    with vm_forked(source) as child:
        assert child.eval(f"vmm.vcpus[0].msr({_LSTAR})") == 0x123456
        assert settled(child.dump()) == settled(state)


def test_fifty_forks_in_a_row_each_count_on_and_the_source_is_unharmed() -> None:
    with vm_started(2) as source:
        holder = holder_of(source)
        for _ in range(50):
            counts = source.counts()
            with vm_forked(source, holder) as child:
                source.resume()
                assert child.counts() == counts
                child.resume()
                child.counts_on()
                source.counts_on()
                source.pause()


def test_forks_of_one_moment_are_the_same_and_all_run_beside_each_other() -> None:
    with vm_started(2) as source, contextlib.ExitStack() as stack:
        holder = holder_of(source)
        forks = [stack.enter_context(vm_forked(source, holder, keep=True)) for _ in range(8)]
        holder.release()
        counts = source.counts()
        assert [each.counts() for each in forks] == [counts] * len(forks)
        for each in forks:
            each.resume()
        for each in forks:
            each.counts_on()
        assert source.counts() == counts


@on_both
def test_a_fork_is_forked_in_turn(source: Vm) -> None:
    with contextlib.ExitStack() as stack:
        line = [source]
        for _ in range(5):
            line.append(stack.enter_context(vm_forked(line[-1])))
            line[-1].resume()
            line[-1].counts_on()
            line[-1].pause()
        counts = [each.counts()[0] for each in line]
        assert counts == sorted(counts)
        assert len(set(counts)) == len(line)


def test_a_fork_outlives_its_source(source: Vm) -> None:
    with vm_forked(source) as child:
        os.kill(source.pid, signal.SIGKILL)
        child.resume()
        child.counts_on()


# The source, or the fork, is killed


def test_a_source_that_is_killed_at_any_step_leaves_no_half_made_fork() -> None:
    with vm_started() as source:
        with counted_calls() as names, vm_forked(source):
            pass
        steps = len(names)
    for step in range(1, steps, steps // 12):
        before = children()
        with vm_started() as source:
            made = False
            with contextlib.suppress(NotForkable):
                with counted_calls(step, lambda pid=source.pid: os.kill(pid, signal.SIGKILL)), vm_forked(source) as vm:
                    made = True
                    vm.resume()
                    vm.counts_on()
            assert len(children()) == len(before) + 1, (step, made)


def test_a_source_that_is_killed_while_its_state_is_read_is_reported() -> None:
    with vm_started() as source:
        vm = VmPlan(source.record)

        def look(held: Source) -> None:
            os.kill(source.pid, signal.SIGKILL)
            vm.look(held)

        plan = plan_for(vm)
        holder = Holder(source.pid, type(plan)(**{**vars(plan), "look": look}))
        with pytest.raises(NotForkable, match="ended"), forked_from(holder):
            pass


# What is refused


def refused(source: Vm) -> str:
    return refusal_of(source.subject, plan_for(VmPlan(source.record))).message


def test_a_vcpu_whose_exit_may_not_be_answered_is_refused_until_it_is(source: Vm) -> None:
    source.tell("vmm.stop_notifying()")
    source.resume()
    wait_until(lambda: source.peek()["exits"] == [2])
    assert "may wait for an answer from a port" in refused(source)
    source.tell("vmm.start_notifying()")
    source.resume()
    source.counts_on()
    source.pause()
    with vm_forked(source) as child:
        child.resume()
        child.counts_on()


# 1: in al, dx; mov [bx+4], al; inc dword [bx]; jmp 1b
_ASK = """
vcpu, regs = vmm.vcpus[0], bytearray(144)
vmm.memory[0x1200:0x1209] = bytes.fromhex("ec 884704 66ff07 ebf7")
fcntl.ioctl(vcpu.fd, GET_REGS, regs, True)
struct.pack_into("<Q", regs, 128, 0x1200)
fcntl.ioctl(vcpu.fd, SET_REGS, regs)
"""


@on_both
def test_an_answer_that_its_vmm_has_given_is_taken_before_a_vcpu_is_forked(source: Vm) -> None:
    source.tell(_ASK)
    source.resume()
    wait_until(lambda: source.peek()["exits"] == [2])
    source.tell("vmm.vcpus[0].shared[struct.unpack_from('<Q', vmm.vcpus[0].shared, 40)[0]] = 0x5a")
    assert "may wait for an answer from a port" in refused(source)
    (count,) = source.counts()
    with vm_forked(source, Holder(source.pid, plan_for(VmPlan(source.record, answers_all=True)))) as child:
        for vm in (child, source):
            vm.resume()
            # It goes round once before it asks again; had it not taken the answer, it would ask at once.
            wait_until(lambda vm=vm: not vm.eval("vmm.vcpus[0].may_run.is_set()"))
            assert vm.counts() == [count + 1]
            assert vm.eval("vmm.memory[COUNTERS + 4]") == 0x5A


@on_both
def test_time_that_a_vm_stood_still_is_not_seen_in_its_fork(source: Vm) -> None:
    khz = source.eval("fcntl.ioctl(vmm.vcpus[0].fd, 0xAEA3, 0)")
    hour = 3_600 * khz * 1000
    begun = source.eval("vmm.times()[0]")
    source.tell(f"vmm.vcpus[0].set_msr({_TSC}, {begun + 2 * hour})")
    if source.eval("vmm.times()[0]") < begun + hour:
        pytest.skip("the KVM of this host gives VMs its own time")
    plan = VmPlan(source.record)
    looked, hour_ns = plan_for(plan), 3_600 * 10**9
    holder = Holder(source.pid, type(looked)(**{**vars(looked), "look": lambda held: plan.look(held, hour_ns)}))
    with vm_forked(source, holder) as child:
        behind = source.eval("vmm.times()[0]") - child.eval("vmm.times()[0]")
    # Up to what two clocks may differ, and what passed meanwhile.
    assert hour * 0.999 < behind < hour * 1.001


def test_a_vcpu_that_is_told_to_stop_is_told_so_in_the_fork(source: Vm) -> None:
    source.tell("vmm.vcpus[0].shared[1] = 1")
    with vm_forked(source) as child:
        assert child.eval("vmm.vcpus[0].shared[1]") == 1
        child.resume()
        child.counts_on()
        assert child.eval("vmm.vcpus[0].shared[1]") == 0


def test_memory_that_a_vmm_has_come_to_share_is_refused_though_it_was_forked_before(source: Vm) -> None:
    plan = plan_for(VmPlan(source.record))
    with vm_forked(source, Holder(source.pid, plan)):
        pass
    source.tell("shared = mmap.mmap(-1, 4096)")
    assert "shared memory" in refusal_of(source.subject, plan).message
    source.tell("shared.close()")
    with vm_forked(source, Holder(source.pid, plan)) as child:
        child.resume()
        child.counts_on()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("fcntl.ioctl(vmm.vm, 0x4188AEC6, bytearray(392), True)", "set up by ioctl 0x4188aec6"),
        ("vmm.add_memory(1)", "Memory slot 0x1 has flags 0x1"),
        ("other = fcntl.ioctl(vmm.kvm, CREATE_VM, 0)", "has 2 VMs"),
        ("other = os.dup(vmm.vcpus[0].fd)", "descriptors are not those"),
        ("os.close(vmm.kvm)", "descriptors are not those"),
    ],
)
def test_a_vm_that_cannot_be_made_once_more_is_refused_when_it_was_recorded(more: str, message: str) -> None:
    with vmm_started() as subject:
        with pytest.raises(NotForkable, match=message):
            recorded(subject, f"vmm = Vmm(1)\n{more}")
        assert subject.eval("1") == 1
        assert subject.is_free()


def test_more_than_eight_vcpus_are_refused() -> None:
    with vmm_started() as subject:
        with pytest.raises(NotForkable, match="The VM has 9 vCPUs; 8 is the most that can be forked"):
            recorded(subject, "vmm = Vmm(9)")


def test_a_vcpu_that_was_made_by_a_thread_of_which_nothing_was_seen_is_refused() -> None:
    code = (
        "vmm = Vmm(1)\nmore = []\nt = threading.Thread(target=lambda: more.append(Vcpu(vmm, 1)))\nt.start(); t.join()"
    )
    with vmm_started() as subject:
        with pytest.raises(NotForkable, match="descriptors are not those"):
            recorded(subject, code)


def test_what_was_taken_back_is_not_made_in_a_fork() -> None:
    make = "vmm = Vmm({vcpus})\nvmm.stop_notifying()\nvmm.start_notifying()\nvmm.add_memory(0)\nvmm.remove_memory()"
    with vm_started(make=make) as source:
        requests = [each.request for each in source.record.ioctls]
        assert len(requests) == len(set(requests))
        with vm_forked(source) as child:
            child.resume()
            child.counts_on()
            assert child.peek()["notifications"] > 0
