"""The proxy of the secrets recipe, run as it is, between a client and a server on loopback."""

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples/secret_proxy.py"
WAIT_S = 60.0


class Upstream(BaseHTTPRequestHandler):
    def answer(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            return
        size = int(self.headers.get("Content-Length", "0"))
        keys = self.headers.get_all("Authorization") or []
        body = f"{self.command} {self.path} {keys} {self.rfile.read(size).decode()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """Where the proxy listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as upstream:
        thread = threading.Thread(target=upstream.serve_forever)
        thread.start()
        command = [sys.executable, str(PROGRAM), f"http://127.0.0.1:{upstream.server_port}", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"API_KEY": "s3cret"},
        ) as proxy:
            try:
                assert proxy.stdout is not None
                found = re.search(r"Listening on (\S+)", proxy.stdout.readline())
                assert found
                yield found[1]
            finally:
                proxy.send_signal(signal.SIGTERM)
                proxy.wait(WAIT_S)
                upstream.shutdown()
                thread.join(WAIT_S)


def test_the_key_is_added_on_the_way(place: str):
    with urllib.request.urlopen(f"http://{place}/v1/things?a=1", timeout=WAIT_S) as answer:
        assert answer.read() == b"GET /v1/things?a=1 ['Bearer s3cret'] "
    with urllib.request.urlopen(f"http://{place}/v1", data=b"payload", timeout=WAIT_S) as answer:
        assert answer.read() == b"POST /v1 ['Bearer s3cret'] payload"


def test_a_key_of_the_client_is_dropped(place: str):
    request = urllib.request.Request(f"http://{place}/", headers={"authorization": "Bearer mine"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert b"mine" not in answer.read()


def test_the_client_cannot_choose_another_server(place: str):
    connection = HTTPConnection(place, timeout=WAIT_S)
    connection.request("GET", "http://127.0.0.1:1/steal")
    assert connection.getresponse().status == 400
    connection.close()


def test_a_redirect_is_not_followed_with_the_key(place: str):
    connection = HTTPConnection(place, timeout=WAIT_S)
    connection.request("GET", "/moved")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Location"]) == (302, "http://127.0.0.1:1/elsewhere")
    connection.close()


def test_a_body_that_is_too_large_is_refused(place: str):
    connection = HTTPConnection(place, timeout=WAIT_S)
    connection.request("POST", "/", headers={"Content-Length": str(1 << 40)})
    assert connection.getresponse().status == 413
    connection.close()


def test_it_does_not_start_without_a_key():
    env = {name: value for name, value in os.environ.items() if name != "API_KEY"}
    ended = subprocess.run([sys.executable, str(PROGRAM), "http://x"], env=env, capture_output=True, timeout=WAIT_S)
    assert ended.returncode == 2 and b"API_KEY" in ended.stderr
