"""SHA-256 without OpenSSL."""

from __future__ import annotations

# The plain C modules: hashlib would load OpenSSL into every guest, and its cold code into every fork.
try:
    from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore,no-redef]
    except ImportError:
        from hashlib import sha256


def digest(data: bytes) -> bytes:
    digested: bytes = sha256(data).digest()
    return digested


def fingerprint(sample: bytes) -> str:
    """Tells two samples apart without giving either away."""
    text: str = sha256(sample).hexdigest()
    return text
