"""Which snapshots are pruned: never what a sandbox or a layer that stays needs, layers before what they lie over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.errors import InvalidInput
from forkd.model.names import SnapshotTag
from forkd.store.retention import Policy, Stored, choose_to_prune

NOW = 1_000_000.0
HOUR = 3600.0


def stored(tag: str, age_s: float, parent: str | None = None, *, size: int = 100, auto: bool = True) -> Stored:
    return Stored(SnapshotTag(tag), NOW - age_s, size, SnapshotTag(parent) if parent else None, auto)


def pruned(snapshots: list[Stored], policy: Policy, *in_use: str) -> list[str]:
    return [entry.tag for entry in choose_to_prune(snapshots, policy, {SnapshotTag(tag) for tag in in_use}, NOW)]


FOUR = [stored("old", 4 * HOUR), stored("older", 9 * HOUR), stored("new", 1 * HOUR), stored("newest", 0)]


def test_the_newest_are_kept_and_the_rest_goes() -> None:
    assert pruned(FOUR, Policy(keep_last=2)) == ["old", "older"]
    assert pruned(FOUR, Policy(keep_last=9)) == []
    assert sorted(pruned(FOUR, Policy(keep_last=0))) == ["new", "newest", "old", "older"]


def test_what_is_too_old_goes_but_for_the_newest() -> None:
    assert pruned(FOUR, Policy(max_age_s=2 * HOUR)) == ["old", "older"]
    assert pruned(FOUR, Policy(max_age_s=2 * HOUR, keep_last=3)) == ["older"]
    [entry] = choose_to_prune(FOUR, Policy(max_age_s=5 * HOUR), (), NOW)
    assert (entry.bytes, entry.why) == (100, "it is 9 hours old, more than 5 hours")


def test_tags_that_somebody_chose_are_kept_and_do_not_count_as_the_newest() -> None:
    mixed = [*FOUR, stored("chosen", 99 * HOUR, auto=False), stored("mine", 0, auto=False)]
    assert sorted(pruned(mixed, Policy(keep_tagged=True))) == ["new", "newest", "old", "older"]
    assert pruned(mixed, Policy(keep_tagged=True, keep_last=3)) == ["older"]
    assert pruned(mixed, Policy(keep_tagged=True, max_age_s=5 * HOUR)) == ["older"]


def test_the_oldest_go_until_the_rest_fits() -> None:
    assert pruned(FOUR, Policy(max_bytes=400)) == []
    assert pruned(FOUR, Policy(max_bytes=399)) == ["older"]
    assert pruned(FOUR, Policy(max_bytes=250)) == ["old", "older"]
    assert pruned(FOUR, Policy(max_bytes=0, keep_last=3)) == ["older"]
    why = choose_to_prune(FOUR, Policy(max_bytes=399), (), NOW)[0].why
    assert why == "all together are 400 bytes, more than 399, and it is the oldest that can go"
    # What is too old goes first, and may be enough.
    assert pruned(FOUR, Policy(max_age_s=8 * HOUR, max_bytes=300)) == ["older"]


def test_what_is_in_use_stays_and_all_that_lies_below_it() -> None:
    chain = [stored("root", 9 * HOUR), stored("a", 8 * HOUR, "root"), stored("b", 7 * HOUR, "a"), stored("c", 0, "b")]
    assert pruned(chain, Policy(max_age_s=1)) == []  # the head is young, and needs them all
    assert pruned(chain, Policy(keep_last=0), "b") == ["c"]
    assert pruned(chain, Policy(max_bytes=0), "a") == ["c", "b"]
    assert pruned(chain, Policy(keep_last=0)) == ["c", "b", "a", "root"]
    assert pruned(chain[:3], Policy(max_age_s=1)) == ["b", "a", "root"]


def test_a_layer_whose_parent_is_not_there_is_pruned_as_any_other() -> None:
    assert pruned([stored("a", HOUR, "gone")], Policy(max_age_s=1)) == ["a"]


@pytest.mark.parametrize(
    "wrong", [{}, {"keep_last": -1}, {"max_age_s": -1.0}, {"max_bytes": -1}, {"max_age_s": float("nan")}]
)
def test_a_policy_that_says_nothing_or_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Policy(**wrong)  # type: ignore[arg-type]


@st.composite
def forests(draw: st.DrawFn) -> list[Stored]:
    made: list[Stored] = []
    for number in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([None, *(one.tag for one in made)]))
        age, size = draw(st.integers(0, 20)), draw(st.integers(0, 50))
        made.append(Stored(SnapshotTag(f"s{number}"), NOW - age, size, parent, draw(st.booleans())))
    return made


maybe = st.one_of(st.none(), st.integers(0, 20))


@given(forests(), maybe, st.booleans(), maybe, maybe, st.sets(st.integers(0, 12)))
def test_whatever_the_policy_nothing_that_stays_loses_what_it_needs(
    forest: list[Stored],
    keep_last: int | None,
    keep_tagged: bool,
    max_age_s: int | None,
    max_bytes: int | None,
    used: set[int],
) -> None:
    if (keep_last, keep_tagged, max_age_s, max_bytes) == (None, False, None, None):
        return
    policy = Policy(keep_last, keep_tagged, max_age_s, max_bytes)
    in_use = {SnapshotTag(f"s{number}") for number in used}
    chosen = choose_to_prune(forest, policy, in_use, NOW)
    left = {one.tag: one for one in forest}
    for entry in chosen:
        assert not any(one.parent == entry.tag for one in left.values()), "a layer lies over it"
        one = left.pop(entry.tag)
        assert entry.why and entry.bytes == one.bytes
        assert entry.tag not in in_use and not (keep_tagged and not one.auto)
    if keep_last is not None:
        assert len(left) >= min(keep_last, len(forest))
    # No more goes than has to: what could still be removed is there because no rule is left that wants it gone.
    if max_bytes is not None and sum(one.bytes for one in left.values()) > max_bytes:
        again = choose_to_prune(left.values(), policy, in_use, NOW)
        assert again == []
