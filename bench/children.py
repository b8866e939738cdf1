"""Children of forks of one size, made in one way: stamps taken as each becomes ready, and the figures of them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench import figures
from bench.figures import FIRST_EVAL, FORK, Figure
from bench.guest import evaluate
from bench.probes import Probe, exact_cpu_seconds
from bench.report import shares, step_lengths
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.templates import Template


@dataclass
class Children:
    """Of one fork of `n`, or of the same one repeated."""

    n: int
    way: str
    probe: Probe
    template: Template | None = None
    wall_s: list[float] = field(default_factory=list)
    host_cpu_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: list[float] = field(default_factory=list)
    unique_mib: list[float] = field(default_factory=list)
    kill_s: list[float] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    _begun_s: float = 0.0
    _begun_cpu_s: float = 0.0

    def begin(self) -> None:
        self._begun_s, self._begun_cpu_s = time.monotonic(), self._host_cpu_s()

    def all_ready(self, sandboxes: Sequence[Sandbox]) -> None:
        self.wall_s.append(time.monotonic() - self._begun_s)
        self.host_cpu_ms.append((self._host_cpu_s() - self._begun_cpu_s) / self.n * 1000)
        self.unique_mib += self.probe.unique_mib(sandboxes)

    def _host_cpu_s(self) -> float:
        forked = exact_cpu_seconds(self.template.machine.pid) if self.template else 0.0
        return time.process_time() + forked

    async def ready(self, sandbox: Sandbox) -> None:
        await evaluate(sandbox.agent)
        now = time.monotonic()
        phases = sandbox.machine.phases
        self.ways[phases.way.value] += 1
        self.total_ms.append((now - phases.begun) * 1000)
        for step, length in step_lengths(phases.begun, {**phases.steps, FIRST_EVAL: now}).items():
            self.steps_ms.setdefault(step, []).append(length * 1000)
        self.cpu_ms.append(self.probe.cpu_seconds(sandbox) * 1000)

    @contextmanager
    def killing(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.kill_s.append(time.monotonic() - begun)

    def readings(self) -> dict[Figure, float]:
        """Of what was repeated, the median of whole forks; percentiles and means are over all children."""
        n, way = self.n, self.way
        read = {
            figures.fork_wall(n, way): statistics.median(self.wall_s),
            figures.fork_ok(n, way): len(self.total_ms) / len(self.wall_s),
            **{figures.fork_child(n, share, way): value for share, value in shares(self.total_ms).items()},
            **{
                figures.fork_step(n, step, share, way): value
                for step, values in self.steps_ms.items()
                for share, value in shares(values).items()
            },
            self.probe.cpu_figure(n, way): statistics.mean(self.cpu_ms),
        }
        if way:
            read[figures.fork_host_cpu(n, way)] = statistics.mean(self.host_cpu_ms)
        if self.unique_mib:
            read[figures.unique_memory(n, "mean", way)] = statistics.mean(self.unique_mib)
            read[figures.unique_memory(n, "largest", way)] = max(self.unique_mib)
        return {**read, figures.kill(n, way): statistics.median(self.kill_s)}

    def failures(self, title: str) -> tuple[str, ...]:
        """Who was to come from a template and was started does not count as that."""
        started = 0 if self.way != FORK else sum(self.ways.values()) - self.ways[FORK]
        return (f"{title}: {started} children did not come from the template",) if started else ()
