"""Questions to the host's resolvers: a real one on this machine, which answers names of `quick` and no others."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import dns.message
import dns.rrset
import pytest

from forkd.network import resolver as module
from forkd.network.answers import Question, parse_question
from forkd.network.resolver import MAX_ASKING, NoAnswer, Resolver


class Server(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        question = dns.message.from_wire(data)
        name = question.question[0].name
        if name.to_text().startswith("quick"):
            response = dns.message.make_response(question)
            response.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "203.0.113.1"))
            self._transport.sendto(response.to_wire(), address)


@pytest.fixture
async def resolver() -> AsyncIterator[Resolver]:
    made = asyncio.get_running_loop().create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
    transport, _ = await made
    yield Resolver(["127.0.0.1"], transport.get_extra_info("sockname")[1])
    transport.close()


def question(name: str) -> Question:
    return parse_question(dns.message.make_query(name, "A").to_wire())


async def test_one_is_answered_while_others_ask_for_all_that_there_is(resolver: Resolver) -> None:
    loud = [resolver.make_share() for _ in range(8)]
    each = MAX_ASKING // len(loud)
    waiting = [
        asyncio.ensure_future(resolver.ask(question(f"slow{number}.test"), share))
        for share in loud
        for number in range(each)
    ]
    await asyncio.sleep(0)
    answer = await resolver.ask(question("quick.test"), resolver.make_share())
    assert answer.answer and not any(each.done() for each in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_names_that_are_answered_or_not_fill_no_log(
    resolver: Resolver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRY_DEADLINE_S", 0.05)
    share = resolver.make_share()
    for _ in range(5):
        with pytest.raises(NoAnswer):
            await resolver.ask(question("slow.test"), share)
        await resolver.ask(question("quick.test"), share)
    assert [record.message for record in caplog.records] == ["DNS does not answer: resolvers 127.0.0.1"]
