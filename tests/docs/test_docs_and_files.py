"""Documents and files fit together: paths that either names exist, and the measured figures are those in the docs."""

import re
import subprocess
from pathlib import Path

import pytest

from bench.report import read_results, render_report
from forkd.host.faults import POINTS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
INDEX = ROOT / "docs/README.md"

_PATH = re.compile(r"(?<![\w/$.-])(?:src|bench|tools|lab|tests|packaging|docs|examples)/[\w./-]*\w")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_in_a_document_exists(path: Path) -> None:
    # A link is relative to its page; test_readme_commands.py follows it.
    text = re.sub(r"\]\([^)]*\)", "]", path.read_text())
    named = sorted(set(_PATH.findall(text)))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_module_on_the_map_exists() -> None:
    """There they are named without the package that their row or line begins with."""
    known = [path.as_posix() for path in ROOT.glob("src/forkd/**/*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/architecture.md").read_text()))
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in known)] == [
        "tools/unasync.py"
    ]


def test_every_document_that_a_file_names_exists() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = [
        (name, mentioned)
        for name in tracked.splitlines()
        if not name.endswith(".md") and (ROOT / name).suffix in (".py", ".sh", ".service", ".toml", "")
        for mentioned in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg)", (ROOT / name).read_text(errors="replace"))
        if not (ROOT / mentioned).exists()
    ]
    assert missing == []


def test_the_index_leads_to_every_page_of_docs() -> None:
    linked = {(INDEX.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", INDEX.read_text())}
    assert set(ROOT.glob("docs/**/*.md")) - {INDEX} == linked


def test_the_types_of_events_are_those_of_the_code() -> None:
    kinds = re.compile(r"""["`]((?:sandbox|snapshot|daemon)\.[a-z]+)["`]""")
    emitted = {kind for path in ROOT.glob("src/forkd/runtime/*.py") for kind in kinds.findall(path.read_text())}
    listed = (
        (ROOT / "docs/reference/rest.md").read_text().partition("Event types of `/v1/events`")[2].partition("\n")[0]
    )
    assert set(kinds.findall(listed)) == emitted - set(POINTS)


def test_the_tables_of_the_results_are_those_of_the_last_measurement() -> None:
    measured = render_report(read_results(ROOT / "bench/results.json"))
    written = (ROOT / "docs/reference/bench.md").read_text()
    assert set(rows_of(written)) == set(rows_of(measured))


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]
