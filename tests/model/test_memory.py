"""Runs of guest memory, laid over each other: as few as can be, and each byte where the topmost says."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forkd.model.memory import PAGE, Run, lay_over, merge_runs, merge_spans

PAGES = 24
FILES = [Path("a"), Path("b"), None]

Table = dict[int, tuple[Path | None, int]]


@st.composite
def some_runs(draw: st.DrawFn) -> tuple[Run, ...]:
    borders = sorted(draw(st.sets(st.integers(0, PAGES), max_size=12)))
    runs = []
    for start, end in zip(borders[::2], borders[1::2], strict=False):
        file = draw(st.sampled_from(FILES))
        at = 0 if file is None else draw(st.integers(0, 5))
        runs.append(Run(start * PAGE, (end - start) * PAGE, file, at * PAGE))
    return tuple(runs)


def table(runs: tuple[Run, ...]) -> Table:
    """Page by page, what a run says."""
    said: Table = {}
    for run in runs:
        for offset in range(0, run.length, PAGE):
            page = (run.start + offset) // PAGE
            assert page not in said
            said[page] = (run.file, 0 if run.file is None else (run.at + offset) // PAGE)
    return said


def check(runs: tuple[Run, ...]) -> None:
    assert all(run.length > 0 for run in runs)
    for one, other in pairwise(runs):
        assert one.end <= other.start
        goes_on = one.file == other.file and (one.file is None or one.at + one.length == other.at)
        assert not (one.end == other.start and goes_on), "two runs that are one"


@given(some_runs(), some_runs())
def test_where_both_have_something_the_upper_one_counts(lower: tuple[Run, ...], upper: tuple[Run, ...]) -> None:
    both = lay_over(lower, upper)
    check(both)
    assert table(both) == table(lower) | table(upper)


@given(some_runs(), some_runs(), some_runs())
def test_it_does_not_matter_which_of_three_are_put_together_first(
    a: tuple[Run, ...], b: tuple[Run, ...], c: tuple[Run, ...]
) -> None:
    assert lay_over(lay_over(a, b), c) == lay_over(a, lay_over(b, c))


@given(some_runs())
def test_runs_that_go_on_in_guest_and_file_are_merged(runs: tuple[Run, ...]) -> None:
    single = [
        Run(run.start + offset, PAGE, run.file, 0 if run.file is None else run.at + offset)
        for run in runs
        for offset in range(0, run.length, PAGE)
    ]
    merged = merge_runs(single)
    check(merged)
    assert table(merged) == table(runs)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda pair: (pair[0], sum(pair)))))
def test_spans_are_merged_to_the_same_bytes(spans: list[tuple[int, int]]) -> None:
    merged = merge_spans(spans)
    assert {at for span in merged for at in range(*span)} == {at for span in spans for at in range(*span)}
    assert all(one[1] < other[0] for one, other in pairwise(merged))
