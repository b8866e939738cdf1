import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.errors import InvalidInput
from forkd.model.network import (
    MAX_RULES,
    NO_NETWORK,
    PRESETS,
    WEB_PORTS,
    AddressRule,
    DomainRule,
    Mode,
    Network,
    normal_name,
    parse_network,
    parse_rule,
)

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=2, max_size=5).map(".".join).filter(lambda name: not name.endswith(".forkd"))
PORTS = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(lambda pair: (min(pair), max(pair)))
ADDRESSES = st.tuples(st.integers(0, 2**32 - 1), st.integers(8, 32)).map(
    lambda pair: ipaddress.ip_network((pair[0], pair[1]), strict=False)
)
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text(), max_size=3))


def test_without_a_word_there_is_no_network():
    assert Network() == NO_NETWORK == Network.none() == parse_network("none") == parse_network({})
    assert NO_NETWORK.off and NO_NETWORK.as_json() == {"mode": "none"}


def test_rules_or_a_group_without_a_mode_mean_egress():
    assert Network(allow=["pypi"]).mode is Mode.EGRESS
    assert Network(group="team").mode is Mode.EGRESS
    assert parse_network({"allow": ["pypi.org"], "max_bytes": 5}) == Network("egress", ("pypi.org",), max_bytes=5)


def test_open_is_only_what_says_so():
    assert Network.open(deny=["192.0.2.0/24"]).mode is Mode.OPEN
    assert parse_network("open") == Network.open() == Network(Mode.OPEN)


@pytest.mark.parametrize(
    "value",
    [
        "egress",
        "closed",
        7,
        None,
        [],
        {"mode": "open", "more": 1},
        {"mode": "none", "allow": ["pypi"]},
        {"mode": []},
        {"allow": "pypi"},
        {"allow": {"pypi": 1}},
        {"allow": b"pypi"},
        {"allow": [1]},
        {"allow": [""]},
        {"allow": ["x" * 301 + ".org"]},
        {"allow": ["pypi"] * (MAX_RULES + 1)},
        {"allow": ["pypi"], "max_bytes": 0},
        {"allow": ["pypi"], "max_bytes": True},
        {"allow": ["pypi"], "max_bytes": 1.5},
        {"allow": ["pypi"], "max_connections": 65537},
        {"group": "../x"},
        {"group": 3},
        {"mode": "open", "deny": ["pypi.org"]},
        {"mode": "open", "allow": ["pypi.org"]},
        {"mode": "open", "allow": ["8.8.8.8"]},
        {"allow": ["pypi"], "deny": ["pypi.org"]},
        {"allow": ["a.example.org"], "deny": ["*.example.org"]},
        {"allow": ["example.org:8443"], "deny": ["example.org"]},
        {"allow": ["example.org"], "deny": ["other.org:8443"]},
        {"allow": ["10.0.0.1:80"], "deny": ["10.0.0.0/8"]},
        {"allow": ["127.0.0.1"]},
        {"allow": ["224.0.0.1"]},
        {"allow": ["192.0.0.1"]},
    ],
)
def test_what_cannot_be_kept_is_refused(value):
    with pytest.raises(InvalidInput):
        parse_network(value)


@pytest.mark.parametrize(
    "text",
    [
        "pypi.org:",
        "pypi.org:0",
        "pypi.org:65536",
        "pypi.org:90-80",
        "pypi.org:\N{ARABIC-INDIC DIGIT ONE}",
        ":443",
        "localhost",
        "*",
        "*.org:443:1",
        "a.*.org",
        "-a.org",
        "a..org",
        "a.org..",
        "http://a.org",
        "a.org/24",
        "a b.org",
        "bücher.example",
        "1.2.3",
        "0x7f.0.0.0x1",
        "01.2.3.4",
        "1.2.3.4/33",
        "1.2.3.4/24",
        "::1",
        "[::1]:443",
        "::ffff:1.2.3.4",
        "x.forkd",
        "a" * 64 + ".org",
        "\ud800.org",
    ],
)
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(InvalidInput) as caught:
        parse_rule(text)
    assert caught.value.hint


def test_a_preset_is_its_domains():
    for name, domains in PRESETS.items():
        assert parse_rule(name) == tuple(rule for domain in domains for rule in parse_rule(domain))


def test_ports_of_all_rules_for_a_name_count():
    network = Network(allow=["x.a.org:443", "*.a.org:8000-8100", "x.a.org:443"])
    assert network.finds_name("x.a.org").ports == ((443, 443), (8000, 8100))
    assert network.finds_name("a.org") is None


def test_a_denied_name_is_denied_though_a_wider_rule_allows_it():
    network = Network(allow=["*.example.org"], deny=["bad.example.org", "*.worse.example.org"])
    assert network.finds_name("good.example.org") is not None
    assert network.finds_name("worse.example.org") is not None
    assert network.finds_name("bad.example.org") is None
    assert network.finds_name("a.worse.example.org") is None


@given(NAMES, st.booleans(), st.lists(PORTS, max_size=3))
def test_a_domain_rule_reads_as_it_is_written(name, below, ports):
    rule = DomainRule(name, below, tuple(ports) or WEB_PORTS)
    assert parse_rule(str(rule)) == (rule,)


@given(ADDRESSES, st.lists(PORTS, max_size=3))
def test_an_address_rule_reads_as_it_is_written(network, ports):
    rule = AddressRule(network, tuple(ports) or ((1, 65535),))
    assert parse_rule(str(rule)) == (rule,)


@given(NAMES, st.data())
def test_case_and_a_final_dot_change_nothing(name, data):
    written = "".join(data.draw(st.sampled_from((char, char.upper()))) for char in name)
    assert normal_name(written + data.draw(st.sampled_from(("", ".")))) == name
    assert parse_rule(written) == parse_rule(name)


@given(NAMES, NAMES)
def test_an_exact_rule_matches_its_name_and_no_other(allowed, asked):
    found = Network(allow=[allowed]).finds_name(asked)
    assert (found is not None) == (allowed == asked)
    below = Network(allow=["*." + allowed])
    assert below.finds_name(allowed) is None
    assert below.finds_name("x" + allowed) is None
    assert below.finds_name("x." + allowed) is not None


@given(st.text(max_size=300))
def test_any_text_is_rules_or_a_typed_error(text):
    try:
        rules = parse_rule(text)
    except InvalidInput:
        return
    assert rules and all(parse_rule(str(rule)) == (rule,) for rule in rules)


@given(st.dictionaries(st.sampled_from(("mode", "allow", "deny", "max_bytes", "max_connections", "group", "x")), ODD))
def test_any_object_is_a_network_or_a_typed_error(value):
    try:
        network = parse_network(value)
    except InvalidInput:
        return
    assert parse_network(network.as_json()) == network and hash(network) == hash(parse_network(network.as_json()))
