"""How do two loss curves look over each other? An SVG of a few kilobytes, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

_WIDTH: Final = 760
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 50
_STYLES: Final = (
    ("uninterrupted", "#1f77b4", 'stroke-width="4" stroke-opacity="0.45"'),
    ("interrupted and resumed", "#d62728", 'stroke-width="1.5"'),
)


def svg(straight: Sequence[float | None], resumed: Sequence[float | None], *, resume_step: int, title: str) -> str:
    """A picture of both curves: losses of the steps from 1 on; None: not known. A line marks the resume."""
    values = [v for v in (*straight, *resumed) if v is not None and math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    steps = max(len(straight), len(resumed), 2)

    def x(step: float) -> float:
        return _LEFT + (step - 1) / (steps - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#444"/>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    parts += [
        f'<text x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>'
        for step in sorted({1, resume_step, steps})
    ]
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">step</text>')
    at = x(resume_step + 0.5)
    parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#888" stroke-dasharray="4 4"/>')
    parts.append(f'<text x="{at + 4:.1f}" y="{_TOP + 10}" fill="#666">resume</text>')
    for i, ((name, colour, style), curve) in enumerate(zip(_STYLES, (straight, resumed), strict=True)):
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" {style}/>' for points in _polylines(curve, x, y)
        ]
        parts.append(f'<text x="{_LEFT + 220 * i}" y="40" fill="{colour}">{name}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _polylines(curve: Sequence[float | None], x: object, y: object) -> list[str]:
    """The points of each unbroken piece of a curve."""
    assert callable(x)
    assert callable(y)
    pieces: list[list[str]] = [[]]
    for step, value in enumerate(curve, start=1):
        if value is not None and math.isfinite(value):
            pieces[-1].append(f"{x(step):.1f},{y(value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    return [" ".join(piece) for piece in pieces if piece]
