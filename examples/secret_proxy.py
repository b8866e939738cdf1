"""A reverse proxy on the host that adds a secret: sandboxes use an API without ever seeing its key.

    API_KEY=... python3 examples/secret_proxy.py https://api.example.com --listen 10.0.0.1:8080
    forkd fork warm --allow 10.0.0.1:8080
    forkd exec SANDBOX -- curl http://10.0.0.1:8080/v1/models

Only what the sandbox asks for goes out, to this one server and with this one header; its own header of that name is
dropped, and redirects are passed back rather than followed with the key. docs/how-to/secrets.md explains the rest.
"""

from __future__ import annotations

import argparse
import http.client
import os
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

MAX_BODY_BYTES = 16 << 20
UPSTREAM_S = 120.0
CLIENT_S = 60.0
PIECE_BYTES = 64 * 1024
# Of one connection, not of the request; and what we set ourselves.
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "expect"),
}


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listen: tuple[str, int], upstream: str, header: str, value: str) -> None:
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"The upstream must be an http or https URL, got {upstream!r}")
        self.upstream, self.header, self.value = parts, header, value
        super().__init__(listen, Handler)

    def connect(self) -> http.client.HTTPConnection:
        host = self.upstream.hostname
        assert host is not None
        if self.upstream.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, self.upstream.port, timeout=UPSTREAM_S, context=context)
        return http.client.HTTPConnection(host, self.upstream.port, timeout=UPSTREAM_S)


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    timeout = CLIENT_S

    def forward(self) -> None:
        # A whole URL would let the guest choose the server that gets the key.
        if not self.path.startswith("/") or "Transfer-Encoding" in self.headers:
            self.send_error(400)
            return
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and int(length) <= MAX_BODY_BYTES):
            self.send_error(413)
            return
        body = self.rfile.read(int(length)) or None
        dropped = HOP_BY_HOP | {self.server.header.lower()}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection = self.server.connect()
        try:
            connection.request(self.command, self.path, body, {**headers, self.server.header: self.server.value})
            self.answer(connection.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            self.send_error(502)
        finally:
            connection.close()

    def answer(self, response: http.client.HTTPResponse) -> None:
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Connection", "close")  # the end of the answer is the end of the connection
        self.end_headers()
        while self.command != "HEAD" and (piece := response.read(PIECE_BYTES)):
            self.wfile.write(piece)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = forward


def main() -> int:
    parser = argparse.ArgumentParser(description="A reverse proxy that adds a header from the environment.")
    parser.add_argument("upstream", help="such as https://api.example.com")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="ADDRESS:PORT")
    parser.add_argument("--header", default="Authorization", help="its name (default Authorization)")
    parser.add_argument("--prefix", default="Bearer ", help="what stands before the key (default 'Bearer ')")
    parser.add_argument("--key-variable", default="API_KEY", metavar="NAME", help="where the key is (default API_KEY)")
    args = parser.parse_args()
    key = os.environ.get(args.key_variable)
    if not key:
        print(f"The variable {args.key_variable} holds no key", file=sys.stderr)
        return 2
    host, _, port = args.listen.rpartition(":")
    with Proxy((host, int(port)), args.upstream, args.header, args.prefix + key) as proxy:
        print(f"Listening on {proxy.server_address[0]}:{proxy.server_address[1]}", flush=True)
        proxy.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
