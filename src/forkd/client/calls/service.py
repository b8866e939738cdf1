"""The daemon itself: version, health, metrics, events, lineage."""

from __future__ import annotations

from forkd.client.call import Again, Answer, Call, as_json, as_text, query_of
from forkd.wire.api import Event, Lineage, VersionResponse


def version() -> Call[VersionResponse]:
    return Call("GET", ("version",), as_json, again=Again.SAFE)


def healthy() -> Call[bool]:
    return Call("GET", ("healthz",), _succeeded, probe=True)


def ready() -> Call[bool]:
    return Call("GET", ("readyz",), _succeeded, probe=True)


def metrics() -> Call[str]:
    return Call("GET", ("metrics",), as_text, again=Again.SAFE)


def lineage() -> Call[Lineage]:
    return Call("GET", ("v1", "lineage"), as_json, again=Again.SAFE)


def list_events(since: int, type: str | None, sandbox_id: str | None, limit: int) -> Call[list[Event]]:
    query = query_of(since=since, type=type, sandbox_id=sandbox_id, limit=limit)
    return Call("GET", ("v1", "events"), as_json, query=query, again=Again.SAFE)


def follow_events(since: int | None, type: str | None, sandbox_id: str | None) -> Call[None]:
    query = query_of(follow="true", since=since, type=type, sandbox_id=sandbox_id)
    return Call("GET", ("v1", "events"), _streamed, query=query, again=Again.SAFE)


def _succeeded(answer: Answer) -> bool:
    return answer.status == 200


def _streamed(answer: Answer) -> None:
    return None
