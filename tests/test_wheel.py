"""Does the wheel hold what it should, and does it live beside the package that owns the import name `supervisor`?"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUPERVISORD = "supervisor==4.3.0"


def pip(*arguments, python=None):
    where = [] if python is None else ["--python", str(python)]
    return subprocess.run(
        [sys.executable, "-m", "pip", *where, *map(str, arguments)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    built = pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", target, ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = target.glob("*.whl")
    return found


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"ckptd", "ckptd_shim"}
    assert {"ckptd/py.typed", "ckptd_shim/py.typed", "ckptd/cli/__init__.py", "ckptd/node/agent.py"} <= set(names)
    assert {f"ckptd/web/{name}" for name in ("templates/page.html", "static/page.js", "static/page.css")} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    sources = {
        str(path.relative_to(ROOT / root))
        for root in ("supervisor", "trainer_shim")
        for path in (ROOT / root).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_it_lives_beside_supervisord(wheel, tmp_path):
    home = tmp_path / "v"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    installed = pip("install", "--no-deps", "--no-index", wheel, python=python)
    assert installed.returncode == 0, installed.stderr
    neighbour = pip("install", "--no-deps", "--retries", "1", "--timeout", "20", SUPERVISORD, python=python)
    if neighbour.returncode != 0:
        pytest.skip(f"{SUPERVISORD} cannot be had: {neighbour.stderr.strip().splitlines()[-1]}")
    # What both depend on is taken from here: a path in a .pth file brings no other .pth file with it, so not the
    # editable ckptd of a developer. Only now, or pip would take that one for an installed copy.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *arguments):
        answer = subprocess.run(
            [home / "bin" / program, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    assert run("ckptd", "--version") == f"ckptd {wheel.name.split('-')[1]}"
    assert run("supervisord", "--version") == SUPERVISORD.partition("==")[2]
    asked = "import ckptd, ckptd_shim, supervisor; print(ckptd.__file__, ckptd_shim.__file__, supervisor.__file__)"
    origins = run("python", "-c", asked).split()
    assert [Path(origin).parent.parent for origin in origins] == [site] * 3
