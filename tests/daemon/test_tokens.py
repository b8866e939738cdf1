"""Tokens: shown once, kept as digests, found whichever it is, gone when revoked."""

import json
import stat
from pathlib import Path

import pytest

from forkd.cli.main import main
from forkd.daemon.access import is_plain_host, parse_bearer, refuse_page
from forkd.daemon.tokens import PREFIX, TOKEN_FILE_NAME, Keyring, TokenStore, read_token_file
from forkd.errors import Conflict, HostLacks, InvalidInput, NotFound


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home/tokens.json"


def test_a_token_is_kept_as_a_digest_that_only_we_can_read(path: Path) -> None:
    value = TokenStore(path).create("ci")
    assert value.startswith(PREFIX)
    assert len(value) > 40
    assert value not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [token.name for token in TokenStore(path).list()] == ["ci"]


def test_tokens_come_and_go_while_the_keyring_is_in_use(path: Path) -> None:
    keyring, store = Keyring(path), TokenStore(path)
    assert not keyring.needed
    first = store.create("first")
    second = store.create("second")
    assert keyring.needed
    assert (keyring.identify(first), keyring.identify(second)) == ("first", "second")
    assert keyring.identify(first + "x") is None
    assert keyring.identify("") is None
    assert store.revoke("first") == 1
    assert (keyring.identify(first), keyring.identify(second)) == (None, "second")


def test_revoking_the_last_token_lets_nobody_in(path: Path) -> None:
    keyring, store = Keyring(path), TokenStore(path)
    value = store.create("only")
    store.revoke("only")
    assert keyring.needed
    assert not keyring.has_any
    assert keyring.identify(value) is None


def test_a_damaged_file_lets_nobody_in(path: Path) -> None:
    keyring = Keyring(path)
    value = TokenStore(path).create("ci")
    assert keyring.identify(value) == "ci"
    for damage in ("{", "[]", '{"format": 2, "tokens": []}', '{"format": 1, "tokens": [{"name": "a"}]}'):
        path.write_text(damage)
        assert keyring.needed
        assert keyring.identify(value) is None
        with pytest.raises(HostLacks, match="damaged"):
            TokenStore(path).list()


def test_names_are_unique_and_legal(path: Path) -> None:
    store = TokenStore(path)
    store.create("a")
    with pytest.raises(Conflict):
        store.create("a")
    for name in ("", "../x", "a b", "x" * 65, ".a", "é", TOKEN_FILE_NAME):
        with pytest.raises(InvalidInput):
            store.create(name)
    with pytest.raises(NotFound):
        store.revoke("b")
    assert len(json.loads(path.read_text())["tokens"]) == 1


def test_the_token_of_a_token_file_counts_beside_the_named_ones(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  sixteen-bytes-ok\n")
    keyring = Keyring(path, read_token_file(file))
    named = TokenStore(path).create("named")
    assert keyring.identify("sixteen-bytes-ok") == TOKEN_FILE_NAME
    assert keyring.identify(named) == "named"


@pytest.mark.parametrize(
    "content",
    ["", "   \n", "short", "REPLACE_ME_with_a_token", "CHANGE_ME_CHANGE_ME", "two words of a token", "é" * 20],
)
def test_token_files_nobody_should_rely_on_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(InvalidInput):
        read_token_file(file)


def test_a_token_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_token_file(tmp_path / "none")


def test_only_bearer_with_one_space_presents_a_token() -> None:
    assert parse_bearer(b"Bearer abc") == "abc"
    assert parse_bearer(b"Bearer abc \t") == "abc"
    for header in (
        None,
        b"",
        b"bearer abc",
        b"BEARER abc",
        b"Bearer",
        b"Bearer ",
        b"Bearer\tabc",
        b"Basic abc",
        b"abc",
    ):
        assert parse_bearer(header) is None


def test_hosts_that_no_page_can_take_are_plain() -> None:
    for host in ("localhost", "LOCALHOST:8889", "127.0.0.1", "127.0.0.1:8889", "[::1]:8889", "[::1]", "10.1.2.3"):
        assert is_plain_host(host), host
    for host in ("evil.example", "localhost.evil.example:1", "127.0.0.1.evil.example", "", ":80", "[::1", "[evil]:1"):
        assert not is_plain_host(host), host


def test_pages_of_browsers_are_refused() -> None:
    assert refuse_page([(b"host", b"127.0.0.1")]) is None
    assert refuse_page([(b"host", b"localhost"), (b"sec-fetch-site", b"none")]) is None
    assert refuse_page([(b"origin", b"null")]) is not None
    assert refuse_page([(b"sec-fetch-site", b"cross-site")]) is not None
    assert refuse_page([(b"host", b"localhost"), (b"host", b"evil.example")]) is not None


# forkd token


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_shown_once_listed_by_name_and_revoked(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keyring = Keyring(own_home / "tokens.json")
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


def test_programs_get_json(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "create", "a", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Keyring(own_home / "tokens.json").identify(made["token"]) == made["name"] == "a"
    assert main(["token", "ls", "--json"]) == 0
    assert [token["name"] for token in json.loads(capsys.readouterr().out)] == ["a"]
    assert main(["token", "revoke", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "a", "revoked": True, "left": 0}
