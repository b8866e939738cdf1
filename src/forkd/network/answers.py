"""What a sandbox is told about names: decisions and messages of DNS. Pure; both sides' bytes are hostile."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rdtypes.ANY.CNAME
import dns.rdtypes.IN.A
import dns.rrset

from forkd.model.network import GROUP_DOMAIN, PRIVATE_RANGES, AddressRule, DomainRule, Mode, Network, normal_name
from forkd.network.rules import ports_of

MAX_QUESTION_BYTES = 1024
MAX_ANSWER_BYTES = 65535
MAX_ADDRESSES = 32
_MAX_CNAMES = 12
_SMALL_UDP_BYTES = 512
_GROUP_TTL_S = 0

Message = dns.message.Message


class Verdict(enum.Enum):
    FORWARD = "forward"
    EMPTY = "empty"  # the name may be asked for; there is nothing of that type
    REFUSE = "refuse"
    GROUP = "group"


@dataclass(frozen=True)
class Question:
    message: Message
    name: str | None  # None: not a legal host name
    shown: str  # what was asked for, as it may be told to people
    kind: int


@dataclass(frozen=True)
class Found:
    """What is left of an answer. `private`: addresses that were taken out of it."""

    response: Message
    names: tuple[str, ...]  # the name that was asked for, and what it led to
    addresses: tuple[str, ...]
    private: tuple[str, ...]
    ttl_s: int


class Malformed(Exception):
    """Bytes that are no question that can be answered."""


def parse_question(data: bytes) -> Question:
    """Raises Malformed."""
    if len(data) > MAX_QUESTION_BYTES:
        raise Malformed
    try:
        message = dns.message.from_wire(data)
    except (dns.exception.DNSException, ValueError, IndexError, KeyError):
        raise Malformed from None
    if message.flags & dns.flags.QR or message.opcode() != dns.opcode.QUERY or len(message.question) != 1:
        raise Malformed
    asked = message.question[0]
    if asked.rdclass != dns.rdataclass.IN:
        raise Malformed
    shown = asked.name.to_text(omit_final_dot=True)[:253]
    return Question(message, normal_name(shown), shown, asked.rdtype)


def judge(network: Network, question: Question) -> Verdict:
    """IPv6 is off, so only A is forwarded: other types are not needed to reach a name, and could carry data."""
    name = question.name
    if name is None or network.off:
        return Verdict.REFUSE
    if name.endswith("." + GROUP_DOMAIN) or name == GROUP_DOMAIN:
        return Verdict.GROUP if network.group is not None else Verdict.REFUSE
    if network.mode is Mode.EGRESS and not ports_of(network, name):
        return Verdict.REFUSE
    if question.kind == dns.rdatatype.A:
        return Verdict.FORWARD
    if question.kind in (dns.rdatatype.AAAA, dns.rdatatype.HTTPS, dns.rdatatype.SVCB):
        return Verdict.EMPTY
    return Verdict.REFUSE


def render_empty(question: Question, code: dns.rcode.Rcode = dns.rcode.NOERROR) -> Message:
    response = dns.message.make_response(question.message, recursion_available=True)
    response.set_rcode(code)
    return response


def render_group(question: Question, find_member: Callable[[str], str | None]) -> Message:
    """`find_member`: the address of a name in the group."""
    assert question.name is not None
    address = find_member(question.name.removesuffix("." + GROUP_DOMAIN))
    if address is None:
        return render_empty(question, dns.rcode.NXDOMAIN)
    response = render_empty(question)
    if question.kind == dns.rdatatype.A:
        response.answer.append(dns.rrset.from_text(question.message.question[0].name, _GROUP_TTL_S, "IN", "A", address))
    return response


def render_wire(response: Message, *, udp: bool) -> bytes:
    """Cut, with a note to ask by TCP, where the asker takes no more."""
    most = max(_SMALL_UDP_BYTES, min(response.request_payload, 1232)) if udp else MAX_ANSWER_BYTES
    try:
        return response.to_wire(max_size=most)
    except dns.exception.TooBig:
        short = dns.message.Message(id=response.id)
        short.flags, short.question = response.flags | dns.flags.TC, response.question
        return short.to_wire()


def render_upstream(question: Question, number: int) -> bytes:
    """Our own question: nothing of the guest's but the name."""
    asked = dns.message.make_query(question.name or ".", dns.rdatatype.A, use_edns=0, payload=1232)
    asked.id = number
    return asked.to_wire()


def parse_answer(data: bytes, number: int, name: str) -> Message | None:
    """None: not an answer to that question."""
    try:
        message = dns.message.from_wire(data, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError, IndexError, KeyError):
        return None
    asked = message.question
    if message.id != number or not message.flags & dns.flags.QR or len(asked) != 1:
        return None
    same = normal_name(asked[0].name.to_text()) == name
    if not same or asked[0].rdtype != dns.rdatatype.A or asked[0].rdclass != dns.rdataclass.IN:
        return None
    return message


def filter_answer(
    network: Network, question: Question, answer: Message, *, is_ours: Callable[[str], bool] = lambda _: False
) -> Found:
    """The addresses that a name leads to, without those that the sandbox must not be led to.

    `is_ours`: addresses of this host and of sandboxes.
    """
    response = render_empty(question, _passed_on(answer.rcode()))
    owner = question.message.question[0].name
    names, ttl_s, seen = [question.name or ""], 3600, 0
    kept: list[str] = []
    private: list[str] = []
    while seen <= _MAX_CNAMES:
        seen += 1
        found = _find(answer, owner, dns.rdatatype.A)
        if found is not None:
            ttl_s = min(ttl_s, found.ttl)
            listed = [str(each.address) for each in found if isinstance(each, dns.rdtypes.IN.A.A)][:MAX_ADDRESSES]
            kept = [each for each in listed if is_reachable(network, each, is_ours)]
            private = [each for each in listed if each not in kept]
            if kept:
                response.answer.append(dns.rrset.from_text_list(owner, ttl_s, "IN", "A", kept))
            break
        alias = _find(answer, owner, dns.rdatatype.CNAME)
        target = alias[0].target if alias and isinstance(alias[0], dns.rdtypes.ANY.CNAME.CNAME) else None
        name = normal_name(target.to_text()) if target is not None else None
        if alias is None or target is None or name is None or _is_denied(network, name):
            break
        ttl_s = min(ttl_s, alias.ttl)
        response.answer.append(dns.rrset.from_rdata(owner, ttl_s, alias[0]))
        names.append(name)
        owner = target
    return Found(response, tuple(names), tuple(kept), tuple(private), ttl_s)


def is_reachable(network: Network, address: str, is_ours: Callable[[str], bool]) -> bool:
    """A name may stand for it: a public address, or one that a rule for the address allows."""
    where = ipaddress.IPv4Address(address)
    return is_public(address, is_ours) or any(
        isinstance(rule, AddressRule) and where in rule.network for rule in network.allowed
    )


def is_public(address: str, is_ours: Callable[[str], bool]) -> bool:
    where = ipaddress.IPv4Address(address)
    return not is_ours(address) and not any(where in private for private in PRIVATE_RANGES)


def _passed_on(code: dns.rcode.Rcode) -> dns.rcode.Rcode:
    return code if code in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN) else dns.rcode.SERVFAIL


def _find(answer: Message, owner: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.rrset.RRset | None:
    return answer.get_rrset(answer.answer, owner, dns.rdataclass.IN, kind)


def _is_denied(network: Network, name: str) -> bool:
    return any(isinstance(rule, DomainRule) and rule.matches(name) for rule in network.denied)
