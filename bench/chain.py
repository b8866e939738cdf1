"""Chains of snapshots: what a spawn costs at any depth, and what a layer holds; and packs, what they weigh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.clients import PAGE, Client, Tries, source_of
from bench.figures import SAME_ROUND, Bound, Family, Figure, Round, Row, Settings, Values, Where, ratio, shares
from bench.load import CLIENT_STOPS
from bench.served import TAG, Served, warm_template
from forkd.host.paths import Home
from forkd.model.machine import MachineSpec

LIVE, LOADED, REHEARSED = "live", "loaded", "rehearsed"
KINDS = {
    LIVE: "a live template",  # the branch itself, which stands still
    LOADED: "a template loaded from files",  # by a daemon that was started after it was written
}
DEEPER, LARGER, SHARE = 1.1, 1.2, 0.125
_SPAWNED = "the answer to its first evaluation is read; starts before the spawn is sent"
_READY = "daemon, snapshots and connection ready; a template of each, which stands still; they take turns"
_WEIGHED = "a sandbox that stands still, branched twice: as a layer, and whole"


def at_depth(kind: str, depth: int) -> dict[str, object]:
    """The words for spawns from one depth, of templates of one kind."""
    return {"kind": kind, "depth": depth, "made": KINDS.get(kind, "")}


def _deepest(settings: Settings) -> Iterable[Where]:
    return (at_depth(kind, settings["chain"]["depth"]) for kind in KINDS)


def _layers(settings: Settings) -> Iterable[Where]:
    return (at_depth("", depth) for depth in (1, settings["chain"]["depth"]))


CHAIN = Family(
    "branch.chain",
    "",
    _READY,
    {
        "spawn.rehearsed.0": Row("spawn from depth 0, a template that has rehearsed", "ms", _SPAWNED),
        "spawn.{kind}.{depth}": Row("spawn from depth {depth}, {made}", "ms", _SPAWNED),
        "deeper.{kind}": ratio(
            "spawn from depth {depth} / depth 0, p50, {made}",
            Bound("spawn from depth {depth} / depth 0, p50, {made}", "<=", DEEPER, _deepest),
        ),
        "load.{depth}": Row(
            "template of depth {depth}, loaded from files",
            "ms",
            f"{CLIENT_STOPS}; one time",
            prepared="a daemon just started; files in the page cache; hashes of them checked within",
        ),
        "layer.{depth}": Row("layer at depth {depth}: takes on disk", "MiB", "it is written", prepared=_WEIGHED),
        "differs.{depth}": Row(
            "layer at depth {depth}: pages that differ from its parent",
            "MiB",
            "the whole memories of both are compared, page by page",
            prepared=_WEIGHED,
        ),
        "larger.{depth}": Row(
            "layer at depth {depth} / what differs",
            "",
            SAME_ROUND,
            (Bound("layer at depth {depth} / what differs", "<=", LARGER, _layers),),
            _WEIGHED,
        ),
        "ok": Row(
            "spawns at all depths that were right",
            "",
            "each has shown what it has in its memory",
            (Bound("spawns at all depths: all right in every round", "=", "tries", lambda each: (_all_tries(each),)),),
        ),
    },
)


def packed(with_image: bool) -> dict[str, object]:
    return {"image": "with" if with_image else "without"}


def _both_packs(_: Settings) -> Iterable[Where]:
    return (packed(with_image=True), packed(with_image=False))


PACKS = Family(
    "branch.pack.{image}",
    "pack {image} image: ",
    "snapshot and image in the page cache",
    {
        "size": Row("bytes sent", "MiB", "the last byte is read"),
        "share": Row(
            "of the memory size",
            "",
            "the last byte is read",
            (Bound("pack of the numpy snapshot {image} image / its memory size", "<=", SHARE, _both_packs),),
        ),
        "rate": Row(
            "packed per second", "MiB/s", "the last byte is read; what is packed, without holes, by the time; median"
        ),
    },
)


@dataclass(frozen=True)
class ChainSpec:
    """`written_mib` at each depth, in the same place; `spawns` from each template."""

    depth: int = 10
    written_mib: int = 8
    spawns: int = 20


@dataclass(frozen=True)
class PackSpec:
    times: int = 2


@dataclass
class Chain:
    """What is known of one. `tags` by depth; `marks`: what each has in its memory."""

    tags: dict[int, str] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    spawns: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    load_ms: dict[int, float] = field(default_factory=dict)
    layers: dict[int, tuple[int, int]] = field(default_factory=dict)  # its bytes, and those that differ
    tries: Tries = field(default_factory=lambda: Tries("chain"))


def build_chain(daemon: Served, client: Client, spec: ChainSpec) -> Chain:
    """Each is a branch of a sandbox of the one before; the templates of some are measured while they are there.

    Depth 0 is a branch too, that holds all of its memory: only so it has a template of the same kind.
    """
    chain = Chain()
    with source_of(client, spec.written_mib) as first:
        source, parent = first, TAG
        for depth in range(1, spec.depth + 1):
            tag, mark = f"depth-{depth}", depth
            _write(client, source, mark)
            if depth in (1, spec.depth):
                chain.layers[depth] = _weigh(daemon.home, client, source, tag, parent)
            else:
                client.branch(source, tag)
            child = client.spawn(tag)
            if source != first:
                client.kill(source)
            source, parent = child, tag
        # Branched again, as only some templates are kept.
        _write(client, first, 0)
        client.branch(first, "depth-0", "full")
        client.branch(first, "depth-1-again")
        client.kill(source)
    live = {0: "depth-0", 1: "depth-1-again", spec.depth: f"depth-{spec.depth}"}
    marks = {0: 0, 1: 0, spec.depth: spec.depth}
    chain.tags, chain.marks = {0: "depth-0", 1: "depth-1", spec.depth: live[spec.depth]}, {**marks, 1: 1}
    _spawn_in_turns(client, chain, LIVE, live, marks, spec.spawns)
    return chain


def measure_loaded(client: Client, spec: ChainSpec, chain: Chain) -> None:
    """By a daemon that knows them from their files only."""
    for depth, tag in chain.tags.items():
        warm_template(client.rest, tag)
        chain.load_ms[depth] = client.rest.took_ms
    warm_template(client.rest, TAG)
    _spawn_in_turns(client, chain, LOADED, chain.tags, chain.marks, spec.spawns)
    for number in range(1, spec.spawns + 1):
        with chain.tries.one(f"{REHEARSED}, spawn {number}"):
            took_ms, child = _spawn_ms(client, TAG)
            client.kill(child)
            chain.spawns.setdefault((REHEARSED, 0), []).append(took_ms)


def _write(client: Client, sandbox_id: str, mark: int) -> None:
    client.expect(sandbox_id, f"write({mark})\nis_written({mark})", True)


def _spawn_in_turns(
    client: Client, chain: Chain, kind: str, tags: dict[int, str], marks: dict[int, int], count: int
) -> None:
    """So that a slow moment of the machine hits all depths."""
    for number in range(1, count + 1):
        for depth, tag in tags.items():
            with chain.tries.one(f"{kind}, depth {depth}, spawn {number}"):
                took_ms, child = _spawn_ms(client, tag)
                client.expect(child, f"is_written({marks[depth]})", True)
                client.kill(child)
                chain.spawns.setdefault((kind, depth), []).append(took_ms)


def _spawn_ms(client: Client, tag: str) -> tuple[float, str]:
    begun = time.perf_counter()
    child = client.spawn(tag)
    client.evaluate(child)
    return (time.perf_counter() - begun) * 1000, child


def _weigh(home: Home, client: Client, sandbox_id: str, tag: str, parent: str) -> tuple[int, int]:
    """The bytes of a layer, and those that differ, of which the layer itself is not asked."""
    place = f"/v1/sandboxes/{sandbox_id}"
    client.rest.ask("POST", f"{place}/pause")
    layer = client.branch(sandbox_id, tag, "diff")
    client.branch(sandbox_id, f"whole-{tag}", "full")
    client.rest.ask("POST", f"{place}/resume")
    flat = parent
    if parent != TAG:
        flat = f"flat-{parent}"
        client.rest.ask("POST", f"/v1/snapshots/{parent}/compact", {"to": flat})
    before, now = (home.snapshots / name / "memory" for name in (flat, f"whole-{tag}"))
    differs = count_differing(before, now) if before.exists() and now.exists() else 0  # the fake engine has no memory
    for made in {f"whole-{tag}", flat} - {TAG}:
        client.remove(made)
    return int(layer.get("diff_physical_bytes", 0)), differs


def count_differing(one: Path, other: Path, batch: int = 1 << 22) -> int:
    """Bytes of pages that are not the same in two files of one size."""
    differing = 0
    with one.open("rb") as first, other.open("rb") as second:
        while mine := first.read(batch):
            theirs = second.read(batch)
            if mine != theirs:
                pages = range(0, len(mine), PAGE)
                differing += sum(mine[at : at + PAGE] != theirs[at : at + PAGE] for at in pages) * PAGE
    return differing


def read_chain(chain: Chain) -> Round:
    values: dict[Figure, float] = CHAIN.read({"ok": chain.tries.right})
    for (kind, depth), took in chain.spawns.items():
        key = "spawn.rehearsed.0" if kind == REHEARSED else "spawn.{kind}.{depth}"
        values |= CHAIN.read({key: took}, **at_depth(kind, depth))
    for kind in KINDS:
        depths = {depth: shares(took)["p50"] for (of, depth), took in chain.spawns.items() if of == kind}
        if 0 in depths and (deepest := max(depths)):
            values |= CHAIN.read({"deeper.{kind}": depths[deepest] / depths[0]}, **at_depth(kind, deepest))
    for depth, took_ms in chain.load_ms.items():
        values |= CHAIN.read({"load.{depth}": took_ms}, **at_depth("", depth))
    for depth, (stored, differs) in chain.layers.items():
        if differs:
            amounts: Values = {"layer.{depth}": stored / 2**20, "differs.{depth}": differs / 2**20}
            values |= CHAIN.read({**amounts, "larger.{depth}": stored / differs}, **at_depth("", depth))
    return Round(values, tuple(chain.tries.failures))


def _all_tries(settings: Settings) -> Where:
    # Three depths of each kind, and the one that has rehearsed.
    depths = len({0, 1, settings["chain"]["depth"]})
    return {"tries": settings["chain"]["spawns"] * (depths * len(KINDS) + 1)}


def measure_packs(client: Client, machine: MachineSpec, spec: PackSpec) -> Round:
    values: dict[Figure, float] = {}
    tries = Tries("pack")
    for with_image in (True, False):
        sizes: list[int] = []
        rates: list[float] = []
        with tries.one(f"{packed(with_image)['image']} image"):
            for _ in range(spec.times):
                size, made = client.rest.measure(f"/v1/snapshots/{TAG}/pack?image={str(with_image).lower()}")
                sizes.append(size)
                rates.append(made / 2**20 / (client.rest.took_ms / 1000))
            values |= read_pack(with_image, sizes, rates, machine.memory_mib)
    return Round(values, tuple(tries.failures))


def read_pack(with_image: bool, sizes: Sequence[int], rates: Sequence[float], memory_mib: int) -> dict[Figure, float]:
    size_mib = statistics.median(sizes) / 2**20
    values: Values = {"size": size_mib, "share": size_mib / memory_mib, "rate": statistics.median(rates)}
    return PACKS.read(values, **packed(with_image))
