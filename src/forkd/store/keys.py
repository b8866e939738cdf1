"""Who signs packs, and whose signatures count: one key of this home, and a list of keys of others.

    signing.key   ours, made when it is first used; only its owner may read it
    trust.json    those of others, each for one origin, or for all

A key of an origin is remembered when it is first seen and accepted. After that the origin has no other key.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forkd.errors import Conflict, HostLacks, InvalidInput, NotFound, Untrusted
from forkd.host.files import locked, write_atomic
from forkd.host.paths import ensure_home
from forkd.store.pack_manifest import refused

ANYWHERE = "*"
FILES = "file"  # packs that were handed over as files come from anybody: there may be several keys
UNSIGNED = b"unsigned\n"
_PREFIX = "ed25519:"
_KEY = re.compile(r"ed25519:[A-Za-z0-9_-]{43}", re.ASCII)
_ORIGIN = re.compile(r"[\x21-\x7e]{1,300}", re.ASCII)
_DOMAIN = b"forkd pack 1\n"  # what is signed is a manifest of a pack and nothing else
_MAX_KEYS = 10_000


@dataclass(frozen=True)
class Trusted:
    key: str
    origin: str
    added_at_unix: int
    name: str = ""


class SigningKey:
    """This home's. `path` appears with the first signature."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_public(self) -> str | None:
        return self.public() if self._path.exists() else None

    def public(self) -> str:
        return render_key(self._load().public_key().public_bytes_raw())

    def sign(self, manifest: bytes) -> bytes:
        """The content of a pack's signature. The same manifest has the same one."""
        signature = self._load().sign(_DOMAIN + manifest)
        return f"{self.public()} {base64.b64encode(signature).decode()}\n".encode()

    def _load(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            ensure_home(self._path.parent)
            with locked(self._path.with_suffix(".lock")):
                if not self._path.exists():
                    made = Ed25519PrivateKey.generate().private_bytes_raw()
                    write_atomic(self._path, base64.b64encode(made) + b"\n", 0o600)
            if self._path.stat().st_mode & 0o077:
                raise HostLacks(f"Others may read the signing key {self._path}", hint=f"chmod 600 {self._path}")
            return Ed25519PrivateKey.from_private_bytes(base64.b64decode(self._path.read_bytes(), validate=False))
        except (OSError, ValueError) as error:
            raise HostLacks(
                f"The signing key {self._path} cannot be used: {error}", hint="Remove it, and a new one is made"
            ) from error


def verify_signature(manifest: bytes, signature: bytes) -> str | None:
    """The key that signed it, None when nobody did. Raises when the signature is not right."""
    if signature == UNSIGNED:
        return None
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key, _, signed = signature.decode("ascii").rstrip("\n").partition(" ")
        public = Ed25519PublicKey.from_public_bytes(_parse_raw(key))
        public.verify(base64.b64decode(signed, validate=True), _DOMAIN + manifest)
    except (ValueError, InvalidSignature) as error:
        raise refused("its signature does not match") from error
    return key


class TrustList:
    def __init__(self, path: Path, own: SigningKey) -> None:
        self._path = path
        self._own = own

    def list(self) -> list[Trusted]:
        try:
            raw = json.loads(self._path.read_bytes())
            return [Trusted(str(e["key"]), str(e["origin"]), int(e["added_at_unix"]), str(e["name"])) for e in raw]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostLacks(
                f"The list of keys {self._path} cannot be read", hint="Repair it, or remove it to trust nobody"
            ) from error

    def add(self, key: str, origin: str = ANYWHERE, name: str = "") -> Trusted:
        made = Trusted(parse_key(key), _check_origin(origin), int(time.time()), _check_name(name))
        with self._changing() as keys:
            if any((each.key, each.origin) == (made.key, made.origin) for each in keys):
                raise Conflict(f"The key {key} is trusted already", hint="See forkd trust ls")
            keys.append(made)
        return made

    def remove(self, text: str) -> Sequence[Trusted]:
        """By key, by origin or by name."""
        with self._changing() as keys:
            gone = [each for each in keys if text in (each.key, each.origin, each.name)]
            if not gone:
                raise NotFound(f"No key is trusted as {ascii(text)[:80]}", hint="List them with: forkd trust ls")
            keys[:] = [each for each in keys if each not in gone]
        return gone

    def check(self, key: str | None, origin: str, *, trust: bool, unsigned: bool) -> bool:
        """Whether `key` is new, and to be remembered once its pack has proved right. Raises Untrusted."""
        if key is None:
            if unsigned:
                return False
            raise Untrusted("The pack is not signed", hint="Ask for a signed one, or say --unsigned if you made it")
        known = self.list()
        if key == self._own.find_public() or any(e.key == key and e.origin in (ANYWHERE, origin) for e in known):
            return False
        before = [each.key for each in known if each.origin == origin]
        if before and origin != FILES:
            raise Untrusted(
                f"Packs of {origin} were signed by {before[0]}, this one is signed by {key}",
                hint=f"If the key of {origin} was changed on purpose: forkd trust rm {origin}",
            )
        if not trust:
            raise Untrusted(
                f"The pack is signed by {key}, which is not trusted",
                hint="If that is the key you expect, say --trust, which remembers it; or: forkd trust add KEY",
            )
        return True

    def remember(self, key: str, origin: str) -> None:
        with contextlib.suppress(Conflict):
            self.add(key, origin)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[MutableSequence[Trusted]]:
        try:
            ensure_home(self._path.parent)
            with locked(self._path.with_suffix(".lock")):
                keys = self.list()
                yield keys
                if len(keys) > _MAX_KEYS:
                    raise Conflict(f"More than {_MAX_KEYS} keys are trusted", hint="Remove some: forkd trust rm")
                write_atomic(self._path, json.dumps([asdict(each) for each in keys], indent=1).encode(), 0o600)
        except OSError as error:
            raise HostLacks(f"Cannot change the trusted keys in {self._path}: {error.strerror}") from error


def render_key(raw: bytes) -> str:
    return _PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def parse_key(text: str) -> str:
    if _KEY.fullmatch(text) is None or render_key(_parse_raw(text)) != text:
        raise InvalidInput(f"{ascii(text)[:80]} is not a key", hint="Keys look like ed25519:..., see forkd trust key")
    return text


def _parse_raw(key: str) -> bytes:
    if _KEY.fullmatch(key) is None:
        raise ValueError("not a key")
    return base64.urlsafe_b64decode(key.removeprefix(_PREFIX) + "=")


def _check_origin(text: str) -> str:
    if _ORIGIN.fullmatch(text) is None:
        raise InvalidInput(f"{ascii(text)[:80]} is not an origin", hint="An origin is an address, such as https://host")
    return text


def _check_name(text: str) -> str:
    if len(text) > 100 or not text.isprintable():
        raise InvalidInput("The name of a key has at most 100 printable characters")
    return text
