"""Judged trials as Optuna trials: how they are written, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optuna import TrialPruned
from optuna.trial import FrozenTrial, TrialState

from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial

if TYPE_CHECKING:
    import optuna

_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_DEVICE = "device "
_DEMANDS = "min_headroom_bytes"


def tell(
    study: optuna.Study, trial: optuna.Trial, judged: JudgedTrial, *, min_headroom_bytes: Sequence[int], reason: str
) -> None:
    """Finish `trial` with what was measured.

    A split that did not run is PRUNED: samplers ignore what is FAIL.
    """
    _note(trial, judged, min_headroom_bytes, reason)
    if _has_value(judged):
        study.tell(trial, judged.measurement.throughput)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def report(trial: optuna.Trial, measurement: Measurement) -> float:
    """Note what was measured in a trial of one's own ``study.optimize``; its samples/s.

    Raises:
        optuna.TrialPruned: the split ran out of memory or crashed.
    """
    demands = trial.study.user_attrs.get(_DEMANDS) or [0] * measurement.split.num_devices
    judged = JudgedTrial.of(measurement, demands)
    _note(trial, judged, demands, getattr(trial.study.sampler, "reason", ""))
    if not _has_value(judged):
        raise TrialPruned(judged.measurement.message)
    assert judged.measurement.throughput is not None
    return judged.measurement.throughput


def _has_value(judged: JudgedTrial) -> bool:
    return judged.measurement.outcome in (Outcome.OK, Outcome.NO_HEADROOM)


def _note(trial: optuna.Trial, judged: JudgedTrial, min_headroom_bytes: Sequence[int], reason: str) -> None:
    """Write what was measured into the trial.

    User attributes hold the split, the reason and the whole measurement. Constraints, positive
    where violated, are ``"device i"``, the headroom it lacks as a share of its memory (1 where the
    amount is unknown), and 1 for each of ``"out_of_memory"``, ``"crashed"`` and ``"no_headroom"``,
    the last where no device is known to lack any.
    """
    split, measurement = judged.split, judged.measurement
    trial.set_user_attr("gpu0_bsz", split.gpu0_bsz)
    trial.set_user_attr("shard_sizes", list(split.shard_sizes))
    trial.set_user_attr("reason", reason)
    trial.set_user_attr("measurement", measurement.to_dict())
    for name, overflow in _constraints(judged, min_headroom_bytes).items():
        trial.set_constraint(name, overflow)


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials with a measurement, oldest first: none that was interrupted or failed."""
    return study.get_trials(deepcopy=False, states=_FINISHED)


def demand(study: optuna.Study, min_headroom_bytes: Sequence[int]) -> None:
    """Note what every device must keep free from now on.

    Stored trials are judged by it when they are read back.

    Other programs come and go, so a search that goes on another day may well have another demand.
    """
    if study.user_attrs.get(_DEMANDS) != list(min_headroom_bytes):
        study.set_user_attr(_DEMANDS, list(min_headroom_bytes))


def judged_trial_of(trial: FrozenTrial, min_headroom_bytes: Sequence[int]) -> JudgedTrial:
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
    return JudgedTrial.of(measurement, min_headroom_bytes)


def read_judged_trial(trial: FrozenTrial, min_headroom_bytes: Sequence[int]) -> JudgedTrial | None:
    """What `tell` or `report` wrote; None where neither did."""
    return judged_trial_of(trial, min_headroom_bytes) if "measurement" in trial.user_attrs else None


def read_judged_trials(study: optuna.Study) -> list[JudgedTrial]:
    """Everything measured so far, oldest first."""
    trials = finished_trials(study)
    if not trials:
        return []
    demands = study.user_attrs[_DEMANDS]
    return [judged_trial_of(trial, demands) for trial in trials]


def _constraints(judged: JudgedTrial, min_headroom_bytes: Sequence[int]) -> dict[str, float]:
    measurement = judged.measurement
    if measurement.outcome is Outcome.CRASHED:
        return {"crashed": 1.0}
    constraints = {
        f"{_DEVICE}{memory.device}": (min_headroom_bytes[memory.device] - memory.headroom_bytes)
        / max(memory.total_bytes, 1)
        for memory in measurement.memory
    }
    for device in judged.oom_devices:
        name = f"{_DEVICE}{device}"
        constraints[name] = constraints[name] if constraints.get(name, 0) > 0 else 1.0
    if measurement.outcome is Outcome.OUT_OF_MEMORY:
        constraints["out_of_memory"] = 1.0
    elif measurement.outcome is Outcome.NO_HEADROOM and not judged.oom_devices:
        constraints["no_headroom"] = 1.0
    return constraints
