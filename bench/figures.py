"""What a figure is, from its declaration to its place in results.json. Pure.

A family declares figures that one probe reads: what each measures, its unit, where its clock stops, what was there
before, and the bounds it is meant to keep. The probe hands its values to `Family.read`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forkd.errors import ForkdError
from forkd.runtime.demo import percentile

# Words that fill the {gaps} in the texts of a family: n, engine, way, ...
Where = Mapping[str, object]
Settings = Mapping[str, Any]
# What a probe read, by the key of its declaration: a value, or samples.
Values = dict[str, float | Sequence[float]]

# The key of samples that have no name of their own: `load.p50` is of each command of the load.
EACH = ""
SAME_ROUND = "both in the same round"
SEE_BOTH = "see the two figures"

# Whether a value keeps a limit, and of which round that is the least true.
_HOLDS: dict[str, tuple[Callable[[float, float], bool], Callable[[float, float], float]]] = {
    "<=": (lambda value, limit: value <= limit, lambda value, _: value),
    "<": (lambda value, limit: value < limit, lambda value, _: value),
    ">=": (lambda value, limit: value >= limit, lambda value, _: -value),
    "=": (lambda value, limit: value == limit, lambda value, limit: abs(value - limit)),
}
# Of amounts there are ratios; not of counts, nor of what is nearly nothing.
_AMOUNTS = ("s", "ms", "MiB")


@dataclass(frozen=True)
class Figure:
    """One figure that was or may be measured: a declaration whose gaps are filled."""

    name: str
    what: str
    unit: str
    stops_at: str
    prepared: str

    @property
    def is_amount(self) -> bool:
        """Whether it makes a ratio with another. Steps are compared in their own table."""
        return self.unit in _AMOUNTS and not (self.name.startswith("fork.") and ".step." in self.name)


def _once(_: Settings) -> Iterable[Where]:
    return ({},)


@dataclass(frozen=True)
class Bound:
    """A target: what the median has to keep; `=` has to hold in every round. A `limit` of text is one of the words.

    `at` says where it is judged, whether or not that was measured; `share` is the percentile of samples.
    """

    target: str
    holds: str
    limit: float | str
    at: Callable[[Settings], Iterable[Where]] = _once
    share: str = ""


@dataclass(frozen=True)
class Row:
    """The declaration of one figure. Without `prepared` or `title` those of its family hold."""

    what: str
    unit: str
    stops_at: str
    bounds: tuple[Bound, ...] = ()
    prepared: str = ""
    title: str | None = None


def ratio(what: str, *bounds: Bound) -> Row:
    """Of two figures."""
    return Row(what, "", SAME_ROUND, bounds, SEE_BOTH)


@dataclass(frozen=True)
class Family:
    """Figures whose names begin with `place`, by the rest of their names."""

    place: str
    title: str
    prepared: str
    rows: Mapping[str, Row]

    def at(self, key: str, share: str = "", /, **where: object) -> Figure:
        row = self.rows[key]
        what = f"{self.title if row.title is None else row.title}{row.what}{f', {share}' if share else ''}"
        texts = (what, row.unit, row.stops_at, row.prepared or self.prepared)
        return Figure(self.name(key, share, **where), *(text.format_map(where) for text in texts))

    def name(self, key: str, share: str = "", /, **where: object) -> str:
        return ".".join(part for part in (self.place, key, share) if part).format_map(where)

    def read(self, values: Mapping[str, float | Sequence[float]], /, **where: object) -> dict[Figure, float]:
        """In the order of the declaration. Samples become p50 and p99; of no samples there is nothing."""
        if undeclared := values.keys() - self.rows.keys():
            raise KeyError(f"{self.place} declares no {sorted(undeclared)}")
        readings: dict[Figure, float] = {}
        for key in (key for key in self.rows if key in values):
            value = values[key]
            parts = (shares(value) if value else {}) if isinstance(value, Sequence) else {"": value}
            readings |= {self.at(key, share, **where): part for share, part in parts.items()}
        return readings


Readings = Mapping[Figure, float]


def by_name(readings: Readings) -> dict[str, float]:
    return {figure.name: value for figure, value in readings.items()}


@dataclass(frozen=True)
class Round:
    """What one round read, and what failed in it."""

    readings: Readings
    failures: tuple[str, ...] = ()

    @classmethod
    def failed(cls, title: str, error: ForkdError, readings: Readings | None = None) -> Round:
        """A failure is a finding, not the end of the run."""
        return cls(readings or {}, (render_failure(title, error),))


def joined(parts: Iterable[Round]) -> Round:
    """What was read one after the other, as one round."""
    readings: dict[Figure, float] = {}
    failures: list[str] = []
    for part in parts:
        readings |= part.readings
        failures += part.failures
    return Round(readings, tuple(failures))


@dataclass(frozen=True)
class Run:
    """Everything a section of results.json is made of."""

    started: str
    host: Mapping[str, Any]
    settings: Settings
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    figure: Figure
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Target:
    """`reached` is None where this run did not measure it. `value` is the median, `worst` the worst round."""

    name: str
    bound: str
    unit: str
    value: float | None = None
    worst: float | None = None
    reached: bool | None = None
    reached_in_every_round: bool | None = None


def render_failure(title: str, error: ForkdError) -> str:
    """With the last line of its details: there the VMM says what it did not like."""
    lines = (error.details or "").strip().splitlines()
    return f"{title}: {error.code}: {error.message}{f' ({lines[-1]})' if lines else ''}"


def shares(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def step_lengths(begun: float, marks: Mapping[str, float]) -> dict[str, float]:
    """How long each step took, of the times at which they were over, in the order they happened."""
    lengths, before = {}, begun
    for step, at in sorted(marks.items(), key=lambda mark: mark[1]):
        lengths[step] = at - before
        before = at
    return lengths


def summarize(rounds: Sequence[Round]) -> dict[str, Summary]:
    """By name, in the order they were first read. A figure that a round lacks has fewer values."""
    collected: dict[Figure, list[float]] = {}
    for each in rounds:
        for figure, value in each.readings.items():
            collected.setdefault(figure, []).append(value)
    return {figure.name: Summary(figure, tuple(values)) for figure, values in collected.items()}


def judge(families: Iterable[Family], summaries: Mapping[str, Summary], settings: Settings) -> list[Target]:
    """Every bound of these families against what was measured."""
    return [
        judge_one(bound, family.name(key, bound.share, **where), row.unit, summaries, where)
        for family in families
        for key, row in family.rows.items()
        for bound in row.bounds
        for where in bound.at(settings)
    ]


def judge_one(bound: Bound, name: str, unit: str, summaries: Mapping[str, Summary], where: Where) -> Target:
    limit = float(str(where[bound.limit])) if isinstance(bound.limit, str) else bound.limit
    target = Target(bound.target.format_map(where), f"{bound.holds} {limit:g}", unit)
    if (summary := summaries.get(name)) is None:
        return target
    keeps, badness = _HOLDS[bound.holds]
    worst = max(summary.values, key=lambda value: badness(value, limit))
    always = keeps(worst, limit)
    reached = always if bound.holds == "=" else keeps(summary.median, limit)
    return replace(target, value=summary.median, worst=worst, reached=reached, reached_in_every_round=always)


def render_section(run: Run, targets: Sequence[Target]) -> dict[str, Any]:
    """As it stands in results.json."""
    return {
        "started": run.started,
        "host": dict(run.host),
        "settings": {**run.settings, "rounds_done": len(run.rounds)},
        "failures": [failure for each in run.rounds for failure in each.failures],
        "targets": [{key: _rounded(value) for key, value in asdict(target).items()} for target in targets],
        "figures": {name: _render_summary(summary) for name, summary in summarize(run.rounds).items()},
    }


def _render_summary(summary: Summary) -> dict[str, Any]:
    figure = summary.figure
    return {
        "what": figure.what,
        "unit": figure.unit,
        "median": _rounded(summary.median),
        "min": _rounded(min(summary.values)),
        "max": _rounded(max(summary.values)),
        "stops_at": figure.stops_at,
        "prepared": figure.prepared,
        "rounds": [_rounded(value) for value in summary.values],
    }


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
