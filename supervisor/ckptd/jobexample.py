"""What does a first job.yaml look like? The commented file that `ckptd init` writes."""

from __future__ import annotations

import json
import re
from typing import Final

_TEMPLATE: Final = """\
# One training job for ckptd. `ckptd validate` checks this file, `ckptd run` runs it.
# Durations are 500ms, 30s, 10m, 2h, 1d or a number of seconds. Relative paths start from the directory of this file,
# and ~ is the home directory; variables such as ${HOME} are not expanded. What is commented out shows its default.
version: 1
name: @NAME@
command: [@SCRIPT@]            # a script and its arguments, or ["-m", "package.module", ...]
workdir: .                     # the workers run here; the script is looked up here
# python: null                 # interpreter of the workers; null: the one that runs ckptd
# env: {OMP_NUM_THREADS: "1"}  # added to the workers' environment (empty by default)
# run_dir: null                # ledger, logs, socket; null: $XDG_STATE_HOME/ckptd/runs/<name>

cluster:
  launcher: local
  devices_per_node: auto       # auto: the GPUs found; where there are none, say how many workers, such as 2
  min_devices: 1               # never train on fewer
  # max_devices: null          # never train on more; null: on all healthy ones
  # multiple_of: 1             # the model-parallel size: a world is a multiple of it
  # wait_for_devices: 1h       # then give up with exit status 69
  # orphan_timeout: 1h         # how long workers go on while the daemon is away
  # On several machines, with `launcher: ssh` (docs/multi-node.md):
  # hosts: []                  # such as [h1, {host: h2, python: /opt/venv/bin/python, devices: 4}]
  # spares: 0                  # so many of them are kept idle, to step in for a broken one
  # listen: null               # host:port that they dial; null: an address that reaches them, any free port
  # heartbeat_timeout: 30s     # silent for so long, a node is lost
  # fence_timeout: 20s         # out of touch for so long, an agent ends what it carries; at least 5s below

# The global batch stays the same on any number of devices: the world has to divide it, and ckptd tells the script how
# many micro-batches to accumulate. Leave it out if the script sees to its batches itself.
# batch: {global: 64, micro: 8}

checkpoint:
  interval: auto               # auto: from the measured costs and failures; or 10m, or {steps: 500}
  # min_interval: null
  # max_interval: 2h
  # formula: daly              # young | daly | exact
  tiers:                       # where committed checkpoints live: <path>/<name>/step_...
    - name: disk
      path: ./checkpoints
      keep_last: 3             # at least 1; pinned checkpoints come on top
      # keep_every: {steps: 1000}   # or a duration: keep these for good (none by default)

restart:
  warm: true                   # fork workers from a process that has imported torch already
  # preload: []                # more modules for it to import
  # stop_grace: 3s             # from SIGTERM to SIGKILL, once a planned stop has saved
  max_without_progress: 3      # give up after so many attempts that committed nothing new
  # max_restarts: null         # in all; null: no limit
  # grow: at_checkpoint        # or never: when to take up devices that came back

# hang: {enabled: true, factor: 10, floor: 30s, startup: 15m}
# guard: {finite: true, loss_spike: null, param_norm: null, param_norm_spike: null, on_reject: skip, rollback_after: 3, skip_data: false}
# health: {interval: 30s, command: null}    # a command that prints the indices of unhealthy devices
# drill: {every: null, tier: null, tolerance: 0.1}    # restore a checkpoint for trial so often
# logs: {max_size: 100MiB, keep: 2, keep_attempts: 50}   # of what workers print
# prior: {failures: 1.0, device_hours: 50000}      # or {log: NAME, max_failures: 10}: see `ckptd import`
# web: {listen: "127.0.0.1:9775"}           # /metrics and the page; port 0: any free one; null: none
"""


def example(name: str = "my-run", script: str = "train.py") -> str:
    """The text of a job.yaml that runs `script` as the run `name`."""
    return _TEMPLATE.replace("@NAME@", json.dumps(name)).replace("@SCRIPT@", json.dumps(script))


def name_from(directory: str) -> str:
    """A run's name made out of a directory's: what a name cannot hold becomes '-'."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory).strip("-.")[:100]
    return name or "my-run"
