"""What a sandbox can be asked to be, its states, and which may follow which."""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from forkd.errors import InvalidInput
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import SnapshotTag
from forkd.model.network import Network

MAX_TIMEOUT_S = 30 * 24 * 3600.0
MAX_PAIRS = 64
MAX_PAIR_VALUE_BYTES = 1024
ID_PREFIX = "sb-"

_PAIR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}", re.ASCII)


class State(enum.Enum):
    STARTING = "starting"  # reserved; a VM may or may not exist yet
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"  # being removed, which cannot be undone
    DEAD = "dead"  # its VM ended by itself; kept so that the user can learn why


# The states that may follow each. Rows that are STARTING, STOPPING or DEAD may be removed.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.RUNNING}),
    State.RUNNING: frozenset({State.PAUSED, State.STOPPING, State.DEAD}),
    State.PAUSED: frozenset({State.RUNNING, State.STOPPING, State.DEAD}),
    State.STOPPING: frozenset(),
    State.DEAD: frozenset(),
}
LIVE = frozenset({State.STARTING, State.RUNNING, State.PAUSED})


class Way(enum.Enum):
    """How a sandbox came to be."""

    START = "start"  # a VMM process was started and loaded the snapshot's files
    FORK = "fork"  # the process of a live VM was forked


class OnTimeout(enum.Enum):
    KILL = "kill"
    PAUSE = "pause"


@dataclass(frozen=True)
class SandboxSpec:
    """What one spawn asks for. Checked when made; `env` is for the guest only and never recorded."""

    snapshot_tag: SnapshotTag
    n: int = 1
    limits: Limits = NO_LIMITS
    timeout_s: float | None = None
    on_timeout: OnTimeout = OnTimeout.KILL
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    workspace: str | None = None
    agent_port: int | None = None
    allow_partial: bool = False
    owner: str | None = None  # the name of the token that asks
    network: Network | None = None  # None: that of what it is forked from

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        check_pairs(self.labels, "label")
        check_pairs(self.metadata, "metadata")
        if self.agent_port is not None and (self.n != 1 or not 1 <= self.agent_port <= 65535):
            raise InvalidInput("agent_port must be between 1 and 65535, and n must be 1")


def new_sandbox_id() -> str:
    return f"{ID_PREFIX}{secrets.token_hex(5)}"


def check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = f"The timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {timeout_s}"
        raise InvalidInput(message, hint="Leave out the timeout for none")


def check_pairs(pairs: Mapping[str, str], what: str) -> None:
    if len(pairs) > MAX_PAIRS:
        raise InvalidInput(f"At most {MAX_PAIRS} entries of {what} are allowed, got {len(pairs)}")
    for name, value in pairs.items():
        if _PAIR_NAME.fullmatch(name) is None:
            raise InvalidInput(
                f"{ascii(name)[:70]} is not a legal {what} name",
                hint="Use letters, digits, '_', '-', '.' or '/', at most 63, starting with a letter or digit",
            )
        if not isinstance(value, str) or "\0" in value or len(_encoded(value, what)) > MAX_PAIR_VALUE_BYTES:
            raise InvalidInput(f"The value of {what} {name} must be text of at most {MAX_PAIR_VALUE_BYTES} bytes")


def _encoded(value: str, what: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"A value of {what} is not UTF-8 text") from None
