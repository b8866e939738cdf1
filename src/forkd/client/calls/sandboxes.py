"""Sandboxes: fork, find, kill, pause, branch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forkd.client.call import Again, Answer, Call, Plan, as_json, as_nothing, as_text, drop_unset, query_of
from forkd.errors import InvalidInput, Unreachable
from forkd.wire.api import PingResponse, SandboxInfo, SnapshotInfo

PAGE = 1000
_MAX_KEY = 200
_SPAWN_S = 60.0
_SPAWN_EACH_S = 1.0
_BRANCH_S = 600.0


@dataclass(frozen=True)
class Spawn:
    """What one spawn asks for, in the order of the forkd SDK's arguments."""

    snapshot_tag: str
    n: int = 1
    per_child_netns: bool = False
    memory_limit_mib: int | None = None
    prewarm: bool = False
    live_fork: bool = False
    hugepages: bool = False
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mib_s: int | None = None
    timeout_secs: float | None = None
    on_timeout: str | None = None
    env: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    metadata: Mapping[str, str] | None = None
    allow_partial: bool = False
    agent_port: int | None = None
    idempotency_key: str | None = None


def spawn_sandboxes(spawn: Spawn) -> Call[list[SandboxInfo]]:
    """With a key always: it is what makes a second attempt harmless."""
    key = spawn.idempotency_key if spawn.idempotency_key is not None else f"sdk-{secrets.token_hex(16)}"
    return Call(
        "POST",
        ("v1", "sandboxes"),
        as_json,
        body=_spawn_body(spawn),
        headers={"Idempotency-Key": _checked_key(key)},
        again=Again.SAFE,
        takes_s=_SPAWN_S + _SPAWN_EACH_S * spawn.n,
    )


def _spawn_body(spawn: Spawn) -> dict[str, Any]:
    body: dict[str, Any] = {
        "snapshot_tag": spawn.snapshot_tag,
        "n": spawn.n,
        "per_child_netns": spawn.per_child_netns,
    }
    for name in ("prewarm", "live_fork", "hugepages", "allow_partial"):
        if getattr(spawn, name):
            body[name] = True
    for name in ("env", "labels", "metadata"):
        if pairs := getattr(spawn, name):
            body[name] = dict(pairs)
    return body | drop_unset(
        memory_limit_mib=spawn.memory_limit_mib,
        cpu_limit=spawn.cpu_limit,
        pids_limit=spawn.pids_limit,
        io_limit_mib_s=spawn.io_limit_mib_s,
        timeout_secs=spawn.timeout_secs,
        on_timeout=spawn.on_timeout,
        agent_port=spawn.agent_port,
    )


def _checked_key(key: str) -> str:
    if not 1 <= len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable() or key != key.strip():
        raise InvalidInput(f"An idempotency key is 1 to {_MAX_KEY} printable ASCII characters")
    return key


@dataclass(frozen=True)
class Page:
    sandboxes: list[SandboxInfo]
    next_token: str | None


def list_sandboxes(
    *,
    state: str | None = None,
    snapshot_tag: str | None = None,
    labels: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Plan[list[SandboxInfo]]:
    """All of them, page after page."""
    pairs = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
    pairs += [("metadata", f"{name}={value}") for name, value in (metadata or {}).items()]
    query = (*query_of(state=state, snapshot_tag=snapshot_tag), *pairs)
    found: list[SandboxInfo] = []
    token: str | None = None
    while True:
        page: Page = yield page_of_sandboxes(query, token)
        found += page.sandboxes
        if page.next_token is None:
            return found
        if page.next_token == token:
            raise Unreachable("The daemon sends the same page again and again", hint="Check FORKD_URL")
        token = page.next_token


def page_of_sandboxes(query: tuple[tuple[str, str], ...], token: str | None) -> Call[Page]:
    query = (*query, *query_of(limit=PAGE, page_token=token))
    return Call("GET", ("v1", "sandboxes"), _as_page, query=query, again=Again.SAFE)


def _as_page(answer: Answer) -> Page:
    return Page(as_json(answer), answer.headers.get("x-next-token") or None)


def get_sandbox(sandbox_id: str) -> Call[SandboxInfo]:
    return Call("GET", _at(sandbox_id), as_json, again=Again.SAFE)


def kill_sandbox(sandbox_id: str) -> Call[None]:
    return Call("DELETE", _at(sandbox_id), as_nothing, again=Again.SAFE, gone_is_done=True)


def ping_sandbox(sandbox_id: str) -> Call[PingResponse]:
    return Call("POST", _at(sandbox_id, "ping"), as_json, again=Again.SAFE)


def pause_sandbox(sandbox_id: str) -> Call[SandboxInfo]:
    return Call("POST", _at(sandbox_id, "pause"), as_json, again=Again.SAFE)


def resume_sandbox(sandbox_id: str) -> Call[SandboxInfo]:
    return Call("POST", _at(sandbox_id, "resume"), as_json, again=Again.SAFE)


def set_sandbox_timeout(sandbox_id: str, timeout_secs: float | None, on_timeout: str | None) -> Call[SandboxInfo]:
    body = {"timeout_secs": timeout_secs, **drop_unset(on_timeout=on_timeout)}
    return Call("POST", _at(sandbox_id, "timeout"), as_json, body=body, again=Again.SAFE)


def branch_sandbox(
    sandbox_id: str, tag: str | None, diff: bool, measure_diff: bool, mode: str | None, wait: bool
) -> Call[SnapshotInfo]:
    """`mode` wins over `diff`, as in the forkd SDK."""
    body = drop_unset(tag=tag, mode=None if mode is None else str(getattr(mode, "value", mode)))
    if diff and mode is None:
        body["diff"] = True
    if measure_diff:
        body["measure_diff"] = True
    if not wait:
        body["wait"] = False
    return Call("POST", _at(sandbox_id, "branch"), as_json, body=body, takes_s=_BRANCH_S)


def sandbox_console(sandbox_id: str) -> Call[str]:
    return Call("GET", _at(sandbox_id, "console"), as_text, again=Again.SAFE)


def _at(sandbox_id: str, *rest: str) -> tuple[str, ...]:
    return ("v1", "sandboxes", sandbox_id, *rest)
