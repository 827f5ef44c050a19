"""How do two loss curves look over each other?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptd import lineplot


def svg(straight: Sequence[float | None], resumed: Sequence[float | None], *, resume_step: int, title: str) -> str:
    """A picture of both curves: losses of the steps from 1 on; None: not known. A line marks the resume."""
    curves = [
        lineplot.Curve(
            name=name, x=range(1, len(losses) + 1), y=[math.nan if v is None else v for v in losses], width=width
        )
        for name, losses, width in (("uninterrupted", straight, 4.0), ("interrupted and resumed", resumed, 1.5))
    ]
    marks = [lineplot.Mark(name="resume", x=resume_step + 0.5)]
    return lineplot.svg(curves, marks, title=title, x_label="step", y_label="loss", from_zero=False)
