"""What the demo shows, by value: one screen, with bars, and commands to go on with."""

import io
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from forkd.cli.demo import print_screen, render_bar, render_next, render_way
from forkd.cli.parser import build_parser
from forkd.runtime.demo import Result

RESULT = Result(
    engine="qemu",
    isolation="qemu-tcg",
    n=1000,
    ok=1000,
    distinct=1000,
    cold_boot_s=14.05,
    fork_one_s=0.073,
    fork_all_s=7.03,
    per_child_ms={"p50": 201.0, "p99": 423.0},
    unique_mib_per_child=4.2,
    idle_cpu_percent_per_child=0.0,
    way="fork",
    template_s=4.52,
    template_mib=57.0,
    kill_all_s=0.5,
)


def show(result: Result, *, terminal: bool, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        console = Console(file=file, force_terminal=terminal, width=80, highlight=False, color_system=None)
        print_screen(result, console, ".venv/bin/forkd")
        file.flush()
        return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


@pytest.mark.parametrize(
    ("terminal", "encoding", "full", "short"),
    [(True, "utf-8", "█", "▎"), (True, "ascii", "#", "#"), (False, "utf-8", "#", "#")],
)
def test_the_result_fits_one_screen_with_bars_that_the_place_can_show(
    terminal: bool, encoding: str, full: str, short: str
) -> None:
    lines = show(RESULT, terminal=terminal, encoding=encoding)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[:3] == [
        f"cold boot of 1 VM  {full * 32}  14.05 s",
        f"fork of 1          {short:32}  0.073 s, 192x faster",
        f"fork of 1000       {full * 16}{'▏' if full == '█' else '#'}{' ' * 15}  7.03 s, 7 ms each",
    ]
    assert "their template, made once  4.52 s, 57 MiB" in lines
    assert "1000 of 1000 VMs, each with its own kernel, answered numpy.zeros(5).tolist()" in lines


def test_forks_that_take_longer_than_the_boot_have_the_longest_bar() -> None:
    lines = show(replace(RESULT, fork_all_s=28.1), terminal=False)
    assert [line.count("#") for line in lines[:3]] == [16, 1, 32]


@pytest.mark.parametrize(("share", "bar"), [(0.0, "▏"), (0.5, "█" * 16), (0.51, "█" * 16 + "▍"), (1.0, "█" * 32)])
def test_a_bar_is_as_long_as_its_share(share: float, bar: str) -> None:
    assert render_bar(share, plain=False) == bar


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("fork", "forked from a template"),
        ("start", "a QEMU started for each"),
        ("fork and start", "forked from a template, and some started"),
    ],
)
def test_how_the_children_were_made_is_said(way: str, said: str) -> None:
    assert render_way(replace(RESULT, way=way)) == said


def test_without_a_template_none_is_shown() -> None:
    lines = show(replace(RESULT, way="start", template_s=None, template_mib=None), terminal=False)
    assert not [line for line in lines if "template" in line]


def test_what_to_try_next_are_commands() -> None:
    for command, _ in render_next("forkd"):
        words = shlex.split(command.replace("$(forkd fork demo -q)", "sb-1"))
        assert words[0] == "forkd" and callable(build_parser().parse_args(words[1:]).func)
