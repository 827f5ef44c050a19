"""The page and the report in a real browser: everything is drawn, from this host alone, and fits the screen."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from made_up_run import MadeUpRun, thirty_days

from ckptd import status
from ckptd.core import picture
from ckptd.core.overview import Overview
from ckptd.ledger import Ledger
from ckptd.web import live, page
from ckptd.web.http import Application, WebServer
from ckptd.web.metrics import Tally

CHARTS = ("timeline", "waste", "curve", "restarts", "saves", "measured")
SCREENS = {"phone": (390, 844), "desktop": (1280, 800)}
LONGEST_MS = 90_000
LARGEST = 150_000
"""Bytes of the document of any run, unpacked."""
SHOTS = os.environ.get("CKPTD_SHOTS")
"""A directory: keep a picture of each page there, for people to look at."""


class Site:
    """A run whose ledger and status are served, and go on."""

    def __init__(self, directory, events, now, t):
        self.now, self.t = now, t
        self.path = directory / "ledger.db"
        with Ledger.open(self.path) as ledger:
            ledger.append_many(events)
        self.overview = live.LiveOverview(self.path, self.status)
        application = Application(tally=Tally(), status=self.status, alive=lambda: True, overview=self.overview)
        self.server = WebServer("127.0.0.1:0", application)
        self.server.start()

    def status(self):
        return status.document(self.now, t=self.t)

    @property
    def url(self):
        return f"http://{self.server.address}/"


@pytest.fixture(scope="module")
def month(tmp_path_factory):
    run = thirty_days()
    site = Site(tmp_path_factory.mktemp("month"), run.events, run.picture, run.t)
    yield site
    site.server.close()


@pytest.fixture
def site(tmp_path):
    """Of a run that is a few minutes old."""
    run = MadeUpRun(nodes=1, devices=2, mtbf_s=600.0, stall_s=2.0, upload_s=4.0).interrupted_times(2)
    run.launch()
    run.train(300.0)
    made = Site(tmp_path, run.events, run.picture, run.t)
    made.run = run
    yield made
    made.server.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    home = str(tmp_path_factory.mktemp("home"))
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=found,
            args=["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)],
            env={**os.environ, "HOME": home},
        )
        yield opened
        opened.close()


class Visit:
    """A page that was opened, what it asked for, and what it complained of."""

    def __init__(self, browser, url, *, screen="desktop", scheme="light"):
        width, height = SCREENS[screen]
        self.name = f"{screen}-{scheme}"
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.context.set_default_timeout(LONGEST_MS)
        self.page = self.context.new_page()
        self.asked, self.complaints = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-shown]")

    def drawn(self):
        """The charts that have something in them."""
        return {name for name in CHARTS if self.page.query_selector(f"#{name} .main-svg") is not None}

    def text(self, selector="body"):
        return self.page.inner_text(selector)

    def check(self, *, of=""):
        """Nothing hangs over the side, nothing complains."""
        assert self.complaints == []
        widest, width = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widest <= width
        if SHOTS:
            self.page.screenshot(path=os.path.join(SHOTS, f"{of}-{self.name}.png"), full_page=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


# --- without a browser ------------------------------------------------------------------------------------------------


def test_a_month_of_interruptions_is_no_more_to_send_than_a_phone_takes(month):
    body = month.overview.body()
    told = json.loads(body)
    assert told["status"]["failures"] == 1000
    assert told["wall_s"] > 28 * 86_400
    assert len(body) < LARGEST
    assert len(told["timeline"]["start_s"]) <= 240


# --- with one -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("screen", "scheme"), [("phone", "dark"), ("desktop", "light")])
def test_a_month_is_drawn_from_this_host_alone_and_can_be_read(browser, month, screen, scheme):
    with Visit(browser, month.url, screen=screen, scheme=scheme) as visit:
        assert visit.drawn() == set(CHARTS)
        assert all(url.startswith(month.url) for url in visit.asked)
        assert "1,000" in visit.text("#tiles")
        assert len(visit.page.query_selector_all("#interruptions details")) == 30
        visit.page.click("#interruptions details >> nth=0")
        assert visit.page.query_selector("#interruptions details[open] pre") is not None
        for selector in ("body", ".hint", "#tiles small", "th", "a", "#state b", "#notes li"):
            assert visit.page.evaluate(_CONTRAST, selector) >= 4.5, selector
        dark = visit.page.evaluate(_LUMINANCE, "body") < 0.1
        assert dark is (scheme == "dark")
        assert visit.page.query_selector_all("[role=img]:not([hidden]):not([aria-label])") == []
        visit.check(of="month")


def test_a_run_that_has_not_begun_says_so(browser, tmp_path):
    site = Site(tmp_path, [], picture.Picture(), 0.0)
    try:
        with Visit(browser, site.url, screen="phone") as visit:
            assert visit.drawn() == set()
            for said in ("The run has not begun.", "There was no restart.", "No checkpoint has been committed."):
                assert said in visit.text()
            visit.check(of="empty")
    finally:
        site.server.close()


def test_it_follows_the_run_and_says_when_nobody_answers(browser, site):
    with Visit(browser, site.url) as visit:
        before = visit.text("#tiles")
        known = len(site.run.events)
        site.run.train(600.0)
        with Ledger.open(site.path) as ledger:
            ledger.append_many(site.run.events[known:])
        site.now, site.t = site.run.picture, site.run.t
        visit.page.wait_for_function("before => document.getElementById('tiles').innerText !== before", arg=before)
        visit.page.emulate_media(color_scheme="dark")
        visit.check(of="small")
        site.server.close()
        visit.page.wait_for_selector("#note:not([hidden])")
        assert "No news from the daemon since" in visit.text("#note")
        assert visit.drawn() == set(CHARTS)


def test_the_report_needs_nobody(browser, site, tmp_path):
    folded = Overview()
    for event in site.run.events:
        folded.apply(event)
    file = tmp_path / "report.html"
    file.write_text(page.report_page(folded.document(site.status()), text="in words"))
    with Visit(browser, file.as_uri(), screen="phone") as visit:
        assert visit.drawn() == set(CHARTS)
        assert visit.asked == [file.as_uri()]
        visit.check(of="report")


# WCAG 2: relative luminance, of text and of what is behind it.
_FUNCTIONS = """
  const luminance = (text) => {
    const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (selector) => {
    let element = document.querySelector(selector);
    while (getComputedStyle(element).backgroundColor === "rgba(0, 0, 0, 0)") element = element.parentElement;
    return luminance(getComputedStyle(element).backgroundColor);
  };"""
_LUMINANCE = f"selector => {{ {_FUNCTIONS} return behind(selector); }}"
_CONTRAST = f"""selector => {{ {_FUNCTIONS}
  const [ink, back] = [luminance(getComputedStyle(document.querySelector(selector)).color), behind(selector)];
  return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
}}"""
