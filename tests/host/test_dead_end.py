"""What takes the place of a network interface where there is to be none."""

import os
import select

import pytest

from forkd.host.dead_end import find_dead_tap, open_nothing
from forkd.host.tap import has_tun


def test_nothing_is_never_ready_and_takes_nothing() -> None:
    fd = open_nothing()
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLOUT)
        assert poll.poll(50) == []
        with pytest.raises(BlockingIOError):
            os.read(fd, 2000)
        with pytest.raises(OSError, match="Invalid argument"):
            os.write(fd, bytes(60))
    finally:
        os.close(fd)


def test_no_packet_gets_into_a_dead_tap_or_out_of_it() -> None:
    tap = find_dead_tap()
    if tap is None:
        pytest.skip("no tap can be made here" if has_tun() else "there is no usable /dev/net/tun")
    with pytest.raises(OSError, match="Input/output error"):
        os.write(tap, bytes(60))
    with pytest.raises(BlockingIOError):
        os.read(tap, 2000)
    assert find_dead_tap() == tap
