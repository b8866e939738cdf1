"""Sends calls and waits for them. One connection pool; any thread may use it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol, TypeVar

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
from forkd.client.refused import close_refused
from forkd.client.stream import EventReader, OutputReader, StreamEvent
from forkd.errors import ForkdError
from forkd.wire.api import Event

T = TypeVar("T")
E = TypeVar("E", covariant=True)


class Reader(Protocol[E]):
    """Turns the bytes of a stream into events; `finish` raises when the stream may not end there."""

    def feed(self, chunk: bytes, /) -> Iterator[E]: ...
    def finish(self) -> None: ...


class Transport:
    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            transport=_local_transport(endpoint), limits=LIMITS, headers=render_headers(endpoint)
        )

    def send(self, call: Call[T]) -> T:
        _, answer = self._exchanged(call, choose_timeout(call, self._timeout_s))
        return call.read(answer)

    def perform(self, plan: Plan[T]) -> T:
        try:
            call = next(plan)
            while True:
                try:
                    answer = self.send(call)
                except ForkdError as error:
                    call = plan.throw(error)
                else:
                    call = plan.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def output(self, call: Call[Any]) -> Generator[StreamEvent, None, None]:
        return self._stream(call, OutputReader(self.endpoint.name))

    def events(self, call: Call[Any]) -> Generator[Event, None, None]:
        return self._stream(call, EventReader(self.endpoint.name))

    def _stream(self, call: Call[Any], reader: Reader[T]) -> Generator[T, None, None]:
        with closing(self._streamed(call, choose_stream_timeout(self._timeout_s))) as chunks:
            for chunk in chunks:
                yield from reader.feed(chunk)
        reader.finish()

    def download(self, call: Call[Any]) -> Generator[bytes, None, None]:
        return self._streamed(call, choose_timeout(call, self._timeout_s))

    def close(self) -> None:
        self._client.close()

    def _exchanged(
        self, call: Call[Any], timeout: httpx.Timeout, *, stream: bool = False
    ) -> tuple[httpx.Response, Answer]:
        steps = exchange(call, self.endpoint)
        wait_s = next(steps)
        while True:
            time.sleep(wait_s)
            response, outcome = self._attempt(call, timeout, stream=stream)
            try:
                wait_s = steps.send(outcome)
            except StopIteration as stop:
                assert response is not None  # a success came with one
                return response, stop.value

    def _attempt(
        self, call: Call[Any], timeout: httpx.Timeout, *, stream: bool
    ) -> tuple[httpx.Response | None, Outcome]:
        request = self._client.build_request(**render_request(call, self.endpoint, timeout))
        try:
            response = self._client.send(request, stream=stream)
            if stream and response.is_success:
                return response, answer_of(response, with_body=False)
            try:
                response.read()
            finally:
                response.close()
            return response, answer_of(response)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ConnectError):
                close_refused(error)
            return None, error

    def _streamed(self, call: Call[Any], timeout: httpx.Timeout) -> Generator[bytes, None, None]:
        response, answer = self._exchanged(call, timeout, stream=True)
        with closing(response):
            try:
                yield from response.iter_bytes()
            except httpx.HTTPError as error:
                raise error_of_transport(error, name=self.endpoint.name, url=answer.url) from error


def _local_transport(endpoint: Endpoint) -> httpx.HTTPTransport | None:
    """None leaves the choice to httpx, which looks for proxies in the environment."""
    if not endpoint.is_local:
        return None
    # Without TLS no certificates are needed, and reading them takes longer than a fork.
    return httpx.HTTPTransport(uds=endpoint.socket, verify=endpoint.is_tls, limits=LIMITS)
