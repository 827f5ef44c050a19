"""What does it take to mirror a node's part of a checkpoint, and what do training steps feel of it?

Two processes on this machine stand for two nodes: one gives its files as an agent does, the other fetches them. Beside
that, the same bytes through a plain socket into a file. Then a small model trains in a third process, with and without
mirroring going on beside it.

    python bench/mirror.py [--megabytes 256] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection as Pipe

from ckptd.node.gather import Source
from ckptd.node.keeper import Keeper
from ckptd.node.neighbours import Neighbours
from ckptd.node.peers import Peer, PeerServer, give_way
from ckptd.node.shelf import Shelf, commit_of
from ckptd.node.tiers import Tier
from ckptd.tiers import Pace, watched
from ckptd_shim import contract
from ckptd_shim.contract import COMMITTED, FileDigest, Marker
from ckptd_shim.digest import crc32c_file

SECRET = bytes(32)
NAME = contract.checkpoint_dirname(1, 1)
FILES = 2


def tier(place: str, node: str) -> Tier:
    return Tier(name="memory", directory=os.path.join(place, node), shared=False)


def commit(place: str, size: int) -> None:
    path = os.path.join(tier(place, "a").directory, NAME)
    os.makedirs(path)
    listed = []
    for k in range(FILES):
        name = f"__{k}_0.distcp"
        with open(os.path.join(path, name), "wb") as file:
            file.writelines(os.urandom(1 << 20) for _ in range(size // FILES >> 20))
        length, crc = crc32c_file(os.path.join(path, name))
        listed.append(FileDigest(name=name, size=length, crc32c=crc))
    Marker(
        format=contract.FORMAT, run_id="r", sequence=1, step=1, samples_seen=1, epoch=0, attempt=1, world_size=FILES,
        global_batch=None, loss=None, created=0.0, files=listed, comparable=True, nodes={"a": list(range(FILES))},
    ).write(os.path.join(path, COMMITTED))  # fmt: skip


def serve(place: str, pipe: Pipe, niceness: int) -> None:
    """One node: gives its files as an agent does, and the bytes of one of them to whoever connects to the plain port."""
    watched.NICE = niceness  # type: ignore[misc]
    keeper = Keeper("r", emit=lambda *_a, **_k: None, say=lambda _m: None)
    neighbours = Neighbours(node="a", run_id="r", secret=SECRET, keeper=keeper, emit=lambda *_a, **_k: None)
    neighbours.configure([tier(place, "a")], None)
    server = PeerServer(host="127.0.0.1", secret=SECRET, answers=neighbours.answers)
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.port, plain.getsockname()[1]))
    buffer = memoryview(bytearray(1 << 20))
    while True:
        sock, _ = plain.accept()
        for k in range(FILES):
            with open(os.path.join(tier(place, "a").directory, NAME, f"__{k}_0.distcp"), "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    sock.sendall(buffer[:count])
        sock.close()


def plain_copy(place: str, port: int) -> float:
    begun = time.monotonic()
    buffer = memoryview(bytearray(1 << 20))
    path = os.path.join(place, "plain")
    with socket.create_connection(("127.0.0.1", port)) as sock, open(path, "wb", buffering=0) as file:
        while count := sock.recv_into(buffer):
            file.write(buffer[:count])
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    os.unlink(path)
    return seconds


def mirror(place: str, port: int) -> float:
    """Fetch and verify all of it, and remove it again."""
    begun = time.monotonic()
    source = Source(node="a", host="127.0.0.1", port=port)
    with Peer.dial(node="a", host=source.host, port=port, secret=SECRET, me="b") as peer:
        found = commit_of(tier(place, "b"), NAME, None, peer)
        Shelf().fetch(found, range(FILES), peer, pace=Pace())
    seconds = time.monotonic() - begun
    shutil.rmtree(tier(place, "b").directory)
    return seconds


def mirror_for_ever(place: str, port: int) -> None:
    give_way()
    while True:
        mirror(place, port)


def train(pipe: Pipe) -> None:
    """Steps of a small model, and the seconds of each, as often as asked."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 512)
    while (count := pipe.recv()) is not None:
        times = []
        for _ in range(count):
            begun = time.monotonic()
            optimizer.zero_grad()
            model(data).pow(2).mean().backward()
            optimizer.step()
            times.append(time.monotonic() - begun)
        pipe.send(times)


def steps(pipe: Pipe, count: int) -> list[float]:
    pipe.send(count)
    times: list[float] = pipe.recv()
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--niceness", type=int, default=watched.NICE, help="0: as if nothing else were to go first")
    args = parser.parse_args()
    size = args.megabytes << 20
    context = multiprocessing.get_context("spawn")
    place = tempfile.mkdtemp(prefix="ckptd-bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    children = []
    try:
        commit(place, size)
        near, far = context.Pipe()
        children.append(context.Process(target=serve, args=(place, far, args.niceness), daemon=True))
        children[-1].start()
        port, plain_port = near.recv()
        plain, copies, plain_cpu, copies_cpu = [], [], [], []
        for _ in range(args.repeat):  # in turn: what else the machine does meets both alike
            before = time.process_time()
            plain.append(plain_copy(place, plain_port))
            between = time.process_time()
            copies.append(mirror(place, port))
            plain_cpu.append(between - before)
            copies_cpu.append(time.process_time() - between)
        trainer, end = context.Pipe()
        children.append(context.Process(target=train, args=(end,), daemon=True))
        children[-1].start()
        steps(trainer, 20)
        without, beside = [], []
        for _ in range(args.repeat if args.steps else 0):
            without += steps(trainer, args.steps)
            busy = context.Process(target=mirror_for_ever, args=(place, port), daemon=True)
            busy.start()
            steps(trainer, 50)  # it has begun by then
            beside += steps(trainer, args.steps)
            busy.kill()
            busy.join()
            shutil.rmtree(tier(place, "b").directory, ignore_errors=True)
        result = {
            "bytes": size,
            "plain_s": statistics.median(plain),
            "mirror_s": statistics.median(copies),
            "plain_cpu_s": statistics.median(plain_cpu),
            "mirror_cpu_s": statistics.median(copies_cpu),
            "mirror_mb_per_s": size / statistics.median(copies) / 1e6,
            "step_ms": statistics.median(without) * 1e3 if without else None,
            "step_ms_while_mirroring": statistics.median(beside) * 1e3 if beside else None,
            "niceness": args.niceness,
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
        print(json.dumps(result))
    finally:
        for child in children:
            child.kill()
            child.join()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
