"""Every error forkd raises on purpose.

    ForkdError
    ├── InvalidInput            a name, number or request that can never work
    ├── NotFound                no such image, snapshot, file
    ├── Unauthorized            no token, or one the daemon does not know
    ├── Conflict                it exists already, or is in use
    │   └── NotRunning          the sandbox is starting, paused or being removed
    ├── Unsupported             named in the API, not built yet
    ├── Unreachable             no daemon answers, or it broke off: the outcome of the call is unknown
    ├── HostLacks               a tool, a kernel facility or a permission is missing on this machine
    ├── NoCapacity              not enough memory, CPU or disk for this, now
    ├── BuildFailed             an image could not be built
    ├── SnapshotDamaged         files of a snapshot or image are missing, truncated or altered
    ├── SnapshotIncompatible    made by another QEMU, CPU or format than this host has
    ├── EngineFailed            the VMM did not start or refused a command
    │   └── NotForkable         a running process could not be forked; it runs on as it was
    ├── GuestDied               the VM ended by itself: killed, panicked, powered off
    ├── GuestTimeout            the guest did not answer within its deadline
    ├── WarmupFailed            the warm-up raised, exited non-zero or hung
    ├── ContractBroken          a fork could not prove that it became someone of its own
    └── AgentError              the agent refused or failed one call
        ├── ProtocolError       what came over the channel is not the protocol
        ├── ChannelClosed       the channel to the agent is gone; the outcome of pending calls is unknown
        └── CommandNotStarted   the command could not be executed at all

A class exists where a caller would act differently. `code` is stable and goes over the wire, `exit_code` is what
the command line returns, `hint` says what to do next, `details` are more lines (a console tail) for people.
Raised by a client, an error also has `status`, `body` and `url` of the answer it came with.
"""

from __future__ import annotations


class ForkdError(Exception):
    code = "internal"
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.status: int | None = None
        self.body: object = None
        self.url: str | None = None


class InvalidInput(ForkdError):
    code = "invalid_input"
    exit_code = 2


class NotFound(ForkdError):
    code = "not_found"
    exit_code = 3


class Conflict(ForkdError):
    code = "conflict"
    exit_code = 4


class NotRunning(Conflict):
    code = "not_running"


class Unauthorized(ForkdError):
    code = "unauthorized"
    exit_code = 16


class Unsupported(ForkdError):
    code = "unsupported"
    exit_code = 17


class Unreachable(ForkdError):
    code = "unreachable"
    exit_code = 18


class HostLacks(ForkdError):
    code = "host_lacks"
    exit_code = 5


class NoCapacity(ForkdError):
    code = "no_capacity"
    exit_code = 6


class BuildFailed(ForkdError):
    code = "build_failed"
    exit_code = 7


class SnapshotDamaged(ForkdError):
    code = "snapshot_damaged"
    exit_code = 8


class SnapshotIncompatible(ForkdError):
    code = "snapshot_incompatible"
    exit_code = 9


class EngineFailed(ForkdError):
    code = "engine_failed"
    exit_code = 10


class NotForkable(EngineFailed):
    code = "not_forkable"


class GuestDied(ForkdError):
    code = "guest_died"
    exit_code = 11


class GuestTimeout(ForkdError):
    code = "guest_timeout"
    exit_code = 12


class WarmupFailed(ForkdError):
    code = "warmup_failed"
    exit_code = 13


class ContractBroken(ForkdError):
    code = "contract_broken"
    exit_code = 14


class AgentError(ForkdError):
    code = "agent_error"
    exit_code = 15


class ProtocolError(AgentError):
    code = "protocol_error"


class ChannelClosed(AgentError):
    code = "channel_closed"


class CommandNotStarted(AgentError):
    code = "command_not_started"
