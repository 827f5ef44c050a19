"""The rules and the dashboard, by Prometheus' own tools, and a real Prometheus that scrapes a real run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import psutil
import pytest
import yaml

from ckptd import status
from ckptd.core import events as ev
from ckptd.core.picture import Picture
from ckptd.web.metrics import RunCollector, Tally

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "ckptd.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "ckptd.json").read_text())

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here")


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def shown():
    """Every expression of the dashboard, as Grafana would send it with all runs chosen."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    found += [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]
    return [text.replace("$run", ".*").replace("$__rate_interval", "1m") for text in found]


def exposed():
    """The names of all series that a run may have."""
    names = set()
    for metric in RunCollector(Tally(), lambda: status.document(Picture(), t=0.0)).collect():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
        names |= {metric.name + ending for ending in endings}
    return names


def promtool(*args):
    done = subprocess.run(
        ["promtool", *args], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_is_asked_for_exists():
    asked = " ".join([*(rule["expr"] for rule in rules()), *shown()])
    named = set(re.findall(r"\bckptd_\w+", asked))
    assert named
    assert named <= exposed()
    derived = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"\bckptd:[\w:]+", " ".join(rule["expr"] for rule in rules()))) <= derived
    assert "ckptd:" not in " ".join(shown()), "the dashboard works without the rules"


def test_every_alert_says_what_and_what_to_do():
    for rule in rules():
        if "alert" in rule:
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
            assert "{{ $labels.run }}" in rule["annotations"]["summary"], rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
def test_promtool_finds_nothing_wrong():
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "ckptd.rules.yml")


@needs_promtool
def test_each_rule_fires_when_it_should_and_only_then():
    promtool("test", "rules", "ckptd.rules.test.yml")
    tested = (DEPLOY / "prometheus" / "ckptd.rules.test.yml").read_text()
    for rule in rules():
        if "alert" in rule:
            assert rule["alert"] in tested


@pytest.fixture
def prometheus(tmp_path):
    """Starts a Prometheus on given targets; it is ended with the test. Returns a function that asks it."""
    started = []

    def start(target):
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = open(tmp_path / "prometheus.log", "wb")  # noqa: SIM115  for as long as it lives
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
             "--web.listen-address=127.0.0.1:0"],
            stdout=log, stderr=log,
        )  # fmt: skip
        started.append((process, log))
        watched = psutil.Process(process.pid)

        def address():
            assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
            for connection in watched.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found = f"{connection.laddr.ip}:{connection.laddr.port}"
                    with contextlib.suppress(OSError), urlopen(f"http://{found}/-/ready", timeout=30):
                        return found
            return None

        deadline = time.monotonic() + 60
        while (where := address()) is None:
            assert time.monotonic() < deadline, "it is not ready"
            time.sleep(0.05)

        def ask(path):
            with urlopen(f"http://{where}/api/v1/{path}", timeout=30) as answer:
                return json.load(answer)["data"]

        return ask

    yield start
    for process, log in started:
        process.kill()
        process.wait()
        log.close()


@needs_prometheus
@pytest.mark.system
def test_a_prometheus_scrapes_a_run_and_answers(make_job, prometheus):
    job = make_job("--steps", "100000", "--pause", "0.02", devices=2, web={"listen": "127.0.0.1:0"})
    job.start()
    job.wait_for(ev.SaveCommitted)
    ask = prometheus(job.status()["daemon"]["web"])

    def query(text):
        return ask(f"query?query={quote(text)}")["result"]

    def value(text):
        found = query(text)
        return float(found[0]["value"][1]) if found else None

    job.wait_until(lambda: (value('ckptd_checkpoints_total{result="committed"}') or 0) >= 2, "two commits are counted")
    (training,) = query('ckptd_run_state{state="training"} == 1')
    assert training["metric"]["run"] == "my-run"
    assert value('up{job="ckptd"}') == 1
    assert value("ckptd_world_size") == 2
    assert value("ckptd_interval_steps") == 10
    age = value("time() - max(ckptd_checkpoint_last_commit_timestamp_seconds)")
    assert 0 <= age < 60
    step = value("ckptd_step")
    job.wait_until(lambda: value("ckptd_step") > step, "the steps go on")
    job.wait_until(lambda: value("ckptd:interval:seconds") is not None, "what the rules derive is there")
    # Everything on the dashboard is a query that Prometheus takes, and most of it has something to show.
    answers = [query(text) for text in shown()]
    assert sum(map(bool, answers)) > len(answers) / 2

    groups = ask("rules")["groups"]
    wrong = [(rule["name"], rule["lastError"]) for group in groups for rule in group["rules"] if rule.get("lastError")]
    assert wrong == []
    assert [a["labels"]["alertname"] for a in ask("alerts")["alerts"] if a["state"] == "firing"] == []

    job.process.send_signal(15)
    assert job.wait() == 75, job.output()
    job.wait_until(lambda: value('up{job="ckptd"}') == 0, "the end of the daemon is seen")
