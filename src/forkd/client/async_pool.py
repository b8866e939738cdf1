"""The connections to one daemon. Where none was named and none runs, one is started."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from forkd.client.call import connection_limits
from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.client.failures import bad_certificates

if TYPE_CHECKING:
    import httpx


class AsyncPool:
    """`endpoint` is what was asked for, `place` where the daemon is: one that we start listens on its socket."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.place = endpoint
        self._client = _open_client(endpoint)
        self._left: list[httpx.AsyncClient] = []
        self._moving = threading.Lock()
        self._closed = False

    @asynccontextmanager
    async def used(self) -> AsyncIterator[httpx.AsyncClient]:
        """After the end one for this call alone: a sandbox that was killed may still be asked how it is."""
        if not self._closed:
            yield self._client
            return
        async with _open_client(self.place) as client:
            yield client

    async def start_daemon(self) -> httpx.AsyncClient | None:
        """The client that reaches it; None where none may be started."""
        from forkd.client.local import async_start_daemon, can_start

        if not self.endpoint.startable or self._closed or not can_start():
            return None
        await async_start_daemon()
        found = find_endpoint()
        with self._moving:
            if found != self.place:
                self._left.append(self._client)  # other threads may be using it
                self._client, self.place = _open_client(found), found
        return self._client

    async def close(self) -> None:
        self._closed = True
        for client in (self._client, *self._left):
            await client.aclose()


def _open_client(endpoint: Endpoint) -> httpx.AsyncClient:
    import httpx  # half of the time that importing this package would take

    transport = None  # httpx chooses one, and looks for proxies in the environment
    try:
        if endpoint.is_local:
            # Without TLS no certificates are needed, and reading them takes longer than a fork.
            transport = httpx.AsyncHTTPTransport(
                uds=endpoint.socket, verify=endpoint.is_tls, limits=connection_limits()
            )
        return httpx.AsyncClient(transport=transport, limits=connection_limits(), headers=endpoint.headers)
    except OSError as error:
        raise bad_certificates(error) from None
