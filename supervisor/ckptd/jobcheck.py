"""What is wrong with this job.yaml? Every error of reading, of types, and of keys that contradict each other, at once.

Types are the models' business (`jobspec`). A file whose types are wrong in one place is still searched for
contradictions in all others: the wrong keys are taken out, and what hangs on them is not judged.
"""

from __future__ import annotations

import difflib
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from ckptd.jobhost import interpreter_problem, place_of, url_problem
from ckptd.jobspec import NODE_IN_PATH, JobSpec
from ckptd.units import described, format_duration, shortened
from ckptd.yamltext import MAX_BYTES, Document, Key, Problem, read

READ_LIMIT: Final = MAX_BYTES + 1

_PLACEHOLDERS: Final[dict[str, Any]] = {"name": "unnamed", "command": ["unnamed"]}
"""Stand for required keys that are missing or wrong, so that the others can be judged."""


def validate(data: bytes, *, source: str | None, check: bool = True) -> tuple[JobSpec | None, list[Problem]]:
    """Read `data` as job.yaml. `source`: absolute path that relative paths start beside; None: the current directory.

    Returns:
        The spec, None where there is none to speak of, and the problems, sorted by line. With `check` false only
        reading and types are judged.
    """
    document = read(data)
    problems = list(document.problems)
    if problems and not document.values:
        return None, problems
    values = document.values
    wrong: set[Key] = set()
    spec = None
    for _ in range(3):  # taking a key out can leave another one without what it needs: a third round always suffices
        try:
            spec = JobSpec.model_validate(values)
            break
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=True)
            if not wrong:
                problems += [_problem(document, dict(item)) for item in found]
            wrong |= {_take_out(values, item["loc"], missing=item["type"] == "missing") for item in found}
    if spec is not None:
        spec._source, spec._text = source, data
        if check:
            problems += [
                Problem(document.line(finding.keys[0]), finding.keys[0], finding.message)
                for finding in _contradictions(spec)
                if not any(_related(key, bad) for key in finding.keys for bad in wrong)
            ]
    unique = {(p.line, p.key, p.message): p for p in problems}
    ordered = sorted(unique.values(), key=lambda p: p.line)
    return (None if wrong else spec), ordered


def rendered(problem: Problem) -> str:
    """`key.path[0].key: message`, with nothing in it that a terminal would act on."""
    key = ""
    for part in problem.key:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    text = f"{key}: {problem.message}" if key else problem.message
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- what pydantic found, in our words --------------------------------------------------------------------------------


def _problem(document: Document, error: dict[str, Any]) -> Problem:
    key: Key = error["loc"]
    kind, context, given = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "extra_forbidden":
        message = _unknown(key)
    elif kind == "missing":
        message = "is missing, and it has no default"
    elif kind == "value_error":
        message = str(context["error"])
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal"):
        bound = context[{"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le"}[kind]]
        words = {"greater_than_equal": "at least", "greater_than": "more than", "less_than_equal": "at most"}[kind]
        message = f"must be {words} {bound:g}"
    elif kind == "literal_error":
        message = _not_one_of(key, str(given))
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        message = f"should be a mapping (`key: value`), is {described(given)}"
    elif kind == "list_type":
        message = f"should be a list, is {described(given)}"
    elif kind == "too_short":
        message = "is empty; it needs a script, or -m and a module"
    else:
        message = str(error["msg"])
    return Problem(document.line(key), key, message)


def _unknown(key: Key) -> str:
    name = str(key[-1])
    here = _fields(_model_at(key[:-1]))
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    homes = [section for section, fields in _homes() if name in fields]
    if homes:
        return f"unknown key here; it belongs {homes[0]}"
    return f"unknown key; known here: {', '.join(here)}"


def _not_one_of(key: Key, given: str) -> str:
    model = _model_at(key[:-1])
    info = model.model_fields.get(str(key[-1])) if model else None
    choices = [str(choice) for choice in get_args(info.annotation)] if info else []
    near = difflib.get_close_matches(given, choices, n=1, cutoff=0.6)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    only = "is not" if len(choices) == 1 else "is not one of"
    return f"{shortened(given)} {only} {', '.join(choices)}{guess}"


def _fields(model: type[BaseModel] | None) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()] if model else []


def _model_at(key: Key) -> type[BaseModel] | None:
    """The model that describes the mapping at `key`."""
    model: type[BaseModel] | None = JobSpec
    for part in key:
        if model is None or isinstance(part, int):
            continue
        model = _nested(model.model_fields[part].annotation) if part in model.model_fields else None
    return model


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested, get_args(annotation))), None)


def _homes() -> Iterator[tuple[str, list[str]]]:
    """Every section, in the words of an error message, and the keys it knows."""
    yield "at the top level", _fields(JobSpec)
    for name, info in JobSpec.model_fields.items():
        section = _nested(info.annotation)
        if section is not None:
            yield f"under {name!r}", _fields(section)
    yield "in an entry of 'checkpoint.tiers'", _fields(_model_at(("checkpoint", "tiers")))


def _take_out(values: dict[str, Any], where: tuple[str | int, ...], *, missing: bool) -> Key:
    """Remove the nearest key that can go without shifting a list, and return it."""
    key: Key = where[:-1] if missing and len(where) > 1 else where
    ints = [i for i, part in enumerate(key) if isinstance(part, int)]
    if ints and (ints[-1] == len(key) - 1):
        key = key[: ints[0]]
    top = key[0]
    if top in _PLACEHOLDERS:
        values[str(top)] = _PLACEHOLDERS[str(top)]
        return (top,)
    inside: Any = values
    for part in key[:-1]:
        if not isinstance(inside, (dict, list)):
            break
        inside = inside[part] if isinstance(inside, list) else inside.get(part)  # type: ignore[index]
    if isinstance(inside, dict):
        inside.pop(key[-1], None)
    return key


def _related(one: Key, other: Key) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


# --- contradictions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finding:
    """A contradiction; `keys` are all that it rests on, the first is the one that is blamed."""

    message: str
    keys: list[Key] = field(default_factory=list)


def _contradictions(spec: JobSpec) -> Iterator[_Finding]:
    yield from _about_devices(spec)
    yield from _about_batch(spec)
    yield from _about_intervals(spec)
    yield from _about_tiers(spec)
    yield from _about_prior(spec)
    yield from _about_files(spec)


def _about_devices(spec: JobSpec) -> Iterator[_Finding]:
    c = spec.cluster

    def at(*names: str) -> list[Key]:
        return [("cluster", name) for name in names]

    if c.hosts and c.launcher != "ssh":
        yield _Finding("only the ssh launcher takes hosts", at("hosts", "launcher"))
    if c.launcher == "ssh":
        yield from _about_hosts(spec)
    if c.launcher != "local":
        yield from _about_fences(spec)
    elif c.listen is not None:
        yield _Finding("the local launcher has no other machine that could dial", at("listen", "launcher"))
    if c.spares and c.launcher == "local":
        yield _Finding("the local launcher has one node, none to spare", at("spares", "launcher"))
    if c.max_devices is not None and c.max_devices < c.min_devices:
        message = f"{c.min_devices} is more than max_devices, {c.max_devices}"
        yield _Finding(message, at("min_devices", "max_devices"))
    elif c.max_devices is not None and c.max_devices < c.multiple_of:
        message = f"{c.max_devices} is less than multiple_of, {c.multiple_of}: no world would be large enough"
        yield _Finding(message, at("max_devices", "multiple_of"))
    elif c.max_devices is not None and c.max_devices // c.multiple_of * c.multiple_of < c.min_devices:
        message = f"no world between {c.min_devices} and {c.max_devices} devices is a multiple of {c.multiple_of}"
        yield _Finding(message, at("multiple_of", "min_devices", "max_devices"))
    if isinstance(c.devices_per_node, int) and c.launcher == "local":
        least = max(c.min_devices, c.multiple_of)
        if c.devices_per_node < least:
            message = f"{c.devices_per_node} on one node is less than the {least} that a world needs"
            yield _Finding(message, at("devices_per_node", "min_devices", "multiple_of", "launcher"))


FENCE_MARGIN_S: Final = 5.0
"""From an agent's ending what it carries to its node's being lost: for the ending itself, and clocks that drift."""


def _about_hosts(spec: JobSpec) -> Iterator[_Finding]:
    c = spec.cluster
    hosts: Key = ("cluster", "hosts")
    if not c.hosts:
        yield _Finding("the ssh launcher needs them: `hosts: [h1, h2]`", [hosts, ("cluster", "launcher")])
    seen: dict[str, int] = {}
    for i, host in enumerate(c.hosts):
        if host.host in seen:
            yield _Finding(f"hosts[{seen[host.host]}] is {host.host!r} too", [(*hosts, i)])
        seen.setdefault(host.host, i)
    if c.spares and c.spares >= len(c.hosts) > 0:
        message = f"{c.spares} of {len(c.hosts)} hosts leaves none to train on"
        yield _Finding(message, [("cluster", "spares"), hosts])
    known = [host.devices or c.devices_per_node for host in c.hosts]
    if c.hosts and all(isinstance(count, int) for count in known):
        total = sum(sorted((int(count) for count in known), reverse=True)[: max(1, len(known) - c.spares)])
        least = max(c.min_devices, c.multiple_of)
        if total < least:
            message = f"{total} devices on all hosts{' but the spares' if c.spares else ''} are less than the {least} that a world needs"
            yield _Finding(message, [("cluster", "min_devices"), hosts, ("cluster", "multiple_of")])
    tiers = spec.checkpoint.tiers
    for i, tier in enumerate(tiers):
        key: Key = ("checkpoint", "tiers", i)
        if tier.shared and NODE_IN_PATH in (tier.path or ""):
            message = f"nodes that see the same files have one path: leave out `shared: true`, or {NODE_IN_PATH}"
            yield _Finding(message, [(*key, "path"), (*key, "shared")])


def _about_fences(spec: JobSpec) -> Iterator[_Finding]:
    c = spec.cluster
    if c.fence_timeout > c.heartbeat_timeout - FENCE_MARGIN_S:
        message = (
            f"{format_duration(c.fence_timeout)} is not {FENCE_MARGIN_S:g}s below heartbeat_timeout, "
            f"{format_duration(c.heartbeat_timeout)}: a node must have ended what it carries before it counts as lost"
        )
        yield _Finding(message, [("cluster", "fence_timeout"), ("cluster", "heartbeat_timeout")])


def _about_batch(spec: JobSpec) -> Iterator[_Finding]:
    if spec.batch is None:
        return
    c, total, micro = spec.cluster, spec.batch.global_batch, spec.batch.micro_batch
    if micro > total:
        message = f"{micro} is more than the global batch, {total}"
        yield _Finding(message, [("batch", "micro"), ("batch", "global")])
    keys: list[Key] = [("batch", "global"), ("cluster", "multiple_of")]
    if total % c.multiple_of:
        yield _Finding(f"{total} is not divisible by cluster.multiple_of, {c.multiple_of}", keys)
        return
    most = c.max_devices if c.max_devices is not None else total
    if most < c.min_devices and c.max_devices is not None:
        return  # said already
    if not any(c.min_devices <= world <= most and world % c.multiple_of == 0 for world in _divisors(total)):
        upper = f"to {most} devices" if c.max_devices is not None else "devices up"
        message = f"{total} is not divisible by any world that cluster allows, from {c.min_devices} {upper}"
        if c.multiple_of > 1:
            message += f" in steps of {c.multiple_of}"
        yield _Finding(message, [*keys, ("cluster", "min_devices"), ("cluster", "max_devices")])


def _divisors(number: int) -> Iterable[int]:
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            yield small
            yield number // small


def _about_intervals(spec: JobSpec) -> Iterator[_Finding]:
    c = spec.checkpoint
    low, high = ("checkpoint", "min_interval"), ("checkpoint", "max_interval")
    if c.min_interval is not None and c.max_interval is not None and c.min_interval > c.max_interval:
        least, most = format_duration(c.min_interval), format_duration(c.max_interval)
        default = "" if "max_interval" in c.model_fields_set else " (its default)"
        yield _Finding(f"{least} is longer than max_interval, {most}{default}", [low, high])
    elif isinstance(c.interval, float):
        # Bounds that nobody wrote down do not contradict a fixed interval: they are for `auto`.
        keys: list[Key] = [("checkpoint", "interval")]
        interval = format_duration(c.interval)
        if c.min_interval is not None and c.interval < c.min_interval:
            message = f"{interval} is shorter than min_interval, {format_duration(c.min_interval)}"
            yield _Finding(message, [*keys, low])
        if c.max_interval is not None and "max_interval" in c.model_fields_set and c.interval > c.max_interval:
            message = f"{interval} is longer than max_interval, {format_duration(c.max_interval)}"
            yield _Finding(message, [*keys, high])


def _about_tiers(spec: JobSpec) -> Iterator[_Finding]:
    everything: Key = ("checkpoint", "tiers")
    tiers = spec.checkpoint.tiers
    if not tiers:
        message = "no tier: say where checkpoints go, such as `tiers: [{name: disk, path: ./checkpoints}]`"
        yield _Finding(message, [everything])
    names: dict[str, int] = {}
    places: dict[str, int] = {}
    for i, tier in enumerate(tiers):
        key: Key = (*everything, i)
        path, url = (*key, "path"), (*key, "url")
        if tier.name in names:
            yield _Finding(f"tiers[{names[tier.name]}] has the name {tier.name!r} too", [(*key, "name")])
        names.setdefault(tier.name, i)
        if tier.path is not None and tier.url is not None:
            yield _Finding("a tier has either a path or a url, not both", [url, path])
        elif tier.path is None and tier.url is None:
            yield _Finding("a tier needs a path, or, unless it is the first, a url", [path, url])
        if i == 0 and tier.url is not None:
            message = (
                "the first tier is what workers write to and read from: give a path, and the object store below it"
            )
            yield _Finding(message, [url])
        if i == 0 and tier.promote is not None:
            message = "the first tier is saved to by training itself; `promote` belongs to the tiers after it"
            yield _Finding(message, [(*key, "promote")])
        where = path
        place = None
        if tier.path is not None:
            place = os.path.realpath(spec.resolve(tier.path))
        elif tier.url is not None:
            where = url
            wrong = url_problem(tier.url)
            if wrong is not None:
                yield _Finding(wrong, [url])
            else:
                place = place_of(tier.url)
        if place is not None:
            if place in places:
                yield _Finding(f"tiers[{places[place]}] lies in the same place, {place}", [where])
            places.setdefault(place, i)
            if tier.path is not None and os.path.lexists(place) and not os.path.isdir(place):
                yield _Finding(f"{place} is not a directory", [path])


def _about_prior(spec: JobSpec) -> Iterator[_Finding]:
    if spec.prior.log is not None:
        for name in sorted({"failures", "device_hours"} & spec.prior.model_fields_set):
            message = f"the prior comes from the log {spec.prior.log!r}; leave either this or prior.log out"
            yield _Finding(message, [("prior", name), ("prior", "log")])


def _about_files(spec: JobSpec) -> Iterator[_Finding]:
    workdir = spec.workdir_path
    command, where = ("command",), ("workdir",)
    first = spec.command[0]
    here = spec.cluster.launcher == "local"  # elsewhere these files are those of other machines
    if not here:
        pass
    elif not os.path.isdir(workdir):
        yield _Finding(f"there is no directory {workdir}", [where])
    elif spec.script_path is not None and first and first[0] != "-" and not os.path.isfile(spec.script_path):
        yield _Finding(f"there is no script {spec.script_path}", [command, where])
    if not first:
        yield _Finding("begins with an empty word; it needs a script, or -m and a module", [command])
    elif first == "-m" and len(spec.command) == 1:
        yield _Finding("-m needs a module after it", [command])
    elif first.startswith("-") and first != "-m":
        yield _Finding(f"begins with {shortened(first)}; it needs a script, or -m and a module", [command])
    if spec.run_dir is not None and os.path.realpath(spec.run_dir_path) == os.path.realpath(spec.base_path):
        yield _Finding("the run directory cannot be the one that holds job.yaml; name one of its own", [("run_dir",)])
    if here and spec.python is not None and (problem := interpreter_problem(spec)) is not None:
        yield _Finding(problem, [("python",), ("env",)])
    for name in spec.env:
        if not name or "=" in name:
            yield _Finding(f"{shortened(name)} cannot be the name of a variable", [("env", name)])
    if spec.health.command is not None:
        program = spec.health.command[0] if spec.health.command else ""
        if not program:
            yield _Finding("is empty; it needs a program, or null", [("health", "command")])
        elif here and shutil.which(workdir / program if "/" in program else program) is None:
            yield _Finding(f"there is no program {shortened(program)}", [("health", "command"), where])
