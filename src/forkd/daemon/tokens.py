"""Bearer tokens: named ones, kept as digests in a file of the home, and the one of a token file.

The holder of a token may do everything. The value is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from forkd.errors import Conflict, HostLacks, InvalidInput, NotFound
from forkd.host.files import locked, write_atomic
from forkd.host.paths import ensure_home

PREFIX = "fk_"
TOKEN_FILE_NAME = "token-file"  # what the audit log calls the token of --token-file
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
_PLACEHOLDERS = ("REPLACE_ME", "CHANGE_ME")
_DIGEST_LENGTH = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)

log = logging.getLogger("forkd.tokens")


@dataclass(frozen=True)
class Token:
    name: str
    sha256: str
    created_at_unix: int


class TokenStore:
    """The named tokens of one home."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def list(self) -> list[Token]:
        return parse_tokens(self._read(), self._path)

    def create(self, name: str) -> str:
        """The token's value: this once, and never again."""
        checked = parse_token_name(name)
        with self._changing() as tokens:
            if any(token.name == checked for token in tokens):
                raise Conflict(f"The token {checked} exists already", hint="Choose another name, or revoke it first")
            value = PREFIX + secrets.token_urlsafe(32)
            tokens.append(Token(checked, digest(value), int(time.time())))
        return value

    def revoke(self, name: str) -> int:
        """How many are left."""
        with self._changing() as tokens:
            left = [token for token in tokens if token.name != name]
            if len(left) == len(tokens):
                raise NotFound(f"There is no token {ascii(name)[:70]}", hint="List them with: forkd token ls")
            tokens[:] = left
        return len(left)

    @contextmanager
    def _changing(self) -> Iterator[MutableSequence[Token]]:
        try:
            ensure_home(self._path.parent)
            with locked(self._path.with_suffix(".lock")):
                tokens = self.list()
                yield tokens
                write_atomic(self._path, render_tokens(tokens), 0o600)
        except OSError as error:
            raise HostLacks(f"Cannot change the tokens in {self._path}: {error.strerror}") from error

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HostLacks(f"Cannot read the tokens in {self._path}: {error.strerror}") from error


class Keyring:
    """Whose a presented token is. Follows the file: tokens can be made and revoked while the daemon runs.

    Once there is a file of tokens, or a token file, one is needed: after the last is revoked, none is accepted.
    """

    def __init__(self, path: Path, file_token: str | None = None) -> None:
        self._path = path
        self._file_digest = None if file_token is None else digest(file_token)
        self._seen: tuple[int, ...] | None = None
        self._tokens: tuple[Token, ...] = ()

    @property
    def needed(self) -> bool:
        self._refresh()
        return self._seen is not None or self._file_digest is not None

    @property
    def generation(self) -> object:
        """Differs when the file was changed."""
        self._refresh()
        return self._seen

    @property
    def has_any(self) -> bool:
        """Whether any token would be accepted."""
        self._refresh()
        return bool(self._tokens) or self._file_digest is not None

    def identify(self, presented: str) -> str | None:
        """The name of the token; None: it is unknown. Compares with all of them, so that the time says nothing."""
        self._refresh()
        candidate = digest(presented)
        found: str | None = None
        if self._file_digest is not None and hmac.compare_digest(self._file_digest, candidate):
            found = TOKEN_FILE_NAME
        for token in self._tokens:
            if hmac.compare_digest(token.sha256, candidate):
                found = token.name
        return found

    def _refresh(self) -> None:
        """While the file cannot be read, no token of it is accepted."""
        seen: tuple[int, ...] | None = (0,)
        try:
            info = self._path.stat()
            seen = (info.st_mtime_ns, info.st_size, info.st_ino)
            if seen != self._seen:
                self._tokens = tuple(parse_tokens(self._path.read_bytes(), self._path))
        except FileNotFoundError:
            seen, self._tokens = None, ()
        except (OSError, HostLacks) as error:
            if seen != self._seen:
                log.error("No token of %s is accepted until the file is repaired: %s", self._path, error)
            self._tokens = ()
        self._seen = seen


def parse_token_name(text: str) -> str:
    if _NAME.fullmatch(text) is None or text == TOKEN_FILE_NAME:
        raise InvalidInput(
            f"Invalid token name {ascii(text)[:70]}",
            hint="Use 1 to 64 letters, digits, '-', '_' or '.', starting with a letter or digit",
        )
    return text


def digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def render_tokens(tokens: Sequence[Token]) -> bytes:
    return json.dumps({"format": 1, "tokens": [asdict(token) for token in tokens]}, indent=1).encode() + b"\n"


def parse_tokens(data: bytes | None, where: Path) -> list[Token]:
    if data is None:
        return []
    try:
        raw = json.loads(data)
        if raw["format"] != 1:
            raise ValueError("unknown format")
        return [_parse_token(entry) for entry in raw["tokens"]]
    except (ValueError, KeyError, TypeError, InvalidInput, RecursionError) as error:
        raise HostLacks(
            f"The tokens in {where} are damaged", hint="Remove the file and make new ones: forkd token create"
        ) from error


def _parse_token(entry: dict[str, object]) -> Token:
    name, sha256, created = entry["name"], entry["sha256"], entry["created_at_unix"]
    if not isinstance(name, str) or not isinstance(sha256, str) or type(created) is not int:
        raise TypeError("not a token")
    if len(sha256) != _DIGEST_LENGTH or not sha256.isascii():
        raise ValueError("not a digest")
    return Token(parse_token_name(name), sha256, created)


def read_token_file(path: Path) -> str:
    """The one token of a token file; refuses short ones and placeholders."""
    hint = "Put a random one there: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"The token file {path} cannot be read: {error.strerror}") from error
    token = data.strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise InvalidInput(f"The token in {path} has fewer than {MIN_TOKEN_BYTES} bytes", hint=hint)
    if len(data) > MAX_TOKEN_BYTES:
        raise InvalidInput(f"The token in {path} has more than {MAX_TOKEN_BYTES} bytes", hint=hint)
    if token.startswith(tuple(map(str.encode, _PLACEHOLDERS))):
        raise InvalidInput(f"The token in {path} is a placeholder", hint=hint)
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise InvalidInput(f"The token in {path} must be one word of printable ASCII", hint=hint)
    return token.decode("ascii")
