"""The fastest even split that was measured, for tools that know only equal shares, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splittune.config.data import ConfigData
from splittune.errors import ConfigError
from splittune.exports.base import found
from splittune.split import BatchSplit

# Even splits that an error lists. A choice: a batch of 4,096 samples has over a dozen.
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSplit:
    """What an export needs of a trial."""

    split: BatchSplit
    kind: str
    """"search", or "confirm": measured in whole steps."""
    outcome: str
    throughput: float | None
    """Samples per second; None where the trial did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSplit:
    """Equal shares whose product is the global batch: ``share * accumulation_steps * num_devices == B``, exactly."""

    split: BatchSplit
    cost: str
    """What it costs against the winner, a sentence."""

    @property
    def share(self) -> int:
        """Every device's samples in a micro-batch."""
        return self.split.shard_sizes[0]


def is_even(split: BatchSplit) -> bool:
    """Whether share x accumulation steps x devices is the global batch, with one share for all.

    64 = 4 x (8 + 8) is even; 64 = 3 x (11 + 11) is not, for its micro-batches are 22, 21 and 21.
    """
    share = split.shard_sizes[0]
    product = share * split.accumulation_steps * split.num_devices
    return set(split.shard_sizes) == {share} and product == split.global_batch_size


def best_even(config: ConfigData, trials: Iterable[TriedSplit], *, otherwise: str = "") -> EvenSplit:
    """The config's own split where it is even, else the fastest even one among the `trials`; never a rounded one.

    `otherwise` says what trains the winner's own shares with this tool, where something does.

    Raises:
        ConfigError: no even split was measured; the message says which there are, and how to measure one.
    """
    winner = config.split
    modelled = found(config)
    if is_even(winner):
        return EvenSplit(split=winner, cost=f"It runs the winner itself, {winner}: the fastest split, {modelled}.")
    trials = [trial for trial in trials if trial.split.num_devices == winner.num_devices]
    ran = [
        trial
        for trial in trials
        if is_even(trial.split)
        and trial.split.global_batch_size == winner.global_batch_size
        and trial.outcome == "ok"
        and trial.throughput is not None
    ]
    if not ran:
        raise ConfigError(f"{_none_measured(winner, trials)}{' ' + otherwise if otherwise else ''}")
    # confirmations are timed in whole steps, and compare with those; then the faster one
    best = max(ran, key=lambda trial: (trial.throughput or 0.0, trial.kind == "confirm"))
    alike = max((t for t in ran if t.split == best.split), key=lambda trial: trial.kind == "confirm")
    return EvenSplit(split=best.split, cost=_cost(config, alike, trials))


def _cost(config: ConfigData, even: TriedSplit, trials: Sequence[TriedSplit]) -> str:
    """What the even split gives, beside the winner timed in the same way: 80 of 100 samples/s are 20.0 % fewer."""
    modelled = found(config)
    start = f"Equal shares, {even.split}, the fastest even split that was tried"
    of_winner = [t.throughput for t in trials if t.split == config.split and t.kind == even.kind and t.throughput]
    how = "in whole steps" if even.kind == "confirm" else "in the search's short trials"
    best = max(of_winner, default=None)
    if best is None:
        best, how = config.throughput, "not timed alike"
    assert even.throughput is not None  # it ran
    if best is None:
        return f"{start}: {even.throughput:.1f} samples/s ({modelled}); the winner {config.split} has no figure."
    lost = 100 * (1 - even.throughput / best)
    less = f"{lost:.1f} % fewer than" if lost > 0 else "no fewer than"
    return (
        f"{start}: {even.throughput:.1f} samples/s, {less} the {best:.1f} of the winner, {config.split} ({modelled}, "
        f"{how})."
    )


def _none_measured(winner: BatchSplit, trials: Sequence[TriedSplit]) -> str:
    """Why there is no even split to export, and what comes nearest."""
    batch, devices = winner.global_batch_size, winner.num_devices
    start = f"the winner is {winner}, and this tool knows only equal shares"
    if batch % devices:
        below, above = batch // devices * devices, -(-batch // devices) * devices
        nearest = f"{above}" if below == 0 else f"{below} or {above}"
        return (
            f"{start}: expected a global batch that {devices} devices divide evenly, and {batch} / {devices} leaves "
            f"{batch % devices}. Rounding would train another batch. The nearest that has an even split is "
            f"{nearest}: tune for that, or export to torchrun, which takes any shares."
        )
    whole = batch // devices
    legal = [(whole // steps, steps) for steps in range(1, whole + 1) if whole % steps == 0]
    said = {
        (trial.split.shard_sizes[0], trial.split.accumulation_steps): trial.outcome
        for trial in trials
        if is_even(trial.split) and trial.split.global_batch_size == batch
    }
    words = [f"{share} x {steps} x {devices} ({said.get((share, steps), 'not tried')})" for share, steps in legal]
    listed = ", ".join([*words[:_MAX_LISTED], *(["..."] if len(words) > _MAX_LISTED else [])])
    return (
        f"{start}: expected an even one among the trials that ran, and there is none. Share x accumulation steps x "
        f"devices = {batch} has: {listed}. Measure one by tuning on, with more --max-trials or "
        "more memory; or export to torchrun, which takes any shares."
    )
