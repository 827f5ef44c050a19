"""Does the example do what its readers will copy: asks little, splits by file, and takes one step in any number of pieces?"""

import os
import re
import subprocess
import sys
from pathlib import Path

from ckptd import jobspec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "stdlib_gpt"


def run_in_example(script):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    for name in ("RANK", "WORLD_SIZE", "CKPTD_LAUNCH"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_job_is_right_and_keeps_the_batch_on_one_worker_and_on_two():
    spec = jobspec.load(EXAMPLE / "job.yaml")
    assert spec.batch is not None
    (total,) = re.findall(r"GLOBAL_BATCH = (\d+)", (EXAMPLE / "train.py").read_text())
    assert spec.batch.global_batch == int(total)
    assert spec.batch.global_batch % 2 == 0


def test_ckptd_asks_for_about_ten_lines():
    marked = [line for line in (EXAMPLE / "train.py").read_text().splitlines() if "  # ckptd" in line]
    assert 8 <= len(marked) <= 12


def test_a_step_is_the_same_in_one_piece_and_in_four():
    """The same samples, weights and no dropout: the loss is scaled right if the new weights are the same."""
    script = """
import tempfile, torch, torch.distributed as dist
import data, model as gpt, train
from ckptd_shim import GlobalSampler, TrainerShim
from torch.utils.data import DataLoader
gpt.DROPOUT = 0.0
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
dataset = data.Windows(bytes(range(256)) * 30, gpt.CONTEXT)
results = []
for micro in (24, 6):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(gpt.Gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(dataset, batch_sampler=GlobalSampler(len(dataset), 24, 1, micro_batch=micro))
    shim = TrainerShim(model=model, optimizer=optimizer, dataloader=loader)
    loss = train.train_step(model, optimizer, scheduler, next(iter(loader)), shim)
    results.append((shim.accumulation_steps, loss, [p.detach() for p in model.parameters()]))
    shim.close()
(one, loss1, weights1), (four, loss4, weights4) = results
assert (one, four) == (1, 4), (one, four)
torch.testing.assert_close(loss4, loss1)
torch.testing.assert_close(weights4, weights1)
before = torch.manual_seed(0) and list(gpt.Gpt().parameters())
assert any((a - b).abs().max() > 1e-4 for a, b in zip(weights1, before, strict=True))
dist.destroy_process_group()
"""
    run_in_example(script)


def test_training_and_validation_share_no_file_and_do_not_change():
    script = """
import hashlib, pathlib, sysconfig
import data, model
training, validation = data.load(model.CONTEXT)
print(len(training), len(validation), *(hashlib.sha256(w.text.numpy().tobytes()).hexdigest() for w in (training, validation)))
root = pathlib.Path(sysconfig.get_path("stdlib"))
texts = [bytes(w.text.numpy().tobytes()) for w in (training, validation)]
held = [name for name in ("dataclasses.py", "argparse.py", "ast.py", "json/decoder.py", "typing.py", "os.py", "enum.py")
        if [(root / name).read_bytes() in text for text in texts].count(True) == 1]
assert len(held) == 7, held
assert 0.01 < len(validation) / len(training) < 0.12
x, y = validation[3]
assert x.shape == y.shape == (model.CONTEXT,) and bool((x[1:] == y[:-1]).all())
"""
    assert run_in_example(script) == run_in_example(script)
