"""New randomness for everything in this interpreter that generates it and is already loaded.

Imported in the interpreter only. We import nothing in order to reseed it: a module that is not loaded yet seeds itself
from the kernel, which was reseeded before.
"""

from __future__ import annotations

import os
import random
import sys
from struct import Struct

from forkd.agent.fingerprint import digest, fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DOUBLES = Struct("dd")


def reseed(host_entropy: bytes) -> str:
    """Reseed all generators from the host's entropy and the kernel's; returns fingerprints of their output, as JSON.

    A fresh fork does this first, and under emulation every new piece of code costs time: hence the plain code.
    """
    kernel_entropy = os.urandom(48)
    secret = host_entropy + kernel_entropy[16:]
    random.seed(int.from_bytes(_derive(b"random", secret), "big"))
    return '"urandom":"%s","random":"%s","numpy":%s,"ssl":%s,"tempfile":%s' % (
        fingerprint(kernel_entropy[:16]),
        fingerprint(random.getrandbits(128).to_bytes(16, "big")),
        _reseed_numpy(secret),
        _reseed_openssl(secret),
        _reset_tempfile(),
    )


def _derive(label: bytes, secret: bytes) -> bytes:
    return digest(b"forkd " + label + b"\0" + secret)


def _reseed_numpy(secret: bytes) -> str:
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return "null"
    # Python's generator is the same Mersenne twister, and its seeding is warm by now; numpy's own is cold code.
    twister = random.Random(int.from_bytes(_derive(b"numpy", secret), "big"))
    key = twister.getstate()[1]
    module.set_state(("MT19937", key[:-1], key[-1]))
    return '"%s"' % fingerprint(_DOUBLES.pack(module.random_sample(), module.random_sample()))


def _reseed_openssl(secret: bytes) -> str:
    # OpenSSL notices a forked process by its pid. A forked machine keeps its pids.
    module: Any = sys.modules.get("_ssl")
    if module is None:
        return "false"
    module.RAND_add(_derive(b"openssl", secret), 32.0)
    return "true"


def _reset_tempfile() -> str:
    module: Any = sys.modules.get("tempfile")
    if module is None:
        return "false"
    module._name_sequence = None
    return "true"
