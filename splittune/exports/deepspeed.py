"""DeepSpeed's JSON: the three sizes whose product it checks."""

from __future__ import annotations

import json
from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, card_numbers, head_of, note_on_ranks
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="deepspeed",
    distribution="deepspeed",
    tried_with="0.19.8",
    file_name="ds_config.json",
    divides_loss="DeepSpeed divides the loss by gradient_accumulation_steps: call engine.backward(loss) on the mean.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], _config_path: str) -> Export:
    """``train_batch_size == train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks``, all three given.

    DeepSpeed rounds down what is missing of them. Keys that it does not know it leaves alone: the notes stand under
    ``"splittune"``, for JSON has no comments.
    """
    even = best_even(config, trials)
    notes = (even.cost, TOOL.divides_loss, f"Start it with `{_command(config)}`.", *note_on_ranks(config, TOOL))
    sizes = {
        "train_batch_size": even.split.global_batch_size,
        "train_micro_batch_size_per_gpu": even.share,
        "gradient_accumulation_steps": even.split.accumulation_steps,
        "splittune": head_of(config, TOOL, notes),
    }
    return Export(tool=TOOL, text=json.dumps(sizes, indent=2) + "\n", split=even.split, notes=notes)


def _command(config: ConfigData) -> str:
    numbers = card_numbers(config)
    if numbers is None:
        return f"deepspeed --num_gpus {len(config.devices)} train.py"
    return f"deepspeed --include localhost:{','.join(map(str, numbers))} train.py"
