from argparse import ArgumentParser

import pytest
from cli_cases import Cli, check

from forkd.cli.network import add_network_options, parse_options
from forkd.errors import InvalidInput
from forkd.model.network import Network


def parse(*words: str) -> Network | None:
    parser = ArgumentParser()
    add_network_options(parser)
    return parse_options(parser.parse_args(words))


def test_options_are_a_network():
    assert parse() is None
    assert parse("--network", "open") == Network.open()
    assert parse("--allow", "pypi", "--allow", "a.org", "--deny", "192.0.2.1", "--max-bytes", "2K") == Network(
        allow=["pypi", "a.org"], deny=["192.0.2.1"], max_bytes=2048
    )
    assert parse("--group", "crew", "--max-connections", "3") == Network(group="crew", max_connections=3)
    with pytest.raises(InvalidInput):
        parse("--max-bytes", "1G")
    with pytest.raises(InvalidInput):
        parse("--network", "none", "--allow", "pypi")


def test_a_network_is_shown_and_changed(warm: Cli):
    sandbox = warm.fork("--allow", "pypi", "--max-bytes", "5M")
    shown = warm.ask("network", sandbox).stdout
    assert "egress" in shown and "pypi" in shown and "5242880" in shown
    assert "egress pypi" in warm.ask("inspect", sandbox).stdout
    assert warm.json("network", sandbox, "--network", "none")["mode"] == "none"
    check(warm.ask("network", sandbox, "--allow", "nope"), 2, "nope")


def test_presets_are_listed(warm: Cli):
    assert "files.pythonhosted.org" in warm.ask("network", "presets").stdout


def test_a_port_is_exposed_listed_and_closed(warm: Cli, sandbox: str):
    [made] = warm.json("port", sandbox, "8000")
    assert f"127.0.0.1:{made['host_port']}" in warm.ask("port", sandbox).stdout
    assert f"127.0.0.1:{made['host_port']}->8000" in warm.ask("inspect", sandbox).stdout
    assert warm.ask("port", sandbox, "8000", "--close").returncode == 0
    assert warm.json("port", sandbox) == []
    check(warm.ask("port", sandbox, "--close"), 2)


def test_a_snapshot_and_a_workspace_keep_a_network(warm: Cli):
    assert warm.create("webbed", "--allow", "debian").returncode == 0
    assert "egress debian" in warm.ask("snapshot", "inspect", "webbed").stdout
    made = warm.json("workspace", "create", "desk", "--snapshot", "webbed", "--network", "none")
    [info] = warm.json("inspect", made["live_sandbox_id"])
    assert info["network"]["mode"] == "none"
