"""CPU templates, where there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from forkd.engines.base import BootSpec, Engine
from forkd.errors import Unsupported
from forkd.model.machine import MachineSpec
from forkd.runtime.engines import FakeEngine, QemuEngine

NOWHERE = Path("/nonexistent")


@pytest.mark.parametrize("make", [FakeEngine, lambda: QemuEngine("tcg")], ids=["fake", "qemu"])
def test_an_engine_without_cpu_templates_refuses_one_before_anything_is_made(
    make: Callable[[], Engine], tmp_path: Path
) -> None:
    engine = make()
    spec = BootSpec(MachineSpec(256, 1, "T2"), NOWHERE, NOWHERE, NOWHERE)
    with pytest.raises(Unsupported, match=f"^The engine {engine.name} has no CPU template T2$") as caught:
        asyncio.run(engine.boot(spec, tmp_path / "vm", tmp_path))
    assert caught.value.hint is not None and "firecracker" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
