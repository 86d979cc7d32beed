"""A training script's lines for torchrun, which takes any shares."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, found, head_of, visible_devices, wrapped
from splittune.exports.even import TriedSplit

TOOL = Tool(
    name="torchrun",
    distribution="torch",
    tried_with="2.13.0",
    file_name="train_split.py",
    divides_loss="Nobody divides the loss: micro.weight is the whole factor.",
)

_SCRIPT = '''"""{head}
"""

import torch
import torch.distributed as dist

from splittune import SplitConfig

config = SplitConfig.load({path!r})


def train(model, loader, loss_fn, make_optimizer, *, num_epochs=1, devices=None):
    """Train `model` as the config says; `loader` gives global batches of {batch} on every rank.

    `make_optimizer(parameters)` gives the optimizer. `devices` None takes the tuned ones, "cuda" the card of each rank.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    model = config.wrap(model, devices=devices)
    loader = config.shard(loader)
    optimizer = make_optimizer(model.parameters())
    for _ in range(num_epochs):
        for batch in loader:
            for micro in config.micro_batches(batch, model):
                inputs, targets = micro.batch
                loss = loss_fn(model(inputs), model.to_output(targets)) * micro.weight
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.unwrap()
'''


def export(config: ConfigData, _trials: Iterable[TriedSplit], config_path: str) -> Export:
    """A module with ``train(model, loader, loss_fn, make_optimizer)``, to be imported or pasted.

    With "ddp" each card has a process. With "dp" there is one process for all of them, as it was measured:
    ``--nproc-per-node 1``.
    """
    split, num_devices = config.split, len(config.devices)
    num_processes = num_devices if config.strategy == "ddp" else 1
    visible = visible_devices(config)
    notes = [
        f"It runs the winner itself, {split}, with unequal shares where it has them.",
        f"Start it with `{visible}torchrun --standalone --nproc-per-node {num_processes} train.py`.",
        "End that script with `dist.destroy_process_group()`: a process that is done may fail without it.",
        TOOL.divides_loss,
    ]
    if config.strategy == "dp" and num_devices > 1:
        notes.append(
            f"One process runs all {num_devices} cards, as it was {found(config)}. For a process on each, load the "
            'config with dataclasses.replace(config, strategy="ddp"): its speed and memory are not known, `splittune '
            "plan --strategy ddp` foretells them."
        )
    text = _SCRIPT.format(
        head="\n".join(part for line in head_of(config, TOOL, notes) for part in wrapped(line)),
        path=config_path,
        batch=split.global_batch_size,
    )
    return Export(tool=TOOL, text=text, split=split, notes=tuple(notes))
