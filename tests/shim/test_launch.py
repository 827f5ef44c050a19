"""The launcher against Python itself: the same script run both ways, and what only the launcher does."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ckptd_shim import contract
from ckptd_shim.launch import STACKS_SIGNAL
from ckptd_shim.pulse import read_pulse_file

LAUNCH = [sys.executable, "-m", "ckptd_shim.launch"]
TIMEOUT = 90


@pytest.fixture
def place(tmp_path):
    """An attempt's directory with a launch context, and the environment that names it, as rank 3."""
    attempt_dir = tmp_path / "attempt"
    attempt_dir.mkdir()
    contract.LaunchContext(
        run_id="r",
        run_name="r",
        attempt=1,
        attempt_dir=str(attempt_dir),
        control_path=str(attempt_dir / "control.json"),
        tier="disk",
        save_dir=str(tmp_path),
        resume=None,
        world_at_start=None,
        global_batch=None,
        micro_batch=None,
        interval_s=None,
        interval_steps=None,
        commit_sequence=0,
    ).write(tmp_path / "launch.json")
    return attempt_dir, {**os.environ, contract.ENV_LAUNCH: str(tmp_path / "launch.json"), "RANK": "3"}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def execute(command, *, env=None, cwd=None):
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def error_of(attempt_dir):
    return contract.WorkerError.read(attempt_dir / "rank3.error.json")


SAME = {
    "identity": """
        import sys, os, json, __main__
        print(__name__, sys.modules["__main__"].__dict__ is globals(), __main__.__file__ == __file__)
        print(sys.argv, sys.path, __file__, __spec__, __package__, __cached__, __doc__)
        print(type(__builtins__), type(__loader__).__name__, __loader__.get_filename())
        print(sorted(n for n in globals()))
        """,
    "docstring": '"""What it does."""\nprint(__doc__)',
    "annotations_not_inherited": """
        def f(x: int): ...
        print(f.__annotations__)
        y: "int" = 1
        print(__annotations__)
        """,
    "neighbour": "import neighbour; print(neighbour.VALUE)",
    "exit_int": "import sys; print('out', end=''); sys.exit(7)",
    "exit_zero": "import sys, atexit; atexit.register(print, 'bye'); sys.exit(0)",
    "exit_none": "import sys; sys.exit()",
    "exit_string": "import sys; sys.exit('no more')",
    "exit_object": "import sys; sys.exit((1, 2))",
    "exit_true": "import sys; sys.exit(True)",
    "exit_negative": "import sys; sys.exit(-1)",
    "exit_large": "import sys; sys.exit(10**30)",
    "exit_256": "import sys; sys.exit(256)",
    "os_exit": "import os; os.write(1, b'x'); os._exit(9)",
    "no_newline": "print('half a line', end='')",
    "normal_end": """
        import atexit, threading, time
        atexit.register(print, "handler")
        ready = threading.Event()
        threading.Thread(target=lambda: (ready.wait(), print("thread"))).start()
        print("end")
        threading.Timer(0.2, ready.set).start()
        """,
    "unclosed_file": """
        import sys
        f = open(sys.argv[1], "w")
        f.write("kept")
        """,
    "raises": """
        def inner():
            raise ValueError("wrong é")
        def outer():
            inner()
        print("before", end="")
        outer()
        """,
    "chained": """
        try:
            1 / 0
        except ZeroDivisionError as e:
            raise RuntimeError("later") from e
        """,
    "syntax_error": "x = (1,\nprint(x",
    "excepthook": """
        import sys
        sys.excepthook = lambda t, v, tb: print("hooked", t.__name__, v, tb.tb_frame.f_code.co_name, tb.tb_lineno)
        raise KeyError("k")
        """,
    "base_exception": """
        class Odd(BaseException):
            pass
        raise Odd("not an Exception")
        """,
    "warning": "import warnings; warnings.warn('old', DeprecationWarning)",
    "pickle": """
        import pickle
        class Thing:
            def __init__(self): self.x = 5
        print(pickle.loads(pickle.dumps(Thing())).x, Thing.__module__)
        """,
    "spawn": """
        import multiprocessing as mp, os
        class Thing:
            x = 5
        def child(queue, thing):
            queue.put((__name__, thing.x, type(thing).__module__))
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue, Thing()))
            process.start()
            print(queue.get(timeout=60))
            process.join()
            print(process.exitcode)
        """,
}


@pytest.mark.parametrize("name", SAME)
def test_a_script_runs_as_under_python(name, tmp_path, place):
    script = write(tmp_path / "dir" / "script.py", SAME[name])
    write(tmp_path / "dir" / "neighbour.py", "VALUE = 42")
    _, env = place
    arguments = ["dir/script.py", str(tmp_path / "file"), "-m", "--", "--flag"]
    python = execute([sys.executable, *arguments], cwd=tmp_path, env=env)
    left = (tmp_path / "file").read_text() if (tmp_path / "file").exists() else None
    (tmp_path / "file").unlink(missing_ok=True)
    ours = execute([*LAUNCH, *arguments], cwd=tmp_path, env=env)
    assert (ours.stdout, ours.stderr, ours.returncode) == (python.stdout, python.stderr, python.returncode)
    assert left == ((tmp_path / "file").read_text() if (tmp_path / "file").exists() else None)
    assert script.exists()
    if name == "unclosed_file":
        assert left == "kept"


def test_a_link_is_followed_for_the_path_of_imports(tmp_path):
    write(tmp_path / "real" / "script.py", "import sys, neighbour; print(sys.path[0], __file__, sys.argv)")
    write(tmp_path / "real" / "neighbour.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    python, ours = execute([sys.executable, "link.py"], cwd=tmp_path), execute([*LAUNCH, "link.py"], cwd=tmp_path)
    assert python.returncode == 0
    assert ours.stdout == python.stdout


def test_safe_path_is_honoured(tmp_path):
    write(tmp_path / "script.py", "import sys; print(sys.path)")
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    python = execute([sys.executable, "script.py"], cwd=tmp_path, env=env)
    assert execute([*LAUNCH, "script.py"], cwd=tmp_path, env=env).stdout == python.stdout != ""


MODULE = """
    import sys
    from . import sibling
    from .sibling import VALUE
    print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], VALUE, type(__loader__).__name__)
    print(sorted(globals()))
    if "raise" in sys.argv:
        raise ValueError("from a module")
    """


@pytest.mark.parametrize("target", ["pkg.mod", "pkg"])
def test_a_module_runs_as_under_python(target, tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "sibling.py", "VALUE = 7")
    write(tmp_path / "pkg" / "mod.py", MODULE)
    write(tmp_path / "pkg" / "__main__.py", MODULE)
    python = execute([sys.executable, "-m", target, "a", "-m"], cwd=tmp_path)
    ours = execute([*LAUNCH, "-m", target, "a", "-m"], cwd=tmp_path)
    assert python.returncode == 0
    assert (ours.stdout, ours.stderr, ours.returncode) == (python.stdout, python.stderr, 0)


def test_a_failing_module_shows_its_own_frames_only(tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "sibling.py", "VALUE = 7")
    write(tmp_path / "pkg" / "mod.py", MODULE)
    ours = execute([*LAUNCH, "-m", "pkg.mod", "raise"], cwd=tmp_path)
    assert ours.returncode == 1
    lines = ours.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{tmp_path}/pkg/mod.py", line 8')
    assert lines[-1] == "ValueError: from a module"


@pytest.mark.parametrize("target", ["nothing_here", "pkg.nothing", "nothing_here.at_all"])
def test_a_module_that_does_not_exist(target, tmp_path, place):
    attempt_dir, env = place
    write(tmp_path / "pkg" / "__init__.py", "")
    ours = execute([*LAUNCH, "-m", target], cwd=tmp_path, env=env)
    assert ours.returncode == 1
    assert ours.stderr == f"{sys.executable}: No module named {target}\n"
    assert error_of(attempt_dir).type == "ModuleNotFoundError"


def test_a_package_without_a_main(tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    python, ours = execute([sys.executable, "-m", "pkg"], cwd=tmp_path), execute([*LAUNCH, "-m", "pkg"], cwd=tmp_path)
    assert (ours.stderr, ours.returncode) == (python.stderr, python.returncode)


def test_a_module_spawns_children(tmp_path):
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "mod.py", "from . import __name__ as package\n" + textwrap.dedent(SAME["spawn"]))
    ours = execute([*LAUNCH, "-m", "pkg.mod"], cwd=tmp_path)
    assert ours.stdout == "('__mp_main__', 5, '__mp_main__')\n0\n", ours.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers(method, tmp_path):
    script = write(
        tmp_path / "script.py",
        """
        import sys, torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor(i * i)
        def join(items): return torch.stack(items).tolist()
        if __name__ == "__main__":
            loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1], collate_fn=join)
            print(list(loader))
        """,
    )
    ours = execute([*LAUNCH, "--", str(script), method])
    assert ours.stdout == "[[0, 1, 4, 9], [16, 25, 36, 49]]\n", ours.stderr


@pytest.mark.parametrize("command", [["dir/missing.py"], ["/no/such/place.py", "arg"], ["."]])
def test_a_script_that_cannot_be_opened(command, tmp_path, place):
    attempt_dir, env = place
    ours = execute([*LAUNCH, *command], cwd=tmp_path, env=env)
    assert ours.returncode == 2
    assert f"{sys.executable}: can't open file {os.path.normpath(tmp_path / command[0])!r}: [Errno " in ours.stderr
    assert "Traceback" not in ours.stderr
    if command != ["."]:  # of a directory Python says something else
        assert ours.stderr == execute([sys.executable, *command], cwd=tmp_path).stderr
        record = error_of(attempt_dir)
        assert (record.type, record.extra) == ("FileNotFoundError", {"exit_status": 2, "errno": 2})


@pytest.mark.parametrize("command", [[], ["--"], ["-m"], ["-x", "script.py"]])
def test_wrong_usage(command, place):
    attempt_dir, env = place
    ours = execute([*LAUNCH, *command], env=env)
    assert (ours.returncode, ours.stdout) == (2, "")
    assert ours.stderr.startswith("usage: ")
    assert error_of(attempt_dir).extra["exit_status"] == 2


def test_the_error_file(tmp_path, place):
    attempt_dir, env = place
    script = write(
        tmp_path / "script.py",
        """
        import os
        from ckptd_shim.pulse import PulseWriter
        PulseWriter(os.path.join(os.path.dirname(os.environ["CKPTD_LAUNCH"]), "attempt", "rank3.pulse")).beat(17, 170)
        class Mine(OSError):
            pass
        def fall():
            raise Mine(28, "no room")
        fall()
        """,
    )
    before = time.time(), time.monotonic()
    ours = execute([*LAUNCH, str(script)], env=env)
    assert ours.returncode == 1
    record = error_of(attempt_dir)
    assert record.type == "__main__.Mine"
    assert record.mro == ["__main__.Mine", "OSError", "Exception", "BaseException"]
    assert record.message == "[Errno 28] no room"
    assert record.traceback == ours.stderr
    assert record.step == 17
    assert record.extra == {"exit_status": 1, "errno": 28}
    assert before[0] <= record.at <= time.time()
    assert before[1] <= record.mono <= time.monotonic()
    assert {p.name for p in attempt_dir.iterdir()} == {"rank3.error.json", "rank3.stacks", "rank3.pulse"}


@pytest.mark.parametrize(
    ("text", "status", "kind", "message"),
    [
        ("import sys; sys.exit(7)", 7, "SystemExit", "7"),
        ("import sys; sys.exit('no more')", 1, "SystemExit", "no more"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt", ""),
        ("class Odd(BaseException): ...\nraise Odd('x')", 1, "__main__.Odd", "x"),
        ("def f(): f()\nf()", 1, "RecursionError", "maximum recursion depth exceeded"),
        ("raise ValueError('\\udc80 \\0')", 1, "ValueError", "\udc80 \0"),
        ("x = (", 1, "SyntaxError", "'(' was never closed (script.py, line 1)"),
        ("import sys; sys.stderr.close(); sys.stdout.close(); raise ValueError('blind')", 1, "ValueError", "blind"),
        ("import sys; sys.stderr = sys.stdout = None; raise ValueError('blind')", 1, "ValueError", "blind"),
    ],
)
def test_every_bad_end_is_recorded(text, status, kind, message, tmp_path, place):
    attempt_dir, env = place
    ours = execute([*LAUNCH, str(write(tmp_path / "script.py", text))], env=env)
    assert ours.returncode == status
    record = error_of(attempt_dir)
    assert (record.type, record.message, record.extra["exit_status"]) == (kind, message, status)


@pytest.mark.parametrize("text", ["pass", "import sys; sys.exit(0)", "import sys; sys.exit()"])
def test_a_good_end_is_not(text, tmp_path, place):
    attempt_dir, env = place
    assert execute([*LAUNCH, str(write(tmp_path / "script.py", text))], env=env).returncode == 0
    assert not (attempt_dir / "rank3.error.json").exists()


@pytest.mark.parametrize("end", ["raise ValueError('seen')", "sys.exit(5)"])
def test_a_failure_is_not_hidden_by_what_never_ends(end, tmp_path, place):
    attempt_dir, env = place
    script = write(
        tmp_path / "script.py",
        f"""
        import atexit, sys, threading, time
        atexit.register(time.sleep, 1000)
        threading.Thread(target=time.sleep, args=(1000,)).start()
        print("half a line", end="")
        {end}
        """,
    )
    ours = execute([*LAUNCH, str(script)], env=env)
    assert ours.returncode in {1, 5}
    assert ours.stdout == "half a line"
    assert error_of(attempt_dir).extra["exit_status"] == ours.returncode


def test_the_record_comes_before_a_hook_that_hangs(tmp_path, place):
    attempt_dir, env = place
    script = write(
        tmp_path / "script.py",
        """
        import os, sys, time
        def hook(*args):
            os.write(1, b"hooked")
            time.sleep(1000)
        sys.excepthook = hook
        raise ValueError("seen")
        """,
    )
    process = subprocess.Popen([*LAUNCH, str(script)], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(6) == b"hooked"
        assert error_of(attempt_dir).message == "seen"
    finally:
        process.kill()
        process.communicate()


def test_a_hook_that_fails_does_not_lose_the_error(tmp_path):
    script = write(tmp_path / "s.py", "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('seen')")
    ours = execute([*LAUNCH, str(script)])
    assert ours.returncode == 1
    assert "Error in sys.excepthook:" in ours.stderr
    assert "ZeroDivisionError" in ours.stderr
    assert ours.stderr.rstrip().endswith("ValueError: seen")


@pytest.mark.parametrize("context", [None, "/no/such/file", "broken"])
def test_it_does_without_a_launch_context(context, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in {contract.ENV_LAUNCH, "RANK"}}
    if context is not None:
        env[contract.ENV_LAUNCH] = str(write(tmp_path / "broken", "{}")) if context == "broken" else context
    script = write(tmp_path / "script.py", "print('ran')\nraise ValueError('and fell')")
    ours = execute([*LAUNCH, str(script)], env=env)
    assert (ours.returncode, ours.stdout) == (1, "ran\n")
    assert ours.stderr.rstrip().endswith("ValueError: and fell")
    assert ("CKPTD_LAUNCH cannot be used" in ours.stderr) == (context is not None)


def test_an_attempt_directory_that_is_gone(tmp_path, place):
    attempt_dir, env = place
    attempt_dir.rmdir()
    ours = execute([*LAUNCH, str(write(tmp_path / "script.py", "raise ValueError('seen')"))], env=env)
    assert ours.returncode == 1
    assert "cannot write" in ours.stderr
    assert ours.stderr.rstrip().endswith("ValueError: seen")


def test_torch_is_left_to_the_script(tmp_path, place):
    _, env = place
    script = write(tmp_path / "script.py", "import sys; print('torch' in sys.modules, 'ckptd' in sys.modules)")
    assert execute([*LAUNCH, str(script)], env=env).stdout == "False False\n"


def test_interrupted_by_a_signal(tmp_path, place):
    attempt_dir, env = place
    script = write(tmp_path / "script.py", "import time\nprint('up', flush=True)\ntime.sleep(1000)")
    process = subprocess.Popen(
        [*LAUNCH, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert error_of(attempt_dir).type == "KeyboardInterrupt"


BLOCKED = {
    "sleep": "time.sleep(1000)",
    "torch": "import torch\nx = torch.ones(1500, 1500)\nprint('up', flush=True)\nwhile True: torch.linalg.svd(x)",
}


@pytest.mark.parametrize("how", BLOCKED)
def test_stacks_on_request(how, tmp_path, place):
    attempt_dir, env = place
    script = write(
        tmp_path / "script.py",
        f"import threading, time\ndef beside():\n    time.sleep(1000)\n"
        f"threading.Thread(target=beside, daemon=True).start()\nprint('up', flush=True)\n{BLOCKED[how]}\n",
    )
    process = subprocess.Popen([*LAUNCH, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2 if how == "torch" else 1):
            assert process.stdout.readline() == "up\n"
        for count in (1, 2):  # and the rank goes on: it can be asked again
            process.send_signal(STACKS_SIGNAL)
            deadline = time.monotonic() + TIMEOUT
            while (text := (attempt_dir / "rank3.stacks").read_text()).count("(most recent call first)") < 2 * count:
                assert time.monotonic() < deadline, text
                os.sched_yield()
            assert process.poll() is None
        assert "in beside" in text
        assert f'{script}", line' in text
        # The dump ends with the launcher's own frames; its last line may still be on the way.
        last = read_pulse_file(attempt_dir / "rank3.pulse")
        assert last is not None
        assert (last.pid, last.phase) == (process.pid, contract.Phase.IMPORT)
    finally:
        process.kill()
        process.communicate()


def test_a_forked_child_may_call_run(tmp_path, place):
    """As a forkserver does: several scripts from one interpreter, each told by its environment."""
    attempt_dir, env = place
    script = write(
        tmp_path / "script.py", "import sys, json\nprint(json.dumps(sys.argv[1:]))\nsys.exit(int(sys.argv[1]))"
    )
    server = write(
        tmp_path / "server.py",
        """
        import os, sys
        from ckptd_shim.launch import run
        statuses = []
        for rank, status in ((3, 0), (4, 6)):
            pid = os.fork()
            if pid == 0:
                os.environ["RANK"] = str(rank)
                run([sys.argv[1], str(status)])
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(statuses, __name__)
        """,
    )
    done = execute([sys.executable, str(server), str(script)], env=env)
    assert done.stdout.splitlines() == [json.dumps(["0"]), json.dumps(["6"]), "[0, 6] __main__"]
    assert not (attempt_dir / "rank3.error.json").exists()
    assert contract.WorkerError.read(attempt_dir / "rank4.error.json").extra == {"exit_status": 6}
