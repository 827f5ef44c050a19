"""A small training job in every layout that people shard models in, for tests in real processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptd_shim import GlobalSampler, TrainerShim
from ckptd_shim.contract import Drill
from ckptd_shim.trace import Tracer

GLOBAL_BATCH = 12
LAYOUTS = ("ddp", "fsdp", "tp", "2d")


class Job:
    """Dropout, shuffling, loader workers and reduced precision, in one of `LAYOUTS`.

    Odd sizes on purpose: some ranks hold smaller shards than others, or none.
    """

    def __init__(self, layout, directory, interval=None, *, workers=0, dropout=0.2, seed=3, micro=None):
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(8, 6), nn.GELU(), nn.Dropout(dropout), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1)
        )
        self.layout, self.group = layout, None
        data_rank, data_world = rank, world
        if layout == "ddp" and world > 1:
            self.model = DistributedDataParallel(net)
        elif layout == "fsdp":
            mesh = init_device_mesh("cpu", (world,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for part in (net[0], net[3]):
                fully_shard(part, mesh=mesh, mp_policy=policy)
            self.model = fully_shard(net, mesh=mesh, mp_policy=policy)
        elif layout in ("tp", "2d"):
            tensor_parallel = world if layout == "tp" else 2
            mesh = init_device_mesh("cpu", (world // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
            net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
            if layout == "2d":
                # A layer a time, so that the layers that are whole over tp are sharded over dp too.
                net = fully_shard(net, mesh=mesh["dp"])
            self.model = net
            data_rank, data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()
            self.group = mesh["dp"].get_group()
        else:
            self.model = net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 0.95**k)
        data = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
        dataset = TensorDataset(torch.arange(60), data, data.sum(1, keepdim=True))
        self.sampler = GlobalSampler(60, GLOBAL_BATCH, 5, rank=data_rank, world_size=data_world, micro_batch=micro)
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        self.data_world = data_world
        torch.manual_seed(100 + data_rank)
        self.shim = TrainerShim(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=self.loader, seed=seed,
            directory=directory, interval=interval,
        )  # fmt: skip
        self.losses, self.lrs, self.seen = [], [], []

    def train(self, until):
        shim = self.shim
        while shim.global_step < until:
            for which, inputs, targets in self.loader:
                self.seen += which.tolist()
                self.losses.append(self.step(inputs, targets).hex())
                self.lrs.append(self.optimizer.param_groups[0]["lr"])
                if shim.step(loss=None) or shim.global_step == until:
                    break
        return self

    def step(self, inputs, targets):
        """One optimizer step, in micro-batches; the mean loss over all that share the batch."""
        k = self.shim.accumulation_steps
        total = torch.zeros(())
        for i, (x, y) in enumerate(zip(inputs.chunk(k), targets.chunk(k), strict=True)):
            last = i == k - 1
            if isinstance(self.model, DistributedDataParallel) and not last:
                with self.model.no_sync():
                    total += self.backward(x, y, k)
            else:
                total += self.backward(x, y, k)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(total, group=self.group)
        return float(total / self.data_world)

    def backward(self, x, y, k):
        # Each micro-batch's mean counts for a k-th; DDP and FSDP take the mean over the ranks.
        loss = (self.model(x).float() - y).pow(2).mean() / k
        loss.backward()
        return loss.detach()

    def digest(self, tmp):
        """Of the full weights and optimizer state, the same in every layout."""
        found = []
        tracer = Tracer(
            Drill(trace=str(tmp), stop_at_step=0, digest_at=[]), state=self.shim._state, rank=0, world_size=1
        )
        tracer._write = lambda kind, **fields: found.append([fields["weights"], fields["optimizer"]])
        tracer.digest(0)
        return found[0]
