"""What bad input gets: an error of ours, soon, and a daemon that goes on."""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support_client import JSON, Client
from support_keys import ERROR
from support_processes import wait_until

HEAD = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(autouse=True)
def daemon_goes_on(client: Client) -> Iterator[None]:
    yield
    assert client.get("/healthz").status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"snapshot_tag": "a"',
        b'{"snapshot_tag": NaN}',
        b'{"n": Infinity}',
        b'{"a": -Infinity}',
        '{"snapshot_tag": "base"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"{'snapshot_tag': 'base'}",
        b'{"a": 1}}',
        b'{"a": "\x01"}',
    ],
)
def test_what_is_no_json_is_400(client: Client, data: bytes) -> None:
    answer = client.post("/v1/sandboxes", data=data, headers=JSON)
    assert answer.error == (400, "invalid_input")
    assert answer.body.keys() == ERROR.keys()


WRONG: dict[str, list[Any]] = {
    "snapshot_tag": [None, ["base"], {"a": 1}, "\udc80", "base\0", "base\n", "", "x" * 100_000],
    "n": [1.0, 10**30, None],
    "memory_limit_mib": ["256", 10**30, -1],
    "cpu_limit": [0, 1e9, "1"],
    "pids_limit": [0, 1.5],
    "io_limit_mib_s": [0],
    "timeout_secs": [1e308, True],
    "env": [{"A": None}, {"A": "a\0b"}, {"A": "\ud800"}, {"\udc80": "x"}, {"": "x"}, [["A", "b"]]],
    "labels": [{"a": "x" * 1025}, {"\udfff": "x"}],
    "metadata": ["x"],
    "agent_port": [70000],
}
WRONG_BODIES = [{"snapshot_tag": "base", key: value} for key, values in WRONG.items() for value in values]


@pytest.mark.parametrize("body", ["text", 3, None, True, [], ["a"], {}, *WRONG_BODIES])
def test_wrong_types_and_impossible_values_are_400_or_422(client: Client, body: Any) -> None:
    answer = client.post("/v1/sandboxes", data=json.dumps(body), headers=JSON)
    assert answer.status in (400, 422), answer.content
    assert answer.body["code"] == "invalid_input"
    assert len(answer.content) < 2000


def test_the_last_of_two_equal_keys_counts(client: Client) -> None:
    data = b'{"snapshot_tag": "base", "snapshot_tag": "nope"}'
    assert client.post("/v1/sandboxes", data=data, headers=JSON).status == 404


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "é"]
)
def test_another_content_type_is_415(client: Client, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind.encode("latin-1").decode("latin-1")}
    answer = client.post("/v1/sandboxes", data=b'{"snapshot_tag": "base"}', headers=headers)
    assert answer.error == (415, "invalid_input")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"])
def test_json_by_other_names_is_json(client: Client, kind: str) -> None:
    data = b'{"snapshot_tag": "nope"}'
    assert client.post("/v1/sandboxes", data=data, headers={"Content-Type": kind}).status == 404


def test_a_declared_body_beyond_the_limit_is_413_before_it_is_sent(client: Client) -> None:
    assert client.exchange(HEAD + b"Content-Length: 3000000\r\n\r\n").error == (413, "invalid_input")


def test_a_sent_body_beyond_the_limit_is_413_and_the_answer_is_not_lost(client: Client, tcp: Client) -> None:
    for asked in (client, tcp):
        answer = asked.post("/v1/sandboxes", data=b" " * 3_000_000, headers=JSON)
        assert answer.status == 413


def test_an_endless_chunked_body_is_413(client: Client) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert client.exchange(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 1000).error[0] == 413


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 20_000,
        b"GET /" + b"a" * 200_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_is_400_in_our_form(client: Client, data: bytes) -> None:
    answer = client.exchange(data)
    assert answer.status in (400, 404, 415)
    assert answer.body.keys() == ERROR.keys()


def test_a_body_that_ends_early_is_400(client: Client, sandbox: str, tmp_path: Path) -> None:
    early = HEAD + b'Content-Length: 100\r\n\r\n{"snapshot_tag"'
    assert client.exchange(early, half_close=True).error == (400, "invalid_input")
    early = f"PUT {sandbox}/files?path={tmp_path}/half HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf".encode()
    assert client.exchange(early, half_close=True).error[0] == 400
    assert client.get(f"{sandbox}/files/stat?path={tmp_path}/half").status == 404


def test_a_client_that_resets_leaves_nothing_behind(client: Client, tcp: Client, sandbox: str, tmp_path: Path) -> None:
    for sent in (
        HEAD + b"Content-Length: 100\r\n\r\n{",
        f"PUT {sandbox}/files?path={tmp_path}/reset HTTP/1.1\r\nHost: ::1\r\nContent-Length: 9\r\n\r\nabc".encode(),
        f"GET {sandbox}/files?path=/dev/zero HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        b"GET /v1/events?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        sock = tcp.raw()
        sock.sendall(sent)
        time.sleep(0.2)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    time.sleep(0.3)
    assert client.get(f"{sandbox}/files/stat?path={tmp_path}/reset").status == 404
    assert client.post(f"{sandbox}/exec", {"args": ["true"]}).status == 200


def test_clients_that_do_not_read_keep_nobody_waiting(client: Client, sandbox: str) -> None:
    socks = []
    body = b'{"shell": "head -c 8000000 /dev/zero"}'
    request = f"POST {sandbox}/exec HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for path in ("exec", "exec/stream"):
        sock = client.raw()
        sock.sendall(request.replace("/exec ", f"/{path} ").encode() + body)
        socks.append(sock)
    for _ in range(5):
        assert client.post(f"{sandbox}/eval", {"code": "1"}).status == 200
    for sock in socks:
        sock.close()


def test_connections_that_say_nothing_keep_nobody_waiting(client: Client) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(50):
            sock = stack.enter_context(client.raw())
            sock.sendall((b"", b"GET", HEAD, HEAD + b"Content-Length: 5\r\n\r\n{")[number % 4])
        assert client.get("/v1/sandboxes").status == 200


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    both = b"GET /healthz HTTP/1.1\r\n\r\nGET /nope HTTP/1.1\r\nConnection: close\r\n\r\n"
    received = client.exchange(both).content
    assert received.index(b'{"ok": true}') < received.index(b"not_found")


@pytest.mark.parametrize(
    "name", ["..", ".", "%2e%2e", "..%2f..", "a%2fb", "%00", "%ff", "a%0ab", "%F0%9F%92%A9", "x" * 300, "-x", "%25"]
)
def test_tricks_in_names_are_400_or_404(client: Client, name: str) -> None:
    for method, path in (
        *(("GET", f"/v1/snapshots/{name}"), ("GET", f"/v1/snapshots/{name}/info"), ("DELETE", f"/v1/snapshots/{name}")),
        *(("GET", f"/v1/sandboxes/{name}"), ("DELETE", f"/v1/sandboxes/{name}"), ("GET", f"/v1/workspaces/{name}")),
        *(("DELETE", f"/v1/workspaces/{name}"), ("GET", f"/v1/sandboxes/{name}/console")),
        *(("POST", f"/v1/sandboxes/{name}/ping"), ("GET", f"/v1/sandboxes/{name}/files?path=/etc/passwd")),
        *(("POST", f"/v1/sandboxes/{name}/pause"), ("GET", f"/v1/sandboxes/{name}/processes")),
    ):
        answer = client.ask(method, path)
        assert answer.status in (400, 404), (method, path, answer.content)
        assert answer.body["code"] in ("invalid_input", "not_found")


def test_unknown_ids_are_404_on_every_route_of_a_sandbox(client: Client) -> None:
    document = client.get("/openapi.json").body
    examples = {
        "exec": {"args": ["a"]},
        "stream": {"args": ["a"], "code": "1"},
        "eval": {"code": "1"},
        "timeout": {"timeout_secs": 1},
        "processes": {"args": ["a"]},
        "resize": {"rows": 1, "cols": 1},
        "mkdir": {"path": "/a"},
        "rename": {"name": "a", "path": "/a", "to": "/b"},  # of the sandbox, and of a file
        "promote": {"child": "sb-9876543210"},
        "network": {"network": "none"},
        "ports": {"port": 80},
    }
    asked = 0
    for path, operations in document["paths"].items():
        if "/sandboxes/{id}" not in path:
            continue
        for method, operation in operations.items():
            where = path.replace("{id}", "sb-0123456789").replace("{pid}", "1").replace("{port}", "80") + "?path=/a"
            raw = "application/json" not in operation.get("requestBody", {}).get("content", {"application/json": 1})
            body = None if raw else examples.get(path.rpartition("/")[2], {})
            answer = client.ask(method.upper(), where, body, data=b"x" if raw else None)
            assert answer.error == (404, "not_found"), (method, path, answer.content)
            asked += 1
    assert asked > 20


def test_arguments_too_large_for_the_guest_are_refused(client: Client, sandbox: str) -> None:
    for body in (
        {"args": ["true", "x" * 1_500_000]},
        {"args": ["true", *["é" * 1000] * 300]},
        {"shell": "true", "env": {"A": "é" * 100_000}},
        {"args": ["true"], "cwd": "/" + "\udc80" * 5000},
        {"args": ["true"], "user": "no such user"},
        {"args": ["true"], "user": -5},
        {"args": ["true"], "user": 10**30},
    ):
        answer = client.post(f"{sandbox}/exec", body)
        assert 200 <= answer.status < 500, (str(body)[:50], answer.content)
    assert client.post(f"{sandbox}/files/mkdir", {"path": "/tmp/" + "é" * 3000}).status == 400


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80", "\udcff", "\0", "\u202e", "\U0001f4a9"])
def test_odd_texts_are_refused_or_come_through(client: Client, sandbox: str, text: str) -> None:
    for route, body in (
        ("exec", {"args": ["true", text]}),
        ("exec", {"args": [text]}),
        ("exec", {"shell": "cat", "stdin": text}),
        ("exec", {"args": ["true"], "user": text}),
        ("exec", {"args": ["true"], "cwd": f"/{text}"}),
        ("exec", {"args": ["true"], "env": {"A": text}}),
        ("exec", {"args": ["true"], "env": {text: "a"}}),
        ("exec", {"args": ["true"], text: 1}),
        ("exec/stream", {"args": ["true", text], "stdin": text}),
        ("eval", {"code": f"{text!r}"}),
        ("eval", {"code": text}),
        ("eval/stream", {"code": f"print({text!r})"}),
        ("processes", {"args": ["true", text]}),
        ("branch", {"tag": text}),
        ("files/mkdir", {"path": f"/nonexistent/{text}", "parents": False}),
        ("files/rename", {"path": f"/{text}", "to": text}),
    ):
        answer = client.post(f"{sandbox}/{route}", body)
        assert answer.status < 500 or answer.status == 501, (route, body, answer.content)
    for path, body in (
        ("/v1/snapshots", {"tag": "odd", "image": text}),
        ("/v1/snapshots", {"tag": "odd", "kernel": text, "rootfs": text}),
        ("/v1/snapshots", {"tag": text, "image": "small"}),
        ("/v1/workspaces", {"name": text, "snapshot_tag": "base"}),
        ("/v1/sandboxes", {"snapshot_tag": "base", "labels": {text: "a"}}),
    ):
        assert 400 <= client.post(path, body).status < 500


@pytest.mark.parametrize(("route", "body"), [("exec", {"args": ["true"]}), ("eval", {"code": "1"}), ("ping", None)])
def test_more_clients_than_a_guest_can_serve_at_once_are_all_answered(
    client: Client, sandbox: str, route: str, body: Any
) -> None:
    with ThreadPoolExecutor(100) as pool:
        statuses = pool.map(lambda _: client.post(f"{sandbox}/{route}", body).status, range(200))
        assert set(statuses) == {200}


def test_descriptors_do_not_grow_with_requests(client: Client) -> None:
    descriptors = Path(f"/proc/{client.get('/version').body['pid']}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(100):
        client.get("/version")
        client.post("/v1/sandboxes", data=b"{")
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 1, "descriptors are closed")
