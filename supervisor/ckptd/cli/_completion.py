"""`ckptd completion`: how does a shell know what may come next?"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ckptd import cli
from ckptd.errors import ExitStatus

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VAR = "_CKPTD_COMPLETE"
"""Set by the script that this prints: click then answers with what fits, instead of running the command."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print the script that completes commands, options and names of runs in SHELL.

    bash: add `eval "$(ckptd completion bash)"` to ~/.bashrc. zsh: the same with zsh, in ~/.zshrc, after compinit.
    fish: ckptd completion fish > ~/.config/fish/completions/ckptd.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    print(found(cli.ckptd, {}, "ckptd", COMPLETE_VAR).source())
    return ExitStatus.FINISHED
