"""results.json and its tables: a part that is measured again replaces its section, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.branch import BRANCH, KINDS, REPEATED
from bench.branch import PART as BRANCHES
from bench.chain import CHAIN, PACKS
from bench.containers import RUNTIMES
from bench.daemon import CALLS, SPAWNS
from bench.daemon import WAYS as CLIENT_WAYS
from bench.engine import ENGINE, RATIOS, without_way
from bench.figures import Family, Run, judge, render_section, summarize
from bench.forks import FORKS, STEP_ENDS, WAYS
from bench.lab import ENGINES
from bench.leasing import LEASES
from bench.live import LIVE
from bench.load import CYCLES as DAEMON_CYCLES
from bench.load import LOAD
from bench.many import CROWD, CYCLES, LIVES
from bench.network import FORKED, NETWORK, VARIANTS, VERSUS
from bench.network import PART as NETWORKS
from bench.packets import PACKETS, SENDING
from bench.siege import SIEGE
from forkd.errors import InvalidInput
from forkd.host.files import write_atomic

FORMAT = 1
# The section of the engine, which stands at the top of the file; the others stand below their names.
TOP = ""

Report = Mapping[str, Any]
Rows = list[str]

_HINT = "Remove it, or write to another with --out"
_STEP = re.compile(
    r"(?:(?P<engine>\w+)\.)?fork\.(?P<n>\d+)\.(?:(?P<way>fork|start)\.)?step\.(?P<step>.+)\.(?P<share>p\d+)"
)
_BY_WAY = re.compile(r"(?:fork\.\d+\.(?:fork|start)|ratio\.fork\.\d+\.fork_to_start)\..+")
_BY_AMOUNT = re.compile(r"live\.(?P<mib>\d+)\..+")
_BY_KIND = re.compile(rf"branch\.(?:{'|'.join(KINDS)})\..+")
_BY_VARIANT = re.compile(r"network\.fork\..+|network\.versus\.\d+\.\w+\.(?!(?:kept|ready|more)$).+")
_SPAWN = re.compile(r"daemon\.(?P<engine>\w+)\.spawn\.(?P<n>\d+)\.own\.p50")
_CALL = re.compile(r"daemon\.(?P<engine>\w+)\.(?P<kind>exec|eval)\.(?P<way>\w+)\.more\.p50")


def read_results(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidInput(f"Expected results of the bench in {path}: {error}", hint=_HINT) from None
    if not isinstance(found, dict):
        raise InvalidInput(f"Expected results of the bench in {path}, found a {type(found).__name__}", hint=_HINT)
    return found


def merge_results(old: Report, new: Report) -> dict[str, Any]:
    """`new` has sections by name, and the keys of the engine's section when that was measured. Pure."""
    if "figures" in new:
        return {**{part: old[part] for part in SECTIONS if part in old}, **new}
    return {**old, **new}


def write_results(path: Path, new: Report) -> dict[str, Any]:
    """What the file holds now."""
    merged = merge_results(read_results(path), new)
    # Sections last, whatever came first: the file is read by people too.
    ordered = {key: merged[key] for key in sorted(merged, key=lambda key: key in SECTIONS)}
    write_atomic(path, json.dumps(ordered, indent=1).encode() + b"\n")
    return ordered


def write_run(path: Path, part: str, run: Run) -> None:
    section = render_run(part, run)
    write_results(path, section if part == TOP else {part: section})


def render_run(part: str, run: Run) -> dict[str, Any]:
    """The section of a part that this process has measured."""
    section = render_section(run, judge(SECTIONS[part].families, summarize(run.rounds), run.settings))
    return {"format": FORMAT, **section} if part == TOP else section


def find_section(report: Report, part: str) -> Report | None:
    if part == TOP:
        return report if "figures" in report else None
    return report.get(part)


def render_report(report: Report) -> str:
    """The tables of the docs, of all that the report has."""
    blocks: list[Rows] = []
    for part, section in SECTIONS.items():
        if (found := find_section(report, part)) is not None:
            title = section.title(found)
            blocks += [[f"### {title}"] if title else [], *(table(found) for table in section.tables)]
    return "".join("\n".join(rows) + "\n\n" for rows in blocks if rows)


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Rows:
    """Nothing where it has no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines] if lines else []


def render_figures(section: Report, elsewhere: Sequence[re.Pattern[str]] = ()) -> Rows:
    """A row for each; `elsewhere`: the names of those that other tables have."""
    rows = []
    for name, figure in section["figures"].items():
        if not any(names.fullmatch(name) for names in elsewhere):
            low, high = render_value(figure["min"]), render_value(figure["max"])
            rows.append((figure["what"], render_median(figure), f"{low} to {high}"))
    return render_table(("what", "median", "fastest to slowest round"), rows)


def render_targets(section: Report) -> Rows:
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [
        (
            target["name"],
            f"{target['bound']} {target['unit']}".strip(),
            render_value(target["value"]),
            render_value(target["worst"]),
            words[target["reached"]],
        )
        for target in section["targets"]
    ]
    return render_table(("target", "bound", "median", "worst round", "reached"), rows)


def render_steps(section: Report, way: str | None = None) -> Rows:
    """One row for each step of a fork, one column for each number of children, by engine where there are several."""
    cells: dict[str, dict[tuple[int, str], list[str]]] = {}
    for name, figure in section["figures"].items():
        if (found := _STEP.fullmatch(name)) and found["way"] == way:
            column = (int(found["n"]), found["engine"] or "")
            cells.setdefault(found["step"], {}).setdefault(column, []).append(render_value(figure["median"]))
    columns = sorted({column for row in cells.values() for column in row})
    titles = (f"fork of {n}, {engine}" if engine else f"fork of {n}" for n, engine in columns)
    # Not every engine has all steps.
    ranks = {step: rank for rank, step in enumerate(STEP_ENDS)}
    rows = [
        (step, *(" / ".join(row.get(column, "-")) for column in columns))
        for step, row in sorted(cells.items(), key=lambda cell: ranks.get(cell[0], len(ranks)))
    ]
    return render_table((f"step of one child{f' made {WAYS[way]}' if way else ''}, p50 / p99 in ms", *titles), rows)


def _render_beside(
    section: Report, columns: Mapping[str, str], each: str, ratio: str, bare: Callable[[str, str], str]
) -> Rows:
    """One row for each figure that was measured in several ways, with the ratio of the first two.

    `each` and `ratio` are the names of figures, with gaps; `bare` is what a figure measures, without the way.
    """
    found, rows = section["figures"], []
    gaps = {"key": "|".join(columns), "n": r"(?P<n>\d+)", "rest": "(?P<rest>.+)"}
    names = re.compile(each.replace(".", r"\.").replace("{key}", "(?:{key})").format(**gaps))
    matches = [match for name in found if not _STEP.fullmatch(name) and (match := names.fullmatch(name))]
    for where in {match.groups(): match.groupdict() for match in matches}.values():
        cells = {key: found.get(each.format(key=key, **where)) for key in columns}
        what = next(bare(figure["what"], key) for key, figure in cells.items() if figure)
        between = found.get(ratio.format(**where))
        rows.append((what, *map(_render_range, cells.values()), render_value(between and between["median"])))
    return render_table(("median (fastest to slowest round)", *columns.values(), "ratio"), rows)


def render_ways(section: Report) -> Rows:
    names = ("fork.{n}.{key}.{rest}", "ratio.fork.{n}.fork_to_start.{rest}")
    return _render_beside(section, WAYS, *names, without_way)


def render_engines(section: Report) -> Rows:
    columns = {engine: engine for engine in ENGINES}
    return _render_beside(
        section, columns, "{key}.{rest}", "versus.{rest}", lambda what, key: what.removeprefix(f"{key}, ")
    )


def render_variants(section: Report) -> Rows:
    """Forks with more and more around them, and the ratio of the last to the first."""
    columns = {key: VARIANTS[key] for key in section["settings"]["variants"]}
    names = ("network.fork.{n}.{key}.{rest}", f"network.versus.{{n}}.{NETWORK}.{{rest}}")
    return _render_beside(section, columns, *names, lambda what, key: what.replace(f" {VARIANTS[key]}:", ":"))


def render_amounts(section: Report) -> Rows:
    """One row for each amount of memory that was just written."""
    found = section["figures"]
    amounts = [match["mib"] for name in found if name.endswith(".ok") and (match := _BY_AMOUNT.fullmatch(name))]
    rows = [
        (
            f"{mib} MiB",
            *(f"{_render_shares(found, f'live.{mib}.{name}')} ms" for name in ("pause", "answer")),
            render_median(found[f"live.{mib}.ok"]),
        )
        for mib in amounts
    ]
    return render_table(("just written", "pause of the source, p50 / p99", "answer, p50 / p99", "right"), rows)


def render_branches(section: Report) -> Rows:
    """One row for each kind of sandbox that is branched."""
    found, rows = section["figures"], []
    times = {
        "pause": "it stands still",
        "returns": "the call returns",
        "usable": "a child answers",
        "written": "written to disk",
        "fork": f"fork of {section['settings']['children']}",
        "rewind": "rewind",
    }
    for kind, who in KINDS.items():
        if f"branch.{kind}.ok" in found:
            cells = (_render_shares(found, f"branch.{kind}.{name}") for name in times)
            sizes = (found.get(f"branch.{kind}.{name}") for name in ("dirty", "stored"))
            right = render_median(found[f"branch.{kind}.ok"])
            rows.append((who, *cells, " / ".join(render_value(size and size["median"]) for size in sizes), right))
    title = f"{section['settings']['written_mib']} MiB just written, p50 / p99 in ms"
    return render_table((title, *times.values(), "MiB that differ / on disk", "right"), rows)


def render_costs(section: Report) -> Rows:
    """One row for each kind of request: what the client waits, and how that is divided."""
    found, rows = section["figures"], []
    for name in found:
        if spawn := _SPAWN.fullmatch(name):
            place, what = f"daemon.{spawn['engine']}.spawn.{spawn['n']}", f"{spawn['engine']}, spawn of {spawn['n']}"
            rows.append((what, f"{place}.total", f"{place}.fork", f"{place}.own"))
        if call := _CALL.fullmatch(name):
            place, way = f"daemon.{call['engine']}.{call['kind']}", call["way"]
            what = f"{call['engine']}, {call['kind']}, {CLIENT_WAYS[way]}"
            rows.append((what, f"{place}.{way}.total", f"{place}.agent", f"{place}.{way}.more"))
    return render_table(
        ("p50 / p99 in ms", "the client waits", "engine or agent", "the daemon's part"),
        ((what, *(_render_shares(found, name) for name in names)) for what, *names in rows),
    )


def render_containers(section: Report) -> Rows:
    """One row for each runtime, whether or not it could be used."""
    found, n, used = section["figures"], section["settings"]["n"], section["settings"]["runtimes"]
    columns = {"wall": "all of them", "p50": "one start, p50", "p99": "one start, p99", "ok": "answered right"}
    rows = []
    for runtime in RUNTIMES:
        cells = (found.get(f"containers.{runtime}.{n}.{name}") for name in columns)
        at_once = str(used[runtime]["at_once"]) if runtime in used else "-"
        rows.append((runtime, *(render_median(cell) if cell else "-" for cell in cells), at_once))
    return render_table((f"{n} cold starts", *columns.values(), "at once"), rows)


def render_notes(section: Report) -> Rows:
    notes = [*(f"did not work: {note}" for note in section["settings"]["notes"]), *section["failures"]]
    return [f"- {note}" for note in notes]


def lab_title(section: Report) -> str:
    """Times of an emulated machine are not to be taken for times."""
    *others, last = ENGINES
    beside = f"{', '.join(others)} and {last} on KVM"
    return f"{beside}, in the lab: ratios only" if section["host"]["emulated"] else beside


def _render_shares(found: Report, name: str) -> str:
    values = (found.get(f"{name}.{share}") for share in ("p50", "p99"))
    return " / ".join(render_value(value and value["median"]) for value in values)


def _render_range(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    return f"{render_median(figure)} ({render_value(figure['min'])} to {render_value(figure['max'])})"


def render_median(figure: Mapping[str, Any]) -> str:
    return f"{render_value(figure['median'])} {figure['unit']}".strip()


def render_value(value: float | None) -> str:
    """About three digits, never an exponent; whole numbers as they are."""
    if value is None:
        return "-"
    if value == int(value):
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Section:
    """What a part of results.json is judged by, and shown with."""

    title: Callable[[Report], str]
    tables: tuple[Callable[[Report], Rows], ...]
    families: tuple[Family, ...] = ()


def _titled(title: str, *families: Family, tables: tuple[Callable[[Report], Rows], ...] = (render_figures,)) -> Section:
    return Section(lambda _: title, (*tables, render_targets), families)


SECTIONS = {
    TOP: _titled(
        "",
        *(RATIOS, FORKS, ENGINE),
        tables=(
            lambda section: render_figures(section, (_STEP, _BY_WAY)),
            render_ways,
            render_steps,
            *(lambda section, way=way: render_steps(section, way) for way in WAYS),
        ),
    ),
    "live": _titled(
        "Forks of a running VM",
        LIVE,
        tables=(render_amounts, lambda section: render_figures(section, (_BY_AMOUNT,))),
    ),
    BRANCHES: _titled(
        "Branches, chains and packs",
        *(BRANCH, REPEATED, CHAIN, PACKS),
        tables=(render_branches, lambda section: render_figures(section, (_BY_KIND,))),
    ),
    NETWORKS: _titled(
        "Forks with a cell and a network",
        *(FORKED, VERSUS, PACKETS, SENDING, LEASES),
        tables=(render_variants, lambda section: render_figures(section, (_BY_VARIANT,))),
    ),
    "crowd": _titled("Many VMs alive at once", CROWD),
    "endurance": _titled("Forks that come and go", CYCLES, LIVES),
    "daemon": _titled("The daemon on top of the engine and the agent", SPAWNS, CALLS, tables=(render_costs,)),
    "load": _titled("Many clients at once", LOAD),
    "cycles": _titled("Sandboxes that come and go", DAEMON_CYCLES),
    "siege": _titled("A daemon under attack", SIEGE),
    "lab": Section(lab_title, (render_engines, render_steps, render_targets)),
    "containers": Section(lambda _: "Containers with the same image and code", (render_containers, render_notes)),
}
