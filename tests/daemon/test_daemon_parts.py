"""Errors, audit log, logs and metrics, each for itself."""

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forkd import errors as tree
from forkd.daemon import logs
from forkd.daemon.audit import AuditEntry, AuditFile
from forkd.daemon.errors import STATUS, ErrorResponse, error_of_validation, status_of
from forkd.daemon.inputs import ExecBody, SpawnBody
from forkd.daemon.metrics import Metrics


def all_errors(root: type[tree.ForkdError]) -> set[type[tree.ForkdError]]:
    return {root}.union(*(all_errors(child) for child in root.__subclasses__()))


def test_every_error_of_the_tree_has_a_status_but_the_one_only_clients_raise() -> None:
    ours = [kind for kind in all_errors(tree.ForkdError) if not kind.__module__.startswith("forkd.client")]
    codes = {kind.code for kind in ours} - {"unreachable"}
    assert codes - set(STATUS) == set()


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/rest.md").read_text().partition("## Codes")[2]
    documented = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 2 and cells[0].startswith("`"):
            for code in cells[0].replace("`", "").split(", "):
                documented[code] = {int(status) for status in cells[1].split(", ")}
    assert set(documented) == set(STATUS)
    assert all(STATUS[code] in statuses for code, statuses in documented.items())


def test_an_error_that_says_its_status_keeps_it() -> None:
    error = tree.GuestDied("dead")
    assert status_of(error) == 502
    error.status = 409
    assert status_of(error) == 409


def test_error_bodies_have_details_only_when_there_are_some() -> None:
    assert json.loads(ErrorResponse(tree.NotFound("a")).body) == {"error": "a", "code": "not_found", "hint": None}
    body = json.loads(ErrorResponse(tree.NotFound("a", hint="b", details="c"), {"stdout": "d"}).body)
    assert body == {"error": "a", "code": "not_found", "hint": "b", "details": "c", "stdout": "d"}
    assert ErrorResponse(tree.NoCapacity("full")).headers["Retry-After"].isdigit()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ([], 422),
        ({"snapshot_tag": 3}, 422),
        ({"snapshot_tag": "a", "n": "3"}, 422),
        ({"snapshot_tag": "a", "n": True}, 422),
        ({"snapshot_tag": "a", "n": 3.0}, 422),
        ({"snapshot_tag": "a", "prewarm": 1}, 422),
        ({"snapshot_tag": "a", "on_timeout": "explode"}, 422),
        ({"snapshot_tag": "a", "env": {"A": 1}}, 422),
        ({"snapshot_tag": "a", "n": 0}, 400),
        ({"snapshot_tag": "a", "n": 1001}, 400),
        ({"snapshot_tag": "a", "timeout_secs": -1}, 400),
        ({"snapshot_tag": "a", "labels": {str(n): "" for n in range(65)}}, 400),
    ],
)
def test_a_wrong_shape_is_422_and_an_impossible_value_400(body: Any, status: int) -> None:
    with pytest.raises(ValidationError) as caught:
        SpawnBody.model_validate(body)
    assert status_of(error_of_validation(caught.value)) == status


def test_errors_about_bodies_do_not_repeat_what_was_sent() -> None:
    with pytest.raises(ValidationError) as caught:
        ExecBody.model_validate({"args": ["a"], "env": {"TOKEN": ["s3cret"]}})
    error = error_of_validation(caught.value)
    assert "env.TOKEN" in error.message
    assert "s3cret" not in error.message


def entry(path: str = "/v1/x") -> AuditEntry:
    return AuditEntry("2026-01-01T00:00:00.000Z", "id", "peer", "ci", "GET", path, 200, 12, ["sb-1"], "ua")


def test_the_audit_log_is_one_json_object_per_line_and_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep/audit.log"
    log = AuditFile(path)
    log.write(entry())
    log.write(entry("/v1/\n\udc80"))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["path"] for line in lines] == ["/v1/x", "/v1/\n\udc80"]
    assert set(lines[0]) == {
        *("ts", "request_id", "peer", "token", "method", "path", "status", "latency_us", "sandboxes", "ua")
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_audit_log_rotates_by_size_and_keeps_so_many(tmp_path: Path) -> None:
    log = AuditFile(tmp_path / "a.log", max_bytes=400, kept=3)
    for number in range(40):
        log.write(entry(f"/{number}"))
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert all(path.stat().st_size <= 400 for path in tmp_path.iterdir())
    order = [tmp_path / name for name in ("a.log.3", "a.log.2", "a.log.1", "a.log")]
    numbers = [int(json.loads(line)["path"][1:]) for path in order for line in path.read_text().splitlines()]
    assert numbers == list(range(40 - len(numbers), 40))


def test_a_reopened_audit_log_goes_on_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = AuditFile(path)
    log.write(entry("/1"))
    path.rename(tmp_path / "moved")
    log.write(entry("/2"))
    log.close()
    log.write(entry("/3"))
    log.close()
    assert len((tmp_path / "moved").read_text().splitlines()) == 2
    assert json.loads(path.read_text())["path"] == "/3"


def test_a_failing_disk_is_said_once_and_counted_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    failures: list[int] = []
    log = AuditFile(tmp_path / "file/a.log", on_failure=lambda: failures.append(1))
    for _ in range(3):
        log.write(entry())
    assert len(failures) == 3
    assert len(caplog.records) == 1
    (tmp_path / "file").unlink()
    log.write(entry())
    log.close()
    assert (tmp_path / "file/a.log").exists()


def test_the_audit_log_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("")
    (tmp_path / "a.log").symlink_to(tmp_path / "target")
    failures: list[int] = []
    AuditFile(tmp_path / "a.log", on_failure=lambda: failures.append(1)).write(entry())
    assert failures
    assert (tmp_path / "target").read_text() == ""


def render(formatter: logging.Formatter) -> str:
    record = logging.LogRecord("forkd.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.created = 1.5
    logs.ContextFilter().filter(record)
    return formatter.format(record)


def test_log_lines_carry_the_request_and_the_sandbox() -> None:
    tokens = logs.request_id.set("r1"), logs.sandbox_id.set("sb-1")
    try:
        assert render(logs.TextFormatter()) == (
            "1970-01-01T00:00:01.500Z info forkd.x: hello you request_id=r1 sandbox_id=sb-1"
        )
        assert json.loads(render(logs.JsonFormatter())) == {
            "ts": "1970-01-01T00:00:01.500Z",
            "level": "info",
            "logger": "forkd.x",
            "message": "hello you",
            "request_id": "r1",
            "sandbox_id": "sb-1",
        }
    finally:
        logs.request_id.reset(tokens[0])
        logs.sandbox_id.reset(tokens[1])


def test_metrics_have_the_names_others_rely_on() -> None:
    metrics = Metrics()
    metrics.errors.labels("not_found").inc()
    metrics.requests.labels("GET", "/healthz", 200).inc()
    text = metrics.render(lambda seen: seen.snapshots.set(3)).decode()
    names = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}
    relied_on = (
        *("snapshots_total", "sandboxes_active", "branches_in_flight", "branch_concurrency_cap", "build_info"),
        *("spawn_seconds", "spawned_total", "exec_seconds", "eval_seconds", "identity_seconds"),
        *("errors_total", "requests_total", "request_seconds"),
    )
    assert {f"forkd_{name}" for name in relied_on} <= names
    assert "forkd_snapshots_total 3.0" in text
    assert 'forkd_errors_total{code="not_found"} 1.0' in text
    assert 'forkd_requests_total{method="GET",route="/healthz",status="200"} 1.0' in text
