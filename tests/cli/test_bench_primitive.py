"""`forkd bench primitive`: a tiny VM is forked, by forkd and by a C program, and the times are told."""

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_cases import Cli, check

from forkd.cli.bench_primitive import render_json
from forkd.host.kvmfork.primitive import Primitive, Round, Timing

MEASURED = Primitive(
    count=100,
    calls=21,
    call_bytes=11512,
    rounds=(
        Round(Timing(100.0, (1.0,) * 99 + (9.0,)), Timing(150.0, (2.0,) * 100)),
        Round(Timing(100.0, (1.0, 3.0)), Timing(190.0, (2.0, 4.0))),
        Round(Timing(50.0, (2.0,)), Timing(150.0, (3.0,))),
    ),
)
needs_all = pytest.mark.skipif(
    shutil.which("gcc") is None or not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="needs gcc and /dev/kvm"
)


def test_ratios_are_taken_within_a_round_and_their_median_is_what_counts() -> None:
    told = render_json(MEASURED)
    assert (told["all_ratio"], told["p50_ratio"], told["reached"]) == (1.9, 1.5, True)
    assert told["rounds"][0] == {
        "native": {"all_ms": 100.0, "p50_ms": 1.0, "p99_ms": 1.0},
        "forkd": {"all_ms": 150.0, "p50_ms": 2.0, "p99_ms": 2.0},
    }
    assert not render_json(Primitive(100, 21, 1, (Round(Timing(1, (1.0,)), Timing(2.1, (1.0,))),)))["reached"]


@needs_all
@pytest.mark.usefixtures("nothing_left")
def test_a_tiny_vm_is_forked_beside_the_c_program(cli: Cli) -> None:
    shown = cli.ask("bench", "primitive", "--rounds", "1", "-n", "5")
    assert shown.returncode == 0, shown.stderr
    assert "5 forked and running, ms" in shown.stdout
    assert "A fork makes its VM by " in shown.stdout
    told = json.loads(cli.ask("bench", "primitive", "--rounds", "2", "-n", "3", "--json").stdout)
    assert (told["n"], len(told["rounds"])) == (3, 2)
    assert all(0 < side["p50_ms"] <= side["p99_ms"] for one in told["rounds"] for side in one.values())


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="needs /dev/kvm")
def test_without_a_compiler_it_says_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    check(cli.ask("bench", "primitive", PATH=str(tmp_path)), 5, "no C compiler", "Install gcc")


def test_what_it_cannot_do_is_refused(cli: Cli) -> None:
    for words in (("-n", "0"), ("-n", "1", "2"), ("--rounds", "0"), ("-n", "1001")):
        check(cli.ask("bench", "primitive", *words), 2, "takes one -n of 1 to 1000")
    check(cli.ask("bench", "primitive", "--only", "daemon"), 2, "has no parts")
    told = cli.ask("bench", "--json")
    assert told.returncode == 2
    assert "forkd bench primitive" in json.loads(told.stdout)["error"]
