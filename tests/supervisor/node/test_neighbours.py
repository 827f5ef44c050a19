"""Three nodes' directories on one machine, real sockets between them: whatever one of them loses, it gets back verified."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import shutil
import socket
import threading
import time

import pytest

from ckptd.core import holdings
from ckptd.node import gather as gathering
from ckptd.node import peers, sharing
from ckptd.node.gather import Source, Wanted, gather
from ckptd.node.inuse import InUse
from ckptd.node.keeper import Keeper
from ckptd.node.mirror import Mirror
from ckptd.node.neighbours import Neighbours
from ckptd.node.peers import Peer, PeerServer
from ckptd.node.shelf import Shelf, needed_by
from ckptd.node.tiers import Tier, scan
from ckptd.tiers import Crew, Pace, StoreError, verify
from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, FileDigest, Marker
from ckptd_shim.digest import crc32c_bytes

SECRET = bytes(range(32))
NAMES = ("a", "b", "c")


class Node:
    """One node's own tier, and the agent's part that other nodes see."""

    def __init__(self, root, name):
        self.name = name
        self.tier = Tier(name="memory", directory=str(root / name / "job"), shared=False)
        keeper = Keeper("r", emit=self.emit, say=lambda _message: None)
        self.neighbours = Neighbours(node=name, run_id="r", secret=SECRET, keeper=keeper, emit=self.emit)
        self.neighbours.configure([self.tier], None)
        self.server = PeerServer(host="127.0.0.1", secret=SECRET, answers=self.neighbours.answers)
        self.shelf = Shelf()
        self.events = []
        self.changed = threading.Condition()
        self.mirror = None

    def emit(self, kind, **event):
        with self.changed:
            self.events.append((kind, event))
            self.changed.notify_all()

    def wait_for(self, kind, timeout=30.0):
        with self.changed:
            assert self.changed.wait_for(lambda: any(k == kind for k, _ in self.events), timeout), self.events
            return next(e for k, e in self.events if k == kind)

    def source(self, held=()):
        return Source(node=self.name, host="127.0.0.1", port=self.server.port, held=frozenset(held))

    def dial(self, source):
        return Peer.dial(node=source.node, host=source.host, port=source.port, secret=SECRET, me=self.name)

    def follow(self, other):
        self.mirror = Mirror(
            tier=self.tier, run_id="r", crew=Crew(), shelf=self.shelf, in_use=InUse(), dial=self.dial, tell=self.emit
        )
        self.mirror.start()
        self.mirror.follow(other.source())

    def told(self):
        return Shelf().tell(self.tier, "r", {}, Pace())

    def files(self, name):
        path = os.path.join(self.tier.directory, name)
        return set(os.listdir(path)) - {COMMITTED, contract.OWNER} if os.path.isdir(path) else set()

    def wipe(self):
        shutil.rmtree(self.tier.directory)

    def close(self):
        if self.mirror is not None:
            self.mirror.close()
            self.mirror.join(10)
        self.server.close()


@pytest.fixture
def nodes(tmp_path):
    made = [Node(tmp_path, name) for name in NAMES]
    yield made
    for node in made:
        node.close()


def commit(nodes, sequence=1, *, size=3_000_000, metadata=True):
    """A commit of one rank a node: each its own shard and extras, and all of them the marker and `.metadata`."""
    step = 10 * sequence
    name = contract.checkpoint_dirname(step, 1)
    contents = {}
    for rank in range(len(nodes)):
        contents[f"__{rank}_0.distcp"] = random.Random(step + rank).randbytes(size + rank)
        contents[contract.extras_name(rank)] = random.Random(rank).randbytes(500)
    if metadata:
        contents[contract.DCP_METADATA] = b"metadata"
    listed = [FileDigest(name=n, size=len(data), crc32c=crc32c_bytes(data)) for n, data in contents.items()]
    places = {file.name: i for i, file in enumerate(listed)}
    own = {
        node.name: sorted([places[f"__{k}_0.distcp"], places[contract.extras_name(k)]]) for k, node in enumerate(nodes)
    }
    own[nodes[0].name].append(places[contract.DCP_METADATA])
    marker = Marker(
        format=contract.FORMAT, run_id="r", sequence=sequence, step=step, samples_seen=step, epoch=0, attempt=1,
        world_size=len(nodes), global_batch=12, loss=None, created=float(sequence), comparable=True, files=listed,
        nodes=own, needs=[[places[f"__{k}_0.distcp"], 0] for k in range(len(nodes))],
    )  # fmt: skip
    for node in nodes:
        path = os.path.join(node.tier.directory, name)
        os.makedirs(path)
        for place in {*own[node.name], places[contract.DCP_METADATA]}:
            with open(os.path.join(path, listed[place].name), "wb") as file:
                file.write(contents[listed[place].name])
        marker.write(os.path.join(path, COMMITTED))
    return name, marker, contents


def mirror_all(nodes):
    for before, node in zip([nodes[-1], *nodes], nodes, strict=False):
        node.follow(before)
    return [node.wait_for("checkpoint_mirrored") for node in nodes]


def wanted(node, nodes, name, ranks, world=3, *, everything=False):
    crc = next(h for other in nodes for h in other.told().holdings if h["name"] == name)["marker_crc32c"]
    sources = [
        other.source(holdings.from_ranges(h["held"]))
        for other in nodes
        if other is not node
        for h in other.told().holdings
        if h["name"] == name
    ]
    return Wanted(
        tier=node.tier,
        name=name,
        marker_crc32c=crc,
        ranks=ranks,
        world_size=world,
        everything=everything,
        sources=sources,
    )


def bring(node, question):
    return gather(question, shelf=node.shelf, dial=node.dial, in_use=InUse(), pace=Pace())


def test_every_nodes_part_comes_to_lie_on_the_next_one(nodes):
    name, marker, contents = commit(nodes)
    told = mirror_all(nodes)
    assert [(e["source"], e["nodes"], e["sequence"]) for e in told] == [("c", 3, 1), ("a", 3, 1), ("b", 3, 1)]
    for k, node in enumerate(nodes):
        ranks = {k, (k - 1) % 3}
        assert node.files(name) == {f(r) for r in ranks for f in ("__{}_0.distcp".format, contract.extras_name)} | {
            contract.DCP_METADATA
        }
        for file in node.files(name):
            with open(os.path.join(node.tier.directory, name, file), "rb") as opened:
                assert opened.read() == contents[file]
    assert sum(e["bytes"] for e in told) == sum(f.size for f in marker.files) - len(b"metadata")


@pytest.mark.parametrize("lost", range(3))
def test_a_node_with_an_empty_memory_gets_what_its_rank_needs_and_no_more(nodes, lost):
    name, _, contents = commit(nodes)
    mirror_all(nodes)
    for node in nodes:
        node.mirror.close()
        node.mirror.join(10)
    nodes[lost].wipe()
    report = {node.name: node.told().holdings for node in nodes}
    assert holdings.choose(report, ["memory"], run_id="r").sequence == 1
    done = bring(nodes[lost], wanted(nodes[lost], nodes, name, [lost]))
    needed = {f"__{lost}_0.distcp", "__0_0.distcp", contract.extras_name(lost), contract.extras_name(0), ".metadata"}
    assert nodes[lost].files(name) == needed
    assert done.fetched == len(needed)
    assert done.bytes == sum(len(contents[file]) for file in needed)
    again = bring(nodes[lost], wanted(nodes[lost], nodes, name, [lost]))
    assert (again.fetched, again.bytes) == (0, 0)


def test_another_world_gets_all_tensors_and_one_nodes_extras(nodes):
    name, _, _ = commit(nodes)
    bring(nodes[1], wanted(nodes[1], nodes, name, [0, 1], world=2))
    assert {f"__{k}_0.distcp" for k in range(3)} | {"extras_rank0", ".metadata"} <= nodes[1].files(name)
    assert "extras_rank2" not in nodes[1].files(name)


def test_two_neighbours_lost_is_said_and_names_what_is_missing(nodes):
    name, marker, _ = commit(nodes)
    mirror_all(nodes)
    question = wanted(nodes[2], nodes, name, [2])
    nodes[0].wipe()
    nodes[1].wipe()
    report = {node.name: node.told().holdings for node in nodes if os.path.isdir(node.tier.directory)}
    assert holdings.choose(report, ["memory"], run_id="r") is None
    with pytest.raises(StoreError, match=r"__0_0\.distcp"):
        bring(nodes[2], question)
    assert len(marker.files) == 7


def test_what_has_rotted_is_found_told_and_fetched_anew(nodes):
    name, _, contents = commit(nodes)
    mirror_all(nodes)
    path = os.path.join(nodes[1].tier.directory, name, "__1_0.distcp")
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"rot")
    told = nodes[1].told()
    assert "__1_0.distcp" in told.rejected[0]["problem"]
    question = wanted(nodes[1], nodes, name, [1])
    nodes[1].shelf = Shelf()
    assert bring(nodes[1], question).fetched == 1
    with open(path, "rb") as file:
        assert file.read() == contents["__1_0.distcp"]


def test_a_source_that_sends_something_else_is_passed_over(nodes):
    name, _, contents = commit(nodes)
    mirror_all(nodes)
    question = wanted(nodes[0], nodes, name, [0])
    nodes[0].wipe()
    with open(os.path.join(nodes[1].tier.directory, name, "__0_0.distcp"), "r+b") as file:
        file.write(b"rot")  # after it was looked at
    with pytest.raises(StoreError, match="came with CRC-32C"):
        bring(nodes[0], question)
    assert not [f for f in nodes[0].files(name) if f.startswith(".fetch-")]
    whole = dataclasses.replace(question.sources[1], held=frozenset(range(7)))
    for file, data in contents.items():
        with open(os.path.join(nodes[2].tier.directory, name, file), "wb") as opened:
            opened.write(data)
    bring(nodes[0], dataclasses.replace(question, sources=[question.sources[0], whole]))
    with open(os.path.join(nodes[0].tier.directory, name, "__0_0.distcp"), "rb") as opened:
        assert opened.read() == contents["__0_0.distcp"]


def test_a_commit_that_was_overtaken_is_left_out_and_a_dead_peer_is_tried_again(nodes):
    nodes[0].server.close()
    first, _, _ = commit(nodes, 1)
    nodes[1].follow(nodes[0])
    assert "cannot be reached" in nodes[1].wait_for("copy_failed")["error"]
    second, _, _ = commit(nodes, 2)
    nodes[0].server = PeerServer(host="127.0.0.1", secret=SECRET, answers=nodes[0].neighbours.answers)
    nodes[1].mirror.follow(nodes[0].source())
    assert nodes[1].wait_for("checkpoint_mirrored")["sequence"] == 2
    assert "__0_0.distcp" in nodes[1].files(second)
    assert "__0_0.distcp" not in nodes[1].files(first)


# --- who is answered, and what ----------------------------------------------------------------------------------------


def test_a_source_that_is_lost_while_it_is_dialled_does_not_hold_up_the_one_after_it(nodes):
    commit(nodes, 1)
    lost, next_one, node = nodes[2], nodes[0], nodes[1]
    dialled, over, dial = threading.Event(), threading.Event(), node.dial

    def to(source):
        if source.node == next_one.name:
            return dial(source)
        dialled.set()
        assert over.wait(30)
        raise TimeoutError("nothing answers")

    node.dial = to
    node.follow(lost)
    assert dialled.wait(30)
    node.mirror.follow(next_one.source())
    over.set()
    assert node.wait_for("checkpoint_mirrored")["source"] == next_one.name
    assert "copy_failed" not in [kind for kind, _ in node.events]


def test_without_the_secret_nothing_is_said(nodes):
    with pytest.raises(StoreError):
        Peer.dial(node="a", host="127.0.0.1", port=nodes[0].server.port, secret=bytes(32), me="x")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100 + b"\n", b"x" * 200_000):
        with socket.create_connection(("127.0.0.1", nodes[0].server.port), timeout=20) as sock:
            sock.sendall(said)
            received = b""
            while chunk := _received(sock):
                received += chunk
            assert received.count(b"\n") <= 1, "the challenge and nothing else"


def _received(sock):
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_strangers_that_say_nothing_do_not_keep_others_out(nodes, monkeypatch):
    monkeypatch.setattr(peers, "MAX_STRANGERS", 4)
    silent = [socket.create_connection(("127.0.0.1", nodes[0].server.port)) for _ in range(12)]
    try:
        nodes[1].dial(nodes[0].source()).__exit__()
    finally:
        for sock in silent:
            sock.close()


@pytest.mark.parametrize(
    ("tier", "name", "file"),
    [
        ("memory", "step_000000010.a0001", "../../secret"), ("memory", "..", "secret"), ("memory", "job", "x"),
        ("disk", "step_000000010.a0001", "__0_0.distcp"), ("memory", "step_000000010.a0001", "nothing"),
        ("memory", "step_000000099.a0001", COMMITTED), ("memory", None, None),
    ],
)  # fmt: skip
def test_only_files_of_checkpoints_on_own_tiers_are_given(nodes, tier, name, file):
    commit(nodes)
    with nodes[1].dial(nodes[0].source()) as peer:
        with pytest.raises(StoreError):
            list(peer.get(tier, name, file, most=1 << 40))
        assert b"".join(map(bytes, peer.get("memory", "step_000000010.a0001", ".metadata", most=100))) == b"metadata"


def test_bytes_that_are_changed_on_the_way_are_noticed(nodes):
    name, _, _ = commit(nodes)

    def meddle(data, count):
        return data[:-1] + bytes([data[-1] ^ 1]) if count > 1_000_000 else data

    with _between(nodes[0].server.port, meddle) as port:
        peer = Peer.dial(node="a", host="127.0.0.1", port=port, secret=SECRET, me="b")
        with peer, pytest.raises(StoreError, match="is not the one that the other end sent"):
            list(peer.get("memory", name, "__0_0.distcp", most=1 << 30))


class _between:  # noqa: N801
    """A man in the middle, for one connection."""

    def __init__(self, port, meddle):
        self._port, self._meddle = port, meddle
        self._listening = socket.create_server(("127.0.0.1", 0))

    def __enter__(self):
        threading.Thread(target=self._run, daemon=True).start()
        return self._listening.getsockname()[1]

    def _run(self):
        near, _ = self._listening.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._pump, args=(near, far, lambda data, _count: data), daemon=True).start()
        self._pump(far, near, self._meddle)

    @staticmethod
    def _pump(source, target, change):
        count = 0
        try:
            while data := source.recv(65536):
                count += len(data)
                target.sendall(change(data, count))
        except OSError:
            pass
        target.close()

    def __exit__(self, *_):
        self._listening.close()


def test_a_rate_is_kept(nodes):
    name, marker, _ = commit(nodes, size=1 << 20)
    begun = time.monotonic()
    shelf = Shelf()
    found = gathering.commit_of(nodes[0].tier, name, None)
    with nodes[1].dial(nodes[0].source()) as peer:
        target = dataclasses.replace(found, tier=nodes[1].tier)
        place = next(i for i, f in enumerate(marker.files) if f.name == "__0_0.distcp")
        shelf.fetch(target, [place], peer, pace=Pace(), rate=peers.Rate(4 << 20))
    assert time.monotonic() - begun >= 0.24


def test_what_ranks_need_is_all_tensors_where_nobody_said():
    files = [FileDigest(name=n, size=1, crc32c="0") for n in ("__0_0.distcp", "__1_0.distcp", "extras_rank0", "extras_rank1")]  # fmt: skip
    make = functools.partial(
        Marker, format=1, run_id="r", sequence=1, step=1, samples_seen=1, epoch=0, attempt=1, world_size=2,
        global_batch=None, loss=None, created=0.0, comparable=True, files=files,
    )  # fmt: skip
    assert needed_by(make(), [1], 2, everything=False) == {0, 1, 2, 3}
    assert needed_by(make(needs=[[0], [1]]), [1], 2, everything=False) == {1, 2, 3}
    assert needed_by(make(needs=[[0], [1]]), [1], 2, everything=True) == {0, 1, 2, 3}
    assert needed_by(make(needs=[[0], [1]]), [0, 1, 2], 3, everything=False) == {0, 1, 2}


# --- slower tiers -----------------------------------------------------------------------------------------------------


def bring_down(nodes, name, target):
    """The first node leads; every node knows `target`, a function of its name."""
    for node in nodes:
        node.neighbours.configure([node.tier, target(node.name)], None)
        others = [{"node": n.name, "host": "127.0.0.1", "port": n.server.port} for n in nodes if n is not node]
        node.neighbours._peers = {o["node"]: Source.from_dict(o) for o in others}
        node.neighbours._mirror = node.mirror
    (found,) = [f for f in scan(nodes[0].tier) if f.name == name]
    return nodes[0].neighbours.copy_together(found, nodes[0].tier, target(nodes[0].name), Pace())


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_each_node_brings_its_own_files_and_the_first_commits_the_whole(nodes, tmp_path, kind):
    name, marker, _ = commit(nodes)
    place = str(tmp_path / "disk" / "job") if kind == "directory" else f"file://{tmp_path}/far/job"
    target = Tier(name="disk", directory=place)
    done = bring_down(nodes, name, lambda _node: target)
    assert verify(target.store(), name).files == marker.files
    total = sum(file.size for file in marker.files)
    assert (done.bytes, done.moved) == (total, total)
    assert bring_down(nodes, name, lambda _node: target).moved == 0


def test_a_lost_nodes_part_comes_from_its_neighbour_and_without_one_nothing_is_committed(nodes, tmp_path):
    name, marker, _ = commit(nodes)
    target = Tier(name="disk", directory=str(tmp_path / "disk" / "job"))
    nodes[1].server.close()
    with pytest.raises(StoreError, match="node b's part is missing"):
        bring_down(nodes, name, lambda _node: target)
    assert not os.path.exists(os.path.join(target.directory, name))
    nodes[2].follow(nodes[1])
    nodes[1].server = PeerServer(host="127.0.0.1", secret=SECRET, answers=nodes[1].neighbours.answers)
    nodes[2].mirror.follow(nodes[1].source())
    nodes[2].wait_for("checkpoint_mirrored")
    nodes[1].server.close()
    bring_down(nodes, name, lambda _node: target)
    assert verify(target.store(), name).files == marker.files


def test_onto_disks_of_their_own_nodes_bring_their_copies_too(nodes, tmp_path):
    name, _, _ = commit(nodes)
    mirror_all(nodes)
    target = lambda node: Tier(name="disk", directory=str(tmp_path / node / "disk"), shared=False)  # noqa: E731
    bring_down(nodes, name, target)
    report = {n.name: Shelf().tell(target(n.name), "r", {}, Pace()).holdings for n in nodes}
    for lost in NAMES:
        left = {node: held for node, held in report.items() if node != lost}
        assert holdings.choose(left, ["disk"], run_id="r").sequence == 1


def test_another_agent_cannot_be_made_to_write_anywhere_else(nodes, tmp_path):
    name, _, _ = commit(nodes)
    target = Tier(name="disk", directory=str(tmp_path / "disk" / "job"))
    nodes[0].neighbours.configure([nodes[0].tier, target], None)
    crc = nodes[0].told().holdings[0]["marker_crc32c"]
    good = {"type": "contribute", "tier": "memory", "to": "disk", "name": name, "marker_crc32c": crc, "places": []}
    with nodes[1].dial(nodes[0].source()) as peer:
        for wrong in (
            {"to": "memory"},
            {"to": str(tmp_path)},
            {"name": "../x"},
            {"marker_crc32c": "0" * 8},
            {"places": 3},
        ):
            with pytest.raises(StoreError):
                peer.ask(good | wrong)
        assert peer.ask(good)["moved"] == 0


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_nodes_that_see_each_others_files_know_it_at_once_and_leave_nothing(tmp_path):
    found = {}

    def look(node):
        found[node] = sharing.look(str(tmp_path / "disk"), "r", node, NAMES, patience_s=60.0)

    threads = [threading.Thread(target=look, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(60)
    assert found == {name: list(NAMES) for name in NAMES}
    for name in NAMES:
        sharing.clear(str(tmp_path / "disk"), "r", name)
    assert os.listdir(tmp_path / "disk") == []


def test_a_node_alone_on_its_disk_or_without_one_sees_itself_at_most(tmp_path):
    assert sharing.look(str(tmp_path / "own"), "r", "a", NAMES, patience_s=0.3) == ["a"]
    (tmp_path / "file").write_text("in the way")
    assert sharing.look(str(tmp_path / "file"), "r", "a", NAMES, patience_s=0.3) == []
