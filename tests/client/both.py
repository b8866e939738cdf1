"""One call, made by the sync and by the async controller, so that every test of the shells is over both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from forkd.client.async_controller import AsyncController
from forkd.client.controller import Controller

Caller = Callable[..., Any]


def call_sync(url: str, method: str, *args: Any, timeout: float = 20.0, **named: Any) -> Any:
    with Controller(url, timeout=timeout) as controller:
        answer = getattr(controller, method)(*args, **named)
        return list(answer) if inspect.isgenerator(answer) else answer


def call_async(url: str, method: str, *args: Any, timeout: float = 20.0, **named: Any) -> Any:
    async def inside() -> Any:
        async with AsyncController(url, timeout=timeout) as controller:
            answer = getattr(controller, method)(*args, **named)
            return [item async for item in answer] if inspect.isasyncgen(answer) else await answer

    return asyncio.run(inside())


BOTH = [call_sync, call_async]
