"""A layer of a saved VM, without a store: the pages that are its own, back to back in a file."""

from pathlib import Path

from forkd.engines.base import Frozen
from forkd.host.pages import LiveMemory, find_written, opened_memory
from forkd.model.memory import Run, lay_over


def layer_of(memory: LiveMemory | None, base: Frozen, into: Path) -> tuple[Path | None, tuple[Run, ...]]:
    """The root's memory file, and the runs over it."""
    if memory is None:
        return None, ()
    runs = []
    at = 0
    with opened_memory(memory) as reader, (into / "pages").open("xb") as file:
        for start, end in find_written(memory):
            content = bytearray(end - start)
            reader.read_into(start, memoryview(content))
            if any(content):
                file.write(content)
                runs.append(Run(start, end - start, into / "pages", at))
                at += end - start
            else:
                runs.append(Run(start, end - start, None, 0))
    assert memory.file == base.memory_file
    return memory.file, lay_over(base.runs, runs)
