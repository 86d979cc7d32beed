"""Transformers' TrainingArguments as the YAML that HfArgumentParser reads."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, commented, found, head_of, visible_devices
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="transformers",
    distribution="transformers",
    tried_with="5.23.0",
    file_name="training_args.yaml",
    divides_loss="The Trainer divides the loss itself: by gradient_accumulation_steps, or by the tokens of the step.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], config_path: str) -> Export:
    """``HfArgumentParser(TrainingArguments).parse_yaml_file(...)`` reads it, beside arguments of the user's own.

    ``per_device_train_batch_size * gradient_accumulation_steps * devices`` is the global batch, in one process
    (nn.DataParallel) and under torchrun.
    """
    winner = [
        f"The winner's own shares, with gradient_accumulation_steps={config.split.accumulation_steps}:",
        "    from splittune.integrations.transformers import SplitTrainerMixin",
        "    class SplitTrainer(SplitTrainerMixin, Trainer): ...  # your own Trainer, where you have one",
        f"    config = splittune.SplitConfig.load({config_path!r})",
        "    trainer = SplitTrainer(split_config=config, model=model, args=args, train_dataset=train_dataset)",
    ]
    even = best_even(config, trials, otherwise="Inside transformers.Trainer SplitTrainerMixin trains any shares.")
    split, num_devices = even.split, len(config.devices)
    visible = visible_devices(config)
    start = f"{visible}python train.py" if config.strategy == "dp" else _torchrun(visible, num_devices)
    notes = [even.cost, TOOL.divides_loss, f"Start it with `{start}`, where {num_devices} cards are visible."]
    if config.strategy == "dp" and num_devices > 1:
        notes.append(
            f"The Trainer then runs torch's nn.DataParallel: its speed and memory are not those {found(config)} here."
        )
    settings = {
        "per_device_train_batch_size": even.share,
        "gradient_accumulation_steps": split.accumulation_steps,
        "auto_find_batch_size": "false  # it would change the batch that is trained",
    }
    lines = "".join(f"{key}: {value}\n" for key, value in settings.items())
    head = head_of(config, TOOL, notes)
    if split != config.split:
        head += winner
    return Export(tool=TOOL, text=commented(head) + lines, split=split, notes=tuple(notes))


def _torchrun(visible: str, num_ranks: int) -> str:
    return f"{visible}torchrun --standalone --nproc-per-node {num_ranks} train.py"
