"""What the docs say about running the daemon is what the code does, and the systemd unit holds what it promises."""

import ctypes.util
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_daemon import environment, served
from support_images import make_image
from unit_filter import allowed_calls, parse_unit, read_sets

from forkd.client.controller import Controller
from forkd.daemon import audit, connection, repeats, serve, settings
from forkd.daemon.metrics import Metrics
from forkd.daemon.settings import OPTIONS, merge_settings
from forkd.engines.qemu.machine import ADOPT_DEADLINE_S
from forkd.host import faults
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.host.probe import CHECKS
from forkd.model.sandbox import TRANSITIONS, State
from forkd.runtime import events, ports, upkeep

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
UNIT = ROOT / "packaging/forkd.service"
FILTER = Path(__file__).with_name("unit_filter.py")

_TRY_S = 120.0
_needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
_needs_filter = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None,
    reason="systemd-analyze or libseccomp is not installed",
)


def read(name: str) -> str:
    return (DOCS / name).read_text()


def table(text: str, first: str) -> Iterator[list[str]]:
    """The cells of the rows below the header whose first cell is `first`."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            break
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        made = Home(tmp_path / "home", Path(runtime) / "run")
        make_image(made)
        yield made
        assert find_marked(made.runtime) == {}


# Settings


def test_the_table_of_settings_is_that_of_the_code() -> None:
    places = Home(Path("/<home>"), Path("/<runtime>"))
    documented = [[ticked(cell)[0] for cell in row[:4]] for row in table(read("reference/settings.md"), "key")]
    assert documented == [
        [option.key, option.flag, option.variable, option.default_in(places).removeprefix("/")] for option in OPTIONS
    ]


def test_the_values_of_a_setting_are_all_in_its_row() -> None:
    rows = {ticked(row[0])[0]: row[4] for row in table(read("reference/settings.md"), "key")}
    choices = {option.key: option.metavar.split("|") for option in OPTIONS if "|" in option.metavar}
    assert {"log_format", "log_level", "on_stop"} <= set(choices)
    for key, allowed in {**choices, "engine": ["auto", *settings.ENGINES]}.items():
        assert set(allowed) <= set(ticked(rows[key])), key


def test_the_settings_file_in_the_documents_is_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", read("reference/settings.md"), re.DOTALL)
    merged = merge_settings({}, {}, tomllib.loads(example), Home(Path("/h"), Path("/r")))
    assert merged.bind is not None and not merged.bind.loopback


# Monitoring


def test_the_table_of_metrics_is_what_prometheus_sees() -> None:
    exposed = {}
    for family in Metrics().registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exposed[name] = family.type
    documented = {ticked(row[0])[0]: row[1] for row in table(read("reference/metrics.md"), "name")}
    assert documented == exposed


def test_the_labels_of_the_metrics_are_in_the_table() -> None:
    metrics = Metrics()
    labels = {
        name: list(collector._labelnames)
        for collector, names in metrics.registry._collector_to_names.items()
        for name in names
    }
    for row in table(read("reference/metrics.md"), "name"):
        assert ticked(row[2]) == labels[ticked(row[0])[0]], row[0]


def test_the_alerts_ask_for_metrics_that_exist() -> None:
    documented = {ticked(row[0])[0] for row in table(read("reference/metrics.md"), "name")}
    asked = {name for row in table(read("how-to/monitoring.md"), "when") for name in re.findall(r"forkd_\w+", row[0])}
    assert asked
    assert asked <= documented


def test_the_fields_of_the_audit_log_are_those_of_the_code() -> None:
    documented = [name for row in table(read("reference/metrics.md"), "field") for name in ticked(row[0])]
    assert documented == [field.name for field in dataclasses.fields(audit.AuditEntry)]


# Doctor


def test_the_checks_of_doctor_are_in_the_table() -> None:
    documented = {name for row in table(read("reference/doctor.md"), "check") for name in ticked(row[0])}
    found_beside_others = {"tcg", "qemu with kvm", "jailer"}
    assert documented == {check.name for check in CHECKS} | found_beside_others


# Crashes


def test_the_states_are_those_of_the_code() -> None:
    documented = [ticked(row[0])[0] for row in table(read("explanation/crashes.md"), "state")]
    assert documented == [state.value for state in State]


def test_the_transitions_are_those_that_are_allowed() -> None:
    documented = {
        (State(before), State(after))
        for row in table(read("explanation/crashes.md"), "from")
        for before in ticked(row[0])
        for after in ticked(row[1])
    }
    allowed = {(before, after) for before, following in TRANSITIONS.items() for after in following}
    assert documented == allowed


def test_the_numbers_in_the_documents_are_those_of_the_code() -> None:
    crashes, security = read("explanation/crashes.md"), read("explanation/security.md")
    monitoring, metrics = read("how-to/monitoring.md"), read("reference/metrics.md")
    assert f"{serve.DRAIN_S:g} s" in crashes
    assert f"within {ADOPT_DEADLINE_S:g} s" in crashes
    assert f"kept for {upkeep.DEAD_KEPT_S / 60:g} minutes" in crashes
    assert f"for {upkeep.DEAD_KEPT_S / 60:g} minutes" in metrics
    assert f"at {audit.AUDIT_BYTES >> 20} MiB" in monitoring
    assert {5: "five old ones"}[audit.AUDIT_KEPT] in monitoring
    assert f"at {audit.OUTSIDE_BYTES >> 20} MiB" in monitoring
    assert {1: "one old one"}[audit.OUTSIDE_KEPT] in monitoring
    assert f"`audit.log{audit.OUTSIDE_SUFFIX}`" in monitoring
    assert f"{connection.HEAD_BYTES >> 10} KiB" in security and f"{connection.MAX_HEADERS} headers" in security
    assert f"shown {repeats.BUDGET} times a minute, or {repeats.BUDGET // repeats.TRACEBACK_COST} times" in metrics
    assert repeats.WINDOW_S == 60
    assert f"the last {events.KEPT:,}" in monitoring
    assert {0.5: "every half second"}[upkeep.TICK_S] in crashes
    assert f"{ports.MAX_SERVED} connections" in security
    assert upkeep.SPAWN_KEYS_KEPT_S == 24 * 3600 and "for a day" in security


def test_the_fault_point_in_contributing_is_one() -> None:
    (named,) = re.findall(r"FORKD_FAULT=([\w.]+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert named in faults.POINTS


# The unit


def test_the_unit_leaves_sandboxes_running_and_their_places_alone() -> None:
    unit = parse_unit(UNIT.read_text())
    assert unit["Type"] == ["notify"]
    assert unit["KillMode"] == ["process"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert unit["OOMPolicy"] == ["continue"]
    variables = dict(word.split("=", 1) for word in " ".join(unit["Environment"]).split())
    assert variables["FORKD_HOME"] == f"/var/lib/{unit['StateDirectory'][0]}"
    assert variables["FORKD_RUNTIME_DIR"] == f"/run/{unit['RuntimeDirectory'][0]}"
    assert not {"PrivateUsers", "PrivateDevices", "ProcSubset", "MemoryDenyWriteExecute"} & unit.keys()
    for option in OPTIONS:
        variables.pop(option.variable, None)
    assert variables.keys() == {"FORKD_HOME", "FORKD_RUNTIME_DIR"}


def test_the_unit_gives_the_daemon_more_time_than_it_takes() -> None:
    unit = parse_unit(UNIT.read_text())
    assert int(unit["TimeoutStopSec"][0]) > 2 * serve.DRAIN_S


def test_every_line_of_the_unit_that_the_document_explains_is_in_it() -> None:
    text = UNIT.read_text()
    for row in table(read("explanation/systemd-unit.md"), "line"):
        for line in ticked(row[0]):
            assert f"\n{line}" in text, line


@_needs_analyze
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    done = analyze(tmp_path, "verify")
    # Before version 254 it does not know the subgroup; systemd-unit.md has what that means.
    complaints = [line for line in done.stderr.splitlines() if "Unknown key 'DelegateSubgroup'" not in line]
    assert (done.returncode, complaints) == (0, [])


@_needs_analyze
def test_systemd_calls_the_unit_hardly_exposed(tmp_path: Path) -> None:
    # At most 3 of 10, as it may make namespaces and mounts in them; versions of systemd differ in what they count.
    done = analyze(tmp_path, "security", "--offline=true", "--no-pager", "--threshold=30")
    assert done.returncode == 0, done.stdout[-200:]


@_needs_analyze
def test_the_unit_refuses_system_calls_that_nobody_needs() -> None:
    allowed = allowed_calls(parse_unit(UNIT.read_text()), read_sets())
    assert allowed >= {"seccomp", "capset", "pidfd_open", "execve", "ptrace", "pidfd_getfd", "kcmp"}
    assert not allowed & {"setuid", "chown", "perf_event_open", "bpf", "init_module", "keyctl", "reboot"}


@_needs_filter
def test_the_filter_of_the_unit_is_on_in_the_test() -> None:
    done = subprocess.run(
        [sys.executable, FILTER, UNIT, "--", "unshare", "--user", "--pid", "true"],
        capture_output=True,
        text=True,
        timeout=_TRY_S,
    )
    assert done.returncode != 0
    assert "Operation not permitted" in done.stderr


@_needs_filter
def test_a_daemon_and_its_sandboxes_live_under_the_filter_of_the_unit(home: Home) -> None:
    live_under_the_filter(home, "fake", "small")


@_needs_filter
@pytest.mark.vm
def test_virtual_machines_live_under_the_filter_of_the_unit(fake_home: Home) -> None:
    live_under_the_filter(fake_home, "qemu", "python")


def live_under_the_filter(home: Home, engine: str, image: str) -> None:
    prefix = [sys.executable, str(FILTER), str(UNIT), "--"]
    with (
        served(home, "--bind", "none", engine=engine, prefix=prefix) as daemon,
        daemon.controller() as controller,
    ):
        controller.create_snapshot("warm", image, memory_mib=256, warm="past = 41", wait=True)
        (made,) = controller.spawn_sandboxes("warm")
        if engine != "fake":
            check_forks(controller)
        assert controller.exec_command(made["id"], ["sh", "-c", "echo $((6 * 7))"])["stdout"] == "42\n"
        started = controller.start_process(made["id"], shell="sleep 1000")["pid"]
        controller.pause_sandbox(made["id"])
        controller.resume_sandbox(made["id"])
        daemon.kill()
    with (
        served(home, "--bind", "none", "--on-stop", "kill", engine=engine, prefix=prefix) as daemon,
        daemon.controller() as controller,
    ):
        for info in controller.list_sandboxes():
            assert controller.eval_code(info["id"], "past + 1")["result"] == "42"
        # As crashes.md has it: commands end with their daemon, sandboxes do not.
        assert controller.list_processes(made["id"]) == []
        gone = controller.exec_command(made["id"], ["sh", "-c", f"kill -0 {started}"])
        assert gone["exit_code"] != 0
    assert find_marked(home.vms) == {}


def check_forks(controller: Controller) -> None:
    """Templates are made and forked as they are without the filter."""
    assert controller.warm_snapshot("warm")["memory_bytes"] > 0
    forks = controller.spawn_sandboxes("warm", n=3)
    assert [info["way"] for info in forks] == ["fork"] * 3
    for info in forks:
        assert controller.eval_code(info["id"], "past + 1")["result"] == "42"
        assert controller.exec_command(info["id"], ["hostname"])["stdout"].strip() == info["id"]


def analyze(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The unit's own program is not installed here, which would be all that is found.
    copy = tmp_path / "forkd.service"
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE))
    return subprocess.run(["systemd-analyze", *words, copy], capture_output=True, text=True, timeout=_TRY_S)


# README


def test_the_readme_leads_to_a_sandbox_by_python_and_by_curl(home: Home) -> None:
    readme = (ROOT / "README.md").read_text()
    python = "".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    (console,) = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    with served(home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as daemon, daemon.controller() as controller:
        controller.create_snapshot("warm", "small", warm="class numpy:\n  zeros = bytearray", wait=True)
        variables = environment(home, "fake")
        python = python.replace("numpy.zeros(5).tolist()", "list(numpy.zeros(5))")
        shown = run([sys.executable, "-c", python], variables)
        assert shown.endswith("[0, 0, 0, 0, 0]\n")
        assert [view["tag"] for view in controller.list_snapshots()] == ["warm"]  # its checkpoints went with it
        assert controller.list_sandboxes() == []
        if shutil.which("curl") is None or shutil.which("jq") is None:
            pytest.skip("curl or jq is not installed")
        script = "\n".join(line.removeprefix("$ ") for line in console.splitlines())
        programs = f"{Path(sys.executable).parent}:{variables['PATH']}"
        answer = run(["sh", "-ec", script], variables | {"PATH": programs})
        assert '"exit_code": 0' in answer
        assert controller.list_sandboxes() == []
        assert set(re.findall(r"^# TYPE (\w+)", controller.metrics(), re.MULTILINE)) == {
            ticked(row[0])[0] for row in table(read("reference/metrics.md"), "name")
        }


def run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_TRY_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
