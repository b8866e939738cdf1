"""A runtime over the fake engine, its registry, and a real agent."""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from runtime_cases import opened
from support_freeze import NO_IMAGE

from forkd.engines.base import Engine
from forkd.engines.fake import FakeEngine
from forkd.guest.agent import Agent
from forkd.host.paths import Home
from forkd.runtime.freeze import booted
from forkd.runtime.registry import Registry
from forkd.runtime.runtime import Runtime


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with closing(Registry(tmp_path / "registry.db")) as registry:
        yield registry


@pytest.fixture
def engine() -> Engine:
    return FakeEngine(outlive=True)


@pytest.fixture
async def runtime(fake_home: Home, engine: Engine) -> AsyncIterator[Runtime]:
    """With the snapshot `warm`, whose interpreter has x = 41."""
    async with opened(fake_home, engine) as runtime:
        yield runtime


@pytest.fixture
async def agent(run_directory: Path, tmp_path: Path) -> AsyncIterator[Agent]:
    """A real one, in a process of its own."""
    async with booted(FakeEngine(), NO_IMAGE, run_directory / "parent", tmp_path) as (_, agent):
        yield agent
