"""job.yaml: what is accepted, and that what is wrong is said all at once, in the right place."""

from __future__ import annotations

import re
import string
import sys
import textwrap
import venv

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ckptd import jobcheck, jobhost, units, yamltext
from ckptd.core.policy import Policy
from ckptd.errors import ExitStatus, JobSpecError
from ckptd.jobexample import example, name_from
from ckptd.jobscalars import Steps
from ckptd.jobspec import JobSpec, load

MINIMAL = """\
version: 1
name: r
command: [train.py]
checkpoint: {tiers: [{name: disk, path: ck}]}
"""

FULL = """\
version: 1
name: stdlib-gpt
command: [train.py, --steps, "400"]
workdir: .
python: null
env: {OMP_NUM_THREADS: "1"}
run_dir: null
cluster:
  launcher: local
  hosts: []
  devices_per_node: auto
  min_devices: 1
  max_devices: null
  multiple_of: 1
  spares: 0
  wait_for_devices: 1h
  orphan_timeout: 1h
batch: {global: 64, micro: 8}
checkpoint:
  interval: auto
  min_interval: null
  max_interval: 2h
  formula: daly
  tiers:
    - {name: memory, path: /dev/shm/ckptd, keep_last: 2}
    - {name: disk, path: ./checkpoints, keep_last: 3, keep_every: {steps: 1000}}
    - {name: durable, url: "s3://bucket/prefix", promote: auto, keep_last: 5, keep_every: 24h}
restart:
  warm: true
  preload: []
  stop_grace: 3s
  max_without_progress: 3
  max_restarts: null
  grow: at_checkpoint
hang: {enabled: true, factor: 10, floor: 30s, startup: 15m}
guard: {finite: true, loss_spike: null, param_norm: null, on_reject: skip, rollback_after: 3}
health: {interval: 30s, command: null}
prior: {failures: 1.0, device_hours: 50000}
web: {listen: "127.0.0.1:9775"}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes job.yaml beside a train.py and loads it, from another directory."""
    place = tmp_path / "job"
    place.mkdir()
    (place / "train.py").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def write(text, **options):
        path = place / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return load(path, **options)

    write.place = place
    return write


def problems(job, text):
    """The problems of a text, each without the directory of the file."""
    with pytest.raises(JobSpecError) as caught:
        job(text)
    return [line.removeprefix(f"{job.place}/") for line in caught.value.problems]


def problem(job, extra, base=MINIMAL):
    """The one problem of a file that is right but for `extra`, without file and line."""
    found = problems(job, base + textwrap.dedent(extra))
    assert len(found) == 1, found
    return found[0].split(" ", 1)[1]


class TestAccepted:
    def test_every_key_of_the_format_and_every_default(self, job):
        full = job(FULL, check=False)
        assert full.checkpoint.tiers[2].url == "s3://bucket/prefix"
        assert full.checkpoint.tiers[2].promote == "auto"
        assert full.checkpoint.tiers[2].keep_every == 86400.0
        assert full.checkpoint.tiers[1].keep_every == Steps(1000)
        assert (full.batch.global_batch, full.batch.micro_batch) == (64, 8)
        assert full.env == {"OMP_NUM_THREADS": "1"}
        assert full.command == ["train.py", "--steps", "400"]
        # All else shows the default: a file without these keys means the same.
        bare = job(MINIMAL)
        for section in ("cluster", "restart", "hang", "guard", "health", "prior", "web"):
            assert getattr(full, section) == getattr(bare, section), section
        for key in ("interval", "min_interval", "max_interval", "formula"):
            assert getattr(full.checkpoint, key) == getattr(bare.checkpoint, key), key
        assert bare.batch is None
        assert bare.checkpoint.tiers[0].keep_last == 3
        assert bare.cluster.wait_for_devices == 3600.0
        assert bare.restart.stop_grace == 3.0

    def test_frozen(self, job):
        spec = job(MINIMAL)
        with pytest.raises(ValueError, match="frozen"):
            spec.name = "other"

    def test_paths_start_beside_the_file_not_where_the_command_runs(self, job, monkeypatch):
        (job.place / "sub").mkdir()
        (job.place / "sub" / "train.py").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
        spec = job(MINIMAL + "workdir: sub\n")
        assert spec.workdir_path == job.place / "sub"
        assert spec.script_path == job.place / "sub" / "train.py"
        assert spec.tier_dir(spec.checkpoint.tiers[0]) == job.place / "ck" / "r"
        assert str(spec.run_dir_path) == "/var/state/ckptd/runs/r"
        assert spec.python_path == sys.executable
        assert job(MINIMAL + "run_dir: runs/../here\n").run_dir_path == job.place / "here"

    def test_home(self, job, monkeypatch):
        monkeypatch.setenv("HOME", "/home/somebody")
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        spec = job(MINIMAL.replace("path: ck", "path: ~/ck"))
        assert str(spec.tier_dir(spec.checkpoint.tiers[0])) == "/home/somebody/ck/r"
        assert str(spec.run_dir_path) == "/home/somebody/.local/state/ckptd/runs/r"
        # XDG says that a relative one is to be ignored.
        monkeypatch.setenv("XDG_STATE_HOME", "state")
        assert str(spec.run_dir_path) == "/home/somebody/.local/state/ckptd/runs/r"

    def test_frozen_copy_means_the_same_from_another_place(self, job, tmp_path):
        spec = job("\ufeff" + MINIMAL)
        copy = tmp_path / "run" / "job.yaml"
        copy.parent.mkdir()
        copy.write_bytes(spec.frozen_text())
        frozen = load(copy)
        assert frozen.model_dump() == spec.model_dump()
        assert frozen.tier_dir(frozen.checkpoint.tiers[0]) == job.place / "ck" / "r"
        assert frozen.source == str(job.place / "job.yaml")
        # Freezing the frozen one again changes nothing.
        assert frozen.frozen_text() == spec.frozen_text()

    def test_policy_holds_every_number_that_decides(self, job):
        text = """
            name: p
            command: [-m, train]
            cluster: {min_devices: 2, max_devices: 8, multiple_of: 2, wait_for_devices: 90}
            batch: {global: 48, micro: 4}
            checkpoint: {interval: {steps: 7}, min_interval: 1m, max_interval: 1h, formula: young,
                         tiers: [{name: d, path: x}]}
            restart: {warm: no, max_without_progress: 5, max_restarts: 9, grow: never}
            prior: {failures: 2, device_hours: 1e4}
        """
        assert job(text).policy("abc") == Policy(
            run_id="abc", name="p", min_devices=2, max_devices=8, multiple_of=2, global_batch=48, micro_batch=4,
            wait_for_devices_s=90.0, interval_s=None, interval_steps=7, tiers=[{"name": "d", "promote": None, "shared": True}], min_interval_s=60.0, max_interval_s=3600.0,
            formula="young", max_without_progress=5, max_restarts=9, grow_at_checkpoint=False, warm=False,
            prior_failures=2.0, prior_device_seconds=3.6e7,
        )  # fmt: skip
        fixed = job(MINIMAL.replace("{tiers", "{interval: 90s, tiers")).policy("x")
        assert (fixed.interval_s, fixed.interval_steps) == (90.0, None)
        # What job.yaml leaves out is what the core takes for granted.
        assert job(MINIMAL).policy("") == Policy(name="r", tiers=[{"name": "disk", "promote": None, "shared": True}])

    def test_anchors_and_merge_keys(self, job):
        spec = job("""
            name: r
            command: [train.py]
            checkpoint:
              tiers: [{name: disk, path: ck}]
            restart: &r {stop_grace: 5s, max_restarts: 2}
            hang: {enabled: &yes false}
            env: {<<: {A: "1", B: "2"}, B: "3"}
        """)
        assert spec.env == {"A": "1", "B": "3"}
        assert spec.hang.enabled is False

    @pytest.mark.parametrize("word", ["yes", "on", "true", "True", "YES"])
    def test_truth_in_its_yaml_spellings(self, job, word):
        assert job(MINIMAL + f"restart: {{warm: {word}}}\n").restart.warm is True

    def test_arguments_are_what_was_written(self, job):
        """YAML would make 0.0001, 8, 750, 3.1 and a date of these."""
        spec = job(MINIMAL.replace("train.py", "train.py, 1e-4, 010, 12:30, 3.10, 2024-01-01, 1_000, +5, 400"))
        assert spec.command[1:] == ["1e-4", "010", "12:30", "3.10", "2024-01-01", "1_000", "+5", "400"]
        assert job(MINIMAL + "env: {LR: 1e-4, N: 007}\n").env == {"LR": "1e-4", "N": "007"}

    @pytest.mark.parametrize(
        ("written", "seconds"),
        [("30", 30.0), ("30s", 30.0), ("'30s'", 30.0), ("500ms", 0.5), ("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0),
         ("1.5h", 5400.0), ("0.5", 0.5), ("1e3", 1000.0), ("1_000", 1000.0)],
    )  # fmt: skip
    def test_durations(self, job, written, seconds):
        assert job(MINIMAL + f"hang: {{floor: {written}}}\n").hang.floor == seconds

    def test_web_can_be_off_or_on_any_port(self, job):
        assert job(MINIMAL + "web: {listen: null}\n").web.listen is None
        assert job(MINIMAL + 'web: {listen: "[::1]:0"}\n').web.listen == "[::1]:0"


def test_where_checkpoints_cannot_go_is_known_before_training(job, tmp_path):
    assert jobhost.tier_problem(job(MINIMAL), fresh=True) is None
    assert (tmp_path / "job" / "ck" / "r").is_dir()
    found = jobhost.tier_problem(job(MINIMAL.replace("path: ck", "path: train.py/ck")), fresh=True)
    assert found == (
        f"checkpoint.tiers[0].path: checkpoints cannot be written to {tmp_path}/job/train.py/ck/r: "
        f"Not a directory ({tmp_path}/job/train.py/ck)"
    )


@pytest.mark.parametrize(
    ("cluster", "batch", "expected"),
    [
        ("{devices_per_node: 2}", 64, None),
        ("{devices_per_node: 2}", 63, "1 of 2 devices will be idle: a world of 1 is the largest that divides batch.global, 63"),
        ("{devices_per_node: 8, max_devices: 6}", 32, "2 of 6 devices will be idle: a world of 4"),
        ("{devices_per_node: 8, max_devices: 4}", 32, None),
        ("{}", 63, None),
    ],
)  # fmt: skip
def test_devices_that_no_world_takes_up_are_named(job, cluster, batch, expected):
    found = jobhost.idle_devices(job(MINIMAL + f"cluster: {cluster}\nbatch: {{global: {batch}, micro: 8}}\n"))
    assert found == expected if expected is None else found.startswith(expected)


class TestWrong:
    def test_all_at_once_each_with_its_line_and_key(self, job):
        found = problems(
            job,
            """\
            version: 1
            name: no
            command: [train.py]
            cluster:
              min_devices: 4
              max_devices: 2
            checkpoint:
              intervall: auto
              tiers:
                - name: disk
                  path: ck
                  keep_last: -1
            restart:
              stop_grace: '3 sec'
            """,
        )
        assert [line.split(" ")[0] for line in found] == ["job.yaml:2:", "job.yaml:5:", "job.yaml:8:", "job.yaml:12:", "job.yaml:14:"]  # fmt: skip
        assert found[0].startswith("job.yaml:2: name: ")
        assert 'quote it: "no"' in found[0]
        assert found[1] == "job.yaml:5: cluster.min_devices: 4 is more than max_devices, 2"
        assert found[2] == "job.yaml:8: checkpoint.intervall: unknown key; did you mean 'interval'?"
        assert found[3].startswith("job.yaml:12: checkpoint.tiers[0].keep_last: keep_last must be at least 1")
        assert found[4] == (
            "job.yaml:14: restart.stop_grace: '3 sec' is not a duration; write 3s, 10m, 2h or a number of seconds"
        )

    def test_exit_status(self, job):
        with pytest.raises(JobSpecError) as caught:
            job("name: x\n")
        assert caught.value.exit_status == ExitStatus.CONFIG == 78

    @pytest.mark.parametrize(
        ("extra", "expected"),
        [
            ("cluster: {min_devices: 010}", "cluster.min_devices: '010' could mean two numbers"),
            ("cluster: {min_devices: 08}", "cluster.min_devices: '08' could mean two numbers"),
            ("cluster: {min_devices: 0x10}", "cluster.min_devices: '0x10' could mean two numbers"),
            ("cluster: {min_devices: 1:30}", "cluster.min_devices: '1:30' is a number in base 60"),
            ("hang: {floor: 12:30:00}", "hang.floor: '12:30:00' could mean hours or minutes"),
            ("hang: {floor: 010}", "hang.floor: '010' could mean two numbers"),
            ("hang: {floor: 1h30m}", "hang.floor: '1h30m' is not a duration"),
            ("hang: {floor: '30'}", "hang.floor: '30' is not a duration"),
            ("hang: {floor: -3}", "hang.floor: '-3' is negative"),
            ("hang: {floor: 0s}", "hang.floor: must be more than 0"),
            ("hang: {floor: .inf}", "hang.floor: '.inf' is not a duration"),
            ("hang: {floor: 9999999d}", "hang.floor: '9999999d' is longer than a century"),
            ("hang: {floor: 2024-01-01}", "hang.floor: '2024-01-01' is not a duration"),
            ("hang: {floor: }", "hang.floor: needs a value"),
            ("hang: {floor: no}", "hang.floor: 'no' is not a duration"),
            ("hang: {factor: .nan}", "hang.factor: should be a number"),
            ("hang: {factor: 1.0}", "hang.factor: must be more than 1"),
            ("hang: {factor: '10'}", "hang.factor: should be a number, is the quoted text '10'"),
            ("hang: {enabled: 'true'}", "hang.enabled: should be true or false"),
            ("hang: {enabled: 1}", "hang.enabled: should be true or false"),
            ("hang: 5", "hang: should be a mapping"),
            ("hang:", "hang: should be a mapping (`key: value`), is empty"),
            ("env: {A: no}", "env.A: should be text, and YAML reads 'no'"),
            ("env: {A: }", "env.A: needs a value"),
            ("env: {A: [1]}", "env.A: should be text, is a list"),
            ("env: {A=B: x}", "env.A=B: 'A=B' cannot be the name of a variable"),
            ("restart: {preload: torch}", "restart.preload: should be a list, is 'torch'"),
            ("restart: {max_restart: 3}", "restart.max_restart: unknown key; did you mean 'max_restarts'?"),
            ("stop_grace: 3s", "stop_grace: unknown key here; it belongs under 'restart'"),
            ("zebra: 1", "zebra: unknown key; known here: version, name, command"),
            (
                "batch: {global_batch: 8, global: 8, micro: 4}",
                "batch.global_batch: unknown key; did you mean 'global'?",
            ),
            ("batch: {global: 8}", "batch.micro: is missing"),
            ("batch: {global: 8, micro: 9}", "batch.micro: 9 is more than the global batch, 8"),
            ("batch: {global: 0, micro: 9}", "batch.global: must be at least 1"),
            (
                "cluster: {launcher: lokal}",
                "cluster.launcher: 'lokal' is not one of local, ssh, slurm; did you mean 'local'?",
            ),
            ("cluster: {launcher: slurm, hosts: [a]}", "cluster.hosts: only the ssh launcher takes hosts"),
            ("cluster: {launcher: ssh, devices_per_node: 2}", "cluster.hosts: the ssh launcher needs them"),
            (
                "cluster: {launcher: ssh, hosts: [-oProxyCommand=x]}",
                "cluster.hosts[0]: '-oProxyCommand=x' cannot be a host",
            ),
            (
                "cluster: {launcher: ssh, hosts: [{name: a}]}",
                "cluster.hosts[0]: unknown key 'name'; a host has: host, python, devices",
            ),
            ("cluster: {launcher: ssh, hosts: [{python: a}]}", "cluster.hosts[0]: a host needs its name"),
            (
                "cluster: {launcher: ssh, hosts: [{host: a, devices: 0}]}",
                "cluster.hosts[0]: devices must be at least 1",
            ),
            ("cluster: {launcher: ssh, hosts: [a], fence_timeout: 26s}", "cluster.fence_timeout: 26s is not 5s below"),
            ("cluster: {listen: ':7000'}", "cluster.listen: the local launcher has no other machine"),
            ("cluster: {launcher: slurm, fence_timeout: 26s}", "cluster.fence_timeout: 26s is not 5s below"),
            ("cluster: {hosts: [a]}", "cluster.hosts: only the ssh launcher takes hosts"),
            ("cluster: {spares: 1}", "cluster.spares: the local launcher has one node"),
            ("cluster: {max_devices: 2, multiple_of: 4}", "cluster.max_devices: 2 is less than multiple_of, 4"),
            (
                "cluster: {min_devices: 5, max_devices: 7, multiple_of: 4}",
                "cluster.multiple_of: no world between 5 and 7",
            ),
            (
                "cluster: {devices_per_node: 2, min_devices: 4}",
                "cluster.devices_per_node: 2 on one node is less than the 4",
            ),
            ("cluster: {devices_per_node: 0}", "cluster.devices_per_node: must be at least 1, or auto"),
            (
                "guard: {on_reject: stopp}",
                "guard.on_reject: 'stopp' is not one of skip, rollback, stop; did you mean 'stop'?",
            ),
            ("web: {listen: 9775}", "web.listen: '9775' is not an address"),
            ("web: {listen: 'localhost:99999'}", "web.listen: 'localhost:99999' is not an address"),
            ("run_dir: ${HOME}/runs", "run_dir: '${HOME}/runs': variables are not expanded"),
            ("run_dir: $SCRATCH/runs", "run_dir: '$SCRATCH/runs': variables are not expanded"),
            ("run_dir: ~nobody-of-that-name/x", "run_dir: '~nobody-of-that-name/x': there is no such user"),
            ("run_dir: ./", "run_dir: the run directory cannot be the one that holds job.yaml"),
            ("workdir: nowhere", "workdir: there is no directory"),
            ("python: ./nowhere/python", "python: there is no program"),
            ("health: {command: [./nowhere]}", "health.command: there is no program './nowhere'"),
            ("health: {command: []}", "health.command: is empty"),
            ("version: 2", "version: duplicate key; it is already on line 1"),
        ],
    )
    def test_one_key(self, job, extra, expected):
        assert problem(job, extra + "\n").startswith(expected)

    @pytest.mark.parametrize(
        ("cluster", "expected"),
        [
            ("hosts: [a, a]", "cluster.hosts[1]: hosts[0] is 'a' too"),
            ("hosts: [a, b], spares: 2", "cluster.spares: 2 of 2 hosts leaves none to train on"),
            (
                "hosts: [a, {host: b, devices: 1}], devices_per_node: 2, min_devices: 4",
                "cluster.min_devices: 3 devices on all hosts are less than the 4 that a world needs",
            ),
            (
                "hosts: [a, {host: b, devices: 1}], devices_per_node: 2, min_devices: 2, spares: 1, multiple_of: 3",
                "cluster.min_devices: 2 devices on all hosts but the spares are less than the 3",
            ),
        ],
    )
    def test_hosts(self, job, cluster, expected):
        shared = "version: 1\nname: r\ncommand: [train.py]\ncheckpoint: {tiers: [{name: d, path: ck, shared: true}]}\n"
        assert problem(job, f"cluster: {{launcher: ssh, {cluster}}}\n", base=shared).startswith(expected)

    def test_a_path_of_each_node_is_not_shared(self, job):
        base = "version: 1\nname: r\ncommand: [train.py]\ncheckpoint: {tiers: [{name: d, path: '/x/{node}', shared: true}]}\n"
        expected = "checkpoint.tiers[0].path: nodes that see the same files have one path"
        assert problem(job, "cluster: {launcher: ssh, hosts: [a, b]}\n", base=base).startswith(expected)
        spec = job(base.replace(", shared: true", "") + "cluster: {launcher: ssh, hosts: [a, b.c]}\n")
        (tier,) = spec.checkpoint.tiers
        assert (spec.sharing(tier), spec.tier_location(tier, "b.c")) == (False, "/x/b.c/r")

    def test_files_of_other_machines_are_not_looked_for_here(self, job):
        spec = job(
            "name: r\ncommand: [nowhere/train.py]\nworkdir: /nowhere\npython: /nowhere/python\n"
            "health: {command: [./nowhere]}\ncheckpoint: {tiers: [{name: d, path: /nowhere, shared: true}]}\n"
            "cluster: {launcher: ssh, hosts: [me@a, {host: b, python: /opt/python, devices: 4}]}\n"
        )
        assert [(h.host, h.python, h.devices) for h in spec.cluster.hosts] == [
            ("me@a", None, None), ("b", "/opt/python", 4),
        ]  # fmt: skip
        assert spec.policy("r").nodes == ("me@a", "b")

    def test_an_interpreter_must_have_what_workers_import(self, job, tmp_path, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        venv.create(tmp_path / "bare", symlinks=True)
        found = problem(job, f"python: {tmp_path}/bare/bin/python\n")
        assert found.endswith("/bare/bin/python cannot import torch or ckptd, which the workers need; install it there")
        modules = tmp_path / "modules"
        for name in ("torch", "ckptd_shim"):
            (modules / name).mkdir(parents=True)
            (modules / name / "__init__.py").write_text("raise SystemExit('looked for, not imported')\n")
        job(MINIMAL + f"python: {tmp_path}/bare/bin/python\nenv: {{PYTHONPATH: {modules}}}\n")

    @pytest.mark.parametrize(
        ("program", "said"),
        [("#!/bin/sh\nexit 0\n", "ended with status 0"), ("#!/bin/sh\necho no licence >&2; exit 3\n", "no licence"),
         ("#!/nowhere/python\n", "cannot be started")],
    )  # fmt: skip
    def test_an_interpreter_must_be_one(self, job, tmp_path, program, said):
        path = tmp_path / "python"
        path.write_text(program)
        path.chmod(0o755)
        found = problem(job, f"python: {path}\n")
        assert found.startswith(f"python: {path} ")
        assert said in found

    @pytest.mark.parametrize(
        ("cluster", "batch", "fits"),
        [
            ("{min_devices: 3, max_devices: 5}", "{global: 64, micro: 8}", True),  # 4
            ("{min_devices: 5, max_devices: 7}", "{global: 64, micro: 8}", False),
            ("{multiple_of: 3}", "{global: 64, micro: 8}", False),
            ("{multiple_of: 4}", "{global: 12, micro: 8}", True),  # 4 and 12
            ("{multiple_of: 4, max_devices: 11, min_devices: 8}", "{global: 12, micro: 8}", False),
            ("{min_devices: 65}", "{global: 64, micro: 8}", False),
            ("{min_devices: 999999937}", "{global: 999999937, micro: 1}", True),  # a prime: searched by its root
        ],
    )
    def test_some_world_must_divide_the_batch(self, job, cluster, batch, fits):
        text = MINIMAL + f"cluster: {cluster}\nbatch: {batch}\n"
        if fits:
            job(text)
        else:
            assert problems(job, text)[0].split(" ")[1] == "batch.global:"

    @pytest.mark.parametrize(
        ("checkpoint", "expected"),
        [
            ("{}", "checkpoint.tiers: no tier"),
            ("{tiers: []}", "checkpoint.tiers: no tier"),
            ("{tiers: [{name: a, path: x}, {name: a, path: y}]}", "checkpoint.tiers[1].name: tiers[0] has the name 'a' too"),
            ("{tiers: [{name: a, path: x}, {name: b, path: ./y/../x/}]}", "checkpoint.tiers[1].path: tiers[0] lies in the same"),
            ("{tiers: [{name: a, path: x}, {name: b, path: ./x}]}", "checkpoint.tiers[1].path: tiers[0] lies in the same place"),
            ("{tiers: [{name: a, path: x}, {name: b, url: 'file:///tmp/q'}, {name: c, url: 'file:///tmp/r/../q'}]}",
             "checkpoint.tiers[2].url: tiers[1] lies in the same place, /tmp/q"),
            ("{tiers: [{name: a, path: x}, {name: b, url: bucket}]}", "checkpoint.tiers[1].url: 'bucket' is no url"),
            ("{tiers: [{name: a, path: x}, {name: b, url: 's4://b/p'}]}", "checkpoint.tiers[1].url: there is no object store 's4'"),
            ("{tiers: [{name: a, path: x}, {name: b, url: 's3://key:secret@b/p'}]}", "checkpoint.tiers[1].url: a url holds no credentials"),
            ("{tiers: [{name: a, path: x}, {name: b, url: 's3://'}]}", "checkpoint.tiers[1].url: 's3://' names no bucket"),
            ("{tiers: [{name: a, path: x}, {name: b, url: 'file://q'}]}", "checkpoint.tiers[1].url: 'file://q' is relative"),
            ("{tiers: [{name: a}]}", "checkpoint.tiers[0].path: a tier needs a path"),
            ("{tiers: [{name: a, path: x, url: 's3://b'}]}", "checkpoint.tiers[0].url: a tier has either a path or a url"),
            ("{tiers: [{name: a, url: 's3://b'}]}", "checkpoint.tiers[0].url: the first tier is what workers write to"),
            ("{tiers: [{name: a, path: x, promote: 3}]}", "checkpoint.tiers[0].promote: the first tier is saved to by training itself"),
            ("{tiers: [{name: a, path: train.py}]}", "checkpoint.tiers[0].path: "),
            ("{tiers: [{path: x}]}", "checkpoint.tiers[0].name: is missing"),
            ("{tiers: [{name: a/b, path: x}]}", "checkpoint.tiers[0].name: 'a/b' cannot be a name"),
            ("{tiers: [{name: a, path: x, keep_last: 0}]}", "checkpoint.tiers[0].keep_last: keep_last must be at least 1"),
            ("{tiers: [{name: a, path: x, keep_every: {step: 5}}]}", "checkpoint.tiers[0].keep_every: should be {steps: N}"),
            ("{tiers: [{name: a, path: x, keep_every: {steps: 0}}]}", "checkpoint.tiers[0].keep_every: steps must be at least 1"),
            ("{interval: atuo, tiers: [{name: a, path: x}]}", "checkpoint.interval: 'atuo' is not a duration"),
            ("{interval: 0, tiers: [{name: a, path: x}]}", "checkpoint.interval: must be longer than nothing"),
            ("{min_interval: 3h, tiers: [{name: a, path: x}]}", "checkpoint.min_interval: 3h is longer than max_interval, 2h (its default)"),
            ("{min_interval: 2m, max_interval: 1m, tiers: [{name: a, path: x}]}", "checkpoint.min_interval: 2m is longer than max_interval, 1m"),
            ("{interval: 1m, min_interval: 2m, tiers: [{name: a, path: x}]}", "checkpoint.interval: 1m is shorter than min_interval, 2m"),
            ("{interval: 2h, max_interval: 1h, tiers: [{name: a, path: x}]}", "checkpoint.interval: 2h is longer than max_interval, 1h"),
        ],
    )  # fmt: skip
    def test_checkpoint(self, job, checkpoint, expected):
        found = problems(job, f"name: r\ncommand: [train.py]\ncheckpoint: {checkpoint}\n")
        assert found[0].startswith(f"job.yaml:3: {expected}")

    def test_a_fixed_interval_above_the_default_bound_is_no_contradiction(self, job):
        assert job(MINIMAL.replace("{tiers", "{interval: 5h, tiers")).checkpoint.interval == 18000.0

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("[]", "command: is empty"),
            ("train.py", "command: should be a list, is 'train.py'"),
            ("[other.py]", "command: there is no script"),
            ('[""]', "command: begins with an empty word"),
            ("[-m]", "command: -m needs a module"),
            ("[--steps, 4]", "command: begins with '--steps'"),
            ("[train.py, yes]", "command[1]: should be text"),
            ("[train.py, {a: b}]", "command[1]: should be text, is a mapping"),
        ],
    )
    def test_command(self, job, command, expected):
        assert problem(job, f"command: {command}\n", MINIMAL.replace("command: [train.py]\n", "")).startswith(expected)

    @pytest.mark.parametrize("name", ["a/b", "''", ".hidden", "a b", "ä", "..", "x" * 101, "a\\nb"])
    def test_name(self, job, name):
        assert "cannot be a name" in problem(
            job, "", MINIMAL.replace("name: r", f'name: "{name}"'.replace("\"''\"", "''"))
        )

    def test_one_wrong_key_does_not_hide_the_contradictions_elsewhere(self, job):
        found = problems(job, "command: 5\ncluster: {min_devices: x, max_devices: 1}\nbatch: {global: 4, micro: 8}\n")
        keys = [line.split(" ")[1] for line in found]
        # The name and the tier are missing, which no line shows; min_devices is not compared with max_devices.
        assert sorted(keys) == ["batch.micro:", "checkpoint.tiers:", "cluster.min_devices:", "command:", "name:"]

    def test_without_check_only_the_text_is_judged(self, job):
        spec = job("name: r\ncommand: [gone.py]\nworkdir: gone\n", check=False)
        assert spec.name == "r"
        with pytest.raises(JobSpecError):
            job("name: r\ncommand: [gone.py]\nworkdirr: gone\n", check=False)


class TestText:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "1: the file is empty"),
            ("# only a comment\n", "1: the file is empty"),
            ("---\n", "1: the file is empty"),
            ("- a\n", "1: the top level should be a mapping"),
            ("just words\n", "1: the top level should be a mapping"),
            ("name: a\n---\nname: b\n", "2: a second document begins here"),
            ("name: a\ncluster:\n\tmin_devices: 1\n", "3: a tab stands here"),
            ("name: [a\n", "2: not YAML, column 1"),
            ("name: a\ncommand: !!python/object:os.system [x]\n", "2: command: the tag"),
            ("name: !!int 5\n", "1: name: the tag"),
            ("name: a\n? [b]\n: c\n", "2: a list or a mapping cannot be a key"),
            ("name: a\nname: b\n", "2: name: duplicate key; it is already on line 1"),
            ("name: a\nenv: {X: '1', X: '2'}\n", "2: env.X: duplicate key"),
            (b"name: a\nworkdir: \xff\n", "2: not UTF-8: byte 0xff"),
            ("name: a\n".encode("utf-16"), "1: not UTF-8"),
            ("name: a\x07\n", "1: the character '\\x07' is not allowed"),
            ('name: "a\\0b"\n', "1: name: 'a\\x00b' holds a character"),
            ('name: "\\ud800"\n', "1: name: '\\ud800' holds a character"),
            ('name: "\\Uffffffff"\n', "1: cannot be read as YAML"),
            ("name: *nobody\n", "1: not YAML, column 7: found undefined alias"),
            ("a: &a [*a]\n", "1: more than"),
            ("<<: 5\nname: a\n", "1: '<<' merges mappings"),
            ("name: " + "[" * 5000, "1: more than 32 levels of nesting"),
            ("x: 1\n" * 60_000, "1: the file is "),
        ],
    )  # fmt: skip
    def test_refused(self, job, text, expected):
        found = problems(job, text)
        assert any(line.removeprefix("job.yaml:").startswith(expected) for line in found), found
        assert all("\n" not in line for line in found)

    def test_alias_bomb_is_refused_before_it_goes_off(self, job):
        levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
        (found,) = problems(job, "\n".join(levels))
        assert "more than 20000 values" in found

    def test_a_file_that_is_not_there_or_not_a_file(self, tmp_path):
        with pytest.raises(JobSpecError, match="no such file; `ckptd init` writes one"):
            load(tmp_path / "job.yaml")
        with pytest.raises(JobSpecError, match="is a directory"):
            load(tmp_path)
        with pytest.raises(JobSpecError, match="cannot be read"):
            load("a\0b")

    def test_a_frozen_copy_that_was_tampered_with(self, job):
        text = job(MINIMAL).frozen_text().split(b"\n", 1)
        assert "the line that ckptd wrote was changed" in problems(job, text[0][:-1] + b'\\"\n' + text[1])[0]

    @given(st.text(max_size=300))
    def test_any_text_is_a_spec_or_a_list_of_problems(self, text):
        check(text.encode("utf-8", "surrogatepass"))

    @given(st.binary(max_size=100))
    def test_any_bytes(self, data):
        check(data)

    @given(st.data())
    def test_a_file_with_a_piece_replaced(self, data):
        start = data.draw(st.integers(0, len(FULL)))
        end = data.draw(st.integers(start, min(len(FULL), start + 40)))
        piece = data.draw(st.text("{}[]:,-&*!|>'\"#%@`~ \n\t\\ 0123abyesno<.$_", max_size=12))
        check((FULL[:start] + piece + FULL[end:]).encode())

    @given(st.data())
    def test_known_keys_with_values_of_any_kind(self, data):
        leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
        value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)  # fmt: skip
        document = yaml.safe_load(FULL)
        for _ in range(data.draw(st.integers(1, 4))):
            inside = document
            while isinstance(inside, (dict, list)) and inside:
                key = data.draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
                if data.draw(st.booleans()) or not isinstance(inside[key], (dict, list)) or not inside[key]:
                    inside[key] = data.draw(value)
                    break
                inside = inside[key]
        check(yaml.safe_dump(document, allow_unicode=True).encode())


def check(data):
    """`validate` answers with a spec or with problems, each on one printable line."""
    spec, found = jobcheck.validate(data, source="/nowhere/job.yaml")
    assert spec is not None or found
    assert spec is None or isinstance(spec, JobSpec)
    for item in found:
        assert item.line >= 1
        assert jobcheck.rendered(item).isprintable()


class TestExample:
    def test_is_right(self, job):
        spec = job(example("some-run", "train.py"))
        assert spec.name == "some-run"
        assert spec.command == ["train.py"]

    def test_what_is_commented_out_shows_the_defaults(self, job):
        plain = example("r")
        text, count = re.subn(r"(?m)^( *)# (?!batch|keep_every)([a-z_]+: )", r"\1\2", plain)
        assert count > 12
        text = text.replace('{OMP_NUM_THREADS: "1"}', "{}")
        bare = job(MINIMAL.replace("path: ck", "path: ./checkpoints"))
        assert job(text).model_dump() == job(plain).model_dump() == bare.model_dump()

    def test_names_every_key_that_works_in_this_version(self):
        later = {"url", "promote", "shared", "mirror_rate"}
        for model in [JobSpec, *(jobcheck._nested(f.annotation) for f in JobSpec.model_fields.values())]:
            for key in set(jobcheck._fields(model)) - later:
                assert re.search(rf"\b{key}:", example()), key
        for key in jobcheck._fields(jobcheck._model_at(("checkpoint", "tiers"))):
            assert key in later or f"{key}:" in example(), key

    @given(st.text(max_size=150))
    def test_a_name_can_be_made_of_any_directory(self, directory):
        from ckptd.jobscalars import read_name

        assert read_name(name_from(directory))


class TestUnits:
    @given(st.integers(0, 10**6), st.sampled_from(sorted(units.SECONDS)))
    def test_duration(self, count, unit):
        seconds = count * units.SECONDS[unit]
        if seconds <= units.LONGEST:
            assert units.parse_duration(f"{count}{unit}") == pytest.approx(seconds)

    @given(st.text(string.ascii_letters + string.digits + ".:+- ", max_size=8))
    def test_only_a_number_and_a_unit_is_a_duration(self, text):
        is_one = re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?(ms|s|m|h|d)", text)
        try:
            seconds = units.parse_duration(text)
        except ValueError as error:
            assert not is_one or "century" in str(error)
        else:
            assert is_one
            assert seconds >= 0

    @given(st.floats(1e-3, 1e8))
    def test_format_and_parse_agree_to_three_digits(self, seconds):
        text = units.format_duration(seconds)
        if "e" not in text:
            assert units.parse_duration(text) == pytest.approx(seconds, rel=6e-3)

    @pytest.mark.parametrize(("text", "size"), [("512MiB", 512 * 2**20), ("10GB", 10**10), ("1.5KiB", 1536), ("7B", 7)])
    def test_size(self, text, size):
        assert units.parse_size(text) == size

    @pytest.mark.parametrize("text", ["512", "10 GB", "10gb", "MiB", "-1GB", "10G"])
    def test_not_a_size(self, text):
        with pytest.raises(ValueError, match="is not a size"):
            units.parse_size(text)


def test_plain_and_quoted_are_told_apart():
    values = yamltext.read(b"a: 5\nb: '5'\nc: ~\nd: '~'\ne:\n  - x\n").values
    assert values == {"a": "5", "b": "5", "c": None, "d": "~", "e": ["x"]}
    assert isinstance(values["a"], yamltext.Plain)
    assert not isinstance(values["b"], yamltext.Plain)


def test_what_the_nodes_of_an_allocation_cannot_give_is_said_when_they_are_known(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        MINIMAL + "cluster: {launcher: slurm, devices_per_node: 2, min_devices: 4, spares: 1, fence_timeout: 5s}\n"
    )
    (tmp_path / "train.py").touch()
    spec = load(path)
    assert spec.policy("r").nodes == ()
    with pytest.raises(JobSpecError) as caught:
        spec.on_nodes(["n1", "n2"])
    assert caught.value.problems == [f"{path}: cluster.min_devices: the 2 devices of the allocation are less than 4"]
    with pytest.raises(JobSpecError, match=r"cluster\.spares: 1 of the 1 nodes of the allocation leaves none"):
        spec.on_nodes(["n1"])
    path.write_text(MINIMAL + "cluster: {launcher: slurm, devices_per_node: 2}\n")
    assert load(path).on_nodes(["n1", "n2"]).policy("r").nodes == ("n1", "n2")
