"""What a stream of events says, on our own standard output and error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from forkd.cli.tables import note

if TYPE_CHECKING:
    from forkd.client.stream import StreamEvent


def show_output(event: StreamEvent) -> bool:
    """Output, or a gap in it, as it comes. False: it is an event of another kind."""
    if event.kind in ("stdout", "stderr"):
        output = sys.stdout.buffer if event.kind == "stdout" else sys.stderr.buffer
        output.write(event.data)
        output.flush()
        return True
    if event.kind == "gap":
        note(f"forkd: {event.body.get('bytes')} bytes of output came too fast and are lost")
        return True
    return False
