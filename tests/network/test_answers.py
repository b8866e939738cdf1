"""What a sandbox is told about names, decided on values; names of all kinds are tried."""

import itertools
import string

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.model.network import PRIVATE_RANGES, parse_network
from forkd.network.answers import (
    Malformed,
    Question,
    Verdict,
    filter_answer,
    judge,
    parse_answer,
    parse_question,
    render_empty,
    render_group,
    render_upstream,
    render_wire,
)

RULES = parse_network({"allow": ["allowed.test", "*.below.test", "10.9.0.0/16:80"], "deny": ["bad.below.test"]})
OPEN = parse_network("open")

labels = st.binary(min_size=1, max_size=63)
bytes_names = st.lists(labels, min_size=1, max_size=6).filter(lambda parts: sum(len(part) + 1 for part in parts) < 254)


def ask(name: str | dns.name.Name, kind: str = "A") -> Question:
    return parse_question(dns.message.make_query(name, kind).to_wire())


def answer(question: Question, *rrsets: dns.rrset.RRset) -> dns.message.Message:
    upstream = dns.message.make_response(dns.message.from_wire(render_upstream(question, 7)))
    upstream.answer.extend(rrsets)
    found = parse_answer(upstream.to_wire(max_size=65535), 7, question.name or "")
    assert found is not None
    return found


def record(owner: str, kind: str, *values: str, ttl: int = 300) -> dns.rrset.RRset:
    return dns.rrset.from_text_list(owner, ttl, "IN", kind, values)


@pytest.mark.parametrize("name", ["allowed.test", "ALLOWED.test.", "aLLoWeD.TeSt", "a.below.test", "a.b.c.Below.Test"])
def test_allowed_names_are_forwarded_however_they_are_written(name: str) -> None:
    assert judge(RULES, ask(name)) is Verdict.FORWARD


@pytest.mark.parametrize(
    "name",
    [
        "below.test",
        "bad.below.test",
        "allowed.test.evil.test",
        "xallowed.test",
        "x.allowed.test",
        "allowedxtest",
        r"x\.below.test",
        r"allowed\.test",
        r"allowed.test\000",
        r"\001.below.test",
        r"a\032b.below.test",
        r"*.below.test",
        "test",
        ".",
        "-a.below.test",
        "ALLOWED.TEST.forkd",
        "xn--llowed-8ta.test",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    assert judge(RULES, ask(name)) is Verdict.REFUSE


@settings(max_examples=1000, deadline=None)
@given(bytes_names)
def test_a_name_of_any_bytes_passes_only_when_it_is_plainly_allowed(parts: list[bytes]) -> None:
    """The model: labels as bytes, lower case, compared with those of the rules."""
    name = dns.name.Name([*parts, b""])
    lower = [part.lower() for part in parts]
    legal = set(string.ascii_lowercase.encode() + string.digits.encode() + b"-_")
    plain = all(set(part) <= legal and not part.startswith(b"-") and not part.endswith(b"-") for part in lower)
    below = lower[-2:] == [b"below", b"test"] and len(lower) > 2 and lower != [b"bad", b"below", b"test"]
    expected = plain and (lower == [b"allowed", b"test"] or below)
    assert (judge(RULES, ask(name)) is Verdict.FORWARD) == expected


@settings(max_examples=1000, deadline=None)
@given(labels, st.sampled_from(["allowed.test", "below.test", "bad.below.test"]), st.randoms())
def test_a_name_below_a_rules_name_is_judged_by_its_whole_labels(label: bytes, rest: str, chance: object) -> None:
    mixed = "".join(chance.choice((each.upper(), each)) for each in rest)  # type: ignore[attr-defined]
    name = dns.name.Name([label, *dns.name.from_text(mixed).labels])
    legal = set(string.ascii_letters.encode() + string.digits.encode() + b"-_")
    plain = set(label) <= legal and not label.startswith(b"-") and not label.endswith(b"-")
    allowed = plain and rest != "allowed.test" and not (rest == "below.test" and label.lower() == b"bad")
    assert (judge(RULES, ask(name)) is Verdict.FORWARD) == allowed


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=1200))
def test_bytes_that_are_no_question_are_malformed_and_nothing_else(data: bytes) -> None:
    try:
        question = parse_question(data)
    except Malformed:
        return
    render_wire(render_empty(question), udp=True)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 40))
def test_an_upstream_answer_of_any_bytes_is_an_answer_or_not(data: bytes, cut: int) -> None:
    question = ask("allowed.test")
    whole = dns.message.make_response(dns.message.from_wire(render_upstream(question, 7))).to_wire()
    for each in (data, whole[:cut] + data):
        found = parse_answer(each, 7, "allowed.test")
        if found is not None:
            filter_answer(RULES, question, found)


def test_types_that_are_not_needed_are_empty_or_refused() -> None:
    assert judge(RULES, ask("allowed.test", "AAAA")) is Verdict.EMPTY
    assert judge(RULES, ask("allowed.test", "HTTPS")) is Verdict.EMPTY
    for kind in ("TXT", "MX", "ANY", "NS", "PTR", "SRV", "NULL", "AXFR"):
        assert judge(RULES, ask("allowed.test", kind)) is Verdict.REFUSE
    assert judge(OPEN, ask("any.name.test")) is Verdict.FORWARD


@settings(max_examples=500, deadline=None)
@given(st.lists(st.ip_addresses(v=4).map(str), min_size=1, max_size=20))
def test_private_addresses_are_taken_out_of_answers_unless_a_rule_covers_them(addresses: list[str]) -> None:
    import ipaddress

    question = ask("allowed.test")
    found = filter_answer(RULES, question, answer(question, record("allowed.test.", "A", *addresses)))
    for address in addresses:
        where = ipaddress.ip_address(address)
        private = any(where in each for each in PRIVATE_RANGES) and where not in ipaddress.ip_network("10.9.0.0/16")
        assert (address in found.addresses) == (not private)
        assert (address in found.private) == private
    shown = {str(each) for rrset in found.response.answer for each in rrset}
    assert shown == set(found.addresses)


def test_this_hosts_own_addresses_are_taken_out() -> None:
    question = ask("allowed.test")
    given_ = answer(question, record("allowed.test.", "A", "203.0.113.5", "203.0.113.6"))
    found = filter_answer(RULES, question, given_, is_ours=lambda address: address.endswith(".5"))
    assert found.addresses == ("203.0.113.6",) and found.private == ("203.0.113.5",)


def test_a_chain_of_names_is_followed_but_not_through_denied_ones() -> None:
    question = ask("a.below.test")
    chain = [record(f"{a}.below.test.", "CNAME", f"{b}.below.test.") for a, b in zip("abc", "bcd", strict=True)]
    found = filter_answer(RULES, question, answer(question, *chain, record("d.below.test.", "A", "203.0.113.5", ttl=9)))
    assert found.addresses == ("203.0.113.5",) and found.ttl_s == 9
    assert found.names == ("a.below.test", "b.below.test", "c.below.test", "d.below.test")
    through = [record("a.below.test.", "CNAME", "bad.below.test."), record("bad.below.test.", "A", "203.0.113.5")]
    assert filter_answer(RULES, question, answer(question, *through)).addresses == ()


def test_names_that_lead_to_each_other_or_on_and_on_end() -> None:
    question = ask("a.below.test")
    circle = [record("a.below.test.", "CNAME", "b.below.test."), record("b.below.test.", "CNAME", "a.below.test.")]
    assert filter_answer(RULES, question, answer(question, *circle)).addresses == ()
    names = ["a", *(f"n{number}" for number in range(40))]
    long = [record(f"{a}.below.test.", "CNAME", f"{b}.below.test.") for a, b in itertools.pairwise(names)]
    last = record(f"{names[-1]}.below.test.", "A", "203.0.113.5")
    assert filter_answer(RULES, question, answer(question, *long, last)).addresses == ()


def test_an_answer_to_another_question_is_none() -> None:
    question = ask("allowed.test")
    data = dns.message.make_response(dns.message.from_wire(render_upstream(question, 7))).to_wire()
    assert parse_answer(data, 7, "allowed.test") is not None
    assert parse_answer(data, 8, "allowed.test") is None
    assert parse_answer(data, 7, "other.test") is None
    assert parse_answer(render_upstream(question, 7), 7, "allowed.test") is None, "a question"


def test_members_of_a_group_have_names() -> None:
    grouped = parse_network({"group": "team"})
    question = ask("Box.forkd")
    assert judge(grouped, question) is Verdict.GROUP
    assert judge(RULES, question) is Verdict.REFUSE
    response = render_group(question, {"box": "100.127.240.20"}.get)
    assert [str(each) for each in response.answer[0]] == ["100.127.240.20"] and response.answer[0].ttl == 0
    assert render_group(ask("other.forkd"), {"box": "1.2.3.4"}.get).rcode() == dns.rcode.NXDOMAIN


def test_an_answer_that_does_not_fit_a_datagram_says_to_ask_by_tcp() -> None:
    question = ask("allowed.test")
    response = render_empty(question)
    response.answer.append(record("allowed.test.", "A", *(f"203.0.113.{number}" for number in range(200))))
    short = dns.message.from_wire(render_wire(response, udp=True))
    assert short.flags & dns.flags.TC and not short.answer and short.id == response.id
    assert len(dns.message.from_wire(render_wire(response, udp=False)).answer[0]) == 200
