"""`forkd token`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forkd.cli.main import main
from forkd.daemon.tokens import Keyring
from forkd.errors import Conflict, NotFound


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_shown_once_listed_by_name_and_revoked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keyring = Keyring(home / "tokens.json")
    assert main(["token", "create", "ci"]) == 0
    value = capsys.readouterr().out.strip()
    assert keyring.identify(value) == "ci"
    assert main(["token", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "ci" in listed
    assert value not in listed
    assert main(["token", "create", "ci"]) == Conflict.exit_code
    assert main(["token", "revoke", "ci"]) == 0
    assert "No token is left" in capsys.readouterr().err
    assert keyring.identify(value) is None
    assert main(["token", "revoke", "ci"]) == NotFound.exit_code


def test_programs_get_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "create", "a", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Keyring(home / "tokens.json").identify(made["token"]) == made["name"] == "a"
    assert main(["token", "ls", "--json"]) == 0
    assert [token["name"] for token in json.loads(capsys.readouterr().out)] == ["a"]
    assert main(["token", "revoke", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "a", "revoked": True, "left": 0}
