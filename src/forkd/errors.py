"""Every error forkd raises on purpose. A class exists where a caller would act differently.

ForkdError
├── InvalidInput, NotFound, Unauthorized, Untrusted, Unsupported, Unreachable
├── Conflict ── NotRunning, LimitReached
├── HostLacks, NoCapacity, NetworkFailed, BuildFailed, SnapshotDamaged, SnapshotIncompatible
├── EngineFailed ── NotForkable
├── GuestDied, GuestTimeout, WarmupFailed, ContractBroken
└── AgentError ── ProtocolError, ChannelClosed, CommandNotStarted, GuestFull
"""

from __future__ import annotations


class ForkdError(Exception):
    """`code` is stable and goes over the wire, `exit_code` is what the command line returns.

    `hint` says what to do next, and is shown below the message in a traceback; `details` are more lines for people,
    such as the end of a console. An error that a client raises also has `status`, `body` and `url` of the answer it
    came with.
    """

    code = "internal"
    exit_code = 1

    def __init_subclass__(cls, *, code: str | None = None, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code = code
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, *, hint: str | None = None, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self._hint: str | None = None
        self.hint = hint
        self.details = details
        self.status: int | None = None
        self.body: object = None
        self.url: str | None = None

    @property
    def hint(self) -> str | None:
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        if self._hint is not None:
            self.__notes__.remove(f"Hint: {self._hint}")
        self._hint = hint
        if hint is not None:
            self.add_note(f"Hint: {hint}")


class InvalidInput(ForkdError, code="invalid_input", exit_code=2):
    """A name, number or request that can never work."""


class NotFound(ForkdError, code="not_found", exit_code=3):
    """No such sandbox, image, snapshot or file."""


class Conflict(ForkdError, code="conflict", exit_code=4):
    """It exists already, or is in use."""


class NotRunning(Conflict, code="not_running"):
    """The sandbox is starting, paused or being removed."""


class LimitReached(Conflict, code="limit_reached"):
    """A lineage or a token has as many forks, or as much memory, as the settings allow."""


class Unauthorized(ForkdError, code="unauthorized", exit_code=16):
    """No token, or one the daemon does not know."""


class Untrusted(ForkdError, code="untrusted", exit_code=19):
    """A pack that nobody signed, or somebody who is not trusted here."""


class Unsupported(ForkdError, code="unsupported", exit_code=17):
    """Part of the API, but not built yet, or not possible on this host."""


class Unreachable(ForkdError, code="unreachable", exit_code=18):
    """No daemon answers, or the connection broke. `sent` is False when nothing of the call can have arrived."""

    sent = True


class HostLacks(ForkdError, code="host_lacks", exit_code=5):
    """A program, a kernel facility or a permission is missing on this machine."""


class NoCapacity(ForkdError, code="no_capacity", exit_code=6):
    """Not enough memory, CPU or disk now."""


class NetworkFailed(ForkdError, code="network_failed", exit_code=20):
    """A sandbox's network could not be made, changed or reached. It has no network then, never an open one."""


class BuildFailed(ForkdError, code="build_failed", exit_code=7):
    """An image could not be built."""


class SnapshotDamaged(ForkdError, code="snapshot_damaged", exit_code=8):
    """Files of a snapshot or image are missing, truncated or altered."""


class SnapshotIncompatible(ForkdError, code="snapshot_incompatible", exit_code=9):
    """Made by another QEMU, CPU or format than this host has."""


class EngineFailed(ForkdError, code="engine_failed", exit_code=10):
    """The VMM did not start or refused a command."""


class NotForkable(EngineFailed, code="not_forkable"):
    """A running process could not be forked; it runs on unchanged."""


class GuestDied(ForkdError, code="guest_died", exit_code=11):
    """The VM ended by itself: killed, panicked or powered off."""


class GuestTimeout(ForkdError, code="guest_timeout", exit_code=12):
    """The guest did not answer within its deadline."""


class WarmupFailed(ForkdError, code="warmup_failed", exit_code=13):
    """The warm-up raised, exited non-zero or hung."""


class ContractBroken(ForkdError, code="contract_broken", exit_code=14):
    """A fork could not prove that it took a new identity."""


class AgentError(ForkdError, code="agent_error", exit_code=15):
    """The agent refused a call, or failed at it."""


class ProtocolError(AgentError, code="protocol_error"):
    """The bytes on the channel do not follow the protocol."""


class ChannelClosed(AgentError, code="channel_closed"):
    """The channel to the agent is closed; the outcome of pending calls is unknown."""


class CommandNotStarted(AgentError, code="command_not_started"):
    """The command could not be executed at all."""


class GuestFull(AgentError, code="no_space"):
    """The guest's disk is full. What a guest writes is in its memory."""


# Refusals of the agent that no caller handles on its own: AgentError, under these codes.
AGENT_CODES = frozenset({"denied", "is_dir", "not_dir", "io", "busy", "too_many"})
