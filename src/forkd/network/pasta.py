"""An uplink without rights over the host: one pasta, which carries packets of the hub's namespace over sockets."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from forkd.errors import HostLacks, NetworkFailed
from forkd.host import netlink
from forkd.host.tools import find_program
from forkd.network.layout import UPLINK_NAME, UPLINK_PREFIX, Layout

START_DEADLINE_S = 10.0
_LOOK_EVERY_S = 0.02
_PR_SET_PDEATHSIG = 1


def find_pasta() -> Path:
    found = find_program("pasta")
    if found is None:
        raise HostLacks("pasta is not a program on this host", hint="Install it: apt install passt")
    return Path(found)


def render_pasta(program: Path, namespace: str, layout: Layout) -> list[str]:
    """No ports are forwarded, in either direction, and no address stands for this host."""
    return [
        str(program),
        *("--foreground", "--quiet", "--config-net", "--ipv4-only", "--no-map-gw", "--no-dhcp"),
        *("--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none"),
        *("--ns-ifname", UPLINK_NAME, "--address", layout.uplink_hub, "--netmask", str(UPLINK_PREFIX)),
        *("--gateway", layout.uplink_host, "--mtu", "65520", "--netns", namespace, "--no-netns-quit"),
    ]


def has_way_out() -> bool:
    """In the calling thread's namespace."""
    with netlink.Netlink() as links:
        return any(route.network.prefixlen == 0 for route in links.routes())


class Pasta:
    def __init__(self, namespace: int, layout: Layout, on_end: Callable[[], None]) -> None:
        """Takes the namespace's descriptor over."""
        # Its own descriptor: what we have in /proc is closed to a program with fewer rights.
        self._argv = render_pasta(find_pasta(), f"/proc/self/fd/{namespace}", layout)
        self._namespace, self._on_end = namespace, on_end
        self._watching: asyncio.Task[None] | None = None

    async def start(self, is_up: Callable[[], Awaitable[bool]]) -> None:
        """Up when it returns. `is_up` looks into the namespace."""
        libc = ctypes.CDLL(None)
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            pass_fds=[self._namespace],
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                while process.returncode is None and not await is_up():  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            process.kill()
        if process.returncode is not None or not await is_up():
            raise NetworkFailed(f"pasta did not start (exit status {process.returncode})", hint="See the hub's log")
        self._watching = asyncio.ensure_future(self._watch(process))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        # Without an uplink there is nothing to serve: the daemon starts a hub anew.
        self._on_end()
