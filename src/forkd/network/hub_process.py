"""One hub as the daemon has it: its process, from its start to its end, and what it is asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forkd import errors
from forkd.errors import ForkdError, HostLacks, NetworkFailed
from forkd.host.process import Exited, spawn
from forkd.network.channel import Channel, make_pair
from forkd.network.lease import Refused

START_DEADLINE_S = 30.0
CALL_DEADLINE_S = 30.0
START_HINT = "forkd doctor says more; a sandbox without a network works"
_LOG = "hub.log"
# Isolated from the environment, which may be what names the path that we were found by.
_START = """\
import json, sys
sys.path[:] = sys.argv[1].split(":")
from forkd.network.hub import main
main(json.loads(sys.argv[2]))
"""

Answer = tuple[dict[str, Any], list[int]]


class HubProcess:
    def __init__(
        self,
        plan: Mapping[str, Any],
        directory: Path,
        inherited: Sequence[int],
        on_refused: Callable[[Refused], None],
        on_end: Callable[[HubProcess], None],
    ) -> None:
        """`on_end`: it ended, and nobody had said that it should."""
        self.gone = False
        self._on_refused, self._on_end = on_refused, on_end
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[int]] = loop.create_future()
        self._telling: asyncio.Future[None] | None = None
        ours, theirs = make_pair()
        with theirs:
            whole = {**plan, "control": theirs.fileno(), "parent": os.getpid()}
            try:
                self._process = spawn(
                    [sys.executable, "-I", "-c", _START, ":".join(filter(os.path.isabs, sys.path)), json.dumps(whole)],
                    output=directory / _LOG,
                    env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
                    inherited_fds=[theirs.fileno(), *inherited],
                )
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours, self._on_message, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> int:
        """A descriptor of its namespace, the caller's from then on."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                return (await self._process.unless_it_exits(self._ready)).pop()
        except (Exited, TimeoutError, IndexError) as error:
            raise NetworkFailed("The process that serves networks did not start", hint=f"See {_LOG}") from error

    async def call(self, do: str, about: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Answer:
        """What it answers, and the descriptors that came with it. Its errors are raised."""
        number = next(self._numbers)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = answered
        try:
            await self._channel.send({"id": number, "do": do, **about}, descriptors)
            async with asyncio.timeout(CALL_DEADLINE_S):
                answer, received = await answered
        except BaseException as error:
            # It may have come in the moment in which the caller stopped waiting.
            if _has_result(answered):
                _close_all(answered.result()[1])
            if isinstance(error, TimeoutError):
                text = f"The network's {do} took more than {CALL_DEADLINE_S:g} s"
                raise NetworkFailed(text, hint="Try again") from error
            raise
        finally:
            del self._pending[number]
        if "error" in answer:
            _close_all(received)
            raise _parse_error(answer["error"])
        return answer["ok"], received

    def tell(self, do: str, about: Mapping[str, Any]) -> None:
        """Nobody waits for the answer."""
        self._telling = asyncio.ensure_future(self._channel.send({"id": 0, "do": do, **about}))
        self._telling.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def end(self) -> None:
        """All that waits for it fails."""
        self._channel.close()
        self._fail_all()
        if _has_result(self._ready):
            _close_all(self._ready.result())
            self._ready.result().clear()
        await self._process.kill()

    def _ended(self) -> None:
        """All networks are gone with it: they are closed."""
        self._process.send_signal(9)
        self._fail_all()
        self._on_end(self)

    def _fail_all(self) -> None:
        self.gone = True
        futures: list[asyncio.Future[Any]] = [self._ready, *self._pending.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(ended())

    def _on_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "refused" in message:
            for each in message["refused"]:
                self._on_refused(Refused(**each))
        elif "ready" in message or "failed" in message:
            self._on_ready(message, descriptors)
        else:
            waiting = self._pending.get(message.get("id", 0))
            if waiting is None or waiting.done():
                _close_all(descriptors)
            else:
                waiting.set_result((message, descriptors))

    def _on_ready(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if self._ready.done():
            _close_all(descriptors)
        elif "failed" in message:
            text = f"The process that serves networks did not start: {message['failed']}"
            self._ready.set_exception(HostLacks(text, hint=message.get("hint") or START_HINT))
        else:
            self._ready.set_result(descriptors)


def ended() -> NetworkFailed:
    return NetworkFailed("The process that serves networks ended", hint=f"See {_LOG}; try again")


def _parse_error(raw: dict[str, Any]) -> ForkdError:
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForkdError))
    kind = next((kind for kind in kinds if kind.code == raw.get("code")), NetworkFailed)
    return kind(str(raw.get("message")), hint=raw.get("hint"))


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
