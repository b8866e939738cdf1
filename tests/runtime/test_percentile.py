"""The figures of a run, ranked."""

import pytest

from forkd.runtime.demo import percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.5, 50.0),
        ([float(n) for n in range(100, 0, -1)], 0.99, 99.0),
        ([float(n) for n in range(1, 11)], 0.99, 10.0),
        ([1.0] * 99 + [9.0], 0.99, 1.0),
        ([1.0] * 98 + [9.0] * 2, 0.99, 9.0),
    ],
)
def test_it_is_the_smallest_value_that_the_share_does_not_exceed(
    values: list[float], share: float, expected: float
) -> None:
    assert percentile(values, share) == expected


def test_the_values_stay_in_their_order() -> None:
    values = [3.0, 1.0, 2.0]
    percentile(values, 0.5)
    assert values == [3.0, 1.0, 2.0]
