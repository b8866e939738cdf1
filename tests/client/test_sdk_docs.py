"""Every example of the SDK's documents runs, against a real daemon with the fake engine."""

import re
from pathlib import Path

import pytest

from forkd.client import Controller

DOCUMENTS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCUMENTS / "reference/sdk.md"
EXAMPLES = [
    code
    for path in (DOCUMENT, DOCUMENTS / "how-to/branch.md")
    for code in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(code: str, daemon: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The fake engine's guests share our file system.
    exec(compile(code.replace("/srv/data", str(tmp_path / "guest")), str(DOCUMENT), "exec"), {"__name__": "example"})  # noqa: S102


def test_every_method_of_the_controller_is_in_the_table() -> None:
    methods = {name for name in dir(Controller) if not name.startswith("_")} - {"at", "close", "over", "url"}
    table = DOCUMENT.read_text().partition("## The API, route by route")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"Controller"} == methods
