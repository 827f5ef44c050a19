"""How does a worker begin without importing torch again? A process that has it all imported forks one.

The node agent starts `python -u -m ckptd_shim.forkserver FD` with the workers' interpreter and environment and talks to
it over the socket FD, a JSON line each way. Workers are forked twice, so that they become children of the agent, which
is their nearest subreaper: it gets their exit status from the kernel as if it had started them itself.

The server must stay fit to be forked: it never touches CUDA and runs no thread of its own. What a preloaded module does
to that is looked for, and said instead of `ready`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Final, NoReturn

PRELOAD: Final = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it, a second or two
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "torch.optim",
    "torch.utils.data",
    "ckptd_shim.shim",
    "ckptd_shim.sampler",
    "ckptd_shim.launch",
)
MAX_ORDER: Final = 1 << 22

Message = dict[str, Any]


def main() -> None:
    """Import, then fork a worker for each order until the other end closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory that -m put there: each worker puts its script's
    lines = channel.makefile("rb")
    order = json.loads(lines.readline(MAX_ORDER))
    begun = time.monotonic()
    refusal = _preload(order["preload"], order["path"])
    if refusal is not None:
        _say(channel, {"type": "refused", "why": refusal, "sources": _sources(order["preload"])})
        return
    gc.collect()
    gc.freeze()  # so that a collection in a worker does not copy every page that it shares
    _say(channel, {"type": "ready", "seconds": time.monotonic() - begun, "sources": _sources(order["preload"])})
    while line := lines.readline(MAX_ORDER):
        _fork(json.loads(line), channel)


def _say(channel: socket.socket, message: Message) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _preload(names: list[str], path: str | None) -> str | None:
    """Import everything; returns why workers cannot be forked from here, None when they can."""
    for name in PRELOAD:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")
    # Libraries of torch and numpy keep native threads that know about fork; from here on a new one is a module's own.
    before = _native_threads()
    if path is not None:
        sys.path.insert(0, path)
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:  # a module may even call sys.exit
                return f"restart.preload: {name} cannot be imported: {type(error).__name__}: {error}"
            if (threads := [t.name for t in threading.enumerate() if t is not threading.main_thread()]) or (
                _native_threads() > before
            ):
                return f"restart.preload: {name} starts threads ({', '.join(threads) or 'native ones'}), which no fork keeps"
    finally:
        if path is not None:
            sys.path.remove(path)
    return _cuda_was_touched()


def _cuda_was_touched() -> str | None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "a preloaded module has initialised CUDA, which no fork keeps"
    # Asking for the number of devices wakes the driver up already, of which torch.cuda.is_initialized knows nothing.
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (path := os.readlink(f"/proc/self/fd/{fd}")).startswith("/dev/nvidia"):
                return f"a preloaded module has opened {path}: it asked CUDA for something, which no fork keeps"
    return None


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _sources(names: list[str]) -> list[list[Any]]:
    """[path, mtime_ns, size] of the files that the user's preloaded modules came from, their submodules included."""
    found = []
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        file = getattr(module, "__file__", None)
        if file and any(name == wanted or name.startswith(f"{wanted.partition('.')[0]}.") for wanted in names):
            with contextlib.suppress(OSError):
                stat = os.stat(file)
                found.append([file, stat.st_mtime_ns, stat.st_size])
    return found


def _fork(order: Message, channel: socket.socket) -> None:
    refusal = _cuda_was_touched()
    if refusal is not None:
        _say(channel, {"type": "refused", "why": refusal})
        return
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        worker = os.fork()
        if worker:
            os.write(writer, str(worker).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        # Detached: `close` would leave it open for as long as the file that was made of it, and a descriptor closed by
        # number alone would be closed once more at the end, when the number is one of the script's.
        os.close(channel.detach())
        _become_worker(order)
    os.close(writer)
    os.waitpid(between, 0)  # now the worker belongs to the agent
    pid = int(os.read(reader, 32) or b"0")
    os.close(reader)
    _say(channel, {"type": "forked", "pid": pid})


def _default_signals() -> None:
    """The dispositions that Python itself begins with: what the agent ignores is inherited all the way to here."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _become_worker(order: Message) -> NoReturn:
    """In the child: what exec would have done, then the script."""
    try:
        os.setsid()
        _default_signals()
        for number, path in ((1, order["stdout"]), (2, order["stderr"])):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(order["cwd"])
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ.clear()
        os.environ.update(order["env"])
        wanted = os.environ.get("OMP_NUM_THREADS")
        if wanted != threads and wanted and wanted.isdecimal() and int(wanted) > 0:
            sys.modules["torch"].set_num_threads(int(wanted))
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # else every worker would draw what its siblings draw
    except BaseException as error:
        os.write(2, f"ckptd: this worker cannot begin: {error!r}\n".encode())
        os._exit(1)
    from ckptd_shim import launch

    launch.run(order["argv"])


if __name__ == "__main__":
    # As the module of its own name: `__main__` becomes the script in a worker.
    importlib.import_module("ckptd_shim.forkserver").main()
