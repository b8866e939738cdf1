import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from support_roots import make_busybox_root

from forkd.cli.image import parse_request
from forkd.cli.output import render_age, render_size
from forkd.cli.parser import build_parser
from forkd.errors import Conflict, InvalidInput, NotFound
from forkd.image import Copy, ImageStore, Run, debian_spec, directory_spec
from forkd.store.snapshots import SnapshotStore


def parse(*argv: str) -> argparse.Namespace:
    return build_parser("image").parse_args(["image", *argv])


def run(*argv: str) -> int:
    args = parse(*argv)
    status = args.func(args)
    assert isinstance(status, int)
    return status


@pytest.fixture
def at_home(home: Any, monkeypatch: pytest.MonkeyPatch, small_kernel: list[str]) -> ImageStore:
    monkeypatch.setenv("FORKD_HOME", str(home.root))
    monkeypatch.setenv("FORKD_RUNTIME_DIR", "/nonexistent")
    return ImageStore(home)


def test_without_words_the_python_recipe_is_built() -> None:
    spec = debian_spec(["python3", "python3-numpy"])
    assert parse_request(parse("build")) == (spec, "python")
    assert parse_request(parse("build", "python", "--name", "mine")) == (spec, "mine")


def test_packages_come_on_top_of_a_recipe_or_alone() -> None:
    assert parse_request(parse("build", "python", "-p", "curl")) == (
        debian_spec(["python3", "python3-numpy", "curl"]),
        "python",
    )
    alone = parse_request(parse("build", "-p", "python3", "-p", "curl", "--name", "web", "--suite", "trixie"))
    assert alone == (debian_spec(["python3", "curl"], suite="trixie"), "web")


def test_packages_keep_their_order_and_so_do_steps(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# mine\nsix==1.16.0\n\nattrs\n")
    options = ["--pip", "numpy==1.26.4", "-r", str(tmp_path / "requirements.txt"), "--pip", "rich"]
    steps = ["--run", "make", "--copy", "app:/srv/app", "--run", "make install"]
    spec, name = parse_request(parse("build", "-p", "python3", *options, *steps, "--name", "mine"))
    assert spec.pip == ("numpy==1.26.4", "six==1.16.0", "attrs", "rich")
    assert spec.steps == (Run("make"), Copy(Path("app"), "/srv/app"), Run("make install"))
    assert name == "mine"
    # Each command line begins anew.
    assert parse_request(parse("build"))[0].is_layered is False


def test_a_directory_takes_packages_and_steps_too(tmp_path: Path) -> None:
    asked = parse("build", "--from-directory", str(tmp_path), "--name", "mine", "--pip", "six", "--run", "true")
    assert parse_request(asked)[0] == directory_spec(tmp_path, pip=["six"], steps=[Run("true")])


def test_a_file_of_requirements_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, error in (("absent", NotFound), ("binary", InvalidInput), (".", InvalidInput)):
        with pytest.raises(error, match=name):
            parse_request(parse("build", "-r", str(tmp_path / name)))


def test_packages_and_steps_are_shown(at_home: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_busybox_root(tmp_path / "busybox")
    command = ["build", "--from-directory", str(root), "--name", "mine", "--run", "echo x > /etc/x"]
    assert run(*command) == 0
    assert "already built" not in capsys.readouterr().err
    assert run(*command) == 0
    assert "already built" in capsys.readouterr().err
    assert run("inspect", "mine") == 0
    shown = capsys.readouterr().out
    assert "step 1" in shown and "run echo x > /etc/x" in shown and "steps: 1" in shown
    assert run("inspect", "mine", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["pip"], shown["source"]["steps"]) == ({}, [{"run": "echo x > /etc/x"}])


def test_a_directory_is_built_under_the_name_given(tmp_path: Path) -> None:
    asked = parse("build", "--from-directory", str(tmp_path), "--name", "mine")
    assert parse_request(asked) == (directory_spec(tmp_path), "mine")


@pytest.mark.parametrize(
    "argv",
    [
        ["-p", "curl"],
        ["--from-directory", "x"],
        ["--from-directory", "x", "--name", "y", "-p", "curl"],
        ["python", "--from-directory", "x", "--name", "y"],
        ["--from-directory", "x", "--name", "y", "--suite", "trixie"],
    ],
)
def test_requests_that_make_no_sense_are_refused(argv: list[str]) -> None:
    with pytest.raises(InvalidInput):
        parse_request(parse("build", *argv))


def test_an_image_is_built_listed_inspected_and_removed(
    at_home: ImageStore, root_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", "--from-directory", str(root_directory), "--name", "mine", "--json") == 0
    out = capsys.readouterr().out
    built = json.loads(out)
    assert built["name"] == "mine"

    assert run("ls", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [built]
    assert run("ls") == 0
    table = capsys.readouterr().out
    assert "mine" in table and built["id"] in table

    assert run("inspect", built["id"], "--json") == 0
    assert json.loads(capsys.readouterr().out) == {**built, "installed": {}, "pip": {}}
    assert run("inspect", "mine") == 0
    assert built["root"] in capsys.readouterr().out

    assert run("rm", "mine") == 0
    assert capsys.readouterr().out == "mine\n"
    assert at_home.list() == []


def test_progress_goes_to_standard_error_only(
    at_home: ImageStore, root_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("build", "--from-directory", str(root_directory), "--name", "mine")
    shown = capsys.readouterr()
    assert "Packing" in shown.err
    assert "Packing" not in shown.out
    assert len(shown.out.splitlines()) == 1


def test_what_does_not_exist_is_not_found(at_home: ImageStore) -> None:
    with pytest.raises(NotFound):
        run("rm", "absent")
    with pytest.raises(NotFound):
        run("inspect", "absent")


def test_of_several_images_it_is_said_what_became_of_each(
    at_home: ImageStore, root_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        at_home.build(directory_spec(root_directory), name)
    assert run("rm", "one", "absent", "gone", "two") == NotFound.exit_code
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert "There is no image absent" in shown.err and "There is no image gone" in shown.err
    at_home.build(directory_spec(root_directory), "one")
    assert run("rm", "one", "absent", "--json") == NotFound.exit_code
    told = json.loads(capsys.readouterr().out)
    assert told["removed"] == ["one"]
    assert [(each["name"], each["code"]) for each in told["failed"]] == [("absent", "not_found")]


def test_an_image_a_snapshot_was_made_from_stays(
    at_home: ImageStore, root_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = at_home.build(directory_spec(root_directory), "mine")
    monkeypatch.setattr(SnapshotStore, "images_in_use", lambda self: {image.id: ("warm",)})
    with pytest.raises(Conflict):
        run("rm", "mine")
    assert run("prune", "--json") == 0
    at_home.open("mine")


def test_sizes_and_ages_are_short() -> None:
    assert render_size(3 << 20) == "3.0 MiB"
    assert [render_age(age) for age in (-1, 5, 65, 7300, 200_000)] == ["0s", "5s", "1m", "2h", "2d"]
