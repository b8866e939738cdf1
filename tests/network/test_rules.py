"""Rules as texts, and what goes into them."""

import ipaddress

import pytest

from forkd.errors import HostLacks, NetworkFailed
from forkd.host.network_probe import choose_kind, find_drop
from forkd.model.network import parse_network
from forkd.network import rules
from forkd.network.groups import Groups
from forkd.network.layout import choose_layout, host_name
from forkd.network.named import LONGEST_S, SHORTEST_S, SLACK_S, NamedAddresses, SetFull
from forkd.network.refusals import MAX_WAITING, Refusals, Refused, parse_packet
from forkd.network.resolver import parse_resolvers

BLOCK = ipaddress.IPv4Network("100.127.240.0/20")


def test_ports_of_names_come_in_pieces_that_never_overlap() -> None:
    network = parse_network({"allow": ["a.test:80", "*.b.test:70-90", "c.b.test:80,85-100"]})
    assert rules.ports_of(network, "a.test") == ((80, 80),)
    assert rules.ports_of(network, "x.b.test") == ((70, 79), (80, 80), (81, 84), (85, 90))
    assert rules.ports_of(network, "c.b.test") == ((70, 79), (80, 80), (81, 84), (85, 90), (91, 100))
    assert rules.ports_of(network, "d.test") == ()


def test_ports_are_sorted_and_joined() -> None:
    assert rules.merged(((80, 90), (443, 443), (85, 100), (101, 101))) == ((80, 101), (443, 443))


def test_a_network_without_rules_adds_nothing_to_what_denies_all() -> None:
    assert rules.render_policy(parse_network("none"), "100.127.240.16", BLOCK) == ""


def test_deny_rules_keep_tls_from_the_gate_and_all_else_from_passing() -> None:
    text = rules.render_policy(parse_network({"allow": ["a.test"], "deny": ["203.0.113.5"]}), "100.127.240.16", BLOCK)
    lines = text.splitlines()
    assert "add rule ip forkd deny_rules ip daddr 203.0.113.5/32 icmp type echo-request goto refuse_denied" in lines
    gate = [line for line in lines if "gate_rules" in line]
    assert gate[0].endswith("ip daddr 203.0.113.5/32 return") and gate[-1].endswith("redirect to :8443")


def test_a_change_empties_what_it_fills() -> None:
    before = parse_network({"allow": ["a.test"], "max_bytes": 5})
    after = parse_network({"allow": ["203.0.113.5:80"]})
    text = rules.render_change(before, after, "100.127.240.16", BLOCK, used_bytes=3, named={})
    assert text.startswith("flush chain") and "delete quota" in text and "flush set ip forkd names" in text
    assert "@names" not in text


def test_the_first_range_that_the_host_does_not_use_is_chosen() -> None:
    assert choose_layout([ipaddress.IPv4Network("0.0.0.0/0")]).block == BLOCK
    assert choose_layout([ipaddress.IPv4Network("100.127.255.0/24")]).block == ipaddress.IPv4Network("100.127.224.0/20")
    assert choose_layout([ipaddress.IPv4Network("100.64.0.0/10")]).block.subnet_of(ipaddress.IPv4Network("10.0.0.0/8"))


def test_with_no_range_left_it_says_so() -> None:
    taken = [ipaddress.IPv4Network(text) for text in ("100.64.0.0/10", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
    with pytest.raises(NetworkFailed, match="every address range"):
        choose_layout(taken)


def test_addresses_of_a_layout_are_all_different_and_end() -> None:
    layout = choose_layout([])
    addresses = {layout.address(index) for index in range(layout.slots)}
    fixed = {layout.uplink_host, layout.uplink_hub, layout.gateway}
    assert len(addresses) == layout.slots >= 500 and not addresses & fixed
    assert len({layout.mac(index) for index in range(layout.slots)}) == layout.slots
    with pytest.raises(NetworkFailed):
        layout.address(layout.slots)


def test_a_home_always_has_the_same_name_on_the_host(tmp_path: object) -> None:
    from pathlib import Path

    assert host_name(Path("/a")) == host_name(Path("/a/.")) != host_name(Path("/b"))
    assert len(host_name(Path("/a"))) < 16, "an interface has it"


def test_an_address_is_let_through_as_long_as_its_answer_says_within_bounds() -> None:
    named, port = NamedAddresses(), ((80, 80),)
    assert named.plan(["1.1.1.1"], port, 1, 0.0) == {("1.1.1.1", (80, 80)): SHORTEST_S + SLACK_S}
    assert named.plan(["1.1.1.1"], port, 10**6, 0.0) == {("1.1.1.1", (80, 80)): LONGEST_S + SLACK_S}
    plan = named.plan(["1.1.1.1"], port, 300, 0.0)
    named.note(["a.test"], ["1.1.1.1"], plan, 0.0)
    assert named.plan(["1.1.1.1"], port, 300, 100.0) == {}, "it lasts long enough"
    assert named.plan(["1.1.1.1"], port, 300, 200.0) == plan
    assert not named.is_new(plan)
    assert named.find_name("1.1.1.1") == "a.test" and named.stands_for("a.test", "1.1.1.1")
    assert not named.stands_for("a.test", "1.1.1.2")


def test_a_full_set_takes_no_more_until_something_has_expired() -> None:
    named = NamedAddresses()
    addresses = [str(ipaddress.IPv4Address(0x01000000 + number)) for number in range(rules.MAX_NAMED)]
    named.note(["a.test"], addresses, named.plan(addresses, ((80, 80),), 60, 0.0), 0.0)
    with pytest.raises(SetFull):
        named.plan(["9.9.9.9"], ((80, 80),), 60, 1.0)
    assert named.plan(["9.9.9.9"], ((80, 80),), 60, 1000.0)


def test_other_rules_leave_only_the_names_that_they_allow() -> None:
    named = NamedAddresses()
    for name, address in (("a.test", "1.1.1.1"), ("b.test", "2.2.2.2")):
        named.note([name], [address], named.plan([address], ((80, 80),), 300, 0.0), 0.0)
    other = parse_network({"allow": ["b.test:8080"]})
    assert named.left(other, 20.0) == {("2.2.2.2", (8080, 8080)): 400}
    named.keep(other, 20.0)
    assert not named.stands_for("a.test", "1.1.1.1") and named.stands_for("b.test", "2.2.2.2")


def test_who_joins_and_leaves_a_group_changes_its_rules_once() -> None:
    groups = Groups()
    assert groups.put("10.0.0.1", "team", ("one",)) == rules.render_join("10.0.0.1", 1)
    assert groups.put("10.0.0.1", "team", ("uno",)) is None
    assert (groups.find("team", "uno"), groups.find("team", "one")) == ("10.0.0.1", None)
    assert groups.put("10.0.0.2", "rest", ()) == rules.render_join("10.0.0.2", 2)
    moved = groups.put("10.0.0.1", "rest", ("one",))
    assert moved == rules.render_leave("10.0.0.1", 1) + "\n" + rules.render_join("10.0.0.1", 2)
    assert groups.find("team", "uno") is groups.find(None, "one") is None
    assert groups.leave("10.0.0.1") == rules.render_leave("10.0.0.1", 2)
    assert groups.leave("10.0.0.1") is None


@pytest.mark.parametrize("ends", ["10.0.0.1", "10.0.0.2"])
def test_of_two_with_the_same_name_the_last_is_found_and_when_it_ends_the_other(ends: str) -> None:
    """A rewind gives the names of a sandbox to its next VM, and one that fails takes that away again."""
    groups = Groups()
    for address in ("10.0.0.1", "10.0.0.2"):
        groups.put(address, "team", ("db", "db"))
    assert groups.find("team", "db") == "10.0.0.2"
    groups.leave(ends)
    assert groups.find("team", "db") == ({"10.0.0.1", "10.0.0.2"} - {ends}).pop()


def test_refusals_are_counted_and_bounded() -> None:
    refusals = Refusals()
    assert refusals.add(Refused("a", "name", "x.test", None, None, "dns"))
    assert not refusals.add(Refused("a", "name", "x.test", None, None, "dns"))
    for number in range(1000):
        refusals.add(Refused("a", "name", f"{number}.test", None, None, "dns"))
    taken = refusals.take()
    assert len(taken) <= MAX_WAITING + 1 and sum(each.count for each in taken) == 1002
    assert refusals.take() == []


def test_a_logged_packet_says_where_it_was_to_go() -> None:
    header = bytes.fromhex("4500003c000040004006000000000000cb00710a")
    found = parse_packet(header + bytes.fromhex("c35001bb"))
    assert found is not None and (found.protocol, found.address, found.port) == ("tcp", "203.0.113.10", 443)
    assert parse_packet(header[:19]) is None
    cut = parse_packet(header)
    assert cut is not None and cut.port is None


def test_resolvers_are_read_as_the_hosts_own_programs_do() -> None:
    text = "# x\nnameserver 1.1.1.1\nnameserver  ::1\noptions a\nnameserver bad\nnameserver 1.1.1.1\n"
    assert parse_resolvers(text) == ("1.1.1.1", "::1")


def test_the_uplink_follows_from_what_the_host_has() -> None:
    assert choose_kind("auto", root=True, in_the_way=None, pasta=False) == "veth"
    assert choose_kind("auto", root=True, in_the_way="x", pasta=True) == "pasta"
    assert choose_kind("auto", root=False, in_the_way=None, pasta=True) == "pasta"
    assert choose_kind("pasta", root=True, in_the_way=None, pasta=True) == "pasta"
    for wanted, root, in_the_way, pasta in (
        ("auto", True, "x", False),
        ("veth", True, "x", True),
        ("veth", False, None, True),
        ("pasta", True, None, False),
        ("auto", False, None, False),
    ):
        with pytest.raises(HostLacks):
            choose_kind(wanted, root=root, in_the_way=in_the_way, pasta=pasta)  # type: ignore[arg-type]


REJECT = {"reject": {"type": "icmpx", "expr": "admin-prohibited"}}
COUNTED = {"counter": {"packets": 0, "bytes": 0}}
FROM_LO = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "lo"}}


@pytest.mark.parametrize(
    ("policy", "rules_of_it", "found"),
    [
        ("accept", [], None),
        (None, [], None),
        ("drop", [], "policy drop"),
        ("accept", [[FROM_LO, {"accept": None}], [{"log": None}, COUNTED, REJECT]], "reject"),
        ("accept", [[COUNTED, {"drop": None}]], "drop"),
        ("accept", [[FROM_LO, {"drop": None}]], None),
        ("accept", [[{"jump": {"target": "zones"}}]], None),
    ],
)
def test_a_chain_that_drops_what_it_does_not_name_is_found(
    policy: str | None, rules_of_it: list[list[dict[str, object]]], found: str | None
) -> None:
    why = find_drop(policy, rules_of_it)
    assert why is None if found is None else found in (why or "")
