"""CPU templates, where there are none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support_freeze import NO_IMAGE

from forkd.engines.base import Engine
from forkd.engines.fake import FakeEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import Unsupported
from forkd.model.machine import MachineSpec


@pytest.mark.parametrize("make", [FakeEngine, lambda: QemuEngine("tcg")], ids=["fake", "qemu"])
async def test_an_engine_without_cpu_templates_refuses_one_before_anything_is_made(
    make: Callable[[], Engine], tmp_path: Path
) -> None:
    engine = make()
    spec = replace(NO_IMAGE, machine=MachineSpec(256, 1, "T2"))
    with pytest.raises(Unsupported, match=f"(?m)^The engine {engine.name} has no CPU template T2$") as caught:
        await engine.boot(spec, tmp_path / "vm", tmp_path)
    assert caught.value.hint is not None and "firecracker" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
