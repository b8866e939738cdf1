#!/usr/bin/env python3
"""Writes the synchronous client from the asynchronous one: tools/unasync.py, or --check to only compare.

Each src/forkd/client/async_NAME.py becomes NAME.py beside it. The rules replace words; what differs by more than words
is written by hand in both kinds, under names that differ by `async_` or `Async` only (arguments.py, output.py,
shared.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "src/forkd/client"
RULES = [
    (r"AsyncGenerator\[(.+?), None\]", r"Generator[\1, None, None]"),
    (r"\basync (def|for|with) ", r"\1 "),
    (r"\bawait ", ""),
    (r"\bAsync([A-Z]\w*)", r"\1"),
    (r"\basync_(\w+)", r"\1"),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\baclosing\b", "closing"),
    (r"\.a(close|read|iter_bytes)\(", r".\1("),
    (r"\banext\(", "next("),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\(", "time.sleep("),
]
RULES_OF_RUFF = "I,UP028"  # sorted imports, `yield from`


class NoRule(Exception):
    """Something asynchronous that no rule covers."""


def render_sync(source: str, name: str) -> str:
    """The text of `name`.py from that of async_`name`.py."""
    text = source
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"`[^`]*`", "", line)
        if left := re.search(r"\b(async|await|asyncio|aclose|anext)\b", code):
            raise NoRule(f"async_{name}.py:{number}: no rule for {left.group()!r} in: {line.strip()}")
    header = f"# Generated from async_{name}.py by tools/unasync.py: do not edit.\n"
    return _tidy(header + text, CLIENT / f"{name}.py")


def _tidy(text: str, path: Path) -> str:
    for command in (["check", "--fix", "--unsafe-fixes", "--quiet", "--select", RULES_OF_RUFF], ["format"]):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(words, input=text, capture_output=True, text=True, check=True, timeout=60).stdout
    return text


def find_stale(client: Path) -> dict[Path, str]:
    """The generated files that are missing or differ, with what they should be."""
    stale = {}
    for source in sorted(client.glob("async_*.py")):
        name = source.stem.removeprefix("async_")
        text, path = render_sync(source.read_text(), name), client / f"{name}.py"
        if not path.exists() or path.read_text() != text:
            stale[path] = text
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the synchronous client from the asynchronous one.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is not up to date")
    check = parser.parse_args().check
    stale = find_stale(CLIENT)
    for path, text in stale.items():
        if check:
            print(f"{path} is not up to date: run tools/unasync.py", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"{path} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
