"""Where the daemon is: the argument, else FORKD_URL, else its unix socket where there is one, else TCP on loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from forkd import __version__
from forkd.errors import HostLacks, InvalidInput
from forkd.wire.endpoint import DEFAULT_URL, find_socket

_UNIX = "unix://"
_SOCKET_URL = "http://localhost"


@dataclass(frozen=True)
class Endpoint:
    url: str  # without a final slash; of a socket what HTTP needs to be told
    socket: str | None = None
    token: str | None = field(default=None, repr=False)
    startable: bool = False  # nobody named it: where no daemon answers, one may be started

    @property
    def name(self) -> str:
        """For people."""
        return self.url if self.socket is None else f"{_UNIX}{self.socket}"

    @property
    def is_local(self) -> bool:
        """On this machine: what the environment says of proxies is not meant for it."""
        if self.socket is not None:
            return True
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        headers = {"User-Agent": f"forkd-python/{__version__}", "Accept-Encoding": "identity"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    @property
    def is_tls(self) -> bool:
        return self.url.startswith("https://")


def find_endpoint(
    base_url: str | None = None, token: str | None = None, environ: Mapping[str, str] = os.environ
) -> Endpoint:
    token = _checked_token(token if token is not None else environ.get("FORKD_TOKEN"))
    if url := base_url or environ.get("FORKD_URL"):
        return parse_endpoint(url, token)
    # Also when nobody listens there yet: on a port, anybody of this machine could wait for our token.
    if has_unix_sockets() and (path := find_socket(environ)) is not None:
        return Endpoint(_SOCKET_URL, str(path), token, startable=True)
    return Endpoint(DEFAULT_URL, None, token, startable=True)


def parse_endpoint(url: str, token: str | None = None) -> Endpoint:
    if url.startswith(_UNIX):
        path = unquote(url.removeprefix(_UNIX))
        if not path.startswith("/"):
            raise InvalidInput(f"{url!a} does not name a socket", hint="Write it as unix:///run/forkd/forkd.sock")
        if not has_unix_sockets():
            raise HostLacks("This system has no unix sockets", hint="Use the daemon's http:// address in FORKD_URL")
        return Endpoint(_SOCKET_URL, path, token)
    import httpx

    try:
        split = urlsplit(url)
        httpx.URL(url)  # stricter about hosts
        usable = split.scheme in ("http", "https") and split.hostname and split.port != 0
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable or split.query or split.fragment or split.username is not None:
        raise InvalidInput(
            f"{url!a} is not the address of a daemon",
            hint="Use http://host:port, https://host:port or unix:///path/to/forkd.sock",
        )
    return Endpoint(url.rstrip("/"), None, token)


def has_unix_sockets() -> bool:
    return hasattr(socket, "AF_UNIX")


def _checked_token(token: str | None) -> str | None:
    token = (token or "").strip()
    if not token:
        return None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("The token must be printable ASCII without spaces", hint="Check FORKD_TOKEN")
    return token
