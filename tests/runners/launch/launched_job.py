"""A small job for real launches: what a trial may do to its rank, and training under the config that came of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from splittune import SplitConfig, TrainingTask
from splittune.cli import main

torch.set_num_threads(1)
BATCH_SIZE = 32


class Model(nn.Module):
    """In a group, rank 1 does at its second call what it is told to, the first time that it is started."""

    def __init__(self, act: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double()
        self.act, self.num_calls = act, 0

    def fall(self, rank: str) -> None:
        """Rank 1 is killed once those of the other machine are in a trial, where they stay until they are ended."""
        others = [Path(f"at_work{number}") for number in "0123" if not self.is_beside(number)]
        if Path("fallen").exists() or not rank:
            return
        if rank == "1":
            while not all(path.exists() for path in others):
                time.sleep(0.02)
            Path("fallen").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif not self.is_beside(rank):
            Path(f"at_work{rank}").touch()
            time.sleep(600)

    @staticmethod
    def is_beside(rank: str) -> bool:
        """Whether it is on rank 1's machine: of two with two ranks each the first."""
        return rank in "01"

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.act and os.environ.get("RANK"):
            (Path(f"pid{os.environ['RANK']}.part")).write_text(f"{os.getpid()}")
            Path(f"pid{os.environ['RANK']}.part").rename(f"pid{os.environ['RANK']}")
        if self.act == "killed beside others" and self.num_calls == 2:
            self.fall(os.environ.get("RANK", ""))
        is_there = os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_there and self.num_calls == 2:
            if self.act == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.act == "waits":
                Path("waiting").touch()
                time.sleep(600)
        output: Tensor = self.layers(x)
        return output


def loader() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(70, 6, generator=generator).double()
    data = TensorDataset(inputs, torch.randint(3, (70,), generator=generator))
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(2))


def make_task(act: str = "") -> TrainingTask:
    return TrainingTask(Model(act), loader())


def killed() -> TrainingTask:
    return make_task("killed")


def killed_beside_others() -> TrainingTask:
    return make_task("killed beside others")


def waits() -> TrainingTask:
    return make_task("waits")


def command(devices: str, out: str, storage: str | None = None) -> list[str]:
    """Of a search over ranks."""
    kept = [] if storage is None else ["--storage", storage]
    job = ["splittune", "tune", "launched_job.py:make_task", "--strategy", "ddp", "--max-trials", "4"]
    return [*job, "--devices", devices, "--out", out, *kept]


def trained(config: SplitConfig) -> dict[str, Tensor]:
    """The model's state after an epoch under the config."""
    model = config.wrap(Model())
    sharded = config.shard(loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in sharded:
        for micro in config.micro_batches(batch, model):
            inputs, targets = micro.batch
            loss = nn.functional.cross_entropy(model(inputs), targets.to(model.output_device)) * micro.weight
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.unwrap().state_dict()


if __name__ == "__main__":  # under torchrun: train under the config, and go on with the search
    # of the launcher's own store every group needs one of its own: it is the search's
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=world_size)
    torch.save(trained(SplitConfig.load("first/split.json")), f"state{rank}.pt")
    dist.destroy_process_group()
    sys.argv = command(sys.argv[1], "again", "kept/trials")
    main()
