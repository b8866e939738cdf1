"""What a sandbox may reach: a mode, rules, quotas and a group, checked when made. No I/O.

A rule is a preset (`pypi`), a domain (`pypi.org`), all domains below one (`*.example.com`), an address or a range
(`192.0.2.0/24`); behind a domain, address or range may be ports: `:8443`, `:8000-8100`.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forkd.errors import InvalidInput
from forkd.model.names import parse_name

MAX_RULES = 256
MAX_RULE_CHARS = 300
MAX_NAME_CHARS = 253
MAX_QUOTA_BYTES = (1 << 63) - 1
MAX_QUOTA_CONNECTIONS = 65536

# What a guest has, in every sandbox the same: each is alone in its network namespace, so a fork has nothing to change.
# The range is reserved for the link between a host and its translator, and is routed nowhere.
GUEST_INTERFACE = "eth0"
GUEST_ADDRESS = "192.0.0.2"
GATEWAY_ADDRESS = "192.0.0.1"
GUEST_PREFIX = 29
GUEST_MAC = "02:66:6b:64:00:02"
GATEWAY_MAC = "02:66:6b:64:00:01"
# Names of sandboxes in a group end with it.
GROUP_DOMAIN = "forkd"

WEB_PORTS = ((80, 80), (443, 443))
ALL_PORTS = ((1, 65535),)

PRESETS: Mapping[str, tuple[str, ...]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "debian": ("deb.debian.org", "security.debian.org"),
    "github": ("github.com", "*.github.com", "*.githubusercontent.com"),
}

# Never reached in mode open, and only by a rule for the address itself in mode egress: this host and its networks,
# other networks that are not the public one, and what is no host at all.
PRIVATE_RANGES = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# Not even by a rule: they mean the guest itself, its gateway, or more than one host.
NEVER_RANGES = tuple(
    ipaddress.IPv4Network(text) for text in ("0.0.0.0/8", "127.0.0.0/8", "192.0.0.0/24", "224.0.0.0/4", "240.0.0.0/4")
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)

Ports = tuple[tuple[int, int], ...]


class Mode(enum.Enum):
    NONE = "none"
    EGRESS = "egress"  # what the rules allow
    OPEN = "open"  # the public network: all but private ranges, this host and other sandboxes


@dataclass(frozen=True)
class DomainRule:
    """TCP only. `below`: all names below it, not the name itself."""

    name: str
    below: bool
    ports: Ports = WEB_PORTS

    def matches(self, name: str) -> bool:
        """`name`: as `normal_name` returns it."""
        return name.endswith("." + self.name) if self.below else name == self.name

    def __str__(self) -> str:
        return ("*." if self.below else "") + self.name + render_ports(self.ports, WEB_PORTS)


@dataclass(frozen=True)
class AddressRule:
    """TCP and UDP."""

    network: ipaddress.IPv4Network
    ports: Ports = ALL_PORTS

    @property
    def means_inside(self) -> bool:
        """Whether it is meant for what is not public: one address, or a range within a private one."""
        return self.network.prefixlen == 32 or any(self.network.subnet_of(each) for each in PRIVATE_RANGES)

    def __str__(self) -> str:
        text = str(self.network.network_address) if self.network.prefixlen == 32 else str(self.network)
        return text + render_ports(self.ports, ALL_PORTS)


Rule = DomainRule | AddressRule


@dataclass(frozen=True, init=False)
class Network:
    """`allow` and `deny` as text. `max_bytes` counts both directions, `max_connections` those open at once.

    Without a mode it is egress where something is allowed or a group is named, else none.
    """

    mode: Mode
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    max_bytes: int | None
    max_connections: int | None
    group: str | None

    def __init__(
        self,
        mode: Mode | str | None = None,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        max_bytes: int | None = None,
        max_connections: int | None = None,
        group: str | None = None,
    ) -> None:
        allowed, denied = _texts(allow, "allow"), _texts(deny, "deny")
        _check_number(max_bytes, "max_bytes", MAX_QUOTA_BYTES)
        _check_number(max_connections, "max_connections", MAX_QUOTA_CONNECTIONS)
        _check_group(group)
        chosen = (Mode.EGRESS if allowed or group else Mode.NONE) if mode is None else parse_mode(mode)
        for name, value in zip(_FIELDS, (chosen, allowed, denied, max_bytes, max_connections, group), strict=True):
            object.__setattr__(self, name, value)
        _check_agreement(self)

    @classmethod
    def open(
        cls,
        *,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        max_bytes: int | None = None,
        max_connections: int | None = None,
        group: str | None = None,
    ) -> Network:
        """The public network. `allow`: private addresses besides."""
        return cls(Mode.OPEN, allow, deny, max_bytes, max_connections, group)

    @classmethod
    def none(cls) -> Network:
        return cls(Mode.NONE)

    @functools.cached_property
    def allowed(self) -> tuple[Rule, ...]:
        return _expanded(self.allow)

    @functools.cached_property
    def denied(self) -> tuple[Rule, ...]:
        return _expanded(self.deny)

    @property
    def off(self) -> bool:
        return self.mode is Mode.NONE

    def as_json(self) -> dict[str, Any]:
        """Without what is not set."""
        fields: dict[str, Any] = {"mode": self.mode.value}
        fields |= {name: list(texts) for name in ("allow", "deny") if (texts := getattr(self, name))}
        rest = {name: getattr(self, name) for name in ("max_bytes", "max_connections", "group")}
        return fields | {name: value for name, value in rest.items() if value is not None}

    def finds_name(self, name: str) -> DomainRule | None:
        """What allows a name, which is as `normal_name` returns it; None: refused. Not for mode open.

        Where several rules match, it is the first of them with the ports of all.
        """
        if any(isinstance(rule, DomainRule) and rule.matches(name) for rule in self.denied):
            return None
        found = [rule for rule in self.allowed if isinstance(rule, DomainRule) and rule.matches(name)]
        if len(found) < 2:
            return found[0] if found else None
        return replace(found[0], ports=tuple(dict.fromkeys(pair for rule in found for pair in rule.ports)))


_FIELDS = ("mode", "allow", "deny", "max_bytes", "max_connections", "group")


def parse_network(value: object) -> Network:
    """From JSON: `"none"`, `"open"`, or an object; one with rules and without a mode is `egress`."""
    if isinstance(value, Network):
        return value
    if isinstance(value, str):
        return Network(parse_mode(value))
    if not isinstance(value, Mapping):
        raise InvalidInput("network must be a mode or an object", hint='Such as "none" or {"allow": ["pypi"]}')
    if unknown := sorted(map(str, set(value) - set(_FIELDS))):
        raise InvalidInput(f"network has the unknown field {unknown[0][:60]!r}", hint=f"Fields: {', '.join(_FIELDS)}")
    return Network(**{name: each for name, each in value.items() if each is not None})


def parse_mode(value: object) -> Mode:
    if isinstance(value, Mode):
        return value
    try:
        return Mode(value)
    except ValueError:
        shown = ascii(value)[:60]
        raise InvalidInput(
            f"The network mode must be none, egress or open, got {shown}", hint="Rules go into allow: --allow pypi.org"
        ) from None


def parse_rule(text: str) -> tuple[Rule, ...]:
    """The rules that one text stands for: several, of a preset."""
    if text in PRESETS:
        return _expanded(PRESETS[text])
    where, ports = _split_ports(text)
    try:
        network = ipaddress.ip_network(where, strict=True)
    except ValueError as error:
        if _looks_like_address(where):
            raise _bad_rule(
                text, "it is not an address or range" if "host bits" not in str(error) else str(error)
            ) from None
        return (_parse_domain(text, where, ports),)
    if not isinstance(network, ipaddress.IPv4Network):
        raise _bad_rule(text, "sandboxes have no IPv6")
    return (AddressRule(network, ports or ALL_PORTS),)


def normal_name(text: str) -> str | None:
    """Lower case, ASCII, without a final dot; None: it is no host name. What is not ASCII is never a match."""
    name = text[:-1] if text.endswith(".") else text
    name = name.lower() if name.isascii() else ""
    return name if is_name(name) else None


def is_name(name: str) -> bool:
    labels = name.split(".")
    return 0 < len(name) <= MAX_NAME_CHARS and all(_LABEL.fullmatch(label) for label in labels)


def render_ports(ports: Ports, default: Ports) -> str:
    if ports == default:
        return ""
    return ":" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ports)


def _split_ports(text: str) -> tuple[str, Ports | None]:
    where, colon, end = text.rpartition(":")
    if not colon or ":" in where:  # none, or an IPv6 address
        return text, None
    ports = []
    for part in end.split(","):
        found = _PORTS.fullmatch(part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high <= 65535:
            raise _bad_rule(text, "ports are numbers from 1 to 65535, such as :443 or :8000-8100")
        ports.append((low, high))
    return where, tuple(ports)


def _looks_like_address(text: str) -> bool:
    last = text.rpartition(".")[2]
    return "/" in text or ":" in text or last.isdigit() or last.lower().startswith("0x")


def _parse_domain(text: str, where: str, ports: Ports | None) -> DomainRule:
    below = where.startswith("*.")
    name = normal_name(where[2:] if below else where)
    if name is None:
        hint = "not ASCII: write it in Punycode (xn--…)" if not where.isascii() else "not a domain, address or preset"
        raise _bad_rule(text, hint)
    if "." not in name:
        raise _bad_rule(text, f"not a preset ({', '.join(PRESETS)}), and a domain has a dot")
    if name.endswith("." + GROUP_DOMAIN):
        raise _bad_rule(text, f".{GROUP_DOMAIN} is for sandboxes of a group")
    return DomainRule(name, below, ports or WEB_PORTS)


def _bad_rule(text: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{ascii(text)[:80]} is not a network rule: {why}",
        hint="Use a preset, a domain, *.domain, an address or a range, with :port behind it if wanted",
    )


@functools.lru_cache(maxsize=1024)
def _expanded(texts: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(dict.fromkeys(rule for text in texts for rule in parse_rule(text)))


def _texts(value: object, what: str) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidInput(f"network {what} must be a list of rules", hint='Such as ["pypi", "api.example.com"]')
    texts = tuple(itertools.islice(value, MAX_RULES + 1))
    if len(texts) > MAX_RULES:
        raise InvalidInput(f"network {what} may have at most {MAX_RULES} rules")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_RULE_CHARS:
            raise InvalidInput(f"A network rule must be text of at most {MAX_RULE_CHARS} characters")
    return texts


def _check_number(value: object, what: str, most: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        raise InvalidInput(f"network {what} must be a whole number from 1 to {most}, got {ascii(value)[:40]}")


def _check_group(group: object) -> None:
    if group is None:
        return
    if not isinstance(group, str):
        raise InvalidInput(f"network group must be a name, got {ascii(group)[:40]}")
    parse_name(group, "group name")


def _check_agreement(network: Network) -> None:
    """Rules that cannot all be kept, or would have no effect, are refused: a user relies on each of them."""
    if network.mode is Mode.NONE:
        extra = [name for name in _FIELDS[1:] if getattr(network, name)]
        if extra:
            raise InvalidInput(f"network mode none has no {extra[0]}", hint="Use mode egress, or leave it out")
        return
    if network.mode is Mode.EGRESS and not network.allow and network.group is None:
        raise InvalidInput("network mode egress allows nothing without rules", hint="Say what: --allow pypi.org")
    if network.mode is Mode.OPEN:
        _check_open(network)
    denied = set(network.denied)
    for rule in denied:
        if isinstance(rule, DomainRule) and rule.ports != WEB_PORTS:
            raise InvalidInput(
                f"The denied domain {rule} has ports, but a name is denied as a whole",
                hint="Leave the ports out, or allow the name with the ports that are wanted",
            )
    for rule in network.allowed:
        if rule in denied or any(_covers(deny, rule) for deny in denied):
            raise InvalidInput(f"The network rule {rule} is both allowed and denied", hint="Remove one of the two")
        if isinstance(rule, AddressRule) and any(rule.network.subnet_of(never) for never in NEVER_RANGES):
            raise InvalidInput(f"The network rule {rule} can never be reached from a sandbox", hint="Remove it")


def _check_open(network: Network) -> None:
    for rule in network.denied:
        if isinstance(rule, DomainRule):
            raise InvalidInput(
                f"The domain {rule} cannot be denied in mode open: its addresses could be reached without its name",
                hint="Deny its addresses, or use mode egress with rules",
            )
    for rule in network.allowed:
        if isinstance(rule, DomainRule) or not any(rule.network.subnet_of(each) for each in PRIVATE_RANGES):
            raise InvalidInput(
                f"The network rule {rule} has no effect in mode open, which allows all public addresses",
                hint="Use mode egress, or allow private addresses only",
            )


def _covers(deny: Rule, rule: Rule) -> bool:
    if isinstance(deny, AddressRule) and isinstance(rule, AddressRule):
        return rule.network.subnet_of(deny.network) and _ports_cover(deny.ports, rule.ports)
    if isinstance(deny, DomainRule) and isinstance(rule, DomainRule):
        if deny.name == rule.name:
            return deny.below == rule.below
        return deny.below and rule.name.endswith("." + deny.name)
    return False


def _ports_cover(wide: Ports, narrow: Ports) -> bool:
    return all(any(low <= begin and end <= high for low, high in wide) for begin, end in narrow)


NO_NETWORK = Network()
