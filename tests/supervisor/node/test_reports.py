"""What is read of what workers write down, and how much of it."""

from __future__ import annotations

import json

from ckptd import link
from ckptd.node import reports
from ckptd_shim.contract import WorkerError


def test_the_errors_of_many_ranks_fit_into_one_message(tmp_path):
    # A state that does not fit a model names every key of it, on every rank, in message and traceback.
    keys = ", ".join(f'"layers.{i}.weight"' for i in range(12_000))
    error = WorkerError(
        type="RuntimeError", mro=["RuntimeError"], message=f"Missing keys: {keys}",
        traceback=f"Traceback:\n  here\nRuntimeError: Missing keys: {keys}\nthe end", at=1.0, mono=1.0,
    )  # fmt: skip
    error.write(tmp_path / "e")
    found = reports.read_error(str(tmp_path / "e"))
    assert found["type"] == "RuntimeError"
    assert found["message"].startswith("Missing keys: ")
    assert found["traceback"].endswith("the end")
    assert len(json.dumps([found] * 64)) < link.MAX_LINE
