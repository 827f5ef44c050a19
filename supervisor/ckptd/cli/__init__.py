"""What does the command `ckptd` do with its words? It loads the one command that is named, and turns errors into statuses.

Commands are found by name and imported when they are used: `ckptd validate` waits for nothing that it does not need.
A command returns its exit status, or None for 0.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from ckptd import __version__
from ckptd.errors import CkptdError, ExitStatus, JobSpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "init": ("ckptd.cli._init:init", "Write a job.yaml to start from."),
    "run": ("ckptd.cli._run:run", "Run a job until it is over."),
    "status": ("ckptd.cli._ask:status", "Show where a run is."),
    "report": ("ckptd.cli._report:report", "Tell where a run's time went and what each restart cost."),
    "events": ("ckptd.cli._history:events", "List what happened to a run."),
    "checkpoints": ("ckptd.cli._history:checkpoints", "List the checkpoints of a run."),
    "pin": ("ckptd.cli._keep:pin", "Keep a checkpoint whatever the rules say."),
    "unpin": ("ckptd.cli._keep:unpin", "Keep it no longer than the rules say."),
    "gc": ("ckptd.cli._keep:gc", "Delete what the rules do not keep, and leftovers."),
    "rollback": ("ckptd.cli._keep:rollback", "Go on from an earlier checkpoint."),
    "prove": ("ckptd.cli._prove:prove", "Prove that a job resumes exactly, or say what it forgets."),
    "drill": ("ckptd.cli._drill:drill", "Restore the newest checkpoint for trial."),
    "save": ("ckptd.cli._ask:save", "Have a run save now."),
    "stop": ("ckptd.cli._ask:stop", "Have a run save and stop."),
    "drain": ("ckptd.cli._ask:drain", "Take a device or a node out of use."),
    "undrain": ("ckptd.cli._ask:undrain", "Give a device or a node back."),
    "plan": ("ckptd.cli._plan:plan", "Work out how often a job should save, and what that costs."),
    "simulate": ("ckptd.cli._simulate:simulate", "Compare ways of choosing the interval on simulated runs."),
    "import": ("ckptd.cli._import:import_log", "Read a log of interruptions: a CSV, or the output of sacct -P."),
    "doctor": ("ckptd.cli._doctor:doctor", "Look for what will go wrong, on this machine and with a job."),
    "completion": ("ckptd.cli._completion:completion", "Print what completes commands in a shell."),
    "validate": ("ckptd.cli._validate:validate", "Check a job.yaml without starting anything."),
}
"""Name of each command: where it is (`module:attribute`), and a line for `ckptd --help`, which imports none of them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click does it, without importing every command for the line that describes it."""
        fitting = [
            CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return fitting + click.Command.shell_complete(self, ctx, incomplete)

    # click would make a plain 1 of a broken pipe, which means that training failed.

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)  # prints the help
        except BrokenPipeError as error:
            raise _ReaderGone from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error


class _ReaderGone(Exception):
    """Whoever read our output has gone away, like `ckptd events | head`."""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckptd", message="%(prog)s %(version)s")
def ckptd() -> None:
    """Supervise a long training job: restart it from its newest committed checkpoint, and decide when to save."""


def _open_standard_streams() -> None:
    """Give 0, 1 and 2 to /dev/null where they are closed, as under `>&-`.

    Python makes None of such a stream, and the next file or socket that is opened gets its number: what is meant for
    standard error would end up in the ledger.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False, encoding="utf-8"))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; default: this process's) and return its exit status."""
    _open_standard_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text in the terminal's encoding
    try:
        result = ckptd.main(args=None if argv is None else list(argv), prog_name="ckptd", standalone_mode=False)
        sys.stdout.flush()
        return int(result) if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return ExitStatus.USAGE
    except (click.Abort, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED
    except (_ReaderGone, BrokenPipeError):
        # The interpreter flushes stdout once more as it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except JobSpecError as error:
        print(error, file=sys.stderr)  # each line begins with file and line, as editors like it
        return error.exit_status
    except CkptdError as error:
        print(f"ckptd: {error}", file=sys.stderr)
        return error.exit_status
    except Exception:
        traceback.print_exc()
        print(f"ckptd {__version__}: this is a bug in ckptd; please report it with the lines above", file=sys.stderr)
        return ExitStatus.BUG
