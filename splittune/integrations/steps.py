"""A loader of micro-batches for trainers that take one a time, and what each of them counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from splittune.cards import is_card
from splittune.config import SplitConfig
from splittune.config.other_devices import warn_of_other_devices
from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.ranks.share import RankShare


def warn_of_other_card(config: SplitConfig, device: torch.device, rank: int) -> None:
    """A `UserWarning` where this rank's card is another than the one that its share was tuned on."""
    if is_card(device):
        present = resolve_hardware([device])
        warn_of_other_devices(config, present.devices, is_modelled=present.is_modelled, first=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """What a trainer should know of a micro-batch that it was given."""

    weight: float
    """What its mean loss is multiplied by before the backward pass, `MicroBatch.weight`; 0 for a stand-in."""
    is_last: bool
    """Whether the optimizer steps after it."""


class MicroBatchLoader:
    """Yields the micro-batches of every global batch, nested as it is; of each, `next_step` gives a `MicroStep`.

    A trainer may take batches ahead of training them: it asks for the step when it trains. Worked: 20 samples in
    batches of 12, tuned as 2 micro-batches of 6, give 6, 6, 4 and 4.

    Only an epoch's last batch may have fewer micro-batches than the config, for trainers count them.

    Args:
        config: says how batches are cut.
        loader: gives global batches: on one process the user's, on ranks what ``config.shard`` made of it.
    """

    def __init__(self, config: SplitConfig, loader: Any) -> None:
        self.config, self.loader = config, loader
        self._steps: deque[MicroStep] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._steps.clear()
        return self._micro_batches(iter(self.loader))

    def __len__(self) -> int:
        """Micro-batches in an epoch, alike on all ranks.

        Raises:
            TypeError: the loader does not know its length, or the samples of its last batch.
        """
        split, num_batches = self.config.split, len(self.loader)
        if num_batches == 0:
            return 0
        in_last = split.global_batch_size
        if not getattr(self.loader, "drop_last", False):
            in_last = len(self.loader.dataset) - (num_batches - 1) * split.global_batch_size
        if not 0 < in_last <= split.global_batch_size:  # a sampler of the user's own
            raise TypeError("the samples of the last batch are not known before it comes.")
        num_in_last = min(-(-in_last // split.micro_batch_size), split.accumulation_steps)
        if in_last == split.global_batch_size:
            num_in_last = split.accumulation_steps
        return (num_batches - 1) * split.accumulation_steps + num_in_last

    def __getattr__(self, name: str) -> Any:
        """What trainers ask of a loader, `dataset` and `num_workers` say, is the wrapped one's.

        Not its state: that is where the loader is, ahead of what was trained.
        """
        if name in ("config", "loader", "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(f"a MicroBatchLoader has no {name}")
        return getattr(self.loader, name)

    @property
    def sampler(self) -> MicroBatchLoader:
        """Itself: trainers call `set_epoch` of a loader's sampler."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: the batches of the user's are larger than what is yielded."""
        return

    def set_epoch(self, epoch: int) -> None:
        """Passed on to whatever of the loader wants to know."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts = [self.loader, getattr(self.loader, "sampler", None), batch_sampler]
        for part in parts[:1] if hasattr(self.loader, "set_epoch") else parts[1:]:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    @property
    def upcoming(self) -> tuple[MicroStep, ...]:
        """Of the micro-batches that were taken and not yet trained, in their order."""
        return tuple(self._steps)

    def next_step(self) -> MicroStep:
        """What the next micro-batch to be trained counts.

        Raises:
            ConfigError: the trainer trains what this loader did not give.
        """
        if not self._steps:
            raise ConfigError(
                "a micro-batch is trained that the loader did not give: expected the trainer to take each once, in "
                "their order. Leave the loader as it is."
            )
        return self._steps.popleft()

    def _micro_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        tuned, was_short = self.config.split.accumulation_steps, False
        for batch in batches:
            if was_short:
                raise ConfigError(
                    f"a batch of fewer than {tuned} micro-batches came before the epoch's last: expected batches of "
                    f"{self.config.split.global_batch_size} samples but for the last one, for the trainer steps its "
                    f"optimizer every {tuned} micro-batches. Use a sampler that gives them."
                )
            micros = list(self.config.micro_batches(batch))
            was_short = len(micros) < tuned
            sizes = batch.sizes if isinstance(batch, RankShare) else (1,) * len(micros)
            for number, (micro, size) in enumerate(zip(micros, sizes, strict=True), 1):
                weight = micro.weight if size else 0.0
                self._steps.append(MicroStep(weight=weight, is_last=number == len(micros)))
                yield micro.batch
