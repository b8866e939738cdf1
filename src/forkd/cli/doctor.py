"""`forkd doctor`: what this machine has, what it lacks, and which engine will run."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forkd.cli.arguments import add_json
from forkd.cli.output import show
from forkd.errors import HostLacks
from forkd.host.finding import Status
from forkd.runtime.doctor import Diagnosis, diagnose

_WIDTH = 100
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.INFO: "dim"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    diagnosis = diagnose()
    show(args, render_json(diagnosis), lambda _: _print_report(diagnosis))
    return 0 if diagnosis.ok else HostLacks.exit_code


def render_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "ok": diagnosis.ok,
        "engine": diagnosis.engine,
        "accelerator": diagnosis.accelerator,
        "isolation": diagnosis.isolation,
        "reason": diagnosis.reason,
        "findings": [
            {"name": each.name, "status": each.status.value, "found": each.found, "remedy": each.remedy}
            for each in diagnosis.findings
        ],
    }


def render_choice(diagnosis: Diagnosis) -> str:
    """The last line: which engine, and why."""
    if diagnosis.engine is None:
        return diagnosis.reason
    accelerator = f" on {diagnosis.accelerator}" if diagnosis.accelerator else ""
    return f"Engine: {diagnosis.engine}{accelerator}: {diagnosis.reason}"


def _print_report(diagnosis: Diagnosis) -> None:
    # Rich takes 60 ms to import; `--json` and every other command do without.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for each in diagnosis.findings:
        table.add_row(each.name, Text(each.status.value, _COLOURS[each.status]), Text(each.found))
    console.print(table)
    remedies = [each for each in diagnosis.findings if each.remedy]
    if remedies:
        advice = Table(box=None, pad_edge=False, show_header=False, title="What to do", title_justify="left")
        advice.add_column(no_wrap=True)
        advice.add_column(overflow="fold")
        for each in remedies:
            advice.add_row(each.name, Text(each.remedy or ""))
        console.print("", advice, sep="\n")
    console.print()
    if diagnosis.isolation:
        console.print(Text(f"Isolation: {diagnosis.isolation}"))
    console.print(Text(render_choice(diagnosis), "green" if diagnosis.ok else "bold red"))
