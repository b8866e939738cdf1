"""`forkd pack`, `unpack`, `push`, `pull` and `trust`, as people use them."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import Cli, check, ended
from support_daemon import served as serving
from support_images import made_home

from forkd.cli.pack import render_progress

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def packed(served: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "warm.pack"
    done = served.ask("pack", "warm", "-o", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("warm  ")
    return path


@pytest.fixture(scope="module")
def key(served: Cli) -> str:
    return str(served.json("trust", "key")["key"])


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Cli]:
    """Another home with a daemon, and nothing in it."""
    with made_home(tmp_path / "other") as home, serving(home, "--on-stop", "kill", "--bind", "none"):
        with ended(Cli(home)) as made:
            yield made


def test_a_snapshot_goes_to_another_home_and_is_forked_there(packed: Path, other: Cli, key: str) -> None:
    check(other.ask("unpack", str(packed)), 19, key, "--trust")
    assert other.tags() == []
    done = other.json("unpack", str(packed), "--trust")
    assert (done["tag"], done["made"], done["key"], done["warning"]) == ("warm", ["warm"], key, None)
    assert other.json("fork", "warm")[0]["snapshot_tag"] == "warm"
    [sandbox] = other.ids()
    assert other.ask("eval", sandbox, "x + 1").stdout == "42\n"
    again = other.ask("unpack", str(packed))
    assert (again.returncode, again.stdout) == (0, f"warm  signed by {key}; there already: warm\n")
    renamed = other.ask("unpack", str(packed), "--tag", "mine")
    assert renamed.stdout == f"mine  signed by {key}\n"
    assert other.tags() == ["mine", "warm"]


def test_packs_go_through_pipes(warm: Cli, packed: Path, other: Cli) -> None:
    out = subprocess.run(warm.command("pack", "warm", "-o", "-"), env=warm.env, capture_output=True, timeout=60)
    assert out.stdout == packed.read_bytes()
    assert other("unpack", "-", "--trust", stdin=out.stdout).returncode == 0
    assert other.tags() == ["warm"]
    assert warm.ask("pack", "warm", "-o", "-", "--json").returncode == 2


def test_a_pack_without_its_image_is_smaller_and_needs_it(warm: Cli, packed: Path, other: Cli, tmp_path: Path) -> None:
    bare = tmp_path / "bare.pack"
    assert warm.json("pack", "warm", "-o", str(bare), "--without-image")["bytes"] == bare.stat().st_size
    assert bare.stat().st_size < packed.stat().st_size
    check(other.ask("unpack", str(bare), "--trust"), 3, "image")


def test_a_file_that_is_no_pack_or_is_not_there(packed: Path, other: Cli, tmp_path: Path) -> None:
    half = tmp_path / "half.pack"
    half.write_bytes(packed.read_bytes()[:-100])
    check(other.ask("unpack", str(half), "--trust"), 8, "too early")
    check(other.ask("unpack", str(Path(__file__))), 8, "not a forkd pack")
    check(other.ask("unpack", str(tmp_path / "nothing")), 3, "nothing")
    check(other.ask("pack", "nobody", "-o", str(tmp_path / "x")), 3, "nobody")
    assert list(tmp_path.glob("*x*")) == []
    assert other.tags() == []


def test_push_and_pull_between_daemons(warm: Cli, other: Cli, key: str) -> None:
    there = f"unix://{other.runtime}/forkd.sock"
    check(warm.ask("push", "warm", there), 19, key)
    done = warm.ask("push", "warm", there, "--trust", "--as", "pushed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f" to {there}\n")
    assert warm.json("push", "warm", there)["imported"]["image_reused"] is True
    assert other.tags() == ["pushed", "warm"]
    check(other.ask("pull", "http://127.0.0.1:1/pack"), 18)
    check(other.ask("pull", "nonsense"), 2, "address of a pack")


def test_keys_are_listed_added_and_removed(cli: Cli, key: str) -> None:
    assert cli.ask("trust", "ls").stdout == ""
    assert cli.json("trust", "ls") == []
    assert cli.ask("trust", "add", key, "--name", "friend", "--origin", "https://host").returncode == 0
    [found] = cli.json("trust", "ls")
    assert (found["key"], found["origin"], found["name"]) == (key, "https://host", "friend")
    assert key in cli.ask("trust", "ls").stdout
    check(cli.ask("trust", "add", key, "--origin", "https://host"), 4, "already")
    check(cli.ask("trust", "add", "nonsense"), 2, "is not a key")
    assert cli.ask("trust", "rm", "friend").stdout == f"{key}\n"
    check(cli.ask("trust", "rm", "friend"), 3)
    own = cli.ask("trust", "key").stdout.strip()
    assert own.startswith("ed25519:") and own != key
    assert (cli.home / "signing.key").stat().st_mode & 0o777 == 0o600
    assert json.loads((cli.home / "trust.json").read_text()) == []


def test_progress_in_words() -> None:
    assert render_progress(3 << 20, 0.5, 2.0) == " 50%  3.0 MiB  2 MiB/s"
    assert render_progress(0, None, 0.0) == "0.0 MiB"
