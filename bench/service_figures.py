"""What is measured of the daemon. Each says where its clock stops and what was there before it started. Pure."""

from __future__ import annotations

from bench.figures import Figure

_READY = (
    "daemon, snapshot and connection ready; a memory file in the page cache; "
    "no process started ahead but the template, where the engine can fork one"
)
_CLIENTS_STOP = "the last byte of the answer is read; starts before the first byte of the request is sent"
WAYS = {
    "unix": "plain HTTP, unix socket",
    "tcp": "plain HTTP, TCP",
    "sdk": "Controller, unix socket",
}


def spawn_total(engine: str, n: int, share: str) -> Figure:
    return _spawn(engine, n, f"total.{share}", f"POST /v1/sandboxes, {share}", "ms", _CLIENTS_STOP)


def spawn_fork(engine: str, n: int, share: str) -> Figure:
    stop = "the engine's fork returns to the daemon; starts when it is called there"
    return _spawn(engine, n, f"fork.{share}", f"the engine's fork within it, {share}", "ms", stop)


def spawn_own(engine: str, n: int, share: str) -> Figure:
    stop = "as the request, less the engine's fork within the same request"
    return _spawn(engine, n, f"own.{share}", f"the daemon's part, {share}", "ms", stop)


def spawn_direct(engine: str, n: int, share: str) -> Figure:
    stop = "fork_children returns, called without a daemon; each call follows one of POST /v1/sandboxes"
    return _spawn(engine, n, f"direct.{share}", f"the same fork without a daemon, {share}", "ms", stop)


def spawn_to_direct(engine: str, n: int) -> Figure:
    stop = "p50 of POST /v1/sandboxes by p50 of the same fork without a daemon, taken in turns"
    return _spawn(engine, n, "ratio", "through the daemon / without", "", stop)


def _spawn(engine: str, n: int, name: str, what: str, unit: str, stop: str) -> Figure:
    return Figure(f"daemon.{engine}.spawn.{n}.{name}", f"{engine}, spawn of {n}: {what}", unit, stop, _READY)


def call_total(engine: str, kind: str, way: str, share: str) -> Figure:
    return _call(engine, kind, f"{way}.total.{share}", f"{WAYS[way]}, {share}", _CLIENTS_STOP)


def call_more(engine: str, kind: str, way: str, share: str) -> Figure:
    stop = "as the request, less the agent's round trip within the same request"
    return _call(engine, kind, f"{way}.more.{share}", f"{WAYS[way]}, on top of the agent, {share}", stop)


def call_agent(engine: str, kind: str, share: str) -> Figure:
    stop = "the agent's answer is with the daemon; starts when the daemon asks"
    return _call(engine, kind, f"agent.{share}", f"the agent's round trip, {share}", stop)


def call_cpu(engine: str, kind: str) -> Figure:
    stop = "all calls of the round are answered; CPU time of the daemon, by the number of calls"
    return _call(engine, kind, "cpu", "CPU time of the daemon", stop)


def _call(engine: str, kind: str, name: str, what: str, stop: str) -> Figure:
    done = {"exec": "exec of /bin/true", "eval": "eval"}[kind]
    prepared = "one sandbox, the only one; the same call was made before; the ways take turns"
    return Figure(f"daemon.{engine}.{kind}.{name}", f"{engine}, {done}: {what}", "ms", stop, prepared)


def floor(engine: str, share: str) -> Figure:
    what = f"{engine}, GET /healthz: {WAYS['unix']}, {share}"
    return Figure(f"daemon.{engine}.healthz.unix.{share}", what, "ms", _CLIENTS_STOP, "a connection ready")


def load(name: str) -> Figure:
    what, unit, stop = _LOAD[name]
    prepared = "fake engine; all clients were connected for some seconds before; each has one request under way"
    return Figure(f"load.{name}", f"load: {what}", unit, stop, prepared)


def cycles(engine: str, name: str) -> Figure:
    what, unit, stop = _CYCLES[name]
    prepared = "daemon and snapshot ready, some cycles done before"
    return Figure(f"cycles.{engine}.{name}", f"{engine}, spawn, eval, kill: {what}", unit, stop, prepared)


_END = "the time is over and every client has its last answer"
_ALL_GONE = "all clients are gone and the daemon has put away what it needed for them"
_LOAD = {
    "requests": ("commands answered", "", _END),
    "errors": ("errors and wrong answers", "", _END),
    "rate": ("commands per second", "1/s", _END),
    "p50": ("one command, p50", "ms", _CLIENTS_STOP),
    "p99": ("one command, p99", "ms", _CLIENTS_STOP),
    "resident.before": ("memory of the daemon before", "MiB", "the clients are about to connect"),
    "resident.early": ("memory of the daemon after a third of the time", "MiB", "a third of the time is over"),
    "resident.late": ("memory of the daemon at the end", "MiB", "the time is over"),
    "growth": ("memory gained in the last two thirds", "MiB", "the time is over"),
    "left": ("descriptors, tasks, processes, rows, files left", "", _ALL_GONE),
}
_CYCLES = {
    "done": ("cycles done", "", "the last DELETE is answered"),
    "errors": ("errors and wrong answers", "", "the last DELETE is answered"),
    "rate": ("cycles per second", "1/s", "the last DELETE is answered"),
    "p50": ("one cycle, p50", "ms", "its DELETE is answered; starts before its POST is sent"),
    "p99": ("one cycle, p99", "ms", "its DELETE is answered; starts before its POST is sent"),
    "growth": ("memory gained by the daemon", "MiB", _ALL_GONE),
    "left": ("processes, descriptors, sockets, tasks, rows, files left", "", _ALL_GONE),
}
