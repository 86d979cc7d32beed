"""Saving and loading in the ranks' processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.cases import Case, Trained, config_of, loss_of, net_of, share_of

SIZES = ((3, 2), (1, 0))
CASE = Case(sizes=(SIZES,))


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(group: dist.ProcessGroup | None, batch: Any, checkpoint: Path | None, save_to: Path | None) -> Trained:
    """One step from a checkpoint, or from the start; rank 0 saves what comes of it."""
    config = config_of(2)
    model = config.wrap(net_of(CASE), ddp_options={"process_group": group})
    optimizer = adam_of(model)
    if checkpoint is not None:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for micro in config.micro_batches(share_of(batch, SIZES, dist.get_rank(group)), model):
        inputs, targets = micro.batch
        (loss_of(model(inputs), targets) * micro.weight).backward()
    optimizer.step()
    if save_to is not None and dist.get_rank(group) == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save_to)
    return [], {name: parameter.detach().clone() for name, parameter in model.unwrap().named_parameters()}
