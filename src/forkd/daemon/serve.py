"""A daemon's life: open everything, report it, answer until told to stop or idle for long, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType

from starlette.types import ASGIApp

from forkd.daemon.access import TcpAccess
from forkd.daemon.app import make_app
from forkd.daemon.audit import AuditLog
from forkd.daemon.call import Activity, Daemon
from forkd.daemon.cap import ConnectionCap, fit_cap
from forkd.daemon.listeners import Server, check_exposure, load_tls, open_tcp, opened_unix, render_address, served
from forkd.daemon.logs import set_up_logs
from forkd.daemon.metrics import Metrics
from forkd.daemon.settings import Settings
from forkd.daemon.tokens import Keyring, read_token_file
from forkd.engines.base import Opening
from forkd.host.cgroup import LIMITS, find_lack, find_place
from forkd.host.id_maps import UserRange
from forkd.host.paths import Home
from forkd.host.system import allow_open_files, most_open_files
from forkd.image import ImageStore
from forkd.network.fake import FakeNetworks
from forkd.network.lease import NetworkOptions, OpenNetworks
from forkd.network.networks import Networks
from forkd.runtime.doctor import open_engine
from forkd.runtime.lineage import LineagePolicy
from forkd.runtime.origin import TemplatePolicy
from forkd.runtime.runtime import Runtime, RuntimeOptions

DRAIN_S = 10.0
_IDLE_LOOK_S = 0.5

log = logging.getLogger("forkd.daemon")


def serve(home: Home, settings: Settings) -> int:
    """Blocks until the daemon has stopped."""
    set_up_logs(settings.log_format, settings.log_level)
    allow_open_files()
    with _caught_signals() as stop:
        asyncio.run(_serve(home, settings, stop))
    return 0


class Stop:
    """Signals, from before the loop runs until the process ends: the first drains, the second hurries."""

    def __init__(self) -> None:
        self.count = 0
        self.on_signal: Callable[[int], None] = lambda number: None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            self.count += 1
        self.on_signal(number)


@contextlib.contextmanager
def _caught_signals() -> Iterator[Stop]:
    """Plain handlers: when a loop ends, its own give way to the default ones, which kill during the cleanup."""
    stop = Stop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _serve(home: Home, settings: Settings, stop: Stop) -> None:
    file_token = None if settings.token_file is None else read_token_file(settings.token_file)
    keyring = Keyring(home.tokens, file_token)
    check_exposure(settings.bind, has_token=keyring.has_any)
    metrics = Metrics()
    path = settings.audit_log
    audit = None if path is None else AuditLog(path, on_failure=metrics.audit_failures.inc)
    users = None if settings.vm_ids is None else UserRange(*settings.vm_ids)
    engine = open_engine(settings.engine, Opening(outlive=True, cell=settings.cell, users=users))
    if settings.unenforced_limits == "drop" and (lack := find_lack(find_place(), *LIMITS)):
        log.warning("Sandboxes run without limits that cannot be enforced: %s", lack.reason)
    templates = TemplatePolicy(settings.templates, settings.template_memory_mib)
    lineage = LineagePolicy(
        settings.max_fork_depth,
        settings.max_fork_children,
        settings.max_lineage_sandboxes,
        settings.max_lineage_memory_mib,
        settings.max_token_sandboxes,
        settings.max_token_memory_mib,
    )
    options = RuntimeOptions(
        settings.on_stop,
        settings.unenforced_limits,
        templates,
        lineage,
        settings.branch_concurrency,
        find_networks(settings, engine.name),
    )
    async with Runtime.opened(home, engine, options) as runtime:
        only_loopback = settings.bind is None or settings.bind.loopback
        tcp = TcpAccess(keyring, listens=settings.bind is not None, only_loopback=only_loopback)
        activity = Activity(settings.idle_exit_secs)
        daemon = Daemon(runtime, ImageStore(home), metrics, audit, tcp, activity=activity)
        try:
            await _run(make_app(daemon), daemon, settings, stop)
        finally:
            if audit is not None:
                audit.close()


def find_networks(settings: Settings, engine: str) -> OpenNetworks | None:
    """What opens the networks of this daemon's sandboxes; None: they have none."""
    if settings.network == "off":
        return None
    if engine == "fake":
        return FakeNetworks.opened
    options = NetworkOptions(settings.network_uplink, settings.network_pool, settings.network_resolvers)
    return lambda directory, on_refused: Networks.opened(directory, options, on_refused)


async def _run(app: ASGIApp, daemon: Daemon, settings: Settings, stop: Stop) -> None:
    loop = asyncio.get_running_loop()
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        if number != signal.SIGHUP:
            loop.call_soon_threadsafe(hurry.set if stop.count > 1 else stopping.set)
        elif daemon.audit is not None:
            loop.call_soon_threadsafe(daemon.audit.close)  # it is opened again with the next entry

    stop.on_signal = on_signal
    if stop.count:
        return
    async with _listening(app, daemon, settings) as servers:
        notify("READY=1")
        log.info("Ready: engine %s, pid %d", daemon.runtime.engine.name, os.getpid())
        _warn_of_access(daemon)
        await _until_stopped(daemon, stopping)
        notify("STOPPING=1")
        log.info("Stopping: %d requests under way", daemon.activity.in_flight)
        daemon.activity.drain()
        hurrying = asyncio.create_task(_hurry(hurry, servers))
        for server in servers:
            server.should_exit = True
        try:
            await asyncio.gather(*(server.ended() for server in servers))
        finally:
            hurrying.cancel()
    stop.on_signal = lambda number: None


def _warn_of_access(daemon: Daemon) -> None:
    if daemon.tcp.state == "open":
        log.warning(
            "TCP asks for no token: every user of this machine can run commands in the sandboxes at %s. "
            "To change that: forkd token create NAME, or start with --bind none",
            daemon.listeners[-1],
        )
    elif daemon.tcp.state == "locked":
        log.warning("No token is left, so that nobody is let in over TCP. To make one: forkd token create NAME")


async def _until_stopped(daemon: Daemon, stopping: asyncio.Event) -> None:
    activity = daemon.activity
    while activity.idle_exit_s and not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_IDLE_LOOK_S, activity.idle_exit_s)):
                await stopping.wait()
        if not stopping.is_set() and is_idle(daemon):
            log.info("Idle for %g s", activity.idle_exit_s)
            return
    await stopping.wait()


def is_idle(daemon: Daemon) -> bool:
    activity, runtime = daemon.activity, daemon.runtime
    in_flight = runtime.snapshots.in_flight or runtime.packs.in_flight
    if in_flight or any(runtime.sandboxes.counts().values()):
        activity.touch()
        return False
    return 0 < activity.idle_exit_s <= activity.idle_s()


async def _hurry(hurry: asyncio.Event, servers: list[Server]) -> None:
    await hurry.wait()
    log.warning("Told again to stop: requests under way are broken off")
    for server in servers:
        server.break_off()


@contextlib.asynccontextmanager
async def _listening(app: ASGIApp, daemon: Daemon, settings: Settings) -> AsyncIterator[list[Server]]:
    """All sockets are open before the first request is answered: no client sees a daemon that then fails to start."""
    async with contextlib.AsyncExitStack() as stack:
        opened: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        if settings.socket is not None:
            opened.append((stack.enter_context(opened_unix(settings.socket)), None))
            daemon.listeners.append(f"unix://{settings.socket}")
        if settings.bind is not None:
            tls = None
            if settings.tls_cert is not None and settings.tls_key is not None:
                tls = load_tls(settings.tls_cert, settings.tls_key)
            listener = open_tcp(settings.bind)
            stack.callback(listener.close)
            opened.append((listener, tls))
            address = render_address(settings.bind.host, listener.getsockname()[1])
            daemon.listeners.append(f"http{'s' if tls else ''}://{address}")
        most = fit_cap(settings.max_connections, most_open_files())
        if most < settings.max_connections:
            log.info("max_connections is %d here: for more, this process would have to open more files", most)
        servers = [
            await stack.enter_async_context(served(app, sock, tls, DRAIN_S, ConnectionCap(most)))
            for sock, tls in opened
        ]
        with contextlib.suppress(OSError):  # a file on a full disk
            for place in daemon.listeners:
                print(f"Listening on {place}", flush=True)
        yield servers


def notify(state: str) -> None:
    """Tell systemd, if it started us as Type=notify."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.sendall(state.encode())
    except OSError as error:
        print(f"forkd: cannot tell systemd {state}: {error.strerror}", file=sys.stderr)
