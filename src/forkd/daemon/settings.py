"""What the daemon is told: by flag, else by environment, else by its TOML file, else the default."""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forkd.errors import InvalidInput
from forkd.host.paths import Home
from forkd.runtime.doctor import AUTO, ENGINES
from forkd.runtime.templates import DEFAULT_POLICY
from forkd.wire.endpoint import DEFAULT_BIND, SOCKET_NAME

NONE = "none"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
ON_STOP = ("keep", "kill")
UNENFORCED_LIMITS = ("refuse", "drop")
CONFIG_VARIABLE = "FORKD_CONFIG"
_MAX_IDLE_S = 365 * 24 * 3600.0
_MAX_TEMPLATES = 64
_MAX_TEMPLATE_MIB = 1024 * 1024


@dataclass(frozen=True)
class Bind:
    """An address of this machine, never a name: what a name means is decided by others."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


@dataclass(frozen=True)
class Settings:
    bind: Bind | None
    socket: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    token_file: Path | None
    audit_log: Path | None
    log_format: Literal["text", "json"]
    log_level: str
    engine: str
    idle_exit_secs: float
    on_stop: Literal["keep", "kill"]
    unenforced_limits: Literal["refuse", "drop"]
    templates: int
    template_memory_mib: int

    def __post_init__(self) -> None:
        if self.bind is None and self.socket is None:
            raise InvalidInput("With neither bind nor socket there is nothing to listen on")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise InvalidInput(f"There is {given} without {lacking}", hint="TLS needs a certificate and its key")
        if self.tls_cert is not None and self.bind is None:
            raise InvalidInput("TLS is for TCP, and bind is none")


@dataclass(frozen=True)
class Option:
    """One setting: its key in the file; the flag and the variable follow from it."""

    key: str
    parse: Callable[[str], Any]
    default: Callable[[Home], str]
    help: str
    metavar: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"FORKD_{self.key.upper()}"


def parse_bind(text: str) -> Bind | None:
    if text == NONE:
        return None
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address goes into brackets: [::1]:8889")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("it is an address and a port, such as 127.0.0.1:8889") from None
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("its port is a number of 0 to 65535")
    return Bind(host, int(port))


def read_settings(flags: Mapping[str, str | None], environ: Mapping[str, str], home: Home) -> Settings:
    """`flags` by key of the option, and `config`."""
    path, required = find_config(flags, environ, home)
    return merge_settings(flags, environ, read_config(path, required=required), home, str(path))


def find_config(flags: Mapping[str, str | None], environ: Mapping[str, str], home: Home) -> tuple[Path, bool]:
    """The settings file, and whether it was asked for, so that it has to be there."""
    explicit = flags.get("config") or environ.get(CONFIG_VARIABLE)
    return (Path(explicit).absolute(), True) if explicit else (home.config, False)


def read_config(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        if required:
            raise InvalidInput(f"There is no settings file {path}") from None
        return {}
    except OSError as error:
        raise InvalidInput(f"The settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The settings file {path} is not TOML: {error}") from error


def merge_settings(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    home: Home,
    file_name: str = "forkd.toml",
) -> Settings:
    unknown = sorted(set(file) - {option.key for option in OPTIONS})
    if unknown:
        known = ", ".join(option.key for option in OPTIONS)
        raise InvalidInput(f"{file_name} has the unknown setting {unknown[0]!r}", hint=f"Settings: {known}")
    chosen = {}
    for option in OPTIONS:
        source, text = _choose(option, flags, environ, file, home, file_name)
        try:
            chosen[option.key] = option.parse(text)
        except ValueError as error:
            raise InvalidInput(f"{source} cannot be {text!r}: {error}") from None
    return Settings(**chosen)


def _choose(
    option: Option,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    home: Home,
    file_name: str,
) -> tuple[str, str]:
    """Where the value comes from, for the message when it is wrong, and the value."""
    given = flags.get(option.key)
    if given is not None:
        return option.flag, given
    if environ.get(option.variable):
        return option.variable, environ[option.variable]
    if option.key in file:
        source = f"{option.key} in {file_name}"
        value = file[option.key]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InvalidInput(f"{source} is neither a text nor a number")
        return source, str(value)
    return f"The default of {option.key}", option.default(home)


def _parse_path(text: str) -> Path | None:
    if not text or "\0" in text:
        raise ValueError("it is a path, or none")
    return None if text == NONE else Path(text).expanduser().absolute()


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"it is one of {', '.join(allowed)}")
        return text

    return parse


def _parse_engine(text: str) -> str:
    return _one_of(AUTO, *ENGINES)(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("it is a number of seconds") from None
    if not math.isfinite(seconds) or not 0 <= seconds <= _MAX_IDLE_S:
        raise ValueError("it is a number of seconds from 0 (never) to a year")
    return seconds


def _number_to(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
            raise ValueError(f"it is a number of 0 to {most}")
        return int(text)

    return parse


OPTIONS: tuple[Option, ...] = (
    Option("bind", parse_bind, lambda _: DEFAULT_BIND, "listen on this address; none: no TCP", "ADDRESS:PORT"),
    Option("socket", _parse_path, lambda home: str(home.runtime / SOCKET_NAME), "the unix socket, or none", "PATH"),
    Option("tls_cert", _parse_path, lambda _: NONE, "certificate chain (PEM) for TCP", "PATH"),
    Option("tls_key", _parse_path, lambda _: NONE, "its private key (PEM)", "PATH"),
    Option("token_file", _parse_path, lambda _: NONE, "a file that holds one bearer token", "PATH"),
    Option("audit_log", _parse_path, lambda home: str(home.root / "audit.log"), "JSON lines, or none", "PATH"),
    Option("log_format", _one_of(*LOG_FORMATS), lambda _: "text", "of the log on stderr", "|".join(LOG_FORMATS)),
    Option("log_level", _one_of(*LOG_LEVELS), lambda _: "info", "of the log on stderr", "|".join(LOG_LEVELS)),
    Option("engine", _parse_engine, lambda _: AUTO, "what runs the VMs; auto: what doctor chooses", "NAME"),
    Option("idle_exit_secs", _parse_seconds, lambda _: "0", "stop after so long without work; 0: never", "S"),
    Option("on_stop", _one_of(*ON_STOP), lambda _: "keep", "what becomes of the sandboxes", "|".join(ON_STOP)),
    Option(
        "unenforced_limits",
        _one_of(*UNENFORCED_LIMITS),
        lambda _: "refuse",
        "what a limit gets that this host cannot enforce",
        "|".join(UNENFORCED_LIMITS),
    ),
    Option(
        "templates",
        _number_to(_MAX_TEMPLATES),
        lambda _: str(DEFAULT_POLICY.count),
        "how many templates there may be; 0: none, every fork starts a VMM",
        "N",
    ),
    Option(
        "template_memory_mib",
        _number_to(_MAX_TEMPLATE_MIB),
        lambda _: str(DEFAULT_POLICY.memory_mib),
        "memory that all templates together may hold",
        "MIB",
    ),
)
