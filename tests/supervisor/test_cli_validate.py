"""`ckptd validate`, `ckptd init`, and what the command line makes of errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib import metadata

import click
import pytest

from ckptd import cli
from ckptd.errors import CkptdError, ExitStatus

GOOD = "name: r\ncommand: [train.py]\ncheckpoint: {tiers: [{name: disk, path: ck}]}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    place = tmp_path / "my project"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return place


class TestValidate:
    def test_right(self, here, capsys):
        (here / "job.yaml").write_text(GOOD)
        (here / "train.py").touch()
        assert cli.main(["validate"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("job.yaml: ok\n")
        assert str(here / "ck" / "r") in out
        assert err == ""
        assert not (here / "ck").exists()  # it starts and makes nothing

    def test_wrong(self, here, capsys):
        (here / "job.yaml").write_text(GOOD + "restrat: {}\nweb: {listen: x}\n")
        assert cli.main(["validate", "job.yaml"]) == 78
        out, err = capsys.readouterr()
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 3  # the script is not there either
        assert lines[1] == "job.yaml:4: restrat: unknown key; did you mean 'restart'?"
        assert lines[2].startswith("job.yaml:5: web.listen: ")

    @pytest.mark.parametrize(("extra", "status"), [("", 0), ("a: 1\n", 78)])
    def test_json(self, here, capsys, extra, status):
        (here / "train.py").touch()
        (here / "job.yaml").write_text(GOOD + extra)
        assert cli.main(["validate", "--json"]) == status
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["ok"] is (status == 0)
        assert len(document["problems"]) == (1 if extra else 0)
        assert err == ""

    def test_missing(self, capsys):
        assert cli.main(["validate"]) == 78
        assert "job.yaml: no such file; `ckptd init`" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("job", "shown"),
        [
            ("checkpoint: {interval: {steps: 5}, tiers: [{name: d, path: x}]}", "every 5 steps"),
            ("checkpoint: {interval: 90s, tiers: [{name: d, path: x}]}", "every 1.5m"),
            ("checkpoint: {max_interval: null, tiers: [{name: d, path: x}]}", "derived from measured costs (daly)\n"),
            (
                "batch: {global: 64, micro: 2}\ncheckpoint: {tiers: [{name: d, path: x}]}",
                "64 in all, at most 2 on a device",
            ),
            (
                "cluster: {min_devices: 2, max_devices: 4, multiple_of: 2, devices_per_node: 4}\ncheckpoint: {tiers: [{name: d, path: x}]}",
                "2 to 4, in multiples of 2; 4 on this machine",
            ),
        ],
    )
    def test_summary(self, here, capsys, job, shown):
        (here / "train.py").touch()
        (here / "job.yaml").write_text(f"name: r\ncommand: [train.py]\n{job}\n")
        assert cli.main(["validate"]) == 0
        assert shown in capsys.readouterr().out


class TestInit:
    def test_what_it_writes_is_right(self, here, capsys):
        (here / "train.py").touch()
        (here / "model.py").touch()
        assert cli.main(["init"]) == 0
        assert cli.main(["validate"]) == 0
        out, err = capsys.readouterr()
        assert "my-project" in out
        assert "wrote job.yaml; next: ckptd validate job.yaml" in err

    def test_takes_the_only_script(self, here):
        (here / "fit.py").touch()
        assert cli.main(["init", str(here)]) == 0
        assert 'command: ["fit.py"]' in (here / "job.yaml").read_text()
        assert cli.main(["validate"]) == 0

    def test_says_what_is_missing(self, capsys):
        assert cli.main(["init", "other.yaml"]) == 0
        assert "there is no train.py yet" in capsys.readouterr().err

    def test_never_overwrites_unasked(self, here, capsys):
        (here / "job.yaml").write_text("precious")
        assert cli.main(["init"]) == 64
        assert "job.yaml is there already; --force replaces it" in capsys.readouterr().err
        assert (here / "job.yaml").read_text() == "precious"
        assert cli.main(["init", "--force"]) == 0
        assert "my-project" in (here / "job.yaml").read_text()

    def test_where_it_cannot_write(self, capsys):
        assert cli.main(["init", "no/such/job.yaml"]) == 64
        assert "cannot be written: No such file" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch):
    """Adds a command `boom` that does what it is given."""

    def add(action):
        module = types.ModuleType("boom_of_the_tests")
        module.boom = click.command("boom")(action)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "boom", ("boom_of_the_tests:boom", "Does what a test wants."))

    return add


def raising(error):
    def action():
        raise error

    return action


class TestMain:
    @pytest.mark.parametrize("words", [[], ["frobnicate"], ["validate", "--frobnicate"], ["validate", "a", "b"]])
    def test_wrong_usage(self, words, capsys):
        assert cli.main(words) == 64
        out, err = capsys.readouterr()
        assert out == ""
        assert "Usage: ckptd" in err

    @pytest.mark.parametrize("words", [["--help"], ["-h"], ["validate", "--help"], ["--version"]])
    def test_help_and_version(self, words, capsys):
        assert cli.main(words) == 0
        assert "ckptd" in capsys.readouterr().out

    def test_every_command_is_listed_and_loads(self, capsys):
        cli.main(["--help"])
        listed = capsys.readouterr().out
        for name, (_, line) in cli.COMMANDS.items():
            command = cli.ckptd.get_command(click.Context(cli.ckptd), name)
            assert command.name == name
            assert name in listed
            assert line.split()[0] in listed

    def test_an_error_of_ours_is_one_message_and_its_status(self, command, capsys):
        class Refused(CkptdError):
            exit_status = ExitStatus.UNAVAILABLE

        command(raising(Refused("the thing is broken: mend it")))
        assert cli.main(["boom"]) == 69
        assert capsys.readouterr().err == "ckptd: the thing is broken: mend it\n"

    def test_a_bug(self, command, capsys):
        command(raising(ZeroDivisionError("zut")))
        assert cli.main(["boom"]) == 70
        err = capsys.readouterr().err
        assert "ZeroDivisionError: zut" in err
        assert "this is a bug in ckptd" in err

    def test_ctrl_c(self, command, capsys):
        command(raising(KeyboardInterrupt()))
        assert cli.main(["boom"]) == 130
        assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (75, 75), (ExitStatus.FAILED, 1), ("x", 0)])
    def test_status_of_a_command(self, command, result, status):
        command(lambda: result)
        assert cli.main(["boom"]) == status

    def test_status_by_exit(self, command):
        command(lambda: click.get_current_context().exit(75))
        assert cli.main(["boom"]) == 75


def run(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_command_imports_only_what_it_needs(here):
    (here / "train.py").touch()
    code = """
import sys
from ckptd.cli import main
heavy = {"torch", "pydantic", "sqlite_utils", "prometheus_client", "jinja2"}
assert main(["--help"]) == 0
assert main(["init"]) == 0
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert main(["validate"]) == 0
assert heavy & set(sys.modules) == {"pydantic"}, heavy & set(sys.modules)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("words", [["validate"], ["--help"]])
def test_a_reader_that_has_gone_is_no_error(here, words):
    (here / "train.py").touch()
    (here / "job.yaml").write_text(GOOD)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-c", "import sys; from ckptd.cli import main; sys.exit(main())", *words],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert result.stderr == ""
    assert result.returncode == 141


def test_a_terminal_that_cannot_show_a_name(here):
    (here / "train.py").touch()
    (here / "job.yaml").write_text(GOOD.replace("path: ck", "path: ck-\u00e4\u4e16"), encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = run("import sys; from ckptd.cli import main; sys.exit(main(['validate']))", env=environment)
    assert result.returncode == 0, result.stderr
    assert "ck-\\xe4\\u4e16" in result.stdout


def test_closed_stdout(here):
    (here / "train.py").touch()
    (here / "job.yaml").write_text(GOOD)
    shell = f"exec {sys.executable} -c \"import sys; from ckptd.cli import main; sys.exit(main(['validate']))\" >&-"
    result = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_installed_command_is_this_one():
    (entry,) = metadata.entry_points(group="console_scripts", name="ckptd")
    assert entry.load() is cli.main
