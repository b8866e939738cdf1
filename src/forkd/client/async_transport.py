"""Sends calls from an event loop. One connection pool, for the loop it was first used in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import httpx

from forkd.client.call import Answer, Call, Plan
from forkd.client.endpoint import Endpoint
from forkd.client.exchange import (
    LIMITS,
    Outcome,
    answer_of,
    choose_stream_timeout,
    choose_timeout,
    exchange,
    render_headers,
    render_request,
)
from forkd.client.failures import error_of_transport
from forkd.client.stream import EventReader, OutputReader, StreamEvent
from forkd.client.transport import Reader
from forkd.errors import ForkdError
from forkd.wire.api import Event

T = TypeVar("T")


class AsyncTransport:
    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None  # made by the first call, which is inside the loop
        self._closed = False

    async def send(self, call: Call[T]) -> T:
        async with self._used() as client:
            _, answer = await self._exchanged(client, call, choose_timeout(call, self._timeout_s))
        return call.read(answer)

    async def perform(self, plan: Plan[T]) -> T:
        try:
            call = next(plan)
            while True:
                try:
                    answer = await self.send(call)
                except ForkdError as error:
                    call = plan.throw(error)
                else:
                    call = plan.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def output(self, call: Call[Any]) -> AsyncGenerator[StreamEvent, None]:
        return self._stream(call, OutputReader(self.endpoint.name))

    def events(self, call: Call[Any]) -> AsyncGenerator[Event, None]:
        return self._stream(call, EventReader(self.endpoint.name))

    async def _stream(self, call: Call[Any], reader: Reader[T]) -> AsyncGenerator[T, None]:
        timeout = choose_stream_timeout(self._timeout_s)
        async with aclosing(self._streamed(call, timeout)) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    yield event
        reader.finish()

    def download(self, call: Call[Any]) -> AsyncGenerator[bytes, None]:
        return self._streamed(call, choose_timeout(call, self._timeout_s))

    async def close(self) -> None:
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[httpx.AsyncClient]:
        """The pool; after its end one for this call alone: a sandbox that was killed may still be asked how it is."""
        if self._client is None:
            transport = _local_transport(self.endpoint)
            made = httpx.AsyncClient(transport=transport, limits=LIMITS, headers=render_headers(self.endpoint))
            if self._closed:
                async with made:
                    yield made
                return
            self._client = made
        yield self._client

    async def _exchanged(
        self, client: httpx.AsyncClient, call: Call[Any], timeout: httpx.Timeout, *, stream: bool = False
    ) -> tuple[httpx.Response, Answer]:
        steps = exchange(call, self.endpoint)
        wait_s = next(steps)
        while True:
            await asyncio.sleep(wait_s)
            response, outcome = await self._attempt(client, call, timeout, stream=stream)
            try:
                wait_s = steps.send(outcome)
            except StopIteration as stop:
                assert response is not None  # a success came with one
                return response, stop.value

    async def _attempt(
        self, client: httpx.AsyncClient, call: Call[Any], timeout: httpx.Timeout, *, stream: bool
    ) -> tuple[httpx.Response | None, Outcome]:
        request = client.build_request(**render_request(call, self.endpoint, timeout))
        try:
            response = await client.send(request, stream=stream)
            if stream and response.is_success:
                return response, answer_of(response, with_body=False)
            try:
                await response.aread()
            finally:
                await response.aclose()
            return response, answer_of(response)
        except httpx.HTTPError as error:
            return None, error

    async def _streamed(self, call: Call[Any], timeout: httpx.Timeout) -> AsyncGenerator[bytes, None]:
        async with self._used() as client:
            response, answer = await self._exchanged(client, call, timeout, stream=True)
            async with aclosing(response):
                try:
                    async for chunk in response.aiter_bytes():
                        yield chunk
                except httpx.HTTPError as error:
                    raise error_of_transport(error, name=self.endpoint.name, url=answer.url) from error


def _local_transport(endpoint: Endpoint) -> httpx.AsyncHTTPTransport | None:
    """See the sync one."""
    if not endpoint.is_local:
        return None
    return httpx.AsyncHTTPTransport(uds=endpoint.socket, verify=endpoint.is_tls, limits=LIMITS)
