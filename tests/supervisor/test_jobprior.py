"""A prior out of an imported log: `prior.log` in job.yaml."""

import json

import pytest

from ckptd import cli, jobprior, jobspec
from ckptd.core import events as ev
from ckptd.core.estimates import estimate
from ckptd.core.picture import replay
from ckptd.core.policy import Policy
from ckptd.core.sitelog import Log, Row
from ckptd.errors import JobSpecError
from ckptd.history import History
from ckptd.ledger import Ledger

HOUR = 3600.0
JOB = "name: r\ncommand: [train.py]\ncheckpoint: {tiers: [{name: disk, path: ck}]}\nweb: {listen: null}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project, and a site with a log of 40 failures in 400 hours on 1,000 devices."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").touch()
    with History.open() as history:
        rows = [Row(digest=str(hour), kind="failure", at=hour * HOUR) for hour in range(10, 401, 10)]
        history.add(Log(name="site", form="events", devices=1000.0, from_at=0.0), rows)
    return tmp_path


def job(here, prior):
    path = here / "job.yaml"
    path.write_text(f"{JOB}prior: {prior}\n")
    return path


def test_the_rate_of_the_log_with_a_bounded_weight(here):
    spec = jobspec.load(job(here, "{log: site}"))
    told = jobprior.resolve(spec)
    assert told == "log site: 40 failures in 400000 device-hours, taken as 10 in 100000"
    policy = spec.policy("x")
    assert (policy.prior_failures, policy.prior_device_seconds) == (10.0, 100_000 * HOUR)
    heavier = jobspec.load(job(here, "{log: site, max_failures: 100}"))
    jobprior.resolve(heavier)
    assert heavier.policy("x").prior_failures == 40.0


def test_no_log_no_look(here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "elsewhere"))
    spec = jobspec.load(job(here, "{failures: 2, device_hours: 10}"))
    assert jobprior.resolve(spec) is None
    assert spec.policy("x").prior_failures == 2.0


def test_the_log_of_a_large_site_scaled_to_a_small_job(here):
    """1,000 devices failed every 10 h: 4 devices every 2,500 h; own failures soon count for more."""
    spec = jobspec.load(job(here, "{log: site}"))
    jobprior.resolve(spec)
    policy = spec.policy("x").to_dict()

    def mtbf_h(*happened):
        state = replay([ev.DaemonStarted(t=0.0, policy=policy), *happened])
        return estimate(state.estimates, t=happened[-1].t if happened else 0.0, world_size=4).mtbf_s / HOUR

    assert mtbf_h() == pytest.approx(2500)
    own = []
    for i in range(30):  # every hour, on 4 devices
        own.append(ev.AttemptLaunched(t=i * HOUR, attempt=i + 1, world_size=4, placement={"local": [0, 1, 2, 3]}))
        own.append(ev.Interrupted(t=(i + 1) * HOUR, attempt=i + 1, planned=False, cause="signal", severity="process"))
        own.append(ev.AttemptEnded(t=(i + 1) * HOUR, attempt=i + 1, node="local"))
    assert mtbf_h(*own) < (100_000 + 120) / 40 / 4  # what a prior alone, that knows of no regimes, would come to


def test_validate_shows_it(here, capsys):
    job(here, "{log: site}")
    assert cli.main(["validate"]) == 0
    assert "log site: 40 failures in 400000 device-hours, taken as 10 in 100000" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "run"])
def test_an_unknown_log_names_the_known_ones(here, command, capsys):
    job(here, "{log: sita}")
    assert cli.main([command]) == 78
    err = capsys.readouterr().err
    assert "job.yaml:5: prior.log: there is no log 'sita'" in err
    assert "it holds site; did you mean 'site'?" in err
    assert not (here / "state" / "ckptd" / "runs").exists()


def test_json_tells_of_it(here, capsys):
    job(here, "{log: sita}")
    assert cli.main(["validate", "--json"]) == 78
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "prior.log" in problem


def test_a_log_and_numbers_exclude_each_other(here):
    with pytest.raises(JobSpecError) as caught:
        jobspec.load(job(here, "{log: site, failures: 1.0, device_hours: 3}"))
    assert len(caught.value.problems) == 2
    assert "prior.failures: the prior comes from the log 'site'; leave either" in "\n".join(caught.value.problems)


def test_a_run_that_was_under_way_needs_no_history(here, capfd):
    """Whoever deletes the history must not keep the daemon of a live run from starting again."""
    path = job(here, "{log: gone}")
    run_dir = jobspec.load(path).run_dir_path
    run_dir.mkdir(parents=True)
    policy = Policy(run_id="abc", name="r", prior_failures=3.0, prior_device_seconds=7.0)
    with Ledger.open(run_dir / "ledger.db") as ledger:
        ledger.append(ev.DaemonStarted(t=0.0, policy=policy.to_dict()))
        ledger.append(ev.RunEnded(t=1.0, outcome="finished", detail="training finished"))
    assert cli.main(["run", str(path)]) == 0
    assert "it does not train again" in capfd.readouterr().err
    spec = jobspec.load(path)
    jobprior.keep(spec, policy)
    assert (spec.policy("abc").prior_failures, spec.policy("abc").prior_device_seconds) == (3.0, 7.0)
