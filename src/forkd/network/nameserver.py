"""DNS for sandboxes: each asks its gateway, by UDP or TCP, and gets only what its rules allow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Protocol

import dns.rcode

from forkd.model.network import Mode, Network
from forkd.network import answers
from forkd.network.answers import Message, Question, Verdict
from forkd.network.listener import Listener, Room, Spawn
from forkd.network.named import NamedAddresses, SetFull
from forkd.network.resolver import NoAnswer, Resolver
from forkd.network.rules import Named, ports_of

# Of one sandbox at one time.
MAX_ASKING = 32
MAX_TCP = 8
_TCP_DEADLINE_S = 15.0
_PER_WAKE = 16

_log = logging.getLogger(__name__)


class Asker(Protocol):
    """What the name server needs of a sandbox."""

    named: NamedAddresses
    changing: asyncio.Lock  # its rules, or what names stand for

    @property
    def network(self) -> Network: ...

    async def let_reach(self, plan: dict[Named, int], *, new: bool) -> None:
        """Put addresses into the rules' set; they are in force when it returns. Raises OSError."""

    def refuse(self, reason: str, asked: str | None, protocol: str, address: str | None = None) -> None: ...
    def find_member(self, name: str) -> str | None: ...
    def is_ours(self, address: str) -> bool: ...


class NameServer:
    """Of one sandbox. `spawn` runs work that ends with the sandbox."""

    def __init__(
        self, asker: Asker, resolver: Resolver, udp: socket.socket, tcp: socket.socket, room: Room, spawn: Spawn
    ) -> None:
        self.asker, self.resolver, self.udp, self.spawn = asker, resolver, udp, spawn
        self._listener = Listener(tcp, MAX_TCP, room, self._serve, spawn)
        self._share = resolver.make_share()
        self._asking = 0

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self.udp, self._datagrams)
        self._listener.start()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self.udp)
        self._listener.stop()

    def _datagrams(self) -> None:
        for _ in range(_PER_WAKE):
            try:
                data, sender = self.udp.recvfrom(answers.MAX_QUESTION_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # an error that an earlier answer met
                continue
            if self._asking < MAX_ASKING:  # who gets no answer asks again
                self._asking += 1
                self.spawn(self._answer_datagram(data, sender))

    async def _answer_datagram(self, data: bytes, sender: tuple[str, int]) -> None:
        try:
            response = await self._answer(data)
            if response is not None:
                with contextlib.suppress(OSError):
                    self.udp.sendto(answers.render_wire(response, udp=True), sender)
        finally:
            self._asking -= 1

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            async with asyncio.timeout(_TCP_DEADLINE_S):
                while True:
                    size = int.from_bytes(await reader.readexactly(2))
                    response = await self._answer(await reader.readexactly(size))
                    if response is None:
                        return
                    data = answers.render_wire(response, udp=False)
                    writer.write(len(data).to_bytes(2) + data)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
            pass
        finally:
            writer.close()

    async def _answer(self, data: bytes) -> Message | None:
        """None: not worth an answer."""
        try:
            question = answers.parse_question(data)
        except answers.Malformed:
            return None
        verdict = answers.judge(self.asker.network, question)
        if verdict is Verdict.GROUP:
            return answers.render_group(question, self.asker.find_member)
        if verdict is Verdict.EMPTY:
            return answers.render_empty(question)
        if verdict is Verdict.REFUSE:
            self.asker.refuse("name", question.shown, "dns")
            return answers.render_empty(question, dns.rcode.REFUSED)
        try:
            return await self._forward(question)
        except (NoAnswer, SetFull):
            return answers.render_empty(question, dns.rcode.SERVFAIL)
        except OSError as error:
            _log.error("The addresses of a name could not be let through: %s", error)
            return answers.render_empty(question, dns.rcode.SERVFAIL)

    async def _forward(self, question: Question) -> Message:
        answer = await self.resolver.ask(question, self._share)
        async with self.asker.changing:
            # Rules may have changed meanwhile.
            network = self.asker.network
            if answers.judge(network, question) is not Verdict.FORWARD:
                return answers.render_empty(question, dns.rcode.REFUSED)
            found = answers.filter_answer(network, question, answer, is_ours=self.asker.is_ours)
            if found.addresses:
                await self._let_reach(network, question.name or "", found)
        for address in found.private:
            self.asker.refuse("private", question.shown, "dns", address)
        return found.response

    async def _let_reach(self, network: Network, name: str, found: answers.Found) -> None:
        now = time.monotonic()
        named, plan = self.asker.named, {}
        if network.mode is Mode.EGRESS:
            # A private address is there because a rule for the address allows it, with ports of its own.
            public = [each for each in found.addresses if answers.is_public(each, self.asker.is_ours)]
            plan = named.plan(public, ports_of(network, name), found.ttl_s, now)
            if plan:
                await self.asker.let_reach(plan, new=named.is_new(plan))
        named.note(found.names, found.addresses, plan, now)
