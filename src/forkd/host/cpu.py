"""The processor of this host, as far as a frozen VM depends on it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def parse_cpu(cpuinfo: str) -> str:
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = hashlib.sha256(" ".join(sorted(fields.get("flags", "").split())).encode()).hexdigest()[:12]
    return f"{fields.get('model name', 'unknown')} flags-{flags}"


def read_cpuinfo() -> str:
    # Only the first processor: the others repeat it.
    return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
