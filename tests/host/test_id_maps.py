"""The maps of forks' user namespaces. Pure."""

import pytest

from forkd.host.cell_plan import covers
from forkd.host.fork_cell import parse_most_threads
from forkd.host.id_maps import UserRange, render_id_map

USERS = UserRange(1000, 8)


def parse(text: str) -> dict[int, int]:
    """What each id inside is called in the namespace above."""
    ids = {}
    for line in text.splitlines():
        inside, outside, count = map(int, line.split())
        ids |= {inside + n: outside + n for n in range(count)}
    return ids


def test_the_first_user_is_the_forks_own_and_the_others_follow() -> None:
    assert render_id_map(USERS, 1002) == "0 1002 1\n1 1000 2\n4 1003 5\n"
    assert render_id_map(USERS, 1000) == "0 1000 1\n2 1001 7\n"


@pytest.mark.parametrize("chain", [(1000,), (1003, 1001), (1007, 1000, 1004), (1001, 1002, 1003, 1004, 1005)])
def test_a_fork_of_forks_has_all_users_and_its_own_is_the_first(chain: tuple[int, ...]) -> None:
    hosts = {user: user for user in range(USERS.first, USERS.end)}  # a name above, and the host's user
    for depth, user in enumerate(chain):
        ids = parse(render_id_map(USERS, user, chain[:depth]))
        hosts = {inside: hosts[outside] for inside, outside in ids.items()}
        assert hosts[0] == user
        assert sorted(hosts.values()) == list(range(USERS.first, USERS.end))


def test_each_line_lies_within_one_line_of_the_map_above() -> None:
    chain = (1003, 1001, 1006, 1000)
    for depth in range(1, len(chain)):
        above = [
            tuple(map(int, line.split()))
            for line in render_id_map(USERS, chain[depth - 1], chain[: depth - 1]).splitlines()
        ]
        for line in render_id_map(USERS, chain[depth], chain[:depth]).splitlines():
            _, outside, count = map(int, line.split())
            assert any(inside <= outside and outside + count <= inside + size for inside, _, size in above)


def test_a_namespace_covers_a_range_or_not() -> None:
    assert covers("         0          0 4294967295\n", USERS)
    assert not covers("0 100000 1004\n1004 200000 60000\n", USERS)
    assert not covers("0 1000 1\n", USERS)


def test_the_hard_limit_of_threads_is_read() -> None:
    text = "Limit   Soft Limit   Hard Limit   Units\nMax processes    256     {}     processes\n"
    assert parse_most_threads(text.format(4000)) == 4000
    assert parse_most_threads(text.format("unlimited")) == -1
