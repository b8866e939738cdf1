"""How fast networks are made ahead."""

import pytest

from forkd.network.pool import choose_pause_s


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.002), (0.008, 0.08), (2.0, 0.5)])
def test_making_ahead_leaves_most_of_the_processor_to_others(took_s: float, pause_s: float) -> None:
    assert choose_pause_s(took_s) == pytest.approx(pause_s)
