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

# What trains any shares under Accelerate, on ranks. `accumulate` takes the place of accelerator.accumulate, and the
# weight that of its division by the accumulation steps.
_WINNER = (
    "model, optimizer = accelerator.prepare(model, optimizer)  # of Accelerator(), and not the loader",
    "for share in config.shard(loader):",
    "    for micro in splittune.accumulate(model, config.micro_batches(share)):",
    "        inputs, targets = accelerate.utils.send_to_device(micro.batch, accelerator.device)",
    "        accelerator.backward(loss_fn(model(inputs), targets) * micro.weight)",
    "    optimizer.step(); optimizer.zero_grad()",
)

_OTHERWISE = (
    "For any shares on ranks use config.shard and accelerator.backward(loss * micro.weight), without prepare(loader)."
)


def export(config: ConfigData, trials: Iterable[TriedSplit], config_path: str) -> Export:
    """A module with ``ACCELERATOR`` and ``LOADER``: ``Accelerator(**ACCELERATOR)``, ``DataLoader(dataset, **LOADER)``.

    Accelerate's YAML has no key for accumulation, so code it is. Without `split_batches`, its default, the loader's
    batch size is each process's.
    """
    even = best_even(config, trials, otherwise=_OTHERWISE)
    num_devices = len(config.devices)
    start = f"{visible_devices(config)}accelerate launch --num_processes {num_devices} train.py"
    notes = (even.cost, TOOL.divides_loss, f"Start it with `{start}`.", *note_on_ranks(config, TOOL))
    head = head_of(config, TOOL, notes)
    if even.split != config.split and config.strategy == "ddp":
        head += ["The winner's own shares, without these settings; the loader keeps the global batch:"]
        head += [f"    config = splittune.SplitConfig.load({config_path!r})", *(f"    {line}" for line in _WINNER)]
    lines = (
        f'ACCELERATOR = {{"gradient_accumulation_steps": {even.split.accumulation_steps}}}\n'
        f'LOADER = {{"batch_size": {even.share}}}  # of each process\n'
    )
    return Export(tool=TOOL, text=commented(head) + lines, split=even.split, notes=notes)
