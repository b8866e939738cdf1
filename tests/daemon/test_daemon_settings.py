"""Settings: one order, and every bad value names where it came from."""

from pathlib import Path
from typing import Any

import pytest

from forkd.daemon.settings import OPTIONS, Bind, Settings, merge_settings, parse_bind, read_settings
from forkd.errors import InvalidInput
from forkd.host.paths import Home

HOME = Home(Path("/h"), Path("/r"))


def merge(flags: Any = None, environ: Any = None, file: Any = None) -> Settings:
    return merge_settings(flags or {}, environ or {}, file or {}, HOME)


def test_defaults_are_loopback_and_the_socket_of_the_runtime_directory() -> None:
    assert merge() == Settings(
        bind=Bind("127.0.0.1", 8889),
        socket=Path("/r/forkd.sock"),
        tls_cert=None,
        tls_key=None,
        token_file=None,
        audit_log=Path("/h/audit.log"),
        max_connections=1024,
        log_format="text",
        log_level="info",
        engine="auto",
        idle_exit_secs=0.0,
        on_stop="keep",
        unenforced_limits="refuse",
        templates=4,
        template_memory_mib=1024,
        branch_concurrency=4,
        max_fork_depth=64,
        max_fork_children=1000,
        max_lineage_sandboxes=1000,
        max_lineage_memory_mib=0,
        max_token_sandboxes=0,
        max_token_memory_mib=0,
        network="on",
        network_uplink="auto",
        network_pool=16,
        network_resolvers=None,
        cell="required",
        vm_ids=None,
    )


def test_a_flag_wins_over_the_variable_and_that_over_the_file() -> None:
    file = {"on_stop": "kill", "idle_exit_secs": 3, "bind": "127.0.0.1:1"}
    environ = {"FORKD_IDLE_EXIT_SECS": "4", "FORKD_BIND": "127.0.0.1:2"}
    merged = merge({"bind": "127.0.0.1:3", "socket": None}, environ, file)
    assert (merged.on_stop, merged.idle_exit_secs, merged.bind) == ("kill", 4.0, Bind("127.0.0.1", 3))


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert merge(environ={"FORKD_ENGINE": "", "FORKD_BIND": ""}) == merge()


def test_every_setting_can_be_given_in_all_three_ways() -> None:
    values = {
        "bind": "[::1]:99",
        "socket": "/x",
        "tls_cert": "/c",
        "tls_key": "/k",
        "token_file": "/t",
        "audit_log": "none",
        "max_connections": "7",
        "log_format": "json",
        "log_level": "debug",
        "engine": "fake",
        "idle_exit_secs": "5",
        "on_stop": "kill",
        "unenforced_limits": "drop",
        "templates": "0",
        "template_memory_mib": "512",
        "branch_concurrency": "2",
        "max_fork_depth": "3",
        "max_fork_children": "4",
        "max_lineage_sandboxes": "5",
        "max_lineage_memory_mib": "6",
        "max_token_sandboxes": "7",
        "max_token_memory_mib": "8",
        "network": "off",
        "network_uplink": "pasta",
        "network_pool": "9",
        "network_resolvers": "192.0.2.1,192.0.2.2",
        "cell": "best-effort",
        "vm_ids": "1000000:65536",
    }
    assert set(values) == {option.key for option in OPTIONS}
    by_flag = merge(flags=values)
    assert merge(environ={f"FORKD_{key.upper()}": value for key, value in values.items()}) == by_flag
    assert merge(file=values) == by_flag
    assert by_flag != merge()


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({"flags": {"bind": "localhost:1"}}, "--bind"),
        ({"flags": {"bind": "127.0.0.1:70000"}}, "--bind"),
        ({"flags": {"bind": "::1:80"}}, "--bind"),
        ({"environ": {"FORKD_LOG_LEVEL": "loud"}}, "FORKD_LOG_LEVEL"),
        ({"environ": {"FORKD_IDLE_EXIT_SECS": "nan"}}, "FORKD_IDLE_EXIT_SECS"),
        ({"environ": {"FORKD_IDLE_EXIT_SECS": "-1"}}, "FORKD_IDLE_EXIT_SECS"),
        ({"flags": {"templates": "65"}}, "--templates cannot be '65': must be a number from 0 to 64"),
        ({"flags": {"template_memory_mib": "1048577"}}, "--template-memory-mib"),
        ({"environ": {"FORKD_TEMPLATES": "-1"}}, "FORKD_TEMPLATES"),
        ({"environ": {"FORKD_TEMPLATES": "four"}}, "FORKD_TEMPLATES"),
        ({"file": {"templates": 1.5}}, "templates in forkd.toml"),
        ({"file": {"template_memory_mib": True}}, "template_memory_mib in forkd.toml"),
        ({"file": {"on_stop": "explode"}}, "on_stop in forkd.toml"),
        ({"file": {"bind": True}}, "bind in forkd.toml"),
        ({"file": {"socket": ["a"]}}, "socket in forkd.toml"),
        ({"file": {"engine": "xen"}}, "engine in forkd.toml"),
        ({"file": {"bnid": "x"}}, "bnid"),
    ],
)
def test_a_bad_value_names_its_source(where: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        merge(**where)


def test_there_has_to_be_something_to_listen_on() -> None:
    with pytest.raises(InvalidInput, match="nothing to listen on"):
        merge({"bind": "none", "socket": "none"})


@pytest.mark.parametrize("one", ["tls_cert", "tls_key"])
def test_a_certificate_and_its_key_come_together(one: str) -> None:
    with pytest.raises(InvalidInput, match=f"There is {one} without"):
        merge({one: "/some.pem"})


def test_which_addresses_are_loopback() -> None:
    inside = ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1")
    outside = ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[::ffff:8.8.8.8]:1")
    assert all((bind := parse_bind(text)) is not None and bind.loopback for text in inside)
    assert not any((bind := parse_bind(text)) is not None and bind.loopback for text in outside)


def test_the_file_of_the_home_is_optional_and_an_explicit_one_is_not(tmp_path: Path) -> None:
    home = Home(tmp_path, tmp_path / "run")
    assert read_settings({}, {}, home).on_stop == "keep"
    home.config.write_text('on_stop = "kill"\n')
    assert read_settings({}, {}, home).on_stop == "kill"
    with pytest.raises(InvalidInput, match="no settings file"):
        read_settings({"config": str(tmp_path / "other.toml")}, {}, home)
    home.config.write_text("on_stop = \n")
    with pytest.raises(InvalidInput, match="is not TOML"):
        read_settings({}, {}, home)
