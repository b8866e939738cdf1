"""Whom VMs run as: no id is given out twice while a VM, or a fork of it, lives."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from forkd.errors import EngineFailed
from forkd.host.id_maps import UserRange
from forkd.host.user_ids import (
    BLOCK,
    DEFAULT_USERS,
    UserIds,
    find_lineage,
    find_used,
    held_users,
    is_of_a_vm,
    parse_table,
)

FIRST = 0x6FF00000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


def test_ids_are_given_out_once_and_again_when_all_who_hold_them_let_go(tmp_path: Path) -> None:
    ids = UserIds(UserRange(FIRST, BLOCK), tmp_path / "table")
    claimed = [ids.claim() for _ in range(BLOCK)]
    assert sorted(claimed) == list(range(FIRST, FIRST + BLOCK))
    with pytest.raises(EngineFailed, match="are taken"):
        ids.claim()
    ids.hold((claimed[3],))  # a fork of its
    ids.release((claimed[3],))
    with pytest.raises(EngineFailed, match="are taken"):
        ids.claim()
    ids.release((claimed[3],))
    assert ids.claim() == claimed[3]


def test_two_daemons_take_different_blocks(tmp_path: Path) -> None:
    users = UserRange(FIRST, 2 * BLOCK)
    one, other = UserIds(users, tmp_path / "table"), UserIds(users, tmp_path / "table")
    assert {one.claim() // BLOCK, other.claim() // BLOCK} == {FIRST // BLOCK, FIRST // BLOCK + 1}


def test_the_block_of_a_daemon_that_has_ended_is_free_again(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text(json.dumps({str(FIRST): [os.getpid(), 1]}))  # another process had this pid
    assert UserIds(UserRange(FIRST, BLOCK), table).claim() == FIRST


def test_the_id_of_a_vm_that_was_taken_over_is_not_given_out_when_it_ends(tmp_path: Path) -> None:
    """It is of the block of a daemon that is dead, which another daemon may have taken meanwhile."""
    table = tmp_path / "table"
    table.write_text(json.dumps({str(FIRST): [os.getpid(), 1]}))  # of the daemon that is dead
    users = UserRange(FIRST, 2 * BLOCK)
    heir, other = UserIds(users, table), UserIds(users, table)
    heir.hold((FIRST,))
    assert {other.claim() for _ in range(BLOCK)} == set(range(FIRST, FIRST + BLOCK))
    heir.release((FIRST,))
    assert {heir.claim() for _ in range(BLOCK)} == set(range(FIRST + BLOCK, FIRST + 2 * BLOCK))


@needs_root
def test_an_id_of_a_living_process_is_not_given_out(tmp_path: Path) -> None:
    users = UserRange(FIRST, 2 * BLOCK)
    process = subprocess.Popen(["sleep", "60"], user=FIRST + 5)
    try:
        assert find_used(users) == {FIRST + 5}
        assert find_lineage(process.pid, users) == (FIRST + 5,)
        assert UserIds(users, tmp_path / "table").claim() == FIRST + BLOCK
    finally:
        process.kill()
        process.wait()


@needs_root
def test_the_maker_of_a_namespace_stays_taken_as_long_as_somebody_is_in_it(tmp_path: Path) -> None:
    users = UserRange(FIRST, 2 * BLOCK)
    process = subprocess.Popen(["unshare", "--user", "sleep", "60"], user=FIRST + 7)
    try:
        while os.stat(f"/proc/{process.pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino:
            assert process.poll() is None
        assert find_lineage(process.pid, users) == (FIRST + 7,)
    finally:
        process.kill()
        process.wait()


def test_what_is_held_for_a_vm_that_is_not_made_is_given_back(tmp_path: Path) -> None:
    ids = UserIds(UserRange(FIRST, BLOCK), tmp_path / "table")
    source = ids.claim()
    with pytest.raises(RuntimeError), held_users(ids, (source,), claim=True) as lineage:
        assert lineage == (source, FIRST + 1)
        raise RuntimeError
    ids.release((source,))
    claimed = {ids.claim() for _ in range(BLOCK)}
    assert {source, FIRST + 1} <= claimed


def test_a_table_of_garbage_is_an_empty_one() -> None:
    assert parse_table("") == parse_table("[1]") == parse_table("{") == parse_table('{"a": [1], "b": "c"}') == {}
    assert parse_table('{"5": [1, 2]}') == {"5": [1, 2]}


def test_users_of_a_block_that_any_forkd_took_are_those_of_vms(tmp_path: Path) -> None:
    table = tmp_path / "users"
    assert is_of_a_vm(DEFAULT_USERS.first, table) and not is_of_a_vm(1000, table)
    other = UserRange(1_900_000_000, 512)
    user = UserIds(other, table).claim()
    assert is_of_a_vm(user, table)
    assert not is_of_a_vm(other.first + 256, table)
    table.write_text('{"x": [1, 2], "1000": 5}')
    assert not is_of_a_vm(user, table) and not is_of_a_vm(1000, table)
