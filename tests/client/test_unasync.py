"""The synchronous client is what the asynchronous one says without waiting."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import unasync  # noqa: E402


def test_the_generated_files_are_up_to_date() -> None:
    assert subprocess.run([sys.executable, ROOT / "tools/unasync.py", "--check"], timeout=60).returncode == 0


SOURCE = '''
import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from forkd.client.async_thing import AsyncThing, async_find


class AsyncOwner(AsyncThing):
    """An AsyncOwner; `async with` is for asynchronous ones."""

    async def __aenter__(self) -> AsyncGenerator[list[int], None]:
        async with aclosing(self.thing) as it:
            async for piece in it:
                yield await async_find(piece, [await one async for one in it])
        await asyncio.sleep(1)
        await self.thing.aclose()
'''
EXPECTED = '''# Generated from async_owner.py by tools/unasync.py: do not edit.

import time
from collections.abc import Generator
from contextlib import closing, contextmanager

from forkd.client.thing import Thing, find


class Owner(Thing):
    """An Owner; `async with` is for asynchronous ones."""

    def __enter__(self) -> Generator[list[int], None, None]:
        with closing(self.thing) as it:
            for piece in it:
                yield find(piece, [one for one in it])
        time.sleep(1)
        self.thing.close()
'''


def test_words_are_replaced_and_the_rest_stays() -> None:
    text = unasync.render_sync(SOURCE, "owner")
    assert text.splitlines() == EXPECTED.splitlines()


@pytest.mark.parametrize("line", ["task = asyncio.create_task(x)", "async\\\nx", "await(x)", "close = x.aclose"])
def test_what_no_rule_covers_is_an_error(line: str) -> None:
    with pytest.raises(unasync.NoRule, match=r"async_owner\.py:2: no rule"):
        unasync.render_sync(f"import x\n{line}\n", "owner")


def test_a_stale_or_missing_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "async_owner.py").write_text("async def find() -> None: ...\n")
    (stale,) = unasync.find_stale(tmp_path).items()
    assert stale[0] == tmp_path / "owner.py" and "\ndef find() -> None: ..." in stale[1]
    stale[0].write_text(stale[1])
    assert unasync.find_stale(tmp_path) == {}
    stale[0].write_text(stale[1] + "edited = True\n")
    assert list(unasync.find_stale(tmp_path)) == [tmp_path / "owner.py"]
