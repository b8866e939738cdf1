"""Metrics for Prometheus. Their names are an interface: docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from forkd import __version__
from forkd.model.sandbox import Way

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The start times of counters would double their number.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._counted: dict[Counter, int] = {}
        self.snapshots = Gauge("forkd_snapshots_total", "Number of snapshots", registry=registry)
        self.sandboxes = Gauge("forkd_sandboxes_active", "Live sandboxes", registry=registry)
        self.branches = Gauge("forkd_branches_in_flight", "Branches being made", registry=registry)
        self.branch_cap = Gauge("forkd_branch_concurrency_cap", "Branches that may be made at once", registry=registry)
        build = Gauge("forkd_build_info", "Always 1; the version is its label", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self.by_state = Gauge("forkd_sandboxes", "Sandboxes by state", ["state"], registry=registry)
        self.spawned = Counter("forkd_spawned", "Sandboxes that were forked", registry=registry)
        self.forks = Counter(
            "forkd_forks", "Sandboxes that were forked, by the way they took", ["way"], registry=registry
        )
        for way in Way:
            self.forks.labels(way.value)
        self.templates = Gauge("forkd_templates", "Number of templates", registry=registry)
        self.template_bytes = Gauge("forkd_template_memory_bytes", "Memory that templates hold", registry=registry)
        self.templates_made = Counter("forkd_templates_made", "Templates that were made", registry=registry)
        self.templates_failed = Counter("forkd_templates_failed", "Templates that failed", registry=registry)
        self.networks = Gauge("forkd_networks", "VMs that have a network", registry=registry)
        self.network_refused = Counter(
            "forkd_network_refused", "Connections and names that were refused, by reason", ["reason"], registry=registry
        )
        self.network_bytes = Counter(
            "forkd_network_bytes", "Bytes of sandboxes, by direction", ["direction"], registry=registry
        )
        for direction in ("in", "out"):
            self.network_bytes.labels(direction)
        self.errors = Counter("forkd_errors", "Answers that are errors, by code", ["code"], registry=registry)
        self.audit_failures = Counter(
            "forkd_audit_failures", "Requests the audit log could not take", registry=registry
        )
        self.requests = Counter("forkd_requests", "Requests answered", ["method", "route", "status"], registry=registry)
        self.spawn_s = self._histogram("forkd_spawn_seconds", "From the request to all forks running")
        self.exec_s = self._histogram("forkd_exec_seconds", "Commands that ran to their end, by exec")
        self.eval_s = self._histogram("forkd_eval_seconds", "Evaluations")
        self.identity_s = self._histogram("forkd_identity_seconds", "From a running fork to one with its own identity")
        self.request_s = self._histogram("forkd_request_seconds", "Requests, to the end of the answer")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_FAST_S, registry=self.registry)

    def count_up(self, counter: Counter, total: int) -> None:
        """Follow a total that is counted elsewhere."""
        # A sandbox that could not be asked this time is counted the next.
        counter.inc(max(0, total - self._counted.get(counter, 0)))
        self._counted[counter] = max(total, self._counted.get(counter, 0))

    def render(self, look: Callable[[Metrics], None]) -> bytes:
        """`look` sets the gauges to the present values."""
        look(self)
        return generate_latest(self.registry)
