"""How does a drill run the job? As an ordinary run under an ordinary daemon, in a directory of its own."""

from __future__ import annotations

import asyncio
import uuid

from ckptd.core import events
from ckptd.daemon import Daemon
from ckptd.errors import ExitStatus
from ckptd.jobspec import JobSpec
from ckptd.launchers.local import LocalLauncher
from ckptd.ledger import Ledger
from ckptd.rundir import RunDir
from ckptd_shim.contract import Drill, RestoreDrill

NEVER = 10**9
"""An interval in steps that no drill reaches."""
DEVICES_PATIENCE_S = 60.0


def supervise(spec: JobSpec, run_dir: RunDir, drill: Drill | RestoreDrill) -> Daemon:
    """Run the job in `run_dir`, which is made, until it is over; the daemon that did, with all it knows.

    Raises:
        KeyboardInterrupt: by Ctrl-C; nothing is left running.
    """
    run_dir.create()
    with run_dir.acquire_lock(), Ledger.open(run_dir.ledger_path) as ledger:
        daemon = _daemon(spec, run_dir, ledger, drill)
        asyncio.run(daemon.run())
    outcome = daemon.picture.run.outcome
    assert outcome is not None
    if outcome.exit_status == ExitStatus.INTERRUPTED:
        raise KeyboardInterrupt
    return daemon


def _daemon(spec: JobSpec, run_dir: RunDir, ledger: Ledger, drill: Drill | RestoreDrill) -> Daemon:
    run_id = ""
    for _, event in ledger.events():
        if isinstance(event, events.DaemonStarted):
            run_id = str(event.policy.get("run_id", "")) or run_id
    run_id = run_id or uuid.uuid4().hex[:12]
    # Whatever machines the job itself runs on, this happens here.
    here = {"launcher": "local", "hosts": [], "spares": 0}
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update=here)})
    devices = spec.cluster.devices_per_node
    socket_path = run_dir.socket_path()
    launcher = LocalLauncher(
        run_dir=str(run_dir.path), run_id=run_id, socket=socket_path, workdir=str(spec.workdir_path),
        devices=None if devices == "auto" else devices,
    )  # fmt: skip
    return Daemon(
        spec=spec,
        run_dir=run_dir,
        run_id=run_id,
        ledger=ledger,
        launcher=launcher,
        socket_path=socket_path,
        drill=drill,
    )
