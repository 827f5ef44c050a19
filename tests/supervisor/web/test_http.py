"""The HTTP server: a taken port says so, an odd request harms nobody, a slow one holds nobody up."""

from __future__ import annotations

import contextlib
import json
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from ckptd import status
from ckptd.core import picture
from ckptd.errors import ExitStatus, PortTaken
from ckptd.web.http import Application, WebServer
from ckptd.web.metrics import Tally


class Site:
    def __init__(self):
        self.alive = True
        self.state = "training"
        document = status.document(picture.Picture(), t=1.0)
        self.server = WebServer(
            "127.0.0.1:0",
            Application(tally=Tally(), status=lambda: {**document, "state": self.state}, alive=lambda: self.alive),
        )
        self.server.start()

    def get(self, path, method="GET"):
        try:
            with urlopen(Request(f"http://{self.server.address}{path}", method=method), timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def site():
    site = Site()
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
