"""What is the page made of? A template, a style sheet, a script, and plotly's JavaScript out of its Python package.

plotly itself is never imported: only the file that it ships is read. The report is the same page with everything in it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from ckptd import __version__

PLOTLY: Final = "plotly.min.js"
POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the live page: nothing from elsewhere. plotly sets styles from its script."""
_KINDS: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_FILES: Final = ("page.css", "page.js")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticFile:
    """A file as it is served."""

    body: bytes
    packed: bytes
    """The same by gzip."""
    kind: str
    etag: str


def _read(name: str) -> bytes:
    with open(os.path.join(_HERE, "static", name), "rb") as file:
        return file.read()


def plotly_path() -> str | None:
    """Where plotly's script is; None: plotly is not installed, and there are no charts."""
    found = importlib.util.find_spec("plotly")
    for place in (found.submodule_search_locations if found is not None else None) or ():
        path = os.path.join(place, "package_data", PLOTLY)
        if os.path.isfile(path):
            return path
    return None


@functools.cache
def static_file(name: str) -> StaticFile | None:
    """The file that is served under /static/`name`; None: there is no such file."""
    if name in _FILES:
        body = _read(name)
    elif name == PLOTLY and (path := plotly_path()) is not None:
        with open(path, "rb") as file:
            body = file.read()
    else:
        return None
    return StaticFile(
        body=body,
        packed=gzip.compress(body, compresslevel=6, mtime=0),
        kind=_KINDS[name.rpartition(".")[2]],
        etag=f'"{hashlib.sha256(body).hexdigest()[:20]}"',
    )


@functools.cache
def live_page() -> bytes:
    """The page at `/`; it asks for its data itself."""
    digest = hashlib.sha256(b"".join(_read(name) for name in _FILES)).hexdigest()[:12]
    return _render(live=True, title="ckptd", digest=digest, plotly=_plotly_version()).encode()


def report_page(document: dict[str, Any], *, text: str) -> str:
    """The page of a report: one file that needs no other. `text`: the report for who sees no charts."""
    path = plotly_path()
    plotly = ""
    if path is not None:
        with open(path, encoding="utf-8") as file:
            plotly = file.read()
    return _render(
        live=False, title=f"{document['status']['name']}: report", document=_embedded(document), text=text,
        css=_read("page.css").decode(), js=_read("page.js").decode(), plotly=plotly,
    )  # fmt: skip


def _embedded(document: dict[str, Any]) -> str:
    """JSON that cannot end the element that it stands in, whatever a job wrote into its log."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def _plotly_version() -> str:
    try:
        return importlib.metadata.version("plotly")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _render(**values: Any) -> str:
    loader = jinja2.FileSystemLoader(os.path.join(_HERE, "templates"))
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html").render(version=__version__, **values)
