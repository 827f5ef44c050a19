"""How do a few curves look in one picture? An SVG of a few kilobytes, with axes that are linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 760
_HEIGHT: Final = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 70, 50
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_LEGEND_PX: Final = 115
_WIDE: Final = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points that are joined; a point that is not finite breaks the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    width: float = 1.8
    """Of the line; a wide one is see-through, so that another may lie on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at `x`, with a word at it."""

    name: str
    x: float


def svg(
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    from_zero: bool = True,
    y_max: float | None = None,
    x_tick: Callable[[float], str] = "{:.4g}".format,
    y_tick: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """A standalone SVG document. `from_zero`: the y axis shows 0; `y_max` cuts it off."""
    points = [(x, y) for c in curves for x, y in zip(c.x, c.y, strict=True) if _drawable(x, y, log_x=log_x)]
    xs = [x for x, _ in points] or [1.0, 2.0]
    ys = [y for _, y in points] or [0.0, 1.0]
    x_low, x_high = min(xs), max(xs)
    if x_high <= x_low:
        x_low, x_high = (x_low / 2, x_low * 2) if log_x else (x_low - 0.5, x_low + 0.5)
    y_low, y_high = min(ys), max(ys)
    if from_zero:
        y_low = min(0.0, y_low)
    if y_max is not None:
        y_high = min(y_high, y_max)
    if y_high <= y_low:
        y_high = y_low + 1.0
    scale = math.log if log_x else float

    def across(x: float) -> float:
        return _LEFT + (scale(x) - scale(x_low)) / (scale(x_high) - scale(x_low)) * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return _TOP + (y_high - y) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{bottom - _TOP}"/></clipPath>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#444"/>',
    ]
    for value in _ticks(y_low, y_high):
        parts += [
            f'<path d="M{_LEFT} {up(value):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{escape(y_tick(value))}</text>',
        ]
    parts += [
        f'<text x="{across(value):.1f}" y="{bottom + 18}" text-anchor="middle">{escape(x_tick(value))}</text>'
        for value in (_log_ticks(x_low, x_high) if log_x else _ticks(x_low, x_high))
    ]
    parts += [
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="{_LEFT - 6}" y="{_TOP - 10}" text-anchor="end">{escape(y_label)}</text>',
    ]
    for i, mark in enumerate(mark for mark in marks if x_low <= mark.x <= x_high):
        at, text_y = across(mark.x), _TOP + 12 + 14 * (i % 4)
        anchor, aside = ("end", -4) if at > _WIDTH * 0.8 else ("start", 4)
        parts += [
            f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#888" stroke-dasharray="4 4"/>',
            f'<text x="{at + aside:.1f}" y="{text_y}" fill="#555" text-anchor="{anchor}">{escape(mark.name)}</text>',
        ]
    legend_x = _LEFT
    for i, line in enumerate(curves):
        colour = _COLOURS[i % len(_COLOURS)]
        style = f'stroke-width="{line.width:g}"' + (' stroke-dasharray="6 4"' if line.dashed else "")
        if line.width > _WIDE:
            style += ' stroke-opacity="0.45"'
        parts += [
            f'<polyline points="{piece}" fill="none" stroke="{colour}" {style} clip-path="url(#plot)"/>'
            for piece in _pieces(line, across, up, log_x=log_x)
        ]
        parts.append(f'<text x="{legend_x}" y="42" fill="{colour}">{escape(line.name)}</text>')
        legend_x += max(_LEGEND_PX, 8 * len(line.name))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _drawable(x: float, y: float, *, log_x: bool) -> bool:
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)


def _pieces(line: Curve, across: Callable[[float], float], up: Callable[[float], float], *, log_x: bool) -> list[str]:
    """The points of each unbroken piece of a curve."""
    pieces: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if _drawable(x, y, log_x=log_x):
            pieces[-1].append(f"{across(x):.1f},{up(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    return [" ".join(piece) for piece in pieces if piece]


def _ticks(low: float, high: float) -> list[float]:
    """Round values, four to nine of them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Six values, evenly in log x, ends included: the caller's words for them need not be round in tens."""
    return [low * (high / low) ** (i / 5) for i in range(6)]
