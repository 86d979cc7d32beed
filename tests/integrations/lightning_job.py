"""A small module trained by Lightning, by itself or under a config; as a script, on ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from splittune import SplitConfig
from splittune.integrations.lightning import split_trainer_options

SAMPLES, BATCH, EPOCHS = 30, 12, 2  # the last batch has 6


class Module(pl.LightningModule):
    """Keeps the gradients of every step."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: list[nn.Module] = [nn.BatchNorm1d(5)] if normed else []
        self.net = nn.Sequential(nn.Linear(3, 5, bias=not normed), *middle, nn.Tanh(), nn.Linear(5, 2))
        self.gradients: list[list[Tensor]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, True)
        self.log_dict({"samples": len(inputs)})
        return {"loss": loss, "more": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batch_size: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 2, generator=generator))
    return DataLoader(data, batch_size=batch_size)


def fit(options: dict[str, Any], module: Module | None = None, **more: Any) -> tuple[Module, pl.Trainer]:
    module = module or Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": EPOCHS,
    }
    trainer = pl.Trainer(**quiet | options | more)
    trainer.fit(module, loader(), loader())
    return module, trainer


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {}
    for file in sorted(folder.glob("*.json")):
        normed = file.stem == "normed"
        trained, trainer = fit(
            split_trainer_options(SplitConfig.load(file), sync_batch_norm=normed), Module(normed=normed)
        )
        found[file.stem] = (trained.gradients, trainer.global_step, sorted(trainer.callback_metrics))
    torch.save(found, folder / f"rank{trainer.global_rank}.pt")
    # Lightning leaves the group to the end of the process, where gloo's threads may abort it
    torch.distributed.destroy_process_group()
