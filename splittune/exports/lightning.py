"""Settings of Lightning's Trainer and of the loader beside it."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, commented, head_of, note_on_ranks, visible_devices
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="lightning",
    distribution="pytorch-lightning",
    tried_with="2.6.6",
    file_name="lightning_settings.py",
    divides_loss="Lightning divides the loss by accumulate_grad_batches: training_step returns the plain mean.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], config_path: str) -> Export:
    """A module with ``TRAINER`` and ``LOADER``: ``Trainer(**TRAINER)``, ``DataLoader(dataset, **LOADER)``.

    Lightning checks no product: ``batch_size * devices * accumulate_grad_batches`` is the global batch.
    """
    even = best_even(
        config, trials, otherwise="Inside Lightning Trainer(**split_trainer_options(config)) trains any shares."
    )
    num_devices = len(config.devices)
    visible = visible_devices(config)
    notes = (even.cost, TOOL.divides_loss, *note_on_ranks(config, TOOL))
    if visible:
        notes += (f"Start it with `{visible}python train.py`: these cards, in this order.",)
    head = head_of(config, TOOL, notes)
    if even.split != config.split:
        head += [
            "The winner's own shares inside Lightning, without these settings; the loader keeps the global batch:",
            "    from splittune.integrations.lightning import split_trainer_options",
            f"    config = splittune.SplitConfig.load({config_path!r})",
            "    trainer = Trainer(**split_trainer_options(config))",
        ]
    strategy = "ddp" if num_devices > 1 else "auto"
    lines = (
        f'TRAINER = {{"accelerator": "auto", "devices": {num_devices}, "strategy": "{strategy}", '
        f'"accumulate_grad_batches": {even.split.accumulation_steps}}}\n'
        f'LOADER = {{"batch_size": {even.share}}}  # of each device\n'
    )
    return Export(tool=TOOL, text=commented(head) + lines, split=even.split, notes=notes)
