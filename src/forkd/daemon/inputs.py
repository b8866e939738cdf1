"""What requests may contain: the types of parameters, and the bodies.

Types are strict: no text for a number, no 1 for true. Unknown fields are ignored. In a body, a broken constraint is
400, a wrong type or a missing field 422; see errors.py. In a query everything is 400, in a path 404.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from forkd.guest.agent import MAX_CODE_BYTES
from forkd.guest.files import check_path
from forkd.model.machine import (
    CPU_TEMPLATES,
    MAX_CHILDREN,
    MAX_CPUS,
    MAX_IO_MIB_S,
    MAX_MEMORY_LIMIT_MIB,
    MAX_MEMORY_MIB,
    MAX_PIDS,
    MAX_VCPUS,
    MIN_CPUS,
    MIN_MEMORY_MIB,
    Limits,
)
from forkd.model.network import (
    MAX_QUOTA_BYTES,
    MAX_QUOTA_CONNECTIONS,
    MAX_RULE_CHARS,
    MAX_RULES,
    Network,
    parse_network,
)
from forkd.model.sandbox import MAX_PAIRS, MAX_TIMEOUT_S
from forkd.runtime.freeze import MAX_WARM_SECONDS

MAX_LIMIT = 1000
MAX_ID = (1 << 63) - 1
MAX_EXEC_S = 86400.0
MAX_BOOT_WAIT_S = 60
DEFAULT_EXEC_S = 30.0
DEFAULT_EVAL_S = 60.0
ENV_PATTERN = "^[A-Za-z_][A-Za-z0-9_]{0,255}$"
PAIR_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$"
TAG_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$"


def _check_text(value: Any) -> str:
    # Not by pydantic: bytes of a file name that are not UTF-8 are written as lone surrogates, which it may refuse.
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    return value


def _parse_flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise PydanticCustomError("bool", "must be true or false")
    return text == "true"


def check_digits(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise PydanticCustomError("int", "must be a whole number")
    return text


_RULES = {
    "type": "array",
    "maxItems": MAX_RULES,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_RULE_CHARS},
}
_NETWORK = {
    "anyOf": [
        {"type": "string", "enum": ["none", "open"]},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "mode": {"type": "string", "enum": ["none", "egress", "open"]},
                "allow": _RULES,
                "deny": _RULES,
                "max_bytes": {"type": "integer", "minimum": 1, "maximum": MAX_QUOTA_BYTES},
                "max_connections": {"type": "integer", "minimum": 1, "maximum": MAX_QUOTA_CONNECTIONS},
                "group": {"type": "string", "pattern": TAG_PATTERN},
            },
        },
    ]
}
_PATH = {"type": "string", "pattern": "^/", "maxLength": 4095}

# Of paths
SandboxId = Annotated[str, WithJsonSchema({"type": "string", "pattern": TAG_PATTERN})]
TagInPath = Annotated[str, WithJsonSchema({"type": "string", "pattern": TAG_PATTERN})]
UploadId = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{24}$"})]
Pid = Annotated[int, Field(ge=1, le=(1 << 31) - 1), BeforeValidator(check_digits)]

# Of queries
Flag = Annotated[bool, PlainValidator(_parse_flag), WithJsonSchema({"type": "boolean"})]
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT), BeforeValidator(check_digits)]
Number = Annotated[int, Field(ge=0, le=MAX_ID), BeforeValidator(check_digits)]
PageToken = Annotated[str, Field(max_length=128)]
ShortText = Annotated[str, Field(max_length=64)]
FilePath = Annotated[str, PlainValidator(check_path), WithJsonSchema({**_PATH, "minLength": 1})]

# Of bodies
Tag = Annotated[str, Field(json_schema_extra={"pattern": TAG_PATTERN})]
GuestPath = Annotated[str, PlainValidator(_check_text), WithJsonSchema(_PATH)]
Mode = Annotated[str, Field(pattern="^[0-7]{1,4}$")]
Env = Annotated[dict[str, str], Field(json_schema_extra={"propertyNames": {"pattern": ENV_PATTERN}})]
Pairs = Annotated[
    dict[str, str],
    Field(max_length=MAX_PAIRS, json_schema_extra={"propertyNames": {"pattern": PAIR_PATTERN}}),
]
NetworkField = Annotated[Network, PlainValidator(parse_network), WithJsonSchema(_NETWORK)]
ExecSeconds = Annotated[float, Field(gt=0, le=MAX_EXEC_S, allow_inf_nan=False)]
Deadline = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class LimitedBody(Body):
    memory_limit_mib: Annotated[int, Field(ge=1, le=MAX_MEMORY_LIMIT_MIB)] | None = None
    cpu_limit: Annotated[float, Field(ge=MIN_CPUS, le=MAX_CPUS, allow_inf_nan=False)] | None = None
    pids_limit: Annotated[int, Field(ge=1, le=MAX_PIDS)] | None = None
    io_limit_mib_s: Annotated[int, Field(ge=1, le=MAX_IO_MIB_S)] | None = None

    def limits(self) -> Limits:
        return Limits(self.memory_limit_mib, self.cpu_limit, self.pids_limit, self.io_limit_mib_s)


class ChildrenBody(LimitedBody):
    network: NetworkField | None = None
    timeout_secs: Deadline | None = None
    on_timeout: Literal["kill", "pause"] = "kill"
    env: Env = Field(default_factory=dict)
    labels: Pairs = Field(default_factory=dict)
    metadata: Pairs = Field(default_factory=dict)


class SpawnBody(ChildrenBody):
    snapshot_tag: Tag
    n: int = Field(1, ge=1, le=MAX_CHILDREN)
    per_child_netns: bool = False
    prewarm: bool = False
    live_fork: bool = False
    hugepages: bool = False
    allow_partial: bool = False
    agent_port: Annotated[int, Field(ge=1, le=65535)] | None = None


class SnapshotBody(Body):
    """With `image`, or in forkd's form with `kernel` and `rootfs`, which here name an image of the store."""

    tag: Tag
    image: str | None = None
    memory_mib: int = Field(512, ge=MIN_MEMORY_MIB, le=MAX_MEMORY_MIB)
    vcpus: int = Field(1, ge=1, le=MAX_VCPUS)
    cpu_template: str | None = Field(None, pattern=f"^({'|'.join(CPU_TEMPLATES)})$")
    warm: str | None = None
    warm_command: str | None = None
    warm_timeout_secs: float = Field(300.0, gt=0, le=MAX_WARM_SECONDS, allow_inf_nan=False)
    rehearse: str | None = None
    network: NetworkField | None = None
    replace: bool = False
    wait: bool = False
    kernel: str | None = None
    rootfs: str | None = None
    rw: bool = False
    tap: str | None = None
    boot_wait_secs: int = Field(10, ge=0, le=MAX_BOOT_WAIT_S)


class PackBody(Body):
    """A pack that will be sent. `origin` is where it comes from: its key is remembered for that."""

    tag: Tag | None = None
    origin: str | None = Field(None, max_length=300)
    trust: bool = False
    unsigned: bool = False
    force: bool = False
    keep_anyway: bool = False


class CompactBody(Body):
    to: Tag


class PtyBody(Body):
    rows: int = Field(ge=1, le=9999)
    cols: int = Field(ge=1, le=9999)


class CommandBody(Body):
    args: list[str] | None = None
    shell: str | None = None
    cwd: GuestPath | None = None
    env: Env = Field(default_factory=dict)
    user: str | int | None = None


class ExecBody(CommandBody):
    timeout_secs: ExecSeconds = DEFAULT_EXEC_S
    stdin: str | None = None
    pty: None = None


class ProcessBody(CommandBody):
    timeout_secs: ExecSeconds | None = None
    stdin: bool = False
    pty: PtyBody | None = None


class EvalBody(Body):
    code: str = Field(max_length=MAX_CODE_BYTES)
    timeout_secs: ExecSeconds = DEFAULT_EVAL_S


class BranchBody(Body):
    tag: Tag | None = None
    mode: Literal["full", "diff", "live"] | None = None
    diff: bool = False
    live: bool = False
    measure_diff: bool = False
    wait: bool = True
    parent_tag: Tag | None = None


class ForkBody(ChildrenBody):
    count: int = Field(1, ge=1, le=MAX_CHILDREN)
    tag: Tag | None = None


class CheckpointBody(Body):
    name: Tag | None = None


class RewindBody(Body):
    to: Tag | None = None
    discard: bool = False


class PromoteBody(Body):
    child: Tag


class DeriveBody(Body):
    tag: Tag
    args: list[str] | None = None
    shell: str | None = None
    code: str | None = None
    network: NetworkField | None = None
    timeout_secs: float = Field(600.0, gt=0, le=MAX_WARM_SECONDS, allow_inf_nan=False)


class PruneBody(Body):
    keep_last: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    keep_tagged: bool = False
    max_age_secs: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None = None
    max_bytes: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    dry_run: bool = False


class TimeoutBody(Body):
    timeout_secs: Deadline | None
    on_timeout: Literal["kill", "pause"] | None = None
    extend: bool = False


class SignalBody(Body):
    signal: int = Field(15, ge=1, le=64)


class MkdirBody(Body):
    path: GuestPath
    parents: bool = True
    mode: Mode = "755"


class RenameBody(Body):
    path: GuestPath
    to: GuestPath


class WorkspaceBody(LimitedBody):
    name: Tag
    snapshot_tag: Tag
    network: NetworkField | None = None
    per_child_netns: bool = False


class SuspendBody(Body):
    diff: bool = False
