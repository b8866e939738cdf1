"""Whether to try again, as a function of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.client.call import Again
from forkd.client.retry import MAX_ATTEMPTS, MAX_TOTAL_S, MAX_WAIT_S, Failure, Fate, decide_wait, parse_retry_after

CHANCE = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("again", "fate", "repeated"),
    [
        (Again.UNSENT, Fate.UNSENT, True),
        (Again.UNSENT, Fate.LOST, False),
        (Again.UNSENT, Fate.BUSY, False),
        (Again.SAFE, Fate.UNSENT, True),
        (Again.SAFE, Fate.LOST, True),
        (Again.SAFE, Fate.BUSY, True),
        (Again.SAFE, Fate.SLOW, False),
        (Again.SAFE, Fate.ANSWERED, False),
    ],
)
def test_what_is_tried_again(again: Again, fate: Fate, repeated: bool) -> None:
    assert (decide_wait(again, Failure(fate), 1, 0.0, 0.5) is not None) is repeated


@given(st.sampled_from(Again), st.sampled_from(Fate), st.integers(1, 9), st.floats(0, 100), CHANCE, st.floats(0, 99))
def test_waits_are_bounded_each_and_together(
    again: Again, fate: Fate, attempt: int, elapsed_s: float, chance: float, after_s: float
) -> None:
    wait_s = decide_wait(again, Failure(fate, after_s), attempt, elapsed_s, chance)
    if wait_s is not None:
        assert attempt < MAX_ATTEMPTS and elapsed_s + wait_s <= MAX_TOTAL_S and wait_s >= after_s


@given(st.integers(1, MAX_ATTEMPTS - 1), CHANCE)
def test_waits_grow_and_differ_by_chance(attempt: int, chance: float) -> None:
    def wait(number: int, luck: float) -> float:
        return decide_wait(Again.SAFE, Failure(Fate.LOST), number, 0.0, luck) or 0.0

    assert wait(attempt, 0.0) <= wait(attempt, chance) <= 2 * wait(attempt, 0.0) <= 2 * MAX_WAIT_S
    if attempt > 1:
        assert wait(attempt, chance) > wait(attempt - 1, chance)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3.0),
        ("0", 0.0),
        (None, None),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("²", None),
        ("9" * 9, None),
        ("Wed, 1", None),
    ],
)
def test_the_time_named_is_whole_seconds(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text) == seconds
