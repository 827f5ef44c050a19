"""Nodes of 8 devices that exist only on paper, for `bench/scale.py`: real connections, the real protocol, no workers.

    python bench/paper_nodes.py '{"run_dir": ..., "run_id": ..., "nodes": [...], "secret": ..., "host": ..., "port": ...}'

Each node is an `AgentLink` of its own, so it proves the secret, seals its lines, keeps its events until they are
acknowledged, and dials again, as an agent does. What is left out is all that an agent does besides talking. Standard
input takes the name of a node, a line each: from then on that node is silent, as if its cable were cut.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

from ckptd.link import AgentLink

DEVICES = 8
STEP_S = 1.0


class PaperNode:
    """What a node's agent says, and when."""

    def __init__(self, name: str, options: dict) -> None:
        self.name = name
        self.run_id = options["run_id"]
        self.silent = False
        self.attempt: int | None = None
        self.ranks: list[int] = []
        self.begun = 0.0
        self.interval_s = 0.5
        self.last_word = 0.0
        self.address = options["host"], options["port"]
        self.link = AgentLink(
            self._where, hello=self._hello, on_order=self._on_order, secret=bytes.fromhex(options["secret"])
        )

    def _where(self) -> tuple[str, int]:
        if self.silent:
            raise OSError("the cable is cut")
        return self.address

    def _hello(self) -> dict:
        devices = [{"index": i, "id": f"GPU-{self.name}-{i:04d}-5e1f", "name": "H100"} for i in range(DEVICES)]
        return {
            "node": self.name, "agent_id": f"agent of {self.name}", "run_id": self.run_id, "pid": 1000, "version": "paper",
            "devices": devices, "running": self.attempt,
        }  # fmt: skip

    async def _on_order(self, order: dict) -> None:
        if self.silent:
            return
        kind = order["type"]
        if kind == "welcome":
            self.interval_s = order["settings"]["live_interval_s"]
        elif kind == "ask" and order["what"] == "health":
            self.link.event("health_reported", unhealthy=[], detail="")
        elif kind == "ask":
            self.link.event("inventory_reported", chosen=None, commits=0, newest_sequence=0, seconds=0.01)
        elif kind == "store":
            self.link.event("store_opened", attempt=order["attempt"], host="127.0.0.1", port=1)
        elif kind == "launch":
            self._launch(order)
        elif kind == "stop":
            self._stop(order["attempt"])

    def _launch(self, order: dict) -> None:
        self.attempt, self.ranks = order["context"]["attempt"], order["ranks"]
        self.begun = time.monotonic()
        workers = {str(rank): {"pid": 5000 + rank, "start_time": 123456789} for rank in self.ranks}
        self.link.event("workers_started", attempt=self.attempt, workers=workers, warm=True)
        if 0 in self.ranks:
            self.link.event("workers_initialised", attempt=self.attempt, rank=0, world_size=order["world_size"])
            self.link.event("state_restored", attempt=self.attempt, rank=0, step=0, samples=0, seconds=0.1)
            self.link.event("first_step", attempt=self.attempt, rank=0, step=1)

    def _stop(self, attempt: int) -> None:
        if self.attempt != attempt:
            return
        exits = [
            {
                "rank": rank, "node": self.name, "exitcode": -9, "order": i, "t": -0.1, "killed_by_us": True,
                "left_early": False, "oom_killed": False, "xids": [], "gpu_lost": False, "stacks": "", "error": None,
                "stderr_tail": "", "step": self._step(),
            }
            for i, rank in enumerate(self.ranks)
        ]  # fmt: skip
        self.link.event("attempt_ended", attempt=attempt, step=self._step(), exits=exits, leftovers=[], unkillable=[])
        self.attempt, self.ranks = None, []

    def _step(self) -> int:
        return 1 + int((time.monotonic() - self.begun) / STEP_S)

    async def beat(self, first_s: float) -> None:
        """Say where training is, as an agent does, from `first_s` seconds on."""
        await asyncio.sleep(first_s)
        while not self.silent:
            step = self._step()
            beat = {"step": step, "samples": step * 1024, "phase": "step", "beat_age_s": 0.123456, "loss": 2.3456789,
                    "step_s": STEP_S, "pid": 5000}  # fmt: skip
            self.link.live({"attempt": self.attempt, "ranks": {str(rank): beat for rank in self.ranks}})
            if self.link.connected:
                self.last_word = time.monotonic()
            await asyncio.sleep(self.interval_s)


async def main(options: dict) -> None:
    nodes = [PaperNode(name, options) for name in options["nodes"]]
    tasks = [asyncio.create_task(node.link.run()) for node in nodes]
    tasks += [asyncio.create_task(node.beat(i / len(nodes))) for i, node in enumerate(nodes)]
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    named = {node.name: node for node in nodes}

    def silence(name: str) -> None:
        named[name].silent = True
        print(json.dumps({"silent": name, "last_word": named[name].last_word}), flush=True)

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(silence, line.strip())
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.readline())))
