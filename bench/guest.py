"""What the bench asks of a guest, with the answer checked: a wrong answer is no measurement."""

from __future__ import annotations

from forkd.errors import ContractBroken
from forkd.guest.calls import Agent
from forkd.runtime import demo


async def evaluate(agent: Agent) -> None:
    """The demo's expression."""
    await expect(agent, demo.CODE, demo.EXPECTED)


async def expect(agent: Agent, code: str, wanted: object) -> None:
    result = await agent.eval(code)
    if not result.has_value or result.value != wanted:
        raise ContractBroken(
            f"The guest answered {result.repr} instead of {wanted!r}",
            details=result.error.traceback or result.error.message if result.error else None,
        )
