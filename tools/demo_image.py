"""Build the image of the demo's VMs, as a step of tools/setup. Needs no package: it runs while pip installs them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from forkd.errors import ForkdError
from forkd.host.paths import find_home
from forkd.image import ImageStore, debian_spec, get_recipe


class Steps:
    """Progress in the lines of tools/setup."""

    def __init__(self, number: str) -> None:
        self._number = number

    def stage(self, text: str) -> None:
        print(f"setup: {self._number} {text} ...", file=sys.stderr, flush=True)

    def line(self, text: str) -> None: ...


def main(number: str) -> int:
    signal.signal(signal.SIGTERM, _end)
    begun = time.monotonic()
    try:
        ImageStore(find_home()).build(debian_spec(get_recipe("python")), "python", Steps(number))
    except ForkdError as error:
        # The demo builds it again, and says all there is to say about it.
        print(f"setup: {number} no image yet: {error.message}", file=sys.stderr)
        return error.exit_code
    print(f"setup: {number} image of the VMs: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
