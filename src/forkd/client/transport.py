# Generated from async_transport.py by tools/unasync.py: do not edit.
"""Sends calls over one connection pool.

The asynchronous one is for the event loop it is first used in; the synchronous one for any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import httpx

from forkd.client.call import (
    LIMITS,
    Call,
    choose_stream_timeout,
    choose_timeout,
    read_answer,
    render_body,
    render_target,
)
from forkd.client.endpoint import Endpoint
from forkd.client.failures import close_refused, error_of, error_of_transport
from forkd.client.retry import Attempts, Outcome
from forkd.client.stream import EventReader, OutputReader, Reader, StreamEvent
from forkd.wire.api import Event

T = TypeVar("T")


class Transport:
    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._client = _open_client(endpoint)
        self._closed = False

    def send(self, call: Call[T]) -> T:
        return read_answer(call, self.exchange(call))

    def exchange(self, call: Call[Any]) -> httpx.Response:
        """The answer as it came; an error is raised."""
        with self._used() as client:
            return self._exchange(client, call, choose_timeout(call, self._timeout_s))

    def output(self, call: Call[StreamEvent]) -> Generator[StreamEvent, None, None]:
        return self._events(call, OutputReader(self.endpoint.name))

    def events(self, call: Call[Event]) -> Generator[Event, None, None]:
        return self._events(call, EventReader(self.endpoint.name))

    def download(self, call: Call[bytes]) -> Generator[bytes, None, None]:
        return self._chunks(call, choose_timeout(call, self._timeout_s))

    def close(self) -> None:
        self._closed = True
        self._client.close()

    @contextmanager
    def _used(self) -> Iterator[httpx.Client]:
        """The pool; after its end one for this call alone: a sandbox that was killed may still be asked how it is."""
        if not self._closed:
            yield self._client
            return
        with _open_client(self.endpoint) as client:
            yield client

    def _exchange(
        self, client: httpx.Client, call: Call[Any], timeout: httpx.Timeout, *, stream: bool = False
    ) -> httpx.Response:
        url = self.endpoint.url + render_target(call)
        content, headers = render_body(call)
        attempts = Attempts(call)
        while True:
            request = client.build_request(call.method, url, content=content, headers=headers, timeout=timeout)
            outcome = _attempt(client, request, stream=stream)
            if isinstance(outcome, httpx.Response) and attempts.is_success(outcome):
                return outcome
            wait_s = attempts.next_wait(outcome)
            if wait_s is None:
                error = error_of(outcome, name=self.endpoint.name, url=url)
                raise error from (outcome if isinstance(outcome, Exception) else None)
            time.sleep(wait_s)

    def _events(self, call: Call[Any], reader: Reader[T]) -> Generator[T, None, None]:
        with closing(self._chunks(call, choose_stream_timeout(self._timeout_s))) as chunks:
            for chunk in chunks:
                yield from reader.feed(chunk)
        reader.finish()

    def _chunks(self, call: Call[Any], timeout: httpx.Timeout) -> Generator[bytes, None, None]:
        with self._used() as client:
            response = self._exchange(client, call, timeout, stream=True)
            with closing(response):
                try:
                    yield from response.iter_bytes()
                except httpx.HTTPError as error:
                    raise error_of_transport(error, name=self.endpoint.name, url=str(response.url)) from error


def _attempt(client: httpx.Client, request: httpx.Request, *, stream: bool) -> Outcome:
    """What came of it; a stream that succeeds is left open."""
    try:
        response = client.send(request, stream=stream)
        if not (stream and response.is_success):
            with closing(response):
                response.read()
        return response
    except httpx.HTTPError as error:
        if isinstance(error, httpx.ConnectError):
            close_refused(error)
        return error


def _open_client(endpoint: Endpoint) -> httpx.Client:
    transport = None  # httpx chooses one, and looks for proxies in the environment
    if endpoint.is_local:
        # Without TLS no certificates are needed, and reading them takes longer than a fork.
        transport = httpx.HTTPTransport(uds=endpoint.socket, verify=endpoint.is_tls, limits=LIMITS)
    return httpx.Client(transport=transport, limits=LIMITS, headers=endpoint.headers)
