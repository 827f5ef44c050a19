"""Which devices may be used: those that strike too often rest for a while, those that were drained until told otherwise.

A device is known by its identity (a GPU's UUID), so a strike stays with it when indices shift.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptd.core import events

STRIKES: Final = 3
"""Failures put down to one device, within the window, after which it is left out.

That a process was killed, say, may have many reasons: such strikes count only as long as no commit comes in between.
"""
WINDOW_S: Final = 6 * 3600.0
QUARANTINE_S: Final = 3600.0
"""How long the first time; twice as long each time after."""
PROBATION_S: Final = 24 * 3600.0
"""How long one strike is enough for a device that has come back; after that it is as good as any other."""
MAX_QUARANTINE_S: Final = 7 * 86_400.0
FOREVER_S: Final = 1e12

STRIKING: Final = frozenset({"signal", "device_error", "cuda_oom", "hang", "unknown"})
"""Causes that may be a device's doing. An exception of the script's own is not, and neither is its exit: no device makes
a script end with a status of its choice, and a world without that rank would hide the fault, or end training early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is held against one device."""

    strikes: tuple[tuple[float, bool], ...] = ()
    """(time on the run's clock, whether it is certain that the device was at fault)."""
    until: float = 0.0
    """Left out until then."""
    times: int = 0
    """How often it has been left out."""
    drained: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBook:
    """The devices of all nodes. State of a fold, never changed in place."""

    ids: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """node -> index -> identity."""
    records: Mapping[str, Record] = field(default_factory=dict)

    def identity(self, node: str, index: int) -> str:
        """The identity of the device that has this index on a node now."""
        return self.ids.get(node, {}).get(index, f"{node}/{index}")

    def names(self) -> list[str]:
        """Every device as `node:index`."""
        return [f"{node}:{index}" for node, known in self.ids.items() for index in sorted(known)]

    def named(self, text: str) -> list[str]:
        """Identities of the devices that a person means: an identity, `node:index`, a node, or an index where one node is."""
        node, _, index = text.rpartition(":")
        if text in self.ids:
            return [node_identity(text), *self.ids[text].values()]
        if not node and len(self.ids) == 1:
            node = next(iter(self.ids))
        if index.isdecimal() and int(index) in self.ids.get(node, {}):
            return [self.ids[node][int(index)]]
        return [identity for known in self.ids.values() for identity in known.values() if identity == text]

    def held_against(self, t: float) -> list[dict[str, object]]:
        """Devices that are left out at `t`, for people: [{node, index, id, why, until}]."""
        found: list[dict[str, object]] = []
        if not self.holds(t):
            return found
        for node, known in self.ids.items():
            for index, identity in sorted(known.items()):
                why = self.why_not(node, index, t)
                if why is not None:
                    held = [self.records[n] for n in (identity, node_identity(node)) if n in self.records]
                    until = max(record.until for record in held)
                    for_s = None if any(r.drained for r in held) or until >= FOREVER_S else until - t
                    found.append({"node": node, "index": index, "id": identity, "why": why, "for_s": for_s})
        return found

    def usable(self, node: str, indices: Sequence[int], t: float) -> tuple[int, ...]:
        """Those of `indices` that are neither drained nor in quarantine at `t`."""
        if not self.records:
            return tuple(indices)
        return tuple(index for index in indices if self.why_not(node, index, t) is None)

    def holds(self, t: float) -> bool:
        """Whether anything at all is left out at `t`."""
        return any(record.drained or t < record.until for record in self.records.values())

    def not_drained(self, node: str, indices: Sequence[int]) -> tuple[int, ...]:
        """Those of `indices` that nobody took out of use by hand, nor a process that cannot be killed."""

        def taken_out(name: str) -> bool:
            record = self.records.get(name)
            return record is not None and (record.drained or record.until >= FOREVER_S)

        if taken_out(node_identity(node)):
            return ()
        return tuple(index for index in indices if not taken_out(self.identity(node, index)))

    def why_not(self, node: str, index: int, t: float) -> str | None:
        """Why a device must not be used at `t`; None: it may."""
        for name in (self.identity(node, index), node_identity(node)):
            record = self.records.get(name)
            if record is None:
                continue
            if record.drained:
                return "drained"
            if t < record.until:
                return f"in quarantine: {record.reason}"
        return None

    def next_release(self, t: float) -> float | None:
        """When the next quarantine ends."""
        return min((r.until for r in self.records.values() if t < r.until < FOREVER_S), default=None)


def node_identity(node: str) -> str:
    """What is held against a whole node is kept under this name."""
    return f"node {node}"


def connected(book: DeviceBook, event: events.AgentConnected) -> DeviceBook:
    """Learn which device has which index on a node."""
    node = event.node or ""
    known = {int(d["index"]): _identity(node, d) for d in event.devices}
    return dataclasses.replace(book, ids={**book.ids, node: known})


def _identity(node: str, device: events.Json) -> str:
    given = str(device.get("id") or "")
    # A slot of the CPU has a name only on its own node; a GPU's UUID is its own everywhere.
    return given if given and not given.startswith("cpu-slot-") else f"{node}/{device['index']}"


def drained(book: DeviceBook, event: events.DeviceDrained) -> DeviceBook:
    """A person took a device out, or gives it back with a clean record."""
    record = Record(drained=True, reason="drained") if event.drained else Record()
    return dataclasses.replace(book, records={**book.records, event.device: record})


def struck(book: DeviceBook, event: events.Interrupted, placement: Mapping[str, Sequence[int]]) -> DeviceBook:
    """Put an interruption down to the device of the rank that caused it, if it may have been the device's doing."""
    if event.severity == "node" and event.node is not None and len(book.ids) > 1 and not event.planned:
        name = node_identity(event.node)
        return _strike(book, name, t=event.t, now=event.detected_t, certain=True, detail=event.detail)
    if event.planned or event.rank is None or (event.cause not in STRIKING and event.severity != "device"):
        return book
    where = device_of_rank(placement, event.rank)
    if where is None:
        return book
    identity = book.identity(*where)
    return _strike(
        book, identity, t=event.t, now=event.detected_t, certain=event.severity == "device", detail=event.detail
    )


def failed_in_use(book: DeviceBook, event: events.HealthReported, in_use: Collection[int]) -> DeviceBook:
    """Devices that a run trains on were reported unhealthy: once is an accident, but one that comes and goes costs a restart each time."""
    node = event.node or ""
    for index in in_use:
        identity = book.identity(node, index)
        book = _strike(
            book, identity, t=event.t, now=event.t, certain=True, detail=event.detail or "reported unhealthy"
        )
    return book


def _strike(book: DeviceBook, identity: str, *, t: float, now: float, certain: bool, detail: str) -> DeviceBook:
    record = book.records.get(identity, Record())
    if record.until >= FOREVER_S:
        return book  # it is left out until somebody says otherwise: nothing shortens that
    strikes = (*(s for s in record.strikes if t - s[0] < WINDOW_S), (t, certain))
    on_probation = record.times > 0 and t < record.until + PROBATION_S
    if len(strikes) < STRIKES and not on_probation:
        record = dataclasses.replace(record, strikes=strikes)
    else:
        record = dataclasses.replace(
            record,
            strikes=(),
            until=now + min(MAX_QUARANTINE_S, QUARANTINE_S * 2.0**record.times),
            times=record.times + 1,
            reason=f"{len(strikes)} failures were put down to it, the last: {detail}",
        )
    return dataclasses.replace(book, records={**book.records, identity: record})


def proved(book: DeviceBook, placement: Mapping[str, Sequence[int]]) -> DeviceBook:
    """A commit: whatever ended processes before, these devices can train. Only certain faults are still held."""
    records = dict(book.records)
    for node, indices in placement.items():
        for index in indices:
            identity = book.identity(node, index)
            record = records.get(identity)
            if record is not None and record.strikes:
                records[identity] = dataclasses.replace(record, strikes=tuple(s for s in record.strikes if s[1]))
    return dataclasses.replace(book, records=records) if records != book.records else book


def unkillable(book: DeviceBook, event: events.AttemptEnded, placement: Mapping[str, Sequence[int]]) -> DeviceBook:
    """Leave out the device of a worker that survived SIGKILL, until somebody says that it is well."""
    for process in event.unkillable:
        where = device_of_rank(placement, process["rank"]) if process.get("rank") is not None else None
        if where is None:
            continue
        identity = book.identity(*where)
        record = Record(
            until=FOREVER_S,
            times=1,
            drained=book.records.get(identity, Record()).drained,
            reason=f"process {process.get('pid')} on it cannot be killed; undrain it when it is gone",
        )
        book = dataclasses.replace(book, records={**book.records, identity: record})
    return book


def haunted(book: DeviceBook, event: events.AttemptEnded) -> DeviceBook:
    """Leave out a node on which something of an attempt before survives, until somebody says that it is well."""
    if not event.unkillable or event.node is None:
        return book
    name = node_identity(event.node)
    pids = ", ".join(str(process.get("pid")) for process in event.unkillable)
    record = Record(
        until=FOREVER_S,
        times=1,
        drained=book.records.get(name, Record()).drained,
        reason=f"process {pids} on it cannot be killed; undrain it when it is gone",
    )
    return dataclasses.replace(book, records={**book.records, name: record})


def device_of_rank(placement: Mapping[str, Sequence[int]], rank: int) -> tuple[str, int] | None:
    """(node, index) of the device that a rank of an attempt ran on."""
    for node, indices in placement.items():
        if rank < len(indices):
            return node, indices[rank]
        rank -= len(indices)
    return None
