"""The clock of a fork is set by an answer that came soon, however late the first one was."""

import time

import pytest

from forkd.guest import identity
from forkd.guest.agent import Agent
from forkd.model.names import new_identity


async def test_the_time_is_asked_for_again_when_its_answer_took_long(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[int] = []
    answer = identity._Becoming.on_other

    def late(self: identity._Becoming, kind: int, payload: bytes) -> None:
        questions.append(kind)
        if len(questions) == 1:
            time.sleep(1.2)
        answer(self, kind, payload)

    monkeypatch.setattr(identity._Becoming, "on_other", late)
    proof = await identity.become(agent, new_identity("sb-1"))
    assert len(questions) >= 2 and proof.clock_rtt_ns < 1_200_000_000
