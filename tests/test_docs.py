"""Does the README say what is, all of it, and nothing that is not?"""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from ckptd import cli, jobspec, status
from ckptd.core import accounting
from ckptd.core.picture import Picture
from ckptd.core.state import Status
from ckptd.errors import ExitStatus
from ckptd.web.metrics import RunCollector, Tally
from ckptd_shim import TrainerShim

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def section(title, text=README):
    """What stands below a heading, its sub-headings included."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading {title!r}"
    return found[2]


def rows(text):
    """The cells of each table row whose first cell is one piece of code; bars inside of code are escaped."""
    cut = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("\\|", "|") for cell in cells] for cells in cut]


def code(cell):
    found = re.fullmatch(r"`([^`]*)`", cell)
    assert found is not None, f"not one piece of code: {cell}"
    return found[1]


# --- commands ---------------------------------------------------------------------------------------------------------


def command_parameters():
    context = cli.ckptd.make_context("ckptd", ["status"], resilient_parsing=True)
    for name in cli.COMMANDS:
        command = cli.ckptd.get_command(context, name)
        assert command is not None
        yield name, [option for parameter in command.params for option in parameter.opts if option.startswith("--")]


def test_every_command_and_option_has_its_row_and_no_other_has():
    told = {code(first).split()[1]: first for first, *_ in rows(section("Commands"))}
    assert set(told) == set(cli.COMMANDS)
    for name, options in command_parameters():
        assert set(re.findall(r"--[a-z-]+", told[name])) - {"--no-wait"} == set(options), name


def test_the_readme_names_no_command_that_does_not_exist():
    called = set(re.findall(r"`ckptd ([a-z]+)", README)) | set(re.findall(r"^\$ ckptd ([a-z]+)", README, re.MULTILINE))
    assert called <= set(cli.COMMANDS)


def test_every_exit_status_has_its_row_and_no_other_has():
    assert sorted(int(code(first)) for first, *_ in rows(section("Exit statuses"))) == sorted(ExitStatus)


def test_the_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check"} <= set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets


# --- job.yaml ---------------------------------------------------------------------------------------------------------


def leaves(model=jobspec.JobSpec, prefix=""):
    """(key as written, path of fields) of every key of job.yaml that holds a value and not a section."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, jobspec._Model)), None)
        if inner is None:
            yield key
        else:
            yield from leaves(inner, f"{key}[]." if key == "checkpoint.tiers" else f"{key}.")


def test_every_key_has_its_row_and_no_other_has():
    told = [code(first) for first, *_ in rows(section("job.yaml"))]
    assert sorted(told) == sorted(leaves())


def test_the_defaults_are_those_of_the_readme(tmp_path):
    """A job.yaml that spells every default out, as the README gives it, means what one without them means."""
    sections = {}
    for first, default, *_ in rows(section("job.yaml")):
        if default != "required":
            head, _, key = code(first).rpartition(".")
            sections.setdefault(head, []).append((key, code(default)))
    tier = "\n".join(f"      {key}: {value}" for key, value in sections.pop("checkpoint.tiers[]"))
    checkpoint = "\n".join(f"  {key}: {value}" for key, value in sections.pop("checkpoint"))
    text = "name: a\ncommand: [train.py]\n" + "\n".join(f"{key}: {value}" for key, value in sections.pop(""))
    for head, items in sections.items():
        text += f"\n{head}:\n" + "\n".join(f"  {key}: {value}" for key, value in items)
    text += f"\ncheckpoint:\n{checkpoint}\n  tiers:\n    - name: disk\n{tier}\n"
    spelt, bare = tmp_path / "spelt.yaml", tmp_path / "bare.yaml"
    spelt.write_text(text)
    bare.write_text("name: a\ncommand: [train.py]\ncheckpoint: {tiers: [{name: disk}]}\n")
    assert jobspec.load(spelt, check=False).model_dump() == jobspec.load(bare, check=False).model_dump()


@pytest.mark.parametrize("number", range(len(re.findall(r"```yaml", README))))
def test_the_job_files_in_the_readme_are_right(number, tmp_path):
    text = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[number]
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "train.py").write_text("")
    jobspec.load(tmp_path / "job.yaml")


# --- what is shown ----------------------------------------------------------------------------------------------------


def exposed():
    """(name, labels) of each metric as Prometheus sees it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(Tally(), lambda: status.document(Picture(), t=0.0)))
    found: list[Metric] = list(registry.collect())
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in found}


def test_every_metric_has_its_row_and_no_other_has():
    told = [code(first).partition("{")[0] for first, *_ in rows(section("Metrics"))]
    assert sorted(told) == sorted(exposed())


def test_the_readme_names_no_metric_that_does_not_exist():
    assert set(re.findall(r"\bckptd_[a-z_]+", README)) - {"ckptd_shim"} <= exposed()


def test_phases_and_states_are_named():
    assert set(accounting.PHASES) <= set(re.findall(r"`([a-z_]+)`", section("Where the time goes")))
    diagram = section("States of a run", ARCHITECTURE)
    assert {state.value for state in Status} <= set(re.findall(r"\b[a-z_]+\b", diagram))


# --- in your script -----------------------------------------------------------------------------------------------------


def test_the_script_in_the_readme_uses_what_the_shim_has():
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tree = ast.parse(script)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shim"
    }
    assert {"resume", "step", "close"} <= used
    fields = set(re.findall(r"self\.(\w+)[:,]? .*=", (ROOT / "trainer_shim/ckptd_shim/shim.py").read_text()))
    assert used <= set(dir(TrainerShim)) | fields
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "TrainerShim"]
    (made,) = calls
    assert {keyword.arg for keyword in made.keywords} <= set(TrainerShim.__init__.__annotations__)


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
