"""HTTP on loopback that goes wrong to order: it stands between a client and a server that works."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 65536


class Fault:
    """What happens to requests that match, `times` of them.

    Args:
        kind: `status` (answered with `code` instead), `reset` (after a part of the body), `half` (a part of the answer's body,
            then a reset), `slow` (`rate` bytes a second), `stall` (no answer before `release`).
        match: a regular expression for "METHOD /path?query".
    """

    def __init__(self, kind, match="", *, times=1, code=503, rate=200_000):
        self.kind, self.match, self.left, self.code, self.rate = kind, re.compile(match), times, code, rate


class FaultyProxy:
    """Listens on a port of its own while the block lasts."""

    def __init__(self, to):
        self.to = to
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        """Every request, in the order of arrival."""
        self.hit: Counter[str] = Counter()
        self.release = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(_Handler):
            proxy = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, *args, **options):
        with self._lock:
            self.faults.append(Fault(*args, **options))

    def clear(self):
        with self._lock:
            self.faults.clear()
        self.release.set()
        self.release = threading.Event()

    def fault_for(self, line):
        with self._lock:
            self.seen.append(line)
            for fault in self.faults:
                if fault.left > 0 and fault.match.search(line):
                    fault.left -= 1
                    self.hit[fault.kind] += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def log_message(self, *_):
        pass

    def _go(self):
        fault = self.proxy.fault_for(f"{self.command} {self.path}")
        kind = fault.kind if fault is not None else ""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if kind == "reset":
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            self._reset()
            return
        body = self._body(fault if kind == "slow" else None)
        if kind == "stall":
            self.proxy.release.wait(120)
        if kind == "status":
            said = f"<?xml version='1.0'?><Error><Code>{_CODES.get(fault.code, 'InternalError')}</Code><Message>to order</Message></Error>"
            self._answer(fault.code, {"Content-Type": "application/xml"}, said.encode())
            return
        upstream = HTTPConnection(*self.proxy.to, timeout=120)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
            headers["Content-Length"] = str(len(body))
            upstream.request(self.command, self.path, body, headers)
            got = upstream.getresponse()
            data = got.read()
            told = {
                k: v
                for k, v in got.getheaders()
                if k.lower() not in ("transfer-encoding", "connection", "date", "server")
            }
            if kind == "half":
                self._answer(got.status, told, data[: len(data) // 2], length=len(data))
                self._reset()
            else:
                self._answer(got.status, told, data, fault=fault if kind == "slow" else None)
        except OSError:
            self.close_connection = True
        finally:
            upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _go  # noqa: N815  as http.server wants them

    def _body(self, slow):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return data
        left, data = int(self.headers.get("Content-Length") or 0), bytearray()
        while left:
            piece = self.rfile.read(min(left, BLOCK))
            if not piece:
                break
            data += piece
            left -= len(piece)
            if slow is not None:
                time.sleep(len(piece) / slow.rate)
        return bytes(data)

    def _answer(self, status, headers, data, *, length=None, fault=None):
        self.send_response_only(status)
        size = headers.pop("Content-Length", None)
        for key, value in headers.items():
            self.send_header(key, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            return
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        for at in range(0, len(data), BLOCK):
            self.wfile.write(data[at : at + BLOCK])
            if fault is not None:
                time.sleep(BLOCK / fault.rate)

    def _reset(self):
        """End the connection as a crash would, and not in good order."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}
