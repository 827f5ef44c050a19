"""How does a worker run the user's script, so that the script cannot tell, and a failure is never lost?

`python -m ckptd_shim.launch [--] script.py args...` and `... -m pkg.mod args...` do what `python script.py args...` and
`python -m pkg.mod args...` do, with three things more. Python stacks are written to `rank<k>.stacks` on `STACKS_SIGNAL`.
The heartbeat page exists from the start, in phase IMPORT. And a failure is written to `rank<k>.error.json` before
anything else happens, after which the process ends at once: see `_fail`.

torch is not imported here: the script does that, or a forkserver has done it already.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ckptd_shim import contract, pulse

if TYPE_CHECKING:
    from collections.abc import Sequence

STACKS_SIGNAL: Final = int(signal.SIGRTMIN) + 7
"""A worker that gets this signal appends the Python stacks of all its threads to its stacks file, and goes on."""

_USAGE: Final = "usage: python -m ckptd_shim.launch [--] script.py [args...] | -m pkg.mod [args...]"
_LONGEST_TEXT: Final = 256 * 1024


class _CannotStart(Exception):
    """There is no such script or module: said in Python's own words, without a traceback."""

    def __init__(self, message: str, status: int, cause: Exception) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


def run(argv: Sequence[str]) -> NoReturn:
    """Run a script as `__main__` and end as Python would.

    A script that ends well leaves by SystemExit(0), for the caller to let through to the top: the interpreter's own
    ending then joins threads, runs exit handlers and closes files. One that fails leaves by os._exit and does not return
    at all. Reads the environment when called and keeps nothing in this module, so a forked child may call it.

    Args:
        argv: [script, args...] or ["-m", module, args...], after an optional "--".
    """
    directory, rank = _place()
    _watch(directory, rank)
    try:
        code, main = _load(list(argv))
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102  running the script is what this module is for
    except SystemExit as exit_:
        status = _exit_status(exit_.code)
        if status:
            _fail(exit_, status, directory, rank)
    except _CannotStart as error:
        _fail(error, error.status, directory, rank)
    except KeyboardInterrupt as error:
        _fail(error, 128 + signal.SIGINT, directory, rank)
    except BaseException as error:  # some libraries derive their errors from it
        _fail(error, 1, directory, rank)
    raise SystemExit(0)


# --- before the script ------------------------------------------------------------------------------------------------


def _place() -> tuple[str | None, int]:
    """(attempt's directory or None, rank), from the environment; what is missing there is done without."""
    rank = os.environ.get("RANK", "0")
    path = os.environ.get(contract.ENV_LAUNCH)
    directory = None
    if path:
        try:
            directory = contract.LaunchContext.read(path).attempt_dir
        except (OSError, contract.ContractError) as error:
            _say(f"ckptd: {contract.ENV_LAUNCH} cannot be used, going on without: {error}")
    return directory, int(rank) if rank.isdecimal() else 0


def _watch(directory: str | None, rank: int) -> None:
    with contextlib.suppress(Exception):  # no stderr to write to
        faulthandler.enable()
    if directory is None:
        return
    try:
        # The descriptor stays open for as long as the process lives; exec closes it, and resets the signal as well.
        stacks = os.open(
            os.path.join(directory, contract.stacks_name(rank)),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACKS_SIGNAL})
    except (OSError, ValueError, RuntimeError) as error:
        _say(f"ckptd: no stacks on request: {error}")
    try:
        page = pulse.PulseWriter(os.path.join(directory, contract.pulse_name(rank)))
        page.phase(contract.Phase.IMPORT)
        page.close()
    except OSError as error:
        _say(f"ckptd: no heartbeat page: {error}")


def _load(argv: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    """The script's code and a fresh `__main__` for it; sets sys.argv and sys.path as Python does."""
    if argv[:1] == ["--"]:
        del argv[0]
    elif argv[:1] != ["-m"] and argv and argv[0].startswith("-"):
        raise _CannotStart(_USAGE, 2, ValueError(f"unknown option {argv[0]}"))
    if not argv or argv == ["-m"]:
        raise _CannotStart(_USAGE, 2, ValueError("no script is given"))
    if argv[0] == "-m":
        return _load_module(argv[1], argv[2:])
    return _load_script(argv[0], argv[1:])


def _load_script(script: str, args: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise _CannotStart(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {os.strerror(error.errno or 0)}",
            2,
            error,
        ) from None
    _put_first(os.path.dirname(os.path.realpath(path)))
    main = _new_main(path, importlib.machinery.SourceFileLoader("__main__", path))
    return compile(source, path, "exec", dont_inherit=True), main


def _load_module(name: str, args: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    _put_first(os.getcwd())
    sys.argv = ["-m", *args]
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        package, spec = name, _find(f"{name}.__main__")
        if spec is None:
            text = f"No module named {package}.__main__; {package!r} is a package and cannot be directly executed"
            raise _CannotStart(f"{sys.executable}: {text}", 1, ModuleNotFoundError(text))
    code = _code_of(spec)
    if spec is None or code is None:
        text = f"No module named {name}" if spec is None else f"No code object available for {name}"
        raise _CannotStart(f"{sys.executable}: {text}", 1, ModuleNotFoundError(text))
    sys.argv[0] = spec.origin or name
    main = _new_main(spec.origin, spec.loader)
    main.__dict__.update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return code, main


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """As find_spec, and None too when a package on the way does not exist; an error inside of one gets out."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _code_of(spec: importlib.machinery.ModuleSpec | None) -> types.CodeType | None:
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        return None
    code: types.CodeType | None = get_code(spec.name)
    return code


def _new_main(path: str | None, loader: Any) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins, __annotations__={})
    return main


def _put_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


# --- after it ---------------------------------------------------------------------------------------------------------


def _exit_status(code: Any) -> int:
    """The status that Python makes of the argument of sys.exit."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    return 1


def _fail(error: BaseException, status: int, directory: str | None, rank: int) -> NoReturn:
    """Record the failure, show it, end.

    Exit handlers do not run and threads are not waited for. On a rank that failed they often wait for ranks that wait
    for it, which would turn a failure with a cause into a hang without one; what the script itself wanted to clean up,
    it did on the way here. The record comes before anything that can block.
    """
    try:
        if directory is not None:
            _record(error, status, directory, rank)
        _show(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _record(error: BaseException, status: int, directory: str, rank: int) -> None:
    path = os.path.join(directory, contract.error_name(rank))
    try:
        subject = error.cause if isinstance(error, _CannotStart) else error
        extra: dict[str, Any] = {"exit_status": status}
        number = getattr(subject, "errno", None)
        if isinstance(subject, OSError) and isinstance(number, int):
            extra["errno"] = number
        last = pulse.read_pulse_file(os.path.join(directory, contract.pulse_name(rank)))
        contract.WorkerError(
            type=_name(type(subject)),
            mro=[_name(cls) for cls in type(subject).__mro__ if cls is not object],
            message=_text(error)[:_LONGEST_TEXT],
            traceback=_formatted(subject)[-_LONGEST_TEXT:],
            at=time.time(),
            mono=time.monotonic(),
            step=last.step if last is not None and last.pid == os.getpid() else None,
            extra=extra,
        ).write(path)
    except BaseException as problem:
        # The failure itself must still be shown, and its status kept.
        _say(f"ckptd: cannot write {path}: {problem!r}")


def _show(error: BaseException) -> None:
    """What Python itself would print, by the script's own excepthook if it has one."""
    if isinstance(error, _CannotStart):
        _say(str(error))
    elif isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            _say(_text(error))
    else:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        shown = error.with_traceback(_own_frames_off(error))
        try:
            sys.excepthook(type(shown), shown, shown.__traceback__)
        except BaseException as problem:
            _say("Error in sys.excepthook:\n" + _formatted(problem) + "\nOriginal exception was:\n" + _formatted(shown))


def _own_frames_off(error: BaseException) -> types.TracebackType | None:
    """The traceback from the script's first frame on; None for a script that could not even be compiled."""
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if name != run.__code__.co_filename and not name.startswith("<frozen importlib"):
            break
        tb = tb.tb_next
    return tb


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _own_frames_off(error)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<str() of a {type(error).__name__} failed: {problem!r}>"


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _say(text: str) -> None:
    with contextlib.suppress(BaseException):
        print(text, file=sys.stderr, flush=True)


def main() -> NoReturn:
    """The command line: `python -m ckptd_shim.launch`."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory that -m put there: the script's comes in its place
    run(sys.argv[1:])


if __name__ == "__main__":
    # As the module of its own name: `__main__` is about to become the script.
    importlib.import_module("ckptd_shim.launch").main()
