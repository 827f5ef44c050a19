"""The HTTP server: a taken port says so, an odd request harms nobody, a slow one holds nobody up."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from ckptd import status
from ckptd.core import picture
from ckptd.errors import ExitStatus, PortTaken
from ckptd.ledger import Ledger
from ckptd.web.http import Application, WebServer
from ckptd.web.live import LiveOverview
from ckptd.web.metrics import Tally


class Site:
    def __init__(self, ledger_path):
        self.alive = True
        self.state = "training"
        document = status.document(picture.Picture(), t=1.0)
        self.server = WebServer(
            "127.0.0.1:0",
            Application(
                tally=Tally(),
                status=lambda: {**document, "state": self.state},
                alive=lambda: self.alive,
                overview=LiveOverview(ledger_path, lambda: document),
            ),
        )
        self.server.start()

    def ask(self, path, **headers):
        """The status, the headers and the bytes of an answer."""
        try:
            with urlopen(Request(f"http://{self.server.address}{path}", headers=headers), timeout=10) as answer:
                return answer.status, answer.headers, answer.read()
        except HTTPError as error:
            return error.code, error.headers, error.read()

    def get(self, path, method="GET"):
        try:
            with urlopen(Request(f"http://{self.server.address}{path}", method=method), timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def site(tmp_path):
    with Ledger.open(tmp_path / "ledger.db"):
        pass
    site = Site(tmp_path / "ledger.db")
    yield site
    site.server.close()


@pytest.mark.parametrize(
    "state",
    [
        "starting",
        "waiting",
        "launching",
        "initialising",
        "restoring",
        "first_step",
        "training",
        "draining",
        "stopping",
        "ended",
    ],
)
def test_ready_is_stepping_and_healthy_is_alive(site, state):
    site.state = state
    assert site.get("/-/ready") == (200 if state in ("training", "draining") else 503, f"{state}\n")
    assert site.get("/-/healthy")[0] == 200


def test_a_loop_that_does_not_turn_is_not_healthy(site):
    site.alive = False
    assert site.get("/-/healthy")[0] == 503
    assert site.get("/-/ready")[0] == 200


def test_pages(site):
    assert json.loads(site.get("/api/status")[1])["state"] == "training"
    assert "ckptd_build_info" in site.get("/metrics")[1]
    assert site.get("/")[0] == 200
    assert site.get("/nothing")[0] == 404
    assert site.get("/metrics", method="POST")[0] == 405
    assert site.get("/api/status?x=1")[0] == 200


def test_everything_that_the_page_asks_for_is_here(site):
    code, headers, body = site.ask("/")
    assert code == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    page = body.decode()
    asked = re.findall(r'(?:src|href|data-source)="(?!data:)([^"]+)"', page)
    assert {name.partition("?")[0] for name in asked} >= {"static/page.css", "static/page.js", "static/plotly.min.js"}
    for name in asked:
        assert not name.startswith(("http", "//", "/")), f"{name} is not relative to the page"
        assert site.ask(f"/{name}")[0] == 200, name


def test_static_files_are_packed_and_kept_by_browsers(site):
    code, headers, body = site.ask("/static/plotly.min.js?v=1")
    packed_code, packed_headers, packed = site.ask("/static/plotly.min.js?v=1", **{"Accept-Encoding": "gzip"})
    assert (code, packed_code) == (200, 200)
    assert packed_headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == body
    assert len(packed) < len(body) / 2
    assert "immutable" in headers["Cache-Control"]
    assert site.ask("/static/page.js", **{"If-None-Match": site.ask("/static/page.js")[1]["ETag"]})[0] == 304


@pytest.mark.parametrize("name", ["", "nothing.js", "../page.py", "..%2fpage.py", "/etc/passwd", "page.html"])
def test_nothing_else_is_served(site, name):
    assert site.ask(f"/static/{name}")[0] == 404


def test_the_overview_says_what_is_wrong_with_the_ledger(site, tmp_path):
    assert json.loads(site.ask("/api/overview")[2])["wall_s"] == 0.0
    (tmp_path / "gone").mkdir()
    site.server.close()
    other = Site(tmp_path / "gone" / "ledger.db")
    try:
        code, _, body = other.ask("/api/overview")
        assert code == 503
        assert "there is no ledger" in json.loads(body)["error"]
        assert other.ask("/")[0] == 200
    finally:
        other.server.close()


def test_plotly_is_served_and_never_imported():
    """It takes a second and 100 MB that a daemon has no use for; nor does a daemon that nobody looks at need Jinja."""
    code = (
        "import sys, ckptd.cli._run; early = set(sys.modules); from ckptd.web import page; "
        "assert page.static_file('plotly.min.js') and page.live_page(); "
        "print('jinja2' in early, 'plotly' in sys.modules, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout.split() == ["False", "False", "False"], told.stderr


def test_who_says_nothing_or_nonsense_holds_nobody_up(site):
    host, port = site.server.address.split(":")
    with contextlib.ExitStack() as open_:
        silent = [open_.enter_context(socket.create_connection((host, int(port)))) for _ in range(20)]
        silent[0].sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        silent[1].sendall(b"GET /metr")
        assert site.get("/-/healthy")[0] == 200


@pytest.mark.parametrize("listen", ["127.0.0.1:{port}", "192.0.2.1:0", "no-such-host.invalid:0"])
def test_an_address_that_cannot_be_had_is_named(listen):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = listen.format(port=taken.getsockname()[1])
        with pytest.raises(PortTaken) as caught:
            WebServer(address, None)
    assert f"web.listen: {address} cannot be listened on: " in str(caught.value)
    assert "None" not in str(caught.value)
    assert caught.value.exit_status == ExitStatus.CONFIG
