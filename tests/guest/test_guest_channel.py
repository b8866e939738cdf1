"""The host against guests that lie, flood, stall or talk nonsense."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forkd.errors import AgentError, ChannelClosed, ForkdError, GuestTimeout, InvalidInput, ProtocolError
from forkd.guest.agent import Agent
from forkd.guest.channel import Channel
from forkd.guest.exchange import Exchange, parse_failure
from forkd.wire.agent import (
    CALL,
    CANCEL,
    CLOCK,
    DATA,
    FAIL,
    GRANT_BYTES,
    HELLO,
    MAX_MESSAGE,
    MAX_PAYLOAD,
    MAX_STREAMS,
    MORE,
    NOISE,
    REPLY,
    STARTED,
    STDOUT,
    WINDOW_BYTES,
    Parser,
    decode_json,
    encode,
    encode_json,
    encode_message,
    encode_window,
)

Answer = Callable[[int, int, bytes], bytes]


class FakeGuest(asyncio.Protocol):
    """Answers every frame with the bytes that `answer(kind, stream, payload)` gives."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = Parser()
        self.received: list[tuple[int, int, int, bytes]] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        for frame in self._parser.feed(data):
            self.received.append(frame)
            answer = self._answer(frame[0], frame[2], frame[3])
            if answer:
                self.transport.write(answer)


@asynccontextmanager
async def against(answer: Answer) -> AsyncIterator[tuple[Agent, FakeGuest]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, guest = await loop.create_connection(lambda: FakeGuest(answer), sock=theirs)
    agent = Agent.attach(ours)
    try:
        async with asyncio.timeout(20):
            yield agent, guest
    finally:
        agent.close()
        transport.close()
        await asyncio.sleep(0)
    gc.collect()


def reply(value: object) -> Answer:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda kind, stream, _: encode_message(REPLY, stream, payload) if kind != CANCEL else b""


GREETING = {"agent": "1", "protocol": 1, "python": "3", "pid": 1, "interpreter_pid": 2, "uptime_s": 1.5, "streams": 0}
GOOD_EVAL = {"ok": True, "repr": "1", "value": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b'{"ok": true}',
        b'{"ok": 1, "repr": "x"}',
        b'{"ok": true, "repr": 5}',
        b'{"ok": true, "repr": "x", "truncated": "yes"}',
        b'{"ok": false}',
        b'{"ok": false, "error": []}',
        b'{"ok": false, "error": {"type": "E", "message": 1, "traceback": ""}}',
        b'{"ok": false, "error": {"type": "' + b"E" * 5000 + b'", "message": "", "traceback": ""}}',
        b'{"ok": true, "repr": "x", "died": 5}',
        b'{"ok": true, "repr": "x", "died": {"signal": 100000}}',
        b'{"ok": true, "repr": "x", "value": ' + b"[" * 500_000 + b"}",
        b'{"ok": true, "repr": "x", "value": ' + b"9" * 500_000 + b"}",
    ],
)
async def test_answers_of_the_wrong_shape_are_protocol_errors(answer: bytes) -> None:
    async with against(reply(answer)) as (agent, _):
        with pytest.raises(ProtocolError):
            await agent.eval("1")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"agent": "1"},
        {**GREETING, "protocol": True},
        {**GREETING, "pid": -1},
        {**GREETING, "uptime_s": 1e400},
        {**GREETING, "python": "x" * 500},
    ],
)
async def test_an_agent_that_cannot_say_who_it_is_is_not_believed(answer: dict[str, Any]) -> None:
    async with against(reply(answer)) as (agent, _):
        with pytest.raises(ProtocolError):
            await agent.ping()


@pytest.mark.parametrize(
    "frame",
    [
        lambda stream: encode(STARTED, stream, b'{"pid": 1}'),
        lambda stream: encode(CLOCK, stream),
        lambda stream: encode(99, stream),
        lambda stream: encode(FAIL, stream, b"{}"),
        lambda stream: encode(FAIL, stream, b'{"code": 5, "message": "x"}'),
        lambda stream: encode_window(stream, 1),
        lambda stream: encode(10, stream, b"abc"),
        lambda stream: encode(DATA, stream, b"x", 0),
        lambda stream: encode(DATA, stream, b"x" * MAX_PAYLOAD, STDOUT | MORE) * 5 + encode(DATA, stream, b"", STDOUT),
        lambda stream: encode(REPLY, stream, bytes(MAX_PAYLOAD), MORE) * 40 + encode(REPLY, stream),
        lambda stream: encode_json(NOISE, stream, {}),
        lambda stream: encode(DATA, stream, b"", STDOUT),
        lambda stream: encode_window(stream, 0),
        lambda stream: encode(REPLY, stream, b"", MORE),
        lambda stream: encode(REPLY, stream, b'{"ok": true', MORE) + encode(REPLY, stream, b"}"),
        lambda stream: encode(REPLY, stream, bytes(MAX_PAYLOAD), MORE) * 33,
    ],
)
async def test_frames_that_do_not_belong_end_the_channel(frame: Callable[[int], bytes]) -> None:
    async with against(lambda kind, stream, _: frame(stream)) as (agent, _):
        with pytest.raises(ProtocolError):
            await agent.eval("1")
        assert agent.channel.closed
        with pytest.raises(ProtocolError):
            await agent.ping()


async def test_garbage_before_the_first_answer_is_forgiven_and_after_it_is_not() -> None:
    good = reply(GOOD_EVAL)

    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        return b"\x00tail of an old frame" + good(kind, stream, payload)

    async with against(answer) as (agent, _):
        assert (await agent.eval("1")).value == 1
        with pytest.raises(ProtocolError, match="not a frame"):
            await agent.eval("1")


async def test_what_was_meant_for_the_client_before_us_is_not_taken_for_ours() -> None:
    good = reply(GOOD_EVAL)
    stale = encode_json(REPLY, 1, {"ok": True, "repr": "stale", "value": "stale"}) * 10

    async with against(lambda kind, stream, payload: stale + good(kind, stream, payload)) as (agent, _):
        assert (await agent.eval("1")).value == 1


@pytest.mark.parametrize("synchronised", [False, True])
async def test_a_flood_for_nobody_ends_the_channel(synchronised: bool) -> None:
    flood = encode(DATA, 0xFFFFFFFF, bytes(MAX_PAYLOAD), STDOUT) * 80
    good = reply(GOOD_EVAL)

    first = iter([synchronised])

    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        return good(kind, stream, payload) if next(first, False) else flood + good(kind, stream, payload)

    async with against(answer) as (agent, _):
        if synchronised:
            await agent.eval("1")
        with pytest.raises(ProtocolError, match="floods"):
            await agent.eval("2")
            await agent.eval("3")


async def test_a_flood_of_output_beyond_its_window_ends_the_channel() -> None:
    flood = WINDOW_BYTES // MAX_PAYLOAD + 1
    async with against(
        lambda kind, stream, _: (
            encode_json(STARTED, stream, {"pid": 5}) + encode(DATA, stream, bytes(MAX_PAYLOAD), STDOUT) * flood
        )
    ) as (agent, _):
        process_task = asyncio.create_task(agent.start("yes"))
        with pytest.raises(ProtocolError, match="granted"):
            process = await process_task
            await asyncio.sleep(0.2)
            await process.wait()


async def test_a_guest_that_never_answers_runs_into_the_deadline_and_is_told() -> None:
    async with against(lambda *_: b"") as (agent, guest):
        with pytest.raises(GuestTimeout, match=r"answer a ping within 0\.1 s"):
            await agent.ping(deadline_s=0.1)
        await asyncio.sleep(0.05)
        assert guest.received[-1][0] == CANCEL
        with pytest.raises(GuestTimeout):
            await agent.hello(deadline_s=0.2)


async def test_late_frames_of_a_cancelled_exchange_are_dropped() -> None:
    async with against(lambda *_: b"") as (agent, guest):
        with pytest.raises(GuestTimeout):
            await agent.ping(deadline_s=0.05)
        assert guest.transport is not None
        stream = guest.received[0][2]
        guest.transport.write(encode(DATA, stream, bytes(MAX_PAYLOAD), STDOUT) * 4 + encode(REPLY, stream, b"{}"))
        await asyncio.sleep(0.05)
        assert not agent.channel.closed


async def test_hello_is_repeated_behind_padding_when_nobody_answers() -> None:
    hellos = []

    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        if kind != HELLO:
            return b""
        hellos.append(payload)
        if len(hellos) == 1:
            return b""
        return encode_json(HELLO, stream, {**GREETING, "session": decode_json(payload)["session"]})

    async with against(answer) as (agent, guest):
        info = await agent.hello(deadline_s=1)
        assert info.uptime_s == 1.5
        assert hellos[0] == hellos[1]
        assert guest._parser.take_skipped() > MAX_PAYLOAD


@pytest.mark.parametrize(("change", "match"), [({"session": "x"}, "another session"), ({"protocol": 2}, "version 2")])
async def test_a_greeting_for_another_session_or_in_another_version_is_refused(
    change: dict[str, Any], match: str
) -> None:
    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        return encode_json(HELLO, stream, {**GREETING, "session": decode_json(payload)["session"], **change})

    async with against(answer) as (agent, _):
        with pytest.raises(ProtocolError, match=match):
            await agent.hello(deadline_s=1)


async def test_a_lost_channel_fails_everything_pending_and_everything_after() -> None:
    async with against(lambda *_: b"") as (agent, guest):
        pending = [asyncio.create_task(agent.ping()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert guest.transport is not None
        guest.transport.close()
        for error in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(error, ChannelClosed)
        with pytest.raises(ChannelClosed):
            await agent.ping()


async def test_a_callback_that_raises_ends_the_channel_and_nobody_waits() -> None:
    def explode(kind: str, data: bytes) -> None:
        raise RuntimeError(kind)

    async with against(lambda kind, stream, _: encode(DATA, stream, b"x", STDOUT)) as (agent, _):
        with pytest.raises(ChannelClosed) as caught:
            await agent.eval("1", on_output=explode)
        assert isinstance(caught.value.__cause__, RuntimeError)


async def test_an_exchange_given_up_wakes_its_writer() -> None:
    async with against(lambda *_: b"") as (agent, _):
        exchange = Exchange(agent.channel, "take data", CALL, b"{}", 10)
        writer = asyncio.create_task(exchange.send_data(bytes(1_000_000)))
        await asyncio.sleep(0.05)
        assert not writer.done()
        exchange.abandon()
        await writer
        with pytest.raises(AgentError):
            await exchange.answer()


async def test_more_exchanges_than_the_protocol_has_are_refused_here() -> None:
    async with against(lambda *_: b"") as (agent, _):
        tasks = [asyncio.create_task(agent.ping(deadline_s=0.2)) for _ in range(65)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors].count(AgentError) == 1


async def test_a_guest_that_takes_nothing_bounds_what_is_queued_for_it() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    exchanges = [Exchange(channel, "take data", CALL, b"{}", 1) for _ in range(30)]
    writers = [asyncio.create_task(exchange.send_data(bytes(10_000_000))) for exchange in exchanges]
    await asyncio.sleep(0.2)
    assert channel._pending <= 30 * WINDOW_BYTES
    channel.close()
    await asyncio.gather(*writers, return_exceptions=True)
    theirs.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [("not_found", "not_found"), ("exists", "conflict"), ("denied", "denied"), ("made-up", "agent_error")],
)
def test_a_refusal_becomes_the_error_a_caller_would_catch(code: str, expected: str) -> None:
    error = parse_failure(json.dumps({"code": code, "message": "m" * 10_000, "errno": "EX"}).encode())
    assert isinstance(error, ForkdError)
    assert error.code == expected and len(error.message) < 600


async def test_a_message_at_the_limit_is_taken() -> None:
    text = "x" * (MAX_MESSAGE - 100)

    async with against(reply({"ok": True, "repr": text})) as (agent, _):
        assert (await agent.eval("1")).repr == text


async def test_an_answer_of_more_values_than_a_guest_has_to_say_is_refused() -> None:
    many = b'{"ok": true, "repr": "x", "value": [' + b"{}," * 300_000 + b"{}]}"
    async with against(reply(many)) as (agent, _):
        with pytest.raises(ProtocolError, match="more than 262144 values"):
            await agent.eval("1")


@pytest.mark.parametrize("grant", [1, GRANT_BYTES - 1])
async def test_a_grant_smaller_than_a_step_ends_the_channel(grant: int) -> None:
    """Each would wake a sender, for a frame as small."""

    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        return encode_window(stream, grant) if kind == DATA else b""

    async with against(answer) as (agent, _):
        with pytest.raises(ProtocolError, match="less than a step"):
            await agent.write_file("/x", bytes(10_000_000))


@pytest.mark.parametrize("command", ["\U0001f600" * 200_000, ["echo", "\x01" * 500_000]])
async def test_a_request_too_large_is_refused_by_name_and_takes_no_place(command: str | list[str]) -> None:
    """As JSON a character takes up to 12 bytes: the commands are short enough, the request is not."""
    async with against(reply(GREETING)) as (agent, _):
        for _ in range(MAX_STREAMS + 1):
            with pytest.raises(InvalidInput, match=f"may have {MAX_MESSAGE}") as caught:
                await agent.run(command)
            assert caught.value.hint
        assert (await agent.ping()).pid == 1


async def test_a_command_too_large_is_measured_in_bytes() -> None:
    async with against(reply(GREETING)) as (agent, _):
        with pytest.raises(InvalidInput, match="has 1200000 bytes, and may have 1048576"):
            await agent.run("\u20ac" * 400_000)


async def test_a_guest_that_sends_and_never_reads_is_not_granted_without_end() -> None:
    ours, theirs = socket.socketpair()
    agent = Agent.attach(ours)
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    task = asyncio.create_task(agent.eval("1", max_output_bytes=0))
    await asyncio.sleep(0)
    _, _, stream, _ = Parser().feed(await loop.sock_recv(theirs, 65536))[0]
    flood = encode(DATA, stream, bytes(MAX_PAYLOAD), STDOUT) * 16

    async def send() -> None:
        while True:
            await loop.sock_sendall(theirs, flood)

    sending = asyncio.create_task(send())
    with pytest.raises(ProtocolError, match="reads nothing"):
        async with asyncio.timeout(60):
            await task
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    theirs.close()


async def test_a_flood_of_small_frames_comes_through_in_turns_and_whole() -> None:
    """Far more frames than one turn, and than a burst, takes."""
    frames = 6000

    def answer(kind: int, stream: int, payload: bytes) -> bytes:
        output = b"".join(encode(DATA, stream, b"%05d" % number, STDOUT) for number in range(frames))
        return output + encode_json(REPLY, stream, GOOD_EVAL)

    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with against(answer) as (agent, _):
        counting = asyncio.create_task(count())
        result = await agent.eval("1")
        counting.cancel()
        assert result.stdout == b"".join(b"%05d" % number for number in range(frames))
        assert turns > frames / 256, "others had their turns in between"
