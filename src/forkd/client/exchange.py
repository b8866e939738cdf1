"""From a Call to its answer: attempts, waits, errors. No I/O here; a shell makes each attempt and reports what came."""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from typing import Any

import httpx

from forkd import __version__
from forkd.client.call import Answer, Call, render_body, render_target
from forkd.client.endpoint import Endpoint
from forkd.client.failures import error_of_answer, error_of_transport, fate_of
from forkd.client.retry import Failure, Fate, decide_wait, parse_retry_after

CONNECT_S = 10.0
PROBE_S = 5.0
SLACK_S = 75.0  # an answer may come this long after what was asked for took its own time; the daemon gives a guest 60 s
STREAM_SILENCE_S = 45.0  # the daemon sends a comment every 15 s
# Shorter than servers keep idle connections, so that a call does not go out on one that is being closed.
KEEPALIVE_S = 4.0
MAX_CONNECTIONS = 200

LIMITS = httpx.Limits(
    max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
)

Outcome = Answer | httpx.HTTPError


def exchange(call: Call[Any], endpoint: Endpoint) -> Generator[float, Outcome, Answer]:
    """Yields the wait before each attempt and is sent what came of it; returns the answer to read, or raises."""
    url = endpoint.url + render_target(call)
    started, attempt, wait_s, may_have_arrived = time.monotonic(), 1, 0.0, False
    while True:
        outcome = yield wait_s
        if isinstance(outcome, Answer) and _is_success(call, outcome, may_have_arrived):
            return outcome
        failure = classify(outcome)
        may_have_arrived = may_have_arrived or failure.fate is Fate.LOST
        elapsed_s = time.monotonic() - started
        again_s = None if call.probe else decide_wait(call.again, failure, attempt, elapsed_s, random.random())
        if again_s is None:
            if isinstance(outcome, Answer):
                raise error_of_answer(outcome)
            raise error_of_transport(outcome, name=endpoint.name, url=url) from outcome
        attempt, wait_s = attempt + 1, again_s


def _is_success(call: Call[Any], answer: Answer, may_have_arrived: bool) -> bool:
    return 200 <= answer.status < 300 or (answer.status == 404 and call.gone_is_done and may_have_arrived)


def classify(outcome: Outcome) -> Failure:
    if not isinstance(outcome, Answer):
        return Failure(fate_of(outcome))
    retry_after_s = parse_retry_after(outcome.headers.get("retry-after"))
    if outcome.status == 503 and retry_after_s is not None:
        return Failure(Fate.BUSY, retry_after_s)
    return Failure(Fate.ANSWERED)


def render_request(call: Call[Any], endpoint: Endpoint, timeout: httpx.Timeout) -> dict[str, Any]:
    """The arguments of `build_request`, the same for both kinds of client."""
    content, headers = render_body(call)
    return {
        "method": call.method,
        "url": endpoint.url + render_target(call),
        "content": content,
        "headers": headers,
        "timeout": timeout,
    }


def render_headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"User-Agent": f"forkd-python/{__version__}", "Accept-Encoding": "identity"}
    if endpoint.token is not None:
        headers["Authorization"] = f"Bearer {endpoint.token}"
    return headers


def choose_timeout(call: Call[Any], timeout_s: float) -> httpx.Timeout:
    if call.probe:
        return httpx.Timeout(min(PROBE_S, timeout_s))
    read_s = max(timeout_s, call.takes_s + SLACK_S) if call.takes_s else timeout_s
    return httpx.Timeout(connect=min(CONNECT_S, timeout_s), read=read_s, write=timeout_s, pool=read_s)


def choose_stream_timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(
        connect=min(CONNECT_S, timeout_s), read=max(STREAM_SILENCE_S, timeout_s), write=timeout_s, pool=timeout_s
    )


def answer_of(response: httpx.Response, *, with_body: bool = True) -> Answer:
    body = response.content if with_body else b""
    return Answer(response.status_code, body, response.headers, str(response.request.url))
