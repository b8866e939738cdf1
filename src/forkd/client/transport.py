# Generated from async_transport.py by tools/unasync.py: do not edit.
"""Sends calls over one connection pool.

The asynchronous one is for the event loop it is first used in; the synchronous one for any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from forkd.client.call import (
    Call,
    choose_stream_timeout,
    choose_timeout,
    read_answer,
    render_body,
    render_target,
)
from forkd.client.endpoint import Endpoint
from forkd.client.failures import close_refused, error_of, error_of_transport
from forkd.client.pool import Pool
from forkd.client.renewal import Renewal
from forkd.client.retry import Attempts
from forkd.client.stream import EventReader, OutputReader, Reader, StreamEvent
from forkd.wire.api import Event

if TYPE_CHECKING:
    import httpx

    from forkd.client.retry import Outcome

T = TypeVar("T")


class Transport:
    def __init__(self, pool: Pool, timeout_s: float, renewal: Renewal | None = None) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._renewal = renewal

    @classmethod
    def to(cls, endpoint: Endpoint, timeout_s: float) -> Self:
        return cls(Pool(endpoint), timeout_s)

    def renewing(self, renewal: Renewal) -> Transport:
        """The same connections; each call says that it uses something."""
        return Transport(self._pool, self._timeout_s, renewal)

    @property
    def endpoint(self) -> Endpoint:
        """What was asked for."""
        return self._pool.endpoint

    @property
    def place(self) -> Endpoint:
        """Where the daemon is."""
        return self._pool.place

    def send(self, call: Call[T]) -> T:
        return read_answer(call, self.exchange(call))

    def exchange(self, call: Call[Any]) -> httpx.Response:
        """The answer as it came; an error is raised."""
        with self._pool.used() as client:
            return self._exchange(client, call, choose_timeout(call, self._timeout_s))

    def output(self, call: Call[StreamEvent]) -> Generator[StreamEvent, None, None]:
        return self._events(call, OutputReader(self.place.name))

    def events(self, call: Call[Event]) -> Generator[Event, None, None]:
        return self._events(call, EventReader(self.place.name))

    def download(
        self, call: Call[bytes], on_response: Callable[[httpx.Response], None] | None = None
    ) -> Generator[bytes, None, None]:
        """`on_response` is told of the answer before its content is read."""
        return self._chunks(call, choose_timeout(call, self._timeout_s), on_response)

    def close(self) -> None:
        self._pool.close()

    def _exchange(
        self, client: httpx.Client, call: Call[Any], timeout: httpx.Timeout, *, stream: bool = False
    ) -> httpx.Response:
        target = render_target(call)
        content, headers = render_body(call)
        if self._renewal is not None:
            self._renewal.use(call.takes_s)
            if not isinstance(content, bytes) and isinstance(content, Iterable):
                content = self._renewal.while_sent(content)
        attempts = Attempts(call)
        while True:
            url = self.place.url + target
            request = client.build_request(call.method, url, content=content, headers=headers, timeout=timeout)
            outcome = _attempt(client, request, stream=stream)
            if not isinstance(outcome, Exception) and attempts.is_success(outcome):
                return outcome
            if attempts.finds_nobody(outcome) and (started := self._pool.start_daemon()) is not None:
                client = started
                continue
            wait_s = attempts.next_wait(outcome)
            if wait_s is None:
                raise error_of(outcome, name=self.place.name, url=url) from None
            time.sleep(wait_s)

    def _events(self, call: Call[Any], reader: Reader[T]) -> Generator[T, None, None]:
        with closing(self._chunks(call, choose_stream_timeout(self._timeout_s))) as chunks:
            for chunk in chunks:
                yield from reader.feed(chunk)
        reader.finish()

    def _chunks(
        self, call: Call[Any], timeout: httpx.Timeout, on_response: Callable[[httpx.Response], None] | None = None
    ) -> Generator[bytes, None, None]:
        import httpx

        with self._pool.used() as client:
            response = self._exchange(client, call, timeout, stream=True)
            with closing(response):
                if on_response is not None:
                    on_response(response)
                try:
                    for chunk in response.iter_bytes():
                        if self._renewal is not None:
                            self._renewal.use()
                        yield chunk
                except httpx.HTTPError as error:
                    raise error_of_transport(error, name=self.place.name, url=str(response.url)) from None


def _attempt(client: httpx.Client, request: httpx.Request, *, stream: bool) -> Outcome:
    """What came of it; a stream that succeeds is left open."""
    import httpx

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
