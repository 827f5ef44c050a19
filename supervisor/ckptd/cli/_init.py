"""`ckptd init`: write a commented job.yaml to start from."""

from __future__ import annotations

import os
import sys

import click

from ckptd.errors import UsageError
from ckptd.jobexample import example, name_from


@click.command()
@click.argument("path", default="job.yaml", type=click.Path())
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def init(path: str, force: bool) -> None:
    """Write a commented job.yaml at PATH (default: ./job.yaml; a directory: into it).

    The run takes its name from the directory, and train.py in it as its script, or else the only Python file there is.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "job.yaml")
    directory = os.path.dirname(os.path.realpath(path))
    try:
        scripts = sorted(name for name in os.listdir(directory) if name.endswith(".py"))
        script = scripts[0] if len(scripts) == 1 else "train.py"
        text = example(name_from(os.path.basename(directory)), script)
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already; --force replaces it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    hint = "" if script in scripts else f" (there is no {script} yet: edit `command`)"
    print(f"wrote {path}{hint}; next: ckptd validate {path}", file=sys.stderr)
