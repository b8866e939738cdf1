"""What a guest says it has written: hostile guests get ProtocolError, whatever they say."""

import json
from typing import Any

import pytest

from forkd.errors import ProtocolError
from forkd.guest import changes
from forkd.guest.changes import Change, ChangeReader, Clocks

CLOCKS = {"image": "0" * 64, "began_ns": 1, "born_ns": 2, "steps": [[3, -4]]}
FACTS = {"type": "file", "size": 1, "mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 0}
CHANGE = {"path": "/a", "ctime_ns": 1, "ino": 2, "file": FACTS, "base": None}
END = {"end": True}


def read(*answers: Any) -> list[Clocks | Change | None]:
    reader = ChangeReader()
    sent = b"".join(json.dumps(each).encode() + b"\n" for each in answers)
    lines = [line for at in range(0, len(sent), 100) for line in reader.feed(sent[at : at + 100])]
    taken = [reader.take(line) for line in lines]
    reader.finish()
    return taken


def change(**more: Any) -> dict[str, Any]:
    return {**CHANGE, **more}


def test_an_honest_list_is_read_as_it_is() -> None:
    link = {**FACTS, "type": "symlink", "target": "x" * 4095}
    names = ["/a", "/with space/\udcff\n", "/", "/" + "/".join(["d" * 250] * 16)]
    clocks, *found, end = read(CLOCKS, *(change(path=name, base=link) for name in names), END)
    assert isinstance(clocks, Clocks) and clocks.steps == ((3, -4),)
    assert [each.path for each in found if isinstance(each, Change)] == names
    assert end is None
    assert read(CLOCKS, change(file=None, base=FACTS), END)[1] == Change(
        "/a", 1, 2, None, changes.Facts("file", 1, 0o644, 0, 0, 0)
    )


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [CLOCKS],
        [CLOCKS, CHANGE],
        [END],
        [CHANGE, END],
        [CLOCKS, END, CHANGE],
        [CLOCKS, END, END],
        [CLOCKS, [], END],
        [{**CLOCKS, "steps": [[1, 2]] * 101}, END],
        [{**CLOCKS, "steps": [[1, 1 << 63]]}, END],
        [{**CLOCKS, "steps": [[1]]}, END],
        [{**CLOCKS, "born_ns": -1}, END],
        [{**CLOCKS, "image": "x"}, END],
        *(
            [CLOCKS, change(path=path), END]
            for path in ["", "a", "/a/", "//a", "/a/../b", "/..", "/.", "/a\0", "/\ud800", "/" + "a" * 4095, 7, None]
        ),
        [CLOCKS, change(file=None), END],
        [CLOCKS, change(file=[]), END],
        [CLOCKS, change(file={**FACTS, "type": "door"}), END],
        [CLOCKS, change(file={**FACTS, "size": -1}), END],
        [CLOCKS, change(file={**FACTS, "size": 1.5}), END],
        [CLOCKS, change(file={**FACTS, "mode": 0o10000}), END],
        [CLOCKS, change(file={**FACTS, "target": "x"}), END],
        [CLOCKS, change(file={**FACTS, "type": "symlink"}), END],
        [CLOCKS, change(file={**FACTS, "type": "symlink", "target": "x" * 5000}), END],
        [CLOCKS, change(file={**FACTS, "sha256": "0" * 63}), END],
        [CLOCKS, change(ctime_ns=1 << 63), END],
        [CLOCKS, change(ino="1"), END],
        [CLOCKS, change(more="x" * 200_000), END],
    ],
)
def test_everything_else_is_refused(answers: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        read(*answers)


def test_a_list_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_CHANGES", 3)
    with pytest.raises(ProtocolError, match="more than 3 changes"):
        read(CLOCKS, *[CHANGE] * 4, END)
    reader = ChangeReader()
    with pytest.raises(ProtocolError, match="too many words"):
        for _ in range(100):
            reader.feed(bytes(64 * 1024))
    reader = ChangeReader()
    monkeypatch.setattr(changes, "MAX_CHANGES_BYTES", 1000)
    with pytest.raises(ProtocolError, match="more than 1000 bytes"):
        for _ in range(1001):
            reader.feed(b"\n")
