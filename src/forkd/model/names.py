"""Names people choose, by one rule; and the identity of a fork: id, names, environment and randomness."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NewType

from forkd.errors import InvalidInput

ImageName = NewType("ImageName", str)
SnapshotTag = NewType("SnapshotTag", str)

ENTROPY_BYTES = 64
MAX_ENV_BYTES = 128 * 1024
MAX_ENV_VARIABLES = 1024

_SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MACHINE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)

# What the forkd API allows in a tag; also a safe file name on every file system.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HINT = "Use 1 to 64 letters, digits, '-' or '_'"


def parse_image_name(text: str) -> ImageName:
    return ImageName(parse_name(text, "image name"))


def parse_tag(text: str) -> SnapshotTag:
    return SnapshotTag(parse_name(text, "snapshot tag"))


def parse_name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None or text.startswith("-"):
        shown = ascii(text if len(text) <= 70 else text[:67] + "...")
        raise InvalidInput(f"{shown} is not a legal {what}", hint=_HINT + ", not starting with '-'")
    return text


@dataclass(frozen=True)
class Identity:
    """Checked when made. `entropy` is secret and for one fork only: it is never shown."""

    sandbox_id: str
    hostname: str
    machine_id: str
    entropy: bytes = field(repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check(_SANDBOX_ID, self.sandbox_id, "sandbox id")
        _check(_HOSTNAME, self.hostname, "hostname", "Use 1 to 63 lower-case letters, digits or inner '-'")
        _check(_MACHINE_ID, self.machine_id, "machine id", "Use 32 lower-case hex digits")
        if self.machine_id == "0" * 32:
            raise InvalidInput("A machine id of zeros means 'no id'")
        if not isinstance(self.entropy, bytes) or len(self.entropy) != ENTROPY_BYTES:
            raise InvalidInput(f"A fork needs {ENTROPY_BYTES} bytes of entropy")
        object.__setattr__(self, "env", MappingProxyType(check_env(self.env)))


def new_identity(sandbox_id: str, *, hostname: str | None = None, env: Mapping[str, str] | None = None) -> Identity:
    """A fresh identity; the hostname follows from the id when not given."""
    return Identity(
        sandbox_id=sandbox_id,
        hostname=derive_hostname(sandbox_id) if hostname is None else hostname,
        machine_id=secrets.token_hex(16),
        entropy=secrets.token_bytes(ENTROPY_BYTES),
        env=env or {},
    )


def derive_hostname(sandbox_id: str) -> str:
    """The nearest legal hostname."""
    legal = re.sub(r"[^a-z0-9-]", "-", sandbox_id.lower())
    return legal.strip("-")[:63].strip("-") or "sandbox"


def check_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env`, checked to be legal for execve and not too large."""
    if len(env) > MAX_ENV_VARIABLES:
        raise InvalidInput(f"More than {MAX_ENV_VARIABLES} environment variables")
    total = 0
    for name, value in env.items():
        _check(_ENV_NAME, name, "environment variable name")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidInput(f"The value of environment variable {name} must be text without NUL")
        total += len(name) + len(value.encode("utf-8", "surrogateescape")) + 2
    if total > MAX_ENV_BYTES:
        raise InvalidInput(f"The environment is larger than {MAX_ENV_BYTES} bytes")
    return dict(env)


def _check(pattern: re.Pattern[str], text: object, what: str, hint: str | None = None) -> None:
    if not isinstance(text, str) or pattern.fullmatch(text) is None:
        raise InvalidInput(f"{ascii(text)[:70]} is not a legal {what}", hint=hint)
