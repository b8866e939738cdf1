"""The charts of the docs: what each shows, made of a section of results.json; drawing.py draws them in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.branch import FORK_MS, KINDS, PART, REWIND_MS, USABLE_MS
from bench.branch import PAUSE_MS as BRANCH_PAUSE_MS
from bench.chain import KINDS as TEMPLATES
from bench.daemon import CALL_MS, SPAWN_MS
from bench.drawing import Bar, Chart, Panel, draw_chart
from bench.forks import FORK, START, WAYS
from bench.ground import render_host
from bench.lab import FORKED, QEMU, RESTORED, UNIQUE_SHARE_PERCENT
from bench.live import ANSWER_MS, JUDGED_MIB, PAUSE_MS
from bench.network import MOST_TIME, PLAIN, VARIANTS
from bench.network import PART as NETWORKS
from bench.packets import BARE, LEAST_SHARE, ROADS, WAY_MS
from bench.report import TOP, Report, lab_title, render_median, render_value

# Steps of a fork from the outside in: QEMU's in greys, the guest's in colour.
_STEP_COLOURS = {
    "process start": "#8a94a3",
    "state load": "#b3bac5",
    "confine": "#6b7480",
    "quiescence": "#6b7480",
    "clone": "#8a94a3",
    "descriptors": "#a5adb9",
    "threads": "#bfc6cf",
    "resume": "#d3d8de",
    "contract": "#5b9bd5",
    "first eval": "#1f5f9e",
}
_BLUE, _ORANGE, _GREY, _LIGHT = "#1f5f9e", "#d9822b", "#8a94a3", "#b3bac5"
_BY_WAY = {"": _BLUE, FORK: _BLUE, START: _GREY}
_BY_ENGINE = {FORKED: _ORANGE, RESTORED: _LIGHT, QEMU: _BLUE}
# Of the bars of one row together.
_ROW_HEIGHT = 0.75
# A single row, its bars as thick as those of three.
_ONE_ROW = (1.2, -1.2)
_ANSWERED = "Until every VM has answered numpy.zeros(5).tolist()"


def draw(part: str, section: Report, path: Path) -> None:
    draw_chart(CHARTS[part](section), path)


def show_engine(report: Report) -> Chart:
    """All of a fork against one cold boot, and where the time of a child goes, on a scale of its own for each way."""
    settings = report["settings"]
    ways = settings.get("ways", [""])
    panels = {"totals": _show_totals(report, ways), **{f"steps {way}": _show_steps(report, way) for way in ways}}
    ahead = "no process started ahead but the template" if FORK in ways else "no process started ahead"
    heights = [1.0 + 0.35 * (len(ways) - 1), *[1.0] * len(ways)]
    caption = f"{_render_machine(report)}; {ahead}"
    return Chart(3.2 + 2.5 * len(ways), [[name] for name in panels], panels, caption, heights=heights)


def _place(n: int, way: str) -> str:
    return f"fork.{n}.{way}" if way else f"fork.{n}"


def _show_totals(report: Report, ways: Sequence[str]) -> Panel:
    found = report["figures"]
    totals = [("cold boot of 1", found.get("cold_boot.total"), _ORANGE)]
    for n in report["settings"]["n"]:
        for way in ways:
            label = f"fork of {n}{way and f' {WAYS[way]}'}"
            totals.append((label, found.get(f"{_place(n, way)}.wall"), _BY_WAY[way]))
    bars = [
        Bar(label, [(entry["median"], colour, "")], f"{render_value(entry['median'])} s", (entry["min"], entry["max"]))
        for label, entry, colour in totals
        if entry is not None
    ]
    return Panel(_ANSWERED, "seconds; whiskers: fastest and slowest round", bars, margin=0.12)


def _show_steps(report: Report, way: str) -> Panel:
    found = report["figures"]
    sizes = [n for n in report["settings"]["n"] if f"{_place(n, way)}.wall" in found]
    bars = []
    for n in sizes:
        steps = {step: found.get(f"{_place(n, way)}.step.{step}.p50") for step in _STEP_COLOURS}
        parts = [(entry["median"], _STEP_COLOURS[step], step) for step, entry in steps.items() if entry]
        bars.append(Bar(f"1 of {n}", parts, f"{render_value(found[f'{_place(n, way)}.child.p50']['median'])} ms"))
    begin = "from the start of its process"
    if way == FORK:
        begin = "from when it is asked for; until quiescence it waits for its turn, too"
    legend = {"loc": "upper left", "bbox_to_anchor": (-0.12, -0.3), "columnspacing": 1.2, "handlelength": 1.4}
    title = f"Where the time of one child{way and f' {WAYS[way]}'} goes (p50 of each step, and of the whole)"
    return Panel(title, f"milliseconds {begin}", bars, margin=0.12, legend=legend)


def show_live(section: Report) -> Chart:
    """Two panels, as the source and the fork are two VMs: how long the one stands still, how soon the other answers."""
    answers = "The fork has taken a new identity and answers numpy.zeros(5).tolist() after"
    panels = {
        "pause": _show_live(section, "pause", "The running VM stands still for", PAUSE_MS, _ORANGE),
        "answer": _show_live(section, "answer", answers, ANSWER_MS, _BLUE),
    }
    settings = section["settings"]
    forks = f"{settings['memory_mib']} MiB guests; {settings['forks']} forks each; {render_rounds(settings)}"
    return Chart(4.6, [["pause"], ["answer"]], panels, f"{render_host(section['host'])}; {forks}")


def _show_live(section: Report, name: str, title: str, limit_ms: float, colour: str) -> Panel:
    bars = []
    for mib in section["settings"]["written_mib"]:
        if shares := _find_shares(section, f"live.{mib}.{name}"):
            p50, p99 = shares
            text = f"{render_value(p50)} ms (p99 {render_value(p99)})"
            bars.append(Bar(f"{mib} MiB just written", [(p50, colour, "")], text, line_to=p99))
    below = f"milliseconds; bar: p50; line: to p99; dashed: what its p50 may be with {JUDGED_MIB} MiB"
    return Panel(title, below, bars, limit=limit_ms)


def _find_shares(section: Report, name: str) -> tuple[float, float] | None:
    half, most = (section["figures"].get(f"{name}.{share}") for share in ("p50", "p99"))
    return (half["median"], most["median"]) if half and most else None


def show_daemon(section: Report) -> Chart:
    """Two panels: the daemon's part against what it may cost, and how much of a call it is."""
    panels = {"parts": _show_parts(section), "calls": _show_calls(section)}
    caption = f"{render_host(section['host'])}; {render_rounds(section['settings'])}"
    return Chart(6.4, [["parts"], ["calls"]], panels, caption)


def _show_parts(section: Report) -> Panel:
    kinds = [(f"spawn of {n}", f"spawn.{n}.own", limit) for n, limit in SPAWN_MS.items()]
    kinds += [("exec", "exec.unix.more", CALL_MS), ("eval", "eval.unix.more", CALL_MS)]
    parts = [
        (f"{label}, {engine}", f"daemon.{engine}.{place}", limit_ms)
        for engine in section["settings"]["engines"]
        for label, place, limit_ms in kinds
    ]
    return _show_limits(section, "The daemon's own part of a request, in percent of what it may cost", parts)


def _show_calls(section: Report) -> Panel:
    found = section["figures"]
    bars = []
    for engine in section["settings"]["engines"]:
        for way, name in {"unix": "unix socket", "tcp": "TCP", "sdk": "SDK, unix socket"}.items():
            agent, more = (found.get(f"daemon.{engine}.eval.{part}.p50") for part in ("agent", f"{way}.more"))
            if agent and more:
                parts = [(agent["median"], _LIGHT, "agent"), (more["median"], _BLUE, "daemon, HTTP, client")]
                text = f"{render_value(agent['median'])} + {render_value(more['median'])} ms"
                bars.append(Bar(f"{name}, {engine}", parts, text))
    title = "What a client waits for when it evaluates 6 * 7 (p50 of each part)"
    return Panel(title, "milliseconds", bars, legend={"loc": "upper left", "bbox_to_anchor": (0, -0.24)})


def show_branches(section: Report) -> Chart:
    """Two panels: what is promised of a branch against what it may cost, and spawns from any depth."""
    settings = section["settings"]
    costs = [
        ("pause", "pause", BRANCH_PAUSE_MS),
        ("a child answers", "usable", USABLE_MS),
        (f"fork of {settings['children']}", "fork", FORK_MS),
        ("rewind", "rewind", REWIND_MS),
    ]
    kinds = [(label, kind, name, limit) for label, name, limit in costs for kind in KINDS]
    parts = [(f"{label}, {kind}", f"branch.{kind}.{name}", limit) for label, kind, name, limit in kinds]
    title = f"Branches with {settings['written_mib']} MiB just written, in percent of what each may cost"
    depths = []
    for kind, colour in zip(TEMPLATES, (_BLUE, _GREY), strict=True):
        for depth in sorted({0, 1, settings["chain"]["depth"]}):
            if shares := _find_shares(section, f"branch.chain.spawn.{kind}.{depth}"):
                text = f"{render_value(shares[0])} ms (p99 {render_value(shares[1])})"
                depths.append(Bar(f"depth {depth}, {kind}", [(shares[0], colour, "")], text, line_to=shares[1]))
    below = "milliseconds; bar: p50; line: to p99; live: the branch itself is the template; loaded: its files are"
    panels = {
        "costs": _show_limits(section, title, parts),
        "depths": Panel("Spawn until its first evaluation is answered, by the depth of its snapshot", below, depths),
    }
    return Chart(6.8, [["costs"], ["depths"]], panels, _render_machine(section))


def _show_limits(section: Report, title: str, parts: Sequence[tuple[str, str, float]]) -> Panel:
    """Each with its label, its figure, and the most that its p50 may be in ms: in percent of that."""
    bars = []
    for label, place, limit_ms in parts:
        if shares := _find_shares(section, place):
            p50, p99 = (100 * value / limit_ms for value in shares)
            text = f"{render_value(shares[0])} of {limit_ms:g} ms (p99 {render_value(shares[1])})"
            bars.append(Bar(label, [(p50, _BLUE if p50 <= 100 else _ORANGE, "")], text, line_to=p99))
    return Panel(title, "bar: p50; line: to p99; dashed: the most it may cost", bars, limit=100)


def show_networks(section: Report) -> Chart:
    """Forks with and without on top; what a child's packets cost below, and what its network does."""
    ways = {"tap to server": "network.packet.way"}
    leases = {
        "made": "network.lease.made",
        "leased, other rules": "network.lease.other",
        "leased, same rules": "network.lease.same",
        "released": "network.lease.released",
    }
    dashed = "milliseconds; bar: p50; line: to p99; dashed: the most it may take"
    first = Panel("First packet of a child, emulation not counted", dashed, rows=_ONE_ROW, limit=WAY_MS)
    costs = Panel("One network", "milliseconds; bar: p50; line: to p99")
    panels = {
        "forks": _show_variants(section),
        "packets": replace(first, bars=_show_shares(section, ways)),
        "sending": _show_sending(section),
        "leases": replace(costs, bars=_show_shares(section, leases)),
    }
    layout = [["forks", "forks"], ["packets", "packets"], ["sending", "sending"], ["leases", "leases"]]
    return Chart(8.4, layout, panels, _render_machine(section), heights=(1.2, 0.7, 1, 1.2))


def _show_shares(section: Report, rows: Mapping[str, str]) -> list[Bar]:
    """p50 and p99 in ms, by label."""
    bars = []
    for label, name in rows.items():
        if shares := _find_shares(section, name):
            text = f"{render_value(shares[0])} ms (p99 {render_value(shares[1])})"
            bars.append(Bar(label, [(shares[0], _BLUE, "")], text, line_to=shares[1]))
    return bars


def _show_variants(section: Report) -> Panel:
    found, n = section["figures"], section["settings"]["n"]
    bars = []
    for variant in section["settings"]["variants"]:
        if (kept := found.get(f"network.fork.{n}.{variant}.kept")) is None:
            continue
        text = render_median(kept)
        if versus := found.get(f"network.versus.{n}.{variant}.kept"):
            text += f" ({render_value(versus['median'])} times that without)"
        colour = _GREY if variant == PLAIN else _BLUE
        bars.append(Bar(VARIANTS[variant], [(kept["median"], colour, "")], text, (kept["min"], kept["max"])))
    plain = found.get(f"network.fork.{n}.{PLAIN}.kept")
    below = f"seconds; whiskers: fastest and slowest round; dashed: {MOST_TIME:g} times that without"
    title = f"Fork of {n} from a template until all have kept the fork contract"
    return Panel(title, below, bars, margin=0.6, limit=plain and plain["median"] * MOST_TIME)


def _show_sending(section: Report) -> Panel:
    found, bars = section["figures"], []
    for road, label in ROADS.items():
        if (rate := found.get(f"network.send.{road}")) is None:
            continue
        text = render_median(rate)
        if share := found.get(f"network.send.ratio.{road}"):
            text += f" ({render_value(share['median'])} of a bare tap)"
        bars.append(
            Bar(label, [(rate["median"], _GREY if road == BARE else _BLUE, "")], text, (rate["min"], rate["max"]))
        )
    bare = found.get(f"network.send.{BARE}")
    below = f"MiB per second, from one VM over TCP; dashed: {LEAST_SHARE:g} of a bare tap"
    return Panel("Throughput out", below, bars, margin=0.6, limit=bare and bare["median"] * LEAST_SHARE)


def show_lab(section: Report) -> Chart:
    """Time above, on a scale where a fork and a boot can both be seen; CPU time and memory of one child below."""
    found, sizes = section["figures"], section["settings"]["n"]
    most = max(sizes)

    def of_cold_boot(engine: str, entry: Mapping[str, Any]) -> str:
        cold = found.get(f"{engine}.cold_boot.total")
        if cold is None or cold is entry:
            return render_median(entry)
        return f"{render_median(entry)} ({render_value(entry['median'] / cold['median'])} of its cold boot)"

    def with_amount(engine: str, entry: Mapping[str, Any]) -> str:
        held = found[f"{engine}.fork.{most}.idle_unique.largest"]
        return f"{render_value(entry['median'])} % ({render_median(held)})"

    times = {"cold boot of 1": "cold_boot.total", **{f"fork of {n}": f"fork.{n}.wall" for n in sizes}}
    cpu = {f"1 of {n}": f"fork.{n}.cpu" for n in sizes}
    # As a share: guests of two engines do not touch the same memory.
    memory = {f"largest of {most}": f"fork.{most}.unique_share"}
    seconds = "seconds, on a logarithmic scale; whiskers: fastest and slowest round"
    above = Panel(
        "Until every VM has answered", seconds, legend={"loc": "lower right", "bbox_to_anchor": (1, 1)}, log=True
    )
    left = Panel("CPU time of one child until then", "milliseconds, all its processes, mean")
    right = Panel(
        "Unique memory of an idle child",
        "% of the guest's resident memory; dashed: its bound",
        margin=0.65,
        limit=UNIQUE_SHARE_PERCENT,
        rows=_ONE_ROW,
    )
    panels = {
        "times": _with_engines(above, section, times, of_cold_boot),
        "cpu": _with_engines(left, section, cpu, lambda _, entry: render_median(entry)),
        "memory": _with_engines(right, section, memory, with_amount),
    }
    layout = [["times", "times"], ["cpu", "memory"]]
    return Chart(6.8, layout, panels, _render_machine(section), lab_title(section), (1.35, 1))


def _with_engines(
    panel: Panel, section: Report, rows: Mapping[str, str], beside: Callable[[str, Mapping[str, Any]], str]
) -> Panel:
    """The panel with the bars of all engines, for each row that has one."""
    found, engines = section["figures"], section["settings"]["engines"]
    labels = [label for label, name in rows.items() if any(f"{engine}.{name}" in found for engine in engines)]
    bars, height = [], _ROW_HEIGHT / len(engines)
    for at, engine in enumerate(engines):
        for label in labels:
            if entry := found.get(f"{engine}.{rows[label]}"):
                part = (entry["median"], _BY_ENGINE.get(engine, _GREY), engine)
                shift, whiskers = (at - (len(engines) - 1) / 2) * height, (entry["min"], entry["max"])
                bars.append(Bar(label, [part], beside(engine, entry), whiskers, shift=shift))
    return replace(panel, labels=labels, bars=bars, height=height, cap=2)


def render_rounds(settings: Mapping[str, Any]) -> str:
    return f"median of {settings['rounds_done']} rounds" if settings["rounds_done"] > 1 else "one round"


def _render_machine(section: Report) -> str:
    settings = section["settings"]
    return f"{render_host(section['host'])}; {settings['memory_mib']} MiB guests; {render_rounds(settings)}"


CHARTS: dict[str, Callable[[Report], Chart]] = {
    TOP: show_engine,
    "live": show_live,
    "daemon": show_daemon,
    PART: show_branches,
    NETWORKS: show_networks,
    "lab": show_lab,
}
