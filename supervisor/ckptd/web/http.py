"""The HTTP server: a thread beside the event loop, which only ever reads."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from ckptd.errors import PortTaken
from ckptd.web.metrics import RunCollector, Tally

StartResponse = Callable[..., Any]

_INDEX = b"""<!doctype html><title>ckptd</title>
<p>ckptd: <a href="/api/status">status</a>, <a href="/metrics">metrics</a>, <a href="/-/healthy">healthy</a>,
<a href="/-/ready">ready</a></p>
"""


class Application:
    """Routes. `alive` says whether the daemon's main loop still turns."""

    def __init__(self, *, tally: Tally, status: Callable[[], dict[str, Any]], alive: Callable[[], bool]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(tally, status))
        self._metrics = make_wsgi_app(registry)
        self._status = status
        self._alive = alive

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _answer(start_response, "405 Method Not Allowed", b"only GET\n")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path == "/api/status":
            body = json.dumps(self._status()).encode() + b"\n"
            return _answer(start_response, "200 OK", body, "application/json")
        if path == "/-/healthy":
            if self._alive():
                return _answer(start_response, "200 OK", b"healthy\n")
            return _answer(start_response, "503 Service Unavailable", b"the daemon's main loop does not turn\n")
        if path == "/-/ready":
            state = self._status()["state"]
            training = state in ("training", "draining")
            status = "200 OK" if training else "503 Service Unavailable"
            return _answer(start_response, status, f"{state}\n".encode())
        if path == "/":
            return _answer(start_response, "200 OK", _INDEX, "text/html; charset=utf-8")
        return _answer(start_response, "404 Not Found", b"no such page\n")


def _answer(start_response: StartResponse, status: str, body: bytes, kind: str = "text/plain") -> list[bytes]:
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # of the default, 5, a sixth connection at a time waits a second for its retry

    def server_bind(self) -> None:
        # WSGIServer asks the DNS for this host's full name here, which may take seconds; nobody needs it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes are not news."""


class WebServer:
    """Listens from construction on, serves from `start` on."""

    def __init__(self, listen: str, application: Application) -> None:
        """Bind `host:port`; raises PortTaken."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = make_server(
                host.strip("[]"), int(port), application, server_class=_Server, handler_class=_Handler
            )
        except OSError as error:
            raise PortTaken(
                f"web.listen: {listen} cannot be listened on: {error.strerror}; name another port in job.yaml, port 0 for "
                "any free one, or `listen: null` for no web at all"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="web", daemon=True)

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
