"""What a remedy knows of the search that it would improve on, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splittune.advice.job import Job
from splittune.advice.trials import Trials
from splittune.hardware.base import Device, DeviceMemory
from splittune.options import SearchOptions
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult
from splittune.report.advice import How
from splittune.report.words import rate_of
from splittune.split import BatchSplit
from splittune.training import TrainingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A finished search, and the means to run its job again under a change."""

    result: TuneResult
    job: Job
    trials: Trials

    @property
    def options(self) -> SearchOptions:
        return self.trials.options

    @property
    def best(self) -> Measurement:
        return self.result.best

    @property
    def split(self) -> BatchSplit:
        return self.result.best.split

    @property
    def task(self) -> TrainingTask | None:
        return self.job.task

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.result.config.devices

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """At the best split."""
        return self.result.best.memory

    @property
    def is_modelled(self) -> bool:
        return self.result.config.is_modelled

    @property
    def how(self) -> How:
        """What a trial on these cards is."""
        return How.MODELLED if self.is_modelled else How.MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a remedy came to; the measurement is of its fastest split, in whole steps."""

    how: How
    said: str
    measurement: Measurement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something to change other than the split."""

    name: str
    cost: str
    look: Callable[[Case], Finding | None]
    """What it comes to in a case; None where it has nothing to do with it."""
    takes_trials: bool = True
    """Whether it may take a while."""


def tried(case: Case, measurement: Measurement, said: str = "") -> Finding:
    """The finding of trials that ran; `said` stands after the figures."""
    if measurement.outcome is not Outcome.OK or measurement.throughput is None:
        how = How.FAILED
        text = f"{measurement.outcome.value.replace('_', ' ')}: {measurement.message}".rstrip(": ")
        return Finding(how=how, said=f"{text}. {said}".rstrip())
    kind = " (modelled)" if case.is_modelled else ""
    text = f"{rate_of(measurement)} samples/s where the best split without it has {rate_of(case.best)}{kind}."
    return Finding(how=case.how, said=f"{text} {said}".rstrip(), measurement=measurement)


def not_tried(why: str) -> Finding:
    """The finding of what would be no use to try, or cannot be."""
    return Finding(how=How.NOT_TRIED, said=why)


def rule(said: str) -> Finding:
    """The finding of what is known and was not tried here."""
    return Finding(how=How.RULE, said=said)
