"""The log says the same thing so often, and then how often it did not."""

import io
import logging
import sys

from forkd.daemon.logs import TextFormatter
from forkd.daemon.repeats import BUDGET, TRACEBACK_COST, WINDOW_S, BoundedHandler


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[logging.Logger, BoundedHandler, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    handler = BoundedHandler(out, clock)
    handler.setFormatter(TextFormatter())
    log = logging.Logger("x")
    log.addHandler(handler)
    return log, handler, out, clock


def test_lines_that_differ_only_in_values_are_shown_so_often_and_then_counted() -> None:
    log, _, out, clock = make()
    for number in range(1000):
        log.warning("Client %d is rude", number)
    log.warning("Something else")
    lines = out.getvalue().splitlines()
    assert len(lines) == BUDGET + 1
    assert lines[-1].endswith("warning x: Something else")
    clock.now_s = WINDOW_S
    log.warning("Client %d is rude", 1000)
    assert [line.partition(": ")[2] for line in out.getvalue().splitlines()[BUDGET + 1 :]] == [
        f"Left out {1000 - BUDGET} more lines like: Client %d is rude",
        "Client 1000 is rude",
    ]


def test_what_was_left_out_is_said_at_the_end() -> None:
    log, handler, out, _ = make()
    for _ in range(BUDGET + 5):
        log.error("It failed")
    handler.close()
    assert out.getvalue().splitlines()[-1].endswith("error x: Left out 5 more lines like: It failed")


def test_tracebacks_are_shown_less_often() -> None:
    log, _, out, _ = make()
    for number in range(100):
        try:
            raise OSError(24, "Too many open files")
        except OSError:
            # As asyncio does: what it is about is a part of the message.
            log.error(f"socket.accept() failed\nsocket: <socket {number}>", exc_info=sys.exc_info())
    assert out.getvalue().count("Traceback") == BUDGET // TRACEBACK_COST


def test_many_kinds_of_lines_do_not_pile_up_and_long_ones_are_cut() -> None:
    log, handler, out, _ = make()
    for number in range(2000):
        log.warning(f"Kind {number}")
    assert len(handler._limit._windows) < 300
    log.warning("%s", "x" * 100_000)
    assert max(map(len, out.getvalue().splitlines())) < 10_000
