"""KVM's requests, records of them, and the calls that make a VM anew: by value."""

import base64
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.errors import NotForkable
from forkd.host.kvmfork.fold import fold
from forkd.host.kvmfork.ioctls import Effect, Request, effect_of, head_bytes, is_kvm, is_whole, name_of, total_bytes
from forkd.host.kvmfork.msrs import TSC, TSC_DEADLINE, MsrPlan, in_order, parse_msrs, render_msrs
from forkd.host.kvmfork.record import CAPABILITIES, MAX_IOCTLS, Ioctl, Record, parse_record
from forkd.host.kvmfork.recorder import Begun, Notes, ThreadBegun
from forkd.host.kvmfork.restore import render_restore
from forkd.host.kvmfork.run_pages import (
    RunPages,
    can_be_finished,
    check_kernel_pages,
    check_run_pages,
    find_kernel_pages,
    find_run_pages,
    find_unfinished,
    is_run_page,
)
from forkd.host.kvmfork.state import State, VcpuState, in_step, render_gets
from forkd.host.kvmfork.watch import SystemCall
from forkd.host.procfork.program import Call

_IOCTL, _CLOSE, _WRITE, _MMAP, _DUP3 = 16, 3, 1, 9, 292
_KVM, _VM, _VCPU = 3, 4, 7
_UNNAMED_IN_OLD_HEADERS = {Request.SET_USER_MEMORY_REGION2}
_HEADER_NAMES = {Request.SETUP_MCE: "X86_SETUP_MCE", Request.GET_MCE_CAP_SUPPORTED: "X86_GET_MCE_CAP_SUPPORTED"}


# KVM's requests


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_numbers_are_those_of_the_kernels_header(tmp_path: Path) -> None:
    named = {each: _HEADER_NAMES.get(each, each.name) for each in Request if each not in _UNNAMED_IN_OLD_HEADERS}
    lines = [f'check("{name}", KVM_{name}, {each:#x});' for each, name in named.items()]
    lines += [f'check("{name}", KVM_CAP_{name}, {number});' for number, name in CAPABILITIES.items()]
    program = (
        "#include <linux/kvm.h>\n#include <stdio.h>\n"
        "static int wrong;\nstatic void check(const char *name, unsigned one, unsigned other)\n"
        "{ if (one != other) { wrong = 1; puts(name); } }\nint main(void) {\n"
        + "\n".join(lines)
        + "\nreturn wrong; }\n"
    )
    (tmp_path / "numbers.c").write_text(program)
    subprocess.run(["gcc", "-o", tmp_path / "numbers", tmp_path / "numbers.c"], check=True)
    done = subprocess.run([tmp_path / "numbers"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_each_request_has_one_effect_and_what_nobody_knows_is_unknown() -> None:
    assert {effect_of(each) for each in Request} == {Effect.SET_UP, Effect.STATE, Effect.NONE}
    assert effect_of(Request.CREATE_VM) is Effect.SET_UP
    assert effect_of(Request.SET_REGS) is effect_of(Request.KVMCLOCK_CTRL) is Effect.STATE
    assert effect_of(Request.RUN) is effect_of(Request.GET_REGS) is Effect.NONE
    assert effect_of(0x4188AEC6) is Effect.UNKNOWN
    assert name_of(0x4188AEC6) == "ioctl 0x4188aec6"
    assert name_of(Request.IRQFD) == "KVM_IRQFD"
    assert is_kvm(Request.RUN)
    assert not is_kvm(0x5401)


def test_the_sizes_of_fixed_arguments_are_those_in_their_numbers() -> None:
    for each in Request:
        size = each >> 16 & 0x3FFF
        counted = each in (Request.SET_GSI_ROUTING, Request.SET_SIGNAL_MASK)
        if effect_of(each) is Effect.SET_UP and size and not counted:
            assert head_bytes(each) == size
            assert total_bytes(each, bytes(size)) == size


def test_arguments_that_count_what_follows_are_as_long_as_they_say_and_no_longer_than_the_kernel_takes() -> None:
    routing = Request.SET_GSI_ROUTING
    assert total_bytes(routing, struct.pack("<II", 3, 0)) == 8 + 3 * 48
    assert total_bytes(routing, struct.pack("<II", 4097, 0)) is None
    assert is_whole(routing, struct.pack("<II", 1, 0) + bytes(48))
    assert not is_whole(routing, struct.pack("<II", 2, 0) + bytes(48))
    assert total_bytes(Request.SET_SIGNAL_MASK, struct.pack("<I", 8)) == 12
    assert is_whole(Request.CREATE_IRQCHIP, b"")
    assert not is_whole(Request.CREATE_IRQCHIP, b"x")


# Records


def memory(slot: int = 0, flags: int = 0, size: int = 4096, address: int = 0x10000) -> Ioctl:
    return Ioctl(_VM, Request.SET_USER_MEMORY_REGION, 1, struct.pack("<IIQQQ", slot, flags, 0, size, address))


def irqfd(fd: int = 5, line: int = 5, flags: int = 0) -> Ioctl:
    return Ioctl(_VM, Request.IRQFD, 1, struct.pack("<IIII16x", fd, line, flags, 0))


def ioeventfd(fd: int = 6, address: int = 0x510, flags: int = 2, match: int = 0) -> Ioctl:
    return Ioctl(_VM, Request.IOEVENTFD, 1, struct.pack("<QQIiI36x", match, address, 1, fd, flags))


def zone(address: int, size: int, request: Request = Request.REGISTER_COALESCED_MMIO) -> Ioctl:
    return Ioctl(_VM, request, 1, struct.pack("<QII", address, size, 0))


def routing(*routes: tuple[int, int]) -> Ioctl:
    entries = b"".join(struct.pack("<III36x", line, kind, 0) for line, kind in routes)
    return Ioctl(_VM, Request.SET_GSI_ROUTING, 1, struct.pack("<II", len(routes), 0) + entries)


def capability(number: int, fd: int = _VM) -> Ioctl:
    return Ioctl(fd, Request.ENABLE_CAP, 1, struct.pack("<I100x", number))


CREATE_VM = Ioctl(_KVM, Request.CREATE_VM, 0, result=_VM)
IRQCHIP = Ioctl(_VM, Request.CREATE_IRQCHIP, 0)
PIT = Ioctl(_VM, Request.CREATE_PIT2, 1, bytes(64))


def vcpus(count: int = 1, first_fd: int = _VCPU) -> list[Ioctl]:
    return [Ioctl(_VM, Request.CREATE_VCPU, index, result=first_fd + index) for index in range(count)]


def record_with(*more: Ioctl, count: int = 1, first_fd: int = _VCPU) -> Record:
    made = vcpus(count, first_fd)
    return Record(_KVM, _VM, tuple(each.result for each in made), (CREATE_VM, *more, *made))


WHOLE = record_with(IRQCHIP, PIT, memory(), irqfd(), ioeventfd(), routing((5, 1)), capability(116), count=2)


def refusal(record: Record) -> str:
    with pytest.raises(NotForkable) as caught:
        record.check()
    return caught.value.message


def test_a_record_that_is_written_is_read_as_it_was() -> None:
    WHOLE.check()
    assert parse_record(WHOLE.to_json()) == WHOLE
    assert parse_record(replace(WHOLE, clear_tid=0x7F0012345678).to_json()).clear_tid == 0x7F0012345678
    assert parse_record(replace(WHOLE, kernel_pages=1).to_json()).kernel_pages == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (Ioctl(_VM, 0x4188AEC6, 0), "set up by ioctl 0x4188aec6, which a fork cannot repeat"),
        (Ioctl(_VCPU, Request.SET_REGS, 0), "set up by KVM_SET_REGS"),
        (memory(flags=1), "Memory slot 0x0 has flags 0x1"),
        (
            Ioctl(_VM, Request.SET_USER_MEMORY_REGION2, 1, struct.pack("<IIQ", 3, 4, 0) + bytes(144)),
            "slot 0x3 has flags",
        ),
        (memory(size=0), "Memory slot 0x0 is empty"),
        (irqfd(flags=1), "An irqfd has flags 0x1"),
        (ioeventfd(flags=8), "An ioeventfd has flags 0x8"),
        (capability(7), "has capability 7"),
        (routing((5, 3)), "routed in way 3"),
        (Ioctl(_VM, Request.IRQFD, 1, bytes(31)), "record of KVM_IRQFD is damaged"),
        (Ioctl(99, Request.IRQFD, 1, bytes(32)), "KVM_IRQFD on descriptor 99"),
        (Ioctl(_VCPU, Request.IRQFD, 1, bytes(32)), "KVM_IRQFD on descriptor 7"),
        (Ioctl(_VCPU, Request.SET_GUEST_DEBUG, 1, b"\1" + bytes(71)), "KVM_SET_GUEST_DEBUG on descriptor 7"),
        (Ioctl(_VM, Request.CREATE_VCPU, 3, result=99), "not numbered from 0 on"),
    ],
)
def test_what_a_fork_cannot_repeat_is_refused_and_named(more: Ioctl, message: str) -> None:
    assert message in refusal(record_with(more))


def test_a_record_without_a_vm_or_vcpus_or_with_too_many_is_refused() -> None:
    assert "has no vCPU" in refusal(record_with(count=0))
    assert "has 9 vCPUs; 8 is the most" in refusal(record_with(count=9))
    record_with(count=8).check()
    assert "How the VM was made" in refusal(replace(WHOLE, ioctls=WHOLE.ioctls[1:]))
    odd = (replace(CREATE_VM, arg=4), *WHOLE.ioctls[1:])
    assert "of kind 4" in refusal(replace(WHOLE, ioctls=odd))
    assert "not distinct" in refusal(replace(WHOLE, vcpu_fds=(_VM, 8)))


_CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda fields: fields.pop("vm_fd"),
    lambda fields: fields.update(version=2),
    lambda fields: fields.update(kvm_fd=-1),
    lambda fields: fields.update(kvm_fd=True),
    lambda fields: fields.update(vm_fd=1 << 40),
    lambda fields: fields.update(vm_fd=9),
    lambda fields: fields.update(vcpu_fds="78"),
    lambda fields: fields.update(vcpu_fds=[7]),
    lambda fields: fields.update(vcpu_fds=list(range(100))),
    lambda fields: fields.update(clear_tid="0"),
    lambda fields: fields.update(ioctls={}),
    lambda fields: fields.update(ioctls=fields["ioctls"][1:]),
    lambda fields: fields.update(ioctls=fields["ioctls"] * MAX_IOCTLS),
    lambda fields: fields["ioctls"][1].pop(),
    lambda fields: fields["ioctls"][1].append(0),
    lambda fields: fields["ioctls"][3].__setitem__(1, 0x4188AEC6),
    lambda fields: fields["ioctls"][3].__setitem__(3, "!"),
    lambda fields: fields["ioctls"][3].__setitem__(3, base64.b64encode(bytes(31)).decode()),
    lambda fields: fields["ioctls"][3].__setitem__(3, None),
    lambda fields: fields["ioctls"][3].__setitem__(4, -22),
    lambda fields: fields["ioctls"][-1].__setitem__(2, 5),
]


@pytest.mark.parametrize("change", _CHANGES)
def test_a_record_that_was_changed_to_what_cannot_be_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(WHOLE.to_json())
    change(fields)
    with pytest.raises(NotForkable):
        parse_record(json.dumps(fields))


@given(st.data())
def test_a_damaged_record_is_refused_or_is_a_sound_one(data: st.DataObject) -> None:
    text = WHOLE.to_json()
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 40)) :]
    try:
        parse_record(damaged).check()
    except NotForkable:
        pass


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"version": 1}', " " * (5 << 20)])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(NotForkable, match="damaged"):
        parse_record(text)


# What is in force


def test_slots_that_were_set_again_or_taken_back_are_there_as_they_are_now() -> None:
    assert fold([memory(0), memory(1), memory(0, size=8192)]) == (memory(1), memory(0, size=8192))
    assert fold([memory(0), memory(1), memory(0, size=0)]) == (memory(1),)
    assert fold([memory(0), memory(0, size=0), memory(0)]) == (memory(0),)


def test_eventfds_that_were_taken_back_are_not_there() -> None:
    assert fold([irqfd(5, 1), irqfd(5, 2), irqfd(5, 1, flags=1)]) == (irqfd(5, 2),)
    assert fold([irqfd(5, 1), irqfd(5, 1, flags=1), irqfd(5, 1)]) == (irqfd(5, 1),)
    assert fold([ioeventfd(), ioeventfd(7, 0x600), ioeventfd(flags=2 | 4)]) == (ioeventfd(7, 0x600),)
    assert fold([ioeventfd(flags=3, match=1), ioeventfd(flags=3, match=2), ioeventfd(flags=7, match=1)]) == (
        ioeventfd(flags=3, match=2),
    )


def test_zones_of_coalesced_writes_go_when_a_part_of_them_is_taken_back() -> None:
    back = zone(0x1100, 16, Request.UNREGISTER_COALESCED_MMIO)
    assert fold([zone(0x1000, 0x1000), zone(0x3000, 16), back]) == (zone(0x3000, 16),)


def test_of_what_is_replaced_the_last_is_there_and_capabilities_add_up() -> None:
    assert fold([routing((1, 1)), IRQCHIP, routing((2, 2))]) == (IRQCHIP, routing((2, 2)))
    rates = [Ioctl(fd, Request.SET_TSC_KHZ, value) for fd, value in ((7, 1), (8, 1), (7, 2))]
    assert fold(rates) == tuple(rates[1:])
    assert fold([capability(143), capability(143)]) == (capability(143), capability(143))
    debug = Ioctl(_VCPU, Request.SET_GUEST_DEBUG, 1, b"\1" + bytes(71))
    assert fold([debug, replace(debug, data=bytes(72))]) == ()


@given(st.lists(st.sampled_from([memory(0), memory(1), memory(0, size=0), irqfd(), irqfd(flags=1), IRQCHIP])))
def test_what_is_in_force_stays_so(asked: list[Ioctl]) -> None:
    once = fold(asked)
    assert fold(once) == once


# What was seen of a VMM

_LINKS = {3: "kvm", 4: "anon_inode:kvm-vm", 7: "anon_inode:kvm-vcpu:0", 5: "anon_inode:[eventfd]"}


def seen(*ioctls: Ioctl, cleared: tuple[int, ...] = ()) -> Notes:
    notes = Notes()
    for each in ioctls:
        notes.add(Begun(each.fd, each.request, each.arg, each.data), each.result)
    for place in cleared:
        notes.add(ThreadBegun(place), 1234)
    return notes


def test_notes_are_a_record_of_the_vm_that_is_there() -> None:
    record = seen(CREATE_VM, memory(), replace(IRQCHIP, fd=12), *vcpus()).make_record(_LINKS)
    assert record == record_with(memory())


def test_the_place_that_is_cleared_when_a_thread_ends_is_known_where_all_threads_have_one() -> None:
    assert seen(CREATE_VM, *vcpus(), cleared=(0x77, 0x77)).make_record(_LINKS).clear_tid == 0x77
    assert seen(CREATE_VM, *vcpus(), cleared=(0x77, 0x78)).make_record(_LINKS).clear_tid is None
    assert seen(CREATE_VM, *vcpus()).make_record(_LINKS).clear_tid is None


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({}, "ended"),
        ({3: "kvm"}, "made no VM"),
        (_LINKS | {9: "anon_inode:kvm-vm"}, "2 VMs"),
        (_LINKS | {9: "anon_inode:kvm-vcpu:0"}, "not those"),
        (_LINKS | {9: "anon_inode:kvm-vcpu:1"}, "not those"),
        (_LINKS | {3: "/dev/null"}, "not those"),
        (_LINKS | {9: "anon_inode:kvm-vfio"}, "kvm-vfio"),
        ({3: "kvm", 8: "anon_inode:kvm-vm", 7: "anon_inode:kvm-vcpu:0"}, "made no VM"),
    ],
)
def test_descriptors_that_are_not_as_they_were_seen_are_refused(links: dict[int, str], message: str) -> None:
    with pytest.raises(NotForkable, match=message):
        seen(CREATE_VM, *vcpus()).make_record(links)


def test_a_vm_that_was_being_made_when_the_watch_ended_is_refused() -> None:
    notes = seen(CREATE_VM, *vcpus())
    notes.see(SystemCall(True, _IOCTL, (_VM, Request.CREATE_IRQCHIP, 0, 0, 0, 0)), -1)
    with pytest.raises(NotForkable, match="still being made"):
        notes.make_record(_LINKS)
    notes.see(SystemCall(False, result=-17), -1)
    assert notes.make_record(_LINKS) == record_with()


# Run pages

_MAPS = """\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f8bbb1c4000-7f8bbb1c7000 rw-s 00000000 00:0e 1057                       anon_inode:kvm-vcpu:1
7f8bbb1d4000-7f8bbb1d7000 rw-s 00000000 00:0e 1057                       anon_inode:kvm-vcpu:0
"""


def test_run_pages_are_found_by_the_numbers_of_their_vcpus() -> None:
    found = find_run_pages(_MAPS, record_with(count=2))
    assert found == (RunPages(0, 0x7F8BBB1D4000, 0x3000), RunPages(1, 0x7F8BBB1C4000, 0x3000))
    assert is_run_page("anon_inode:kvm-vcpu:11")
    assert not is_run_page("anon_inode:kvm-vm")


@pytest.mark.parametrize(
    "maps",
    [
        "",
        _MAPS + _MAPS,
        _MAPS.replace("rw-s", "r--s"),
        _MAPS.replace("kvm-vcpu:1", "kvm-vcpu:2"),
        _MAPS.replace("rw-s 00000000", "rw-s 00001000"),
    ],
)
def test_vcpus_that_are_mapped_otherwise_are_refused(maps: str) -> None:
    with pytest.raises(NotForkable, match="mapped"):
        find_run_pages(maps, record_with(count=2))


def run_page(at: int = 0, data: bytes = b"") -> bytes:
    page = bytearray(3 * 4096)
    page[at : at + len(data)] = data
    return bytes(page)


def test_a_run_page_with_nothing_under_way_is_fine_whatever_ended_the_last_run() -> None:
    check_run_pages(run_page(), WHOLE)
    check_run_pages(run_page(8, struct.pack("<I", 10)), WHOLE)
    check_run_pages(run_page(16, b"\1"), WHOLE)


@pytest.mark.parametrize(
    ("page", "record", "message"),
    [
        (run_page(0, b"\1"), WHOLE, "told to stop"),
        (run_page(16, b"\1"), record_with(), "plays the guest's local APIC"),
        (run_page(288, b"\1"), WHOLE, "takes registers"),
        (run_page(8192, struct.pack("<II", 1, 2)), record_with(IRQCHIP, zone(0, 16)), "writes of the guest"),
    ],
)
def test_what_would_be_lost_with_a_run_page_is_refused(page: bytes, record: Record, message: str) -> None:
    with pytest.raises(NotForkable, match=message):
        check_run_pages(page, record)


def port(size: int, count: int = 1) -> bytes:
    return run_page(8, struct.pack("<I20xBBHI", 2, 1, size, 0x3F8, count))


def device(address: int, size: int) -> bytes:
    return run_page(8, struct.pack("<I20xQQI", 6, address, 0, size))


def test_who_a_vcpu_waits_for_is_known_and_whether_one_answer_is_all() -> None:
    assert find_unfinished(run_page()) is None and find_unfinished(run_page(8, struct.pack("<I", 10))) is None
    assert find_unfinished(port(1)) == "a port" and find_unfinished(device(0xD0000000, 4)) == "a device"
    assert can_be_finished(port(1)) and can_be_finished(port(4))
    assert can_be_finished(device(0xD0000000, 4)) and can_be_finished(device(0xD0000001, 1))
    for parts in (port(1, 8), device(0xD0000000, 8), device(0xD0000002, 4), device(0xD0000FFC, 4)):
        assert not can_be_finished(parts)
    assert not can_be_finished(run_page(8, struct.pack("<I", 29)))


_KERNELS = "7f8bbb1b0000-7f8bbb1b1000 rw-s 00000000 00:01 2051                       /dev/zero (deleted)\n"


def test_pages_that_kvm_maps_for_itself_are_found_and_others_of_that_name_are_refused() -> None:
    assert find_kernel_pages(_MAPS) == () and find_kernel_pages(_MAPS + _KERNELS) == (0x7F8BBB1B0000,)
    assert check_kernel_pages(_MAPS + _KERNELS, replace(WHOLE, kernel_pages=1)) == (0x7F8BBB1B0000,)
    large = _KERNELS.replace("1b1000", "1b2000")
    for maps, count in ((_MAPS + _KERNELS, 0), (_MAPS, 1), (_KERNELS + large, 1), (large, 0)):
        with pytest.raises(NotForkable, match="shared memory"):
            check_kernel_pages(maps, replace(WHOLE, kernel_pages=count))


def test_what_kvm_maps_when_it_makes_a_vcpu_is_counted_and_nothing_else(tmp_path: Path) -> None:
    pages = iter([1, 2, 2, 2])
    notes = Notes(lambda: next(pages))
    memory = os.open(tmp_path, os.O_RDONLY)
    try:
        for number, made in ((Request.CREATE_VM, 4), (Request.CREATE_VCPU, 7), (Request.CREATE_VCPU, 8)):
            notes.see(SystemCall(True, 16, (4 if made > 4 else 3, number, max(0, made - 7))), memory)
            notes.see(SystemCall(False, result=made), memory)
    finally:
        os.close(memory)
    links = {3: "kvm", 4: "anon_inode:kvm-vm", 7: "anon_inode:kvm-vcpu:0", 8: "anon_inode:kvm-vcpu:1"}
    assert notes.make_record(links).kernel_pages == 1


def test_a_duplicate_gives_back_the_pages_of_its_sources_vm_before_it_makes_its_own() -> None:
    state = State((), bytes(48))
    calls = render_restore(replace(record_with(), vcpu_fds=()), state, 30, (), (0x7F8BBB1B0000,))
    assert (calls[0].number, calls[0].args) == (11, (0x7F8BBB1B0000, 4096))


# State


def test_a_state_is_that_of_when_the_guest_stopped() -> None:
    vcpu = VcpuState(*(8 * (b"",)), msrs=render_msrs([(TSC, 10**13), (0x174, 5)]))
    state = State((vcpu,), struct.pack("<QQ", 10**12, 7))
    assert state.before(0, 2_000_000) == state
    before = state.before(10**11, 2_000_000)
    # A ten-thousandth less than 100 s, at 2 GHz.
    assert parse_msrs(before.vcpus[0].msrs) == [(TSC, 10**13 - 2 * (10**11 - 10**7)), (0x174, 5)]
    assert struct.unpack("<QQ", before.clock) == (10**12 - (10**11 - 10**7), 7)


def test_registers_are_read_and_set_in_an_order_in_which_they_mean_what_they_meant() -> None:
    assert in_order([TSC_DEADLINE, 0x174, TSC, 0x174, 0x175]) == (TSC, 0x174, 0x175, TSC_DEADLINE)
    values = [(TSC, 5), (0x174, 2**63)]
    assert parse_msrs(render_msrs(values)) == values


def test_vcpus_that_were_read_one_after_the_other_get_the_time_of_the_first() -> None:
    first, values = in_step(None, [(TSC, 1000), (1, 2)])
    assert (first, values) == (1000, [(TSC, 1000), (1, 2)])
    assert in_step(first, [(TSC, 50_000), (1, 3)]) == (1000, [(TSC, 1000), (1, 3)])
    assert in_step(first, [(TSC, 10**12)]) == (1000, [(TSC, 10**12)])


def test_what_a_vm_does_not_have_is_not_read() -> None:
    def requests(record: Record) -> set[Request]:
        return {each.request for each in render_gets(record, MsrPlan((TSC,)), sregs2=True, xsave_bytes=4096)}

    assert {Request.GET_IRQCHIP, Request.GET_PIT2, Request.GET_LAPIC} <= requests(WHOLE)
    assert {Request.GET_IRQCHIP, Request.GET_PIT2, Request.GET_LAPIC}.isdisjoint(requests(record_with()))
    split = requests(record_with(capability(121)))
    assert Request.GET_LAPIC in split
    assert Request.GET_IRQCHIP not in split
    assert requests(record_with()) >= {Request.GET_SREGS2, Request.GET_XSAVE, Request.GET_CLOCK}
    large = render_gets(record_with(), MsrPlan(()), sregs2=False, xsave_bytes=11008)
    assert {(each.request, each.size) for each in large} >= {(Request.GET_XSAVE2, 11008), (Request.GET_SREGS, 312)}


# The calls of a fork


def vcpu_state(**more: bytes) -> VcpuState:
    fields = {
        "mp_state": bytes(4),
        "regs": bytes(144),
        "sregs": bytes(320),
        "xsave": bytes(4096),
        "xcrs": struct.pack("<IIIIQ", 1, 0, 0, 0, 1).ljust(392, b"\0"),
        "debugregs": struct.pack("<6Q", 0, 0, 0, 0, 0xFFFF0FF0, 0x400).ljust(128, b"\0"),
        "events": bytes(20) + b"\x0d" + bytes(43),
        "cpuid": struct.pack("<II", 1, 0) + bytes(40),
        "msrs": render_msrs([(TSC, 1), (0x174, 2)]),
        "lapic": bytes(1024),
    }
    return VcpuState(**(fields | more))


def state_of(count: int, **more: bytes) -> State:
    chips = tuple(struct.pack("<I", chip).ljust(520, b"\0") for chip in range(3))
    return State(tuple(vcpu_state(**more) for _ in range(count)), b"\x11" * 48, chips, bytes(112))


def calls_of(record: Record, state: State | None = None, free: int = 50) -> list[Call]:
    count = len(record.vcpu_fds)
    pages = tuple(RunPages(index, 0x7000_0000 + index * 0x3000, 0x3000) for index in range(count))
    return render_restore(record, state or state_of(count), free, pages)


def requests_of(calls: list[Call]) -> list[Request]:
    return [Request(call.args[1]) for call in calls if call.number == _IOCTL]


def test_memory_is_there_before_the_interrupt_chips_and_eventfds_are_connected_last() -> None:
    requests = requests_of(calls_of(WHOLE))
    order = [
        *(Request.CREATE_VM, Request.SET_USER_MEMORY_REGION, Request.CREATE_IRQCHIP, Request.CREATE_PIT2),
        *(Request.CREATE_VCPU, Request.SET_CPUID2, Request.SET_SREGS2, Request.SET_LAPIC, Request.SET_MSRS),
        *(Request.SET_IRQCHIP, Request.SET_PIT2, Request.SET_CLOCK, Request.IRQFD, Request.IOEVENTFD),
    ]
    places = [requests.index(each) for each in order]
    assert places == sorted(places)
    assert requests.count(Request.CREATE_VCPU) == requests.count(Request.SET_MSRS) == 2
    assert requests[-2:] == [Request.IRQFD, Request.IOEVENTFD]


def test_state_that_a_new_vcpu_has_already_is_not_set() -> None:
    plain = requests_of(calls_of(record_with(IRQCHIP)))
    left_out = {Request.SET_XCRS, Request.SET_DEBUGREGS, Request.SET_VCPU_EVENTS, Request.SET_MP_STATE}
    assert left_out.isdisjoint(plain)
    more = {
        "xcrs": struct.pack("<IIIIQ", 1, 0, 0, 0, 7).ljust(392, b"\0"),
        "debugregs": bytes(128),
        "events": bytes(8) + b"\1" + bytes(55),
        "mp_state": struct.pack("<I", 3),
    }
    assert left_out <= set(requests_of(calls_of(record_with(IRQCHIP), state_of(1, **more))))
    # Only the first vCPU is ready to run when it is made.
    assert requests_of(calls_of(record_with(IRQCHIP, count=3))).count(Request.SET_MP_STATE) == 2
    first = Ioctl(_VM, Request.SET_BOOT_CPU_ID, 1)
    assert requests_of(calls_of(record_with(first, IRQCHIP, count=2))).count(Request.SET_MP_STATE) == 1


def test_objects_get_the_old_numbers_directly_where_these_are_the_lowest_free_ones() -> None:
    calls = calls_of(record_with(), free=50)
    assert [(call.number, call.args[0]) for call in calls if call.number in (_CLOSE, _DUP3)] == [
        (_CLOSE, 4),
        (_CLOSE, 7),
    ]
    made = [(call.args[1], call.returns) for call in calls if call.number == _IOCTL][:2]
    assert made == [(Request.CREATE_VM, 4), (Request.CREATE_VCPU, 7)]


def test_objects_are_moved_under_the_old_numbers_where_lower_ones_are_free() -> None:
    calls = calls_of(record_with(), free=2)
    moved = [(call.number, *call.args[:2]) for call in calls if call.number in (_CLOSE, _DUP3)]
    assert moved == [(_DUP3, 2, 4), (_CLOSE, 2), (_DUP3, 2, 7), (_CLOSE, 2)]
    assert [call.args[2] for call in calls if call.number == _DUP3] == [0o2000000] * 2


def test_the_clock_goes_on_where_it_was_and_not_where_it_would_be_now() -> None:
    clock = next(call for call in calls_of(WHOLE) if call.args[1:2] == (Request.SET_CLOCK,))
    assert clock.data == b"\x11" * 8 + bytes(40)


def test_each_line_is_signalled_once_but_for_messages() -> None:
    record = record_with(IRQCHIP, irqfd(5, 5), irqfd(8, 24), irqfd(9, 6), routing((5, 1), (6, 1), (24, 2)))
    assert [call.args[0] for call in calls_of(record) if call.number == _WRITE] == [5, 9]


def test_run_pages_are_mapped_where_they_were_and_all_registers_have_to_be_taken() -> None:
    calls = calls_of(record_with(count=2))
    mapped = [(call.args[0], call.args[4], call.returns) for call in calls if call.number == _MMAP]
    assert mapped == [(0x7000_0000, 7, 0x7000_0000), (0x7000_3000, 8, 0x7000_3000)]
    assert [call.returns for call in calls if call.args[1:2] == (Request.SET_MSRS,)] == [2, 2]


def test_every_call_says_what_it_is() -> None:
    for call in calls_of(WHOLE):
        assert re.match(r"(KVM_[A-Z0-9_]+$|[a-z])", call.what)
