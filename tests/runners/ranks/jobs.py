"""Jobs that ranks tune together, and what they are wanted for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from splittune import TuneResult, autotune, collective
from splittune.report.tables import devices_table, trials_table
from tests.runners.modelled_ranks.jobs import products

DEVICES = "1xT4,1xA10"
OPTIONS: dict[str, Any] = {"global_batch_size": 4096, "progress": False, "max_trials": 4, "strategy": "ddp"}


def tuned(group: dist.ProcessGroup | None, devices: str = DEVICES, **options: Any) -> TuneResult:
    """A model of products, tuned on two cards."""
    task = products(512)
    return autotune(task.model, task.loader, devices=devices, **OPTIONS | options)


def tuned_with(group: dist.ProcessGroup | None, options: dict[str, Any]) -> TuneResult:
    """The same with other options, which a rank may have for itself: `versions` are those that it finds installed."""
    given = dict(options)
    task = products(given.pop("width", 512))
    found = collective.current_versions() | given.pop("versions", {})
    if given.pop("is_scaled", False):
        given["grad_scaler"] = torch.amp.GradScaler("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "current_versions", lambda: found)
        return autotune(task.model, task.loader, **{"devices": DEVICES, **OPTIONS} | given)


def tables(result: TuneResult) -> tuple[str, str]:
    """Both files, as they would be written."""
    trials = trials_table(result.trials, is_modelled=True).to_csv()
    return trials, devices_table(result.trials, devices=result.config.devices).to_csv()


class Refusing(nn.Module):
    """Refuses batches above a size on one rank, as a bug in a user's code would."""

    def __init__(self, rank: int, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.rank, self.most = rank, most

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank and len(x) > self.most:
            raise LookupError(f"{len(x)} samples are too many for me")
        return self.layer(x)


def refused(group: dist.ProcessGroup | None, rank: int, most: int) -> tuple[str, str, bool, bool]:
    """What a rank is told when one of them refuses, and whether the job is as it was found and the group works."""
    model = Refusing(rank, most)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        autotune(model, [(torch.randn(8, 64), torch.randn(8, 64))], devices=DEVICES, **OPTIONS)
    except Exception as error:  # noqa: BLE001  whatever it is, is told
        kind, words = type(error).__name__, str(error)
    is_as_found = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    total = torch.ones(())
    dist.all_reduce(total)
    return kind, words, is_as_found and model.layer.weight.grad is None, total.item() == dist.get_world_size()


class ReadingNormed(nn.Module):
    """BatchNorm, which refuses a single sample, and a value that is read: its trials run on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        if not x.sum().isfinite().item():
            raise ValueError("no numbers")
        output: Tensor = self.layers(x)
        return output


def tuned_normed(group: dist.ProcessGroup | None, size: int) -> TuneResult:
    """Such a model on two cards, by batches of so many samples."""
    loader = [(torch.randn(size, 64), torch.randint(8, (size,)))]
    options = OPTIONS | {"global_batch_size": None}
    return autotune(ReadingNormed(), loader, devices=DEVICES, **options)
