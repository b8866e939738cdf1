"""What a filter says to a call: its program is run here as the kernel would."""

import struct

import pytest

from forkd.host.seccomp import Among, HasBits, Verdict, render_filter
from forkd.host.vmm_filter import render_rules

X86_64, I386 = 0xC000003E, 0x40000003


def run(program: bytes, number: int, *args: int, architecture: int = X86_64) -> int:
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*args, *[0] * (6 - len(args))))
    at = value = 0
    while True:
        code, yes, no, operand = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


def test_what_is_not_listed_ends_the_process() -> None:
    program = render_filter({1: Verdict.ALLOW, 2: Verdict.TRACED})
    assert run(program, 1) == Verdict.ALLOW
    assert run(program, 2) == Verdict.TRACED
    assert run(program, 3) == Verdict.KILL
    assert run(program, 1, architecture=I386) == Verdict.KILL
    assert run(program, 1 | 0x40000000) == Verdict.KILL  # x32


def test_arguments_decide() -> None:
    rules = {
        5: Among(1, {7: Verdict.ALLOW, 8: Verdict.TRACED}),
        6: HasBits(0, 0x10, Verdict.ALLOW, Verdict.TRACED),
        7: Among(0, {0xAE00: Verdict.ALLOW}, mask=0xFF00),
    }
    program = render_filter(rules)
    assert [run(program, 5, 0, value) for value in (7, 8, 9)] == [Verdict.ALLOW, Verdict.TRACED, Verdict.KILL]
    assert [run(program, 6, value) for value in (0x11, 0x01)] == [Verdict.ALLOW, Verdict.TRACED]
    assert [run(program, 7, value) for value in (0x4008AE89, 0x5412)] == [Verdict.ALLOW, Verdict.KILL]


@pytest.mark.parametrize(
    "number", [2, 41, 42, 49, 59, 62, 101, 165, 200, 234, 308, 310, 317, 321, 323, 424, 425, 434, 438]
)
def test_an_emulated_vm_may_not_open_start_or_reach_anything(number: int) -> None:
    assert run(render_filter(render_rules()), number) == Verdict.KILL


def test_a_file_that_it_opens_by_name_is_refused() -> None:
    assert run(render_filter(render_rules()), 257) == Verdict.REFUSED
    assert run(render_filter(render_rules(kvm_pid=77)), 257) == Verdict.REFUSED


@pytest.mark.parametrize("number", [53, 117, 119, 126, 272, 302])
def test_what_forks_need_is_left_to_a_tracer(number: int) -> None:
    assert run(render_filter(render_rules()), number) == Verdict.TRACED


def test_a_vm_under_kvm_may_signal_itself_and_ask_kvm() -> None:
    program = render_filter(render_rules(kvm_pid=77))
    assert run(program, 234, 77) == Verdict.ALLOW
    assert run(program, 234, 78) == Verdict.KILL
    assert run(program, 16, 3, 0xAE80) == Verdict.ALLOW  # KVM_RUN
    assert run(program, 16, 3, 0x5412) == Verdict.UNSUPPORTED  # TIOCSTI
