"""Attempts as Optuna trials: how they are written, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState

from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.attempt import Attempt, lacking_devices

if TYPE_CHECKING:
    import optuna

    from splittune.search.candidates import Candidates

PARAMETER = "candidate"
"""The one parameter of the study: an index into `Candidates`."""

_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_DEVICE = "device "
_DEMANDS = "min_headroom_bytes"


def distribution_of(candidates: Candidates) -> IntDistribution:
    """The fixed distribution of the study's one parameter."""
    return IntDistribution(0, len(candidates) - 1)


def tell(
    study: optuna.Study, trial: optuna.Trial, attempt: Attempt, *, min_headroom_bytes: Sequence[int], reason: str
) -> None:
    """Finish `trial` with what was measured.

    User attributes hold the split, the reason and the whole measurement. A split that ran is COMPLETE with its
    samples/s, one that did not is PRUNED (samplers ignore what is FAIL). Constraints, positive where violated, are
    ``"device i"``, the headroom it lacks as a share of its memory (1 where the amount is unknown), and 1 for each of
    ``"out_of_memory"``, ``"crashed"`` and ``"no_headroom"``, the last where no device is known to lack any.
    """
    split, measurement = attempt.split, attempt.measurement
    trial.set_user_attr("accumulation_steps", split.accumulation_steps)
    trial.set_user_attr("gpu0_bsz", split.gpu0_bsz)
    trial.set_user_attr("shard_sizes", list(split.shard_sizes))
    trial.set_user_attr("reason", reason)
    trial.set_user_attr("measurement", measurement.to_dict())
    for name, overflow in _constraints(attempt, min_headroom_bytes).items():
        trial.set_constraint(name, overflow)
    if measurement.outcome in (Outcome.OK, Outcome.NO_HEADROOM):
        study.tell(trial, measurement.throughput)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials with a measurement, oldest first; those that were interrupted or failed are not among them."""
    return study.get_trials(deepcopy=False, states=_FINISHED)


def demand(study: optuna.Study, min_headroom_bytes: Sequence[int]) -> None:
    """Note what every device must keep free from now on: stored trials are judged by it when they are read back.

    Other programs come and go, so a search that goes on another day may well have another demand.
    """
    study.set_user_attr(_DEMANDS, list(min_headroom_bytes))


def attempt_of(trial: FrozenTrial, min_headroom_bytes: Sequence[int]) -> Attempt:
    """What `tell` wrote, judged by the headroom demanded now.

    Raises:
        ConfigError: the trial was written by another program.
    """
    if "measurement" not in trial.user_attrs:
        raise ConfigError(
            f"trial {trial.number} of the study holds no measurement: it was not written by splittune. "
            "Give another study_name or storage."
        )
    measurement = Measurement.from_dict(trial.user_attrs["measurement"])
    if measurement.outcome is Outcome.NO_HEADROOM and measurement.memory:
        measurement = replace(measurement, outcome=Outcome.OK, message="")
    measurement = measurement.judged(min_headroom_bytes)
    return Attempt(measurement=measurement, lacking=lacking_devices(measurement, min_headroom_bytes))


def read_attempts(study: optuna.Study) -> list[Attempt]:
    """Everything measured so far, oldest first."""
    demands = study.user_attrs[_DEMANDS]
    return [attempt_of(trial, demands) for trial in finished_trials(study)]


def _constraints(attempt: Attempt, min_headroom_bytes: Sequence[int]) -> dict[str, float]:
    measurement = attempt.measurement
    if measurement.outcome is Outcome.CRASHED:
        return {"crashed": 1.0}
    constraints = {
        f"{_DEVICE}{memory.device}": (min_headroom_bytes[memory.device] - memory.headroom_bytes)
        / max(memory.total_bytes, 1)
        for memory in measurement.memory
    }
    for device in attempt.lacking:
        name = f"{_DEVICE}{device}"
        constraints[name] = constraints[name] if constraints.get(name, 0) > 0 else 1.0
    if measurement.outcome is Outcome.OUT_OF_MEMORY:
        constraints["out_of_memory"] = 1.0
    elif measurement.outcome is Outcome.NO_HEADROOM and not attempt.lacking:
        constraints["no_headroom"] = 1.0
    return constraints
