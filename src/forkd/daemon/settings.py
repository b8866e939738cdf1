"""The daemon's settings, each declared once. Its value is from the flag, else the environment, else the TOML file."""

from __future__ import annotations

import contextlib
import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from forkd.engines.table import ENGINES
from forkd.errors import InvalidInput
from forkd.host.paths import Home
from forkd.host.user_ids import BLOCK
from forkd.network.lease import DEFAULT_POOL
from forkd.runtime.branches import DEFAULT_AT_ONCE
from forkd.runtime.doctor import AUTO
from forkd.runtime.lineage import DEFAULT_LINEAGE_POLICY
from forkd.runtime.origin import DEFAULT_POLICY
from forkd.wire.endpoint import DEFAULT_BIND, SOCKET_NAME

NONE = "none"
CONFIG_VARIABLE = "FORKD_CONFIG"
_MAX_IDLE_S = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Bind:
    """An address of this machine, never a name: others decide what a name means."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


@dataclass(frozen=True)
class Option:
    """One setting. `key` is its name in the file; the flag and the variable follow from it."""

    parse: Callable[[str], Any]
    default: Callable[[Home], str] | str
    help: str
    metavar: str
    key: str = ""

    def default_in(self, home: Home) -> str:
        return self.default if isinstance(self.default, str) else self.default(home)

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
        raise ValueError("an IPv6 address needs brackets: [::1]:8889")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("must be an address and a port, such as 127.0.0.1:8889") from None
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("the port must be a number from 0 to 65535")
    return Bind(host, int(port))


def _parse_path(text: str) -> Path | None:
    if not text or "\0" in text:
        raise ValueError("must be a path, or none")
    return None if text == NONE else Path(text).expanduser().absolute()


def _parse_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) <= _MAX_IDLE_S:
            return seconds
    raise ValueError("must be a number of seconds from 0 (never) to a year")


def _parse_resolvers(text: str) -> tuple[str, ...] | None:
    if text == NONE:
        return None
    try:
        return tuple(str(ipaddress.IPv4Address(each.strip())) for each in text.split(","))
    except ValueError:
        raise ValueError("must be IPv4 addresses with commas between them, or none") from None


def _parse_ids(text: str) -> tuple[int, int] | None:
    """The first user id, and how many."""
    if text == NONE:
        return None
    base, _, count = text.partition(":")
    if all(each.isascii() and each.isdigit() and len(each) <= 10 for each in (base, count)):
        first, many = int(base), int(count)
        if first >= 1000 and many >= BLOCK and first + many < 2**32 - 1:
            return first, many
    raise ValueError(f"must be BASE:COUNT, such as 1000000:65536, a base of at least 1000 and {BLOCK} ids; or none")


def _number(most: int, default: int, help: str, metavar: str, *, least: int = 0) -> Option:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most):
            raise ValueError(f"must be a number from {least} to {most}")
        return int(text)

    return Option(parse, str(default), help, metavar)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _choice(default: str, help: str, *allowed: str) -> Option:
    return Option(_one_of(*allowed), default, help, "|".join(allowed))


@dataclass(frozen=True)
class Settings:
    bind: Annotated[
        Bind | None, Option(parse_bind, DEFAULT_BIND, "listen on this address; none: no TCP", "ADDRESS:PORT")
    ]
    socket: Annotated[
        Path | None,
        Option(_parse_path, lambda home: str(home.runtime / SOCKET_NAME), "the unix socket, or none", "PATH"),
    ]
    tls_cert: Annotated[Path | None, Option(_parse_path, NONE, "certificate chain (PEM) for TCP", "PATH")]
    tls_key: Annotated[Path | None, Option(_parse_path, NONE, "its private key (PEM)", "PATH")]
    token_file: Annotated[Path | None, Option(_parse_path, NONE, "a file that holds one bearer token", "PATH")]
    audit_log: Annotated[
        Path | None, Option(_parse_path, lambda home: str(home.root / "audit.log"), "JSON lines, or none", "PATH")
    ]
    max_connections: Annotated[
        int, _number(65536, 1024, "connections that the unix socket and TCP may each have", "N", least=1)
    ]
    log_format: Annotated[Literal["text", "json"], _choice("text", "of the log on stderr", "text", "json")]
    log_level: Annotated[str, _choice("info", "of the log on stderr", "debug", "info", "warning", "error")]
    engine: Annotated[
        str, Option(_one_of(AUTO, *ENGINES), AUTO, "what runs the VMs; auto: what doctor chooses", "NAME")
    ]
    idle_exit_secs: Annotated[float, Option(_parse_seconds, "0", "stop after so long without work; 0: never", "S")]
    on_stop: Annotated[Literal["keep", "kill"], _choice("keep", "what becomes of the sandboxes", "keep", "kill")]
    unenforced_limits: Annotated[
        Literal["refuse", "drop"],
        _choice("refuse", "what a limit gets that this host cannot enforce", "refuse", "drop"),
    ]
    templates: Annotated[
        int,
        _number(64, DEFAULT_POLICY.count, "how many templates there may be; 0: none, every fork starts a VMM", "N"),
    ]
    template_memory_mib: Annotated[
        int, _number(1024 * 1024, DEFAULT_POLICY.memory_mib, "memory that all templates together may hold", "MIB")
    ]

    branch_concurrency: Annotated[
        int, _number(1024, DEFAULT_AT_ONCE, "branches that may be written at once", "N", least=1)
    ]
    max_fork_depth: Annotated[
        int, _number(10**6, DEFAULT_LINEAGE_POLICY.fork_depth, "forks of forks of forks; 0: any number", "N")
    ]
    max_fork_children: Annotated[
        int, _number(10**6, DEFAULT_LINEAGE_POLICY.fork_children, "live forks of one sandbox; 0: any number", "N")
    ]
    max_lineage_sandboxes: Annotated[
        int,
        _number(10**6, DEFAULT_LINEAGE_POLICY.lineage_sandboxes, "live sandboxes of one line; 0: any number", "N"),
    ]
    max_lineage_memory_mib: Annotated[
        int, _number(1 << 30, DEFAULT_LINEAGE_POLICY.lineage_memory_mib, "memory that only they hold; 0: any", "MIB")
    ]
    max_token_sandboxes: Annotated[
        int, _number(10**6, DEFAULT_LINEAGE_POLICY.token_sandboxes, "live sandboxes of one token; 0: any number", "N")
    ]
    max_token_memory_mib: Annotated[
        int, _number(1 << 30, DEFAULT_LINEAGE_POLICY.token_memory_mib, "memory that only they hold; 0: any", "MIB")
    ]

    network: Annotated[Literal["on", "off"], _choice("on", "whether sandboxes may have a network", "on", "off")]
    network_uplink: Annotated[
        Literal["auto", "veth", "pasta"], _choice("auto", "how their packets leave this host", "auto", "veth", "pasta")
    ]
    network_pool: Annotated[int, _number(1024, DEFAULT_POOL, "networks that are kept ready", "N")]
    network_resolvers: Annotated[
        tuple[str, ...] | None,
        Option(_parse_resolvers, NONE, "name servers for them; none: those of /etc/resolv.conf", "ADDRESS,..."),
    ]
    cell: Annotated[
        Literal["required", "best-effort"],
        _choice("required", "what a VM gets that cannot be confined in full", "required", "best-effort"),
    ]
    vm_ids: Annotated[
        tuple[int, int] | None, Option(_parse_ids, NONE, "user ids for VMs, each its own; none: chosen", "BASE:COUNT")
    ]

    def __post_init__(self) -> None:
        if self.bind is None and self.socket is None:
            raise InvalidInput("With neither bind nor socket there is nothing to listen on")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise InvalidInput(f"There is {given} without {lacking}", hint="TLS needs a certificate and its key")
        if self.tls_cert is not None and self.bind is None:
            raise InvalidInput("TLS needs TCP, but bind is none")


OPTIONS = tuple(
    replace(hint.__metadata__[0], key=key)
    for key, hint in get_type_hints(Settings, globals(), include_extras=True).items()
)


def read_settings(flags: Mapping[str, str | None], environ: Mapping[str, str], home: Home) -> Settings:
    """`flags` by the key of the option; and `config`."""
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
        sources: tuple[tuple[str, Any], ...] = (
            (option.flag, flags.get(option.key)),
            (option.variable, environ.get(option.variable) or None),
            (f"{option.key} in {file_name}", file.get(option.key)),
            (f"The default of {option.key}", option.default_in(home)),
        )
        source, value = next((source, value) for source, value in sources if value is not None)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InvalidInput(f"{source} must be a text or a number")
        try:
            chosen[option.key] = option.parse(str(value))
        except ValueError as error:
            raise InvalidInput(f"{source} cannot be {str(value)!r}: {error}") from None
    return Settings(**chosen)
