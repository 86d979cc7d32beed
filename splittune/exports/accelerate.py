"""Settings of an Accelerator and of the loader that it prepares."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, commented, head_of, note_on_ranks, visible_devices
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="accelerate",
    distribution="accelerate",
    tried_with="1.15.0",
    file_name="accelerate_settings.py",
    divides_loss="accelerator.backward divides the loss by the accumulation steps: pass it the plain mean.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], _config_path: str) -> Export:
    """A module with ``ACCELERATOR`` and ``LOADER``: ``Accelerator(**ACCELERATOR)``, ``DataLoader(dataset, **LOADER)``.

    Accelerate's YAML has no key for accumulation, so code it is. Without `split_batches`, its default, the loader's
    batch size is each process's.
    """
    even = best_even(
        config,
        trials,
        otherwise="In a loop of your own the lines of `--to torchrun` train any shares, without prepare().",
    )
    num_devices = len(config.devices)
    start = f"{visible_devices(config)}accelerate launch --num_processes {num_devices} train.py"
    notes = (even.cost, TOOL.divides_loss, f"Start it with `{start}`.", *note_on_ranks(config, TOOL))
    lines = (
        f'ACCELERATOR = {{"gradient_accumulation_steps": {even.split.accumulation_steps}}}\n'
        f'LOADER = {{"batch_size": {even.share}}}  # of each process\n'
    )
    return Export(tool=TOOL, text=commented(head_of(config, TOOL, notes)) + lines, split=even.split, notes=notes)
