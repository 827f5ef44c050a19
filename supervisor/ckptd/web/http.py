"""The HTTP server: a thread beside the event loop, which only ever reads."""

from __future__ import annotations

import gzip
import json
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from ckptd.errors import LedgerError, PortTaken
from ckptd.web import live
from ckptd.web.metrics import RunCollector, Tally

StartResponse = Callable[..., Any]
Headers = list[tuple[str, str]]

_HTML = "text/html; charset=utf-8"
_FOR_EVER = "public, max-age=31536000, immutable"
"""Of a static file that is asked for by its version."""


class Application:
    """Routes. `alive` says whether the daemon's main loop still turns; without `overview` there is no page."""

    def __init__(
        self, *, tally: Tally, status: Callable[[], dict[str, Any]], alive: Callable[[], bool],
        overview: live.LiveOverview | None = None,
    ) -> None:  # fmt: skip
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(tally, status))
        self._metrics = make_wsgi_app(registry)
        self._status = status
        self._alive = alive
        self._overview = overview

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
        if self._overview is not None and path == "/api/overview":
            return _overview(environ, start_response, self._overview)
        if self._overview is not None and path == "/":
            from ckptd.web import page  # here: a run that nobody looks at needs no templates

            headers = [("Content-Security-Policy", page.POLICY), ("Cache-Control", "no-cache")]
            return _answer(start_response, "200 OK", page.live_page(), _HTML, headers)
        if path.startswith("/static/"):
            return _static(environ, start_response, path.removeprefix("/static/"))
        return _answer(start_response, "404 Not Found", b"no such page\n")


def _answer(
    start_response: StartResponse, status: str, body: bytes, kind: str = "text/plain", more: Headers | None = None
) -> list[bytes]:
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("X-Content-Type-Options", "nosniff")]
    start_response(status, headers + (more or []))
    return [body]


def _overview(environ: dict[str, Any], start_response: StartResponse, overview: live.LiveOverview) -> list[bytes]:
    status = "200 OK"
    try:
        body = overview.body()
    except LedgerError as error:
        status, body = "503 Service Unavailable", live.empty(error)
    more: Headers = [("Cache-Control", "no-store")]
    if _takes_gzip(environ):
        body, more = gzip.compress(body, compresslevel=4), [*more, ("Content-Encoding", "gzip")]
    return _answer(start_response, status, body, "application/json", more)


def _static(environ: dict[str, Any], start_response: StartResponse, name: str) -> list[bytes]:
    from ckptd.web import page

    found = page.static_file(name)
    if found is None:
        return _answer(start_response, "404 Not Found", b"no such file\n")
    more = [("ETag", found.etag), ("Vary", "Accept-Encoding")]
    more.append(("Cache-Control", _FOR_EVER if environ.get("QUERY_STRING", "").startswith("v=") else "no-cache"))
    if environ.get("HTTP_IF_NONE_MATCH") == found.etag:
        start_response("304 Not Modified", more)
        return []
    if _takes_gzip(environ):
        return _answer(start_response, "200 OK", found.packed, found.kind, [*more, ("Content-Encoding", "gzip")])
    return _answer(start_response, "200 OK", found.body, found.kind, more)


def _takes_gzip(environ: dict[str, Any]) -> bool:
    return "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")


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
