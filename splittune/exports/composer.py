"""Settings of Composer's Trainer and of the loader beside it."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, commented, head_of, note_on_ranks, visible_devices
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="composer",
    distribution="mosaicml",
    tried_with="0.32.1",
    file_name="composer_settings.py",
    divides_loss="Composer weighs each micro-batch by its samples itself: the loss is the plain mean.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], _config_path: str) -> Export:
    """A module with ``TRAINER`` and ``LOADER``: ``Trainer(**TRAINER)``, ``DataLoader(dataset, **LOADER)``.

    Composer's loader gives a device all its samples of a step, which the Trainer then cuts into micro-batches.
    """
    even = best_even(config, trials)
    num_devices = len(config.devices)
    start = f"{visible_devices(config)}composer --nproc {num_devices} train.py"
    notes = (even.cost, TOOL.divides_loss, f"Start it with `{start}`.", *note_on_ranks(config, TOOL))
    lines = (
        f'TRAINER = {{"device_train_microbatch_size": {even.share}}}\n'
        f'LOADER = {{"batch_size": {even.share * even.split.accumulation_steps}}}  # of each device, for a whole step\n'
    )
    return Export(tool=TOOL, text=commented(head_of(config, TOOL, notes)) + lines, split=even.split, notes=notes)
