"""A socket whose connection was refused."""

from __future__ import annotations

import socket


def close_refused(error: BaseException) -> None:
    """httpcore (1.0) leaves the socket of a refused unix connection to the garbage collector. Close it now."""
    failed: BaseException | None = error
    while failed is not None:
        trace = failed.__traceback__
        while trace is not None:
            made = trace.tb_frame.f_locals.get("sock")
            if isinstance(made, socket.socket):
                made.close()
            trace = trace.tb_next
        failed = failed.__cause__ or failed.__context__
