"""The search itself: ask for a split, measure it, tell the outcome; at the end confirm the best."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from splittune.checks import check_limits
from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement
from splittune.search.candidates.table import even_table
from splittune.search.finalists import confirm_finalists
from splittune.search.headroom import headroom_demands
from splittune.search.judged_trials import JudgedTrial
from splittune.search.no_feasible import no_feasible_split
from splittune.search.result import SearchResult, Stopped, Trial
from splittune.search.samplers.filtered import FilteredSampler
from splittune.search.samplers.guided import GuidedSampler
from splittune.search.samplers.parameters import distributions_of, split_of
from splittune.search.samplers.registry import make_sampler
from splittune.search.storage import records
from splittune.search.storage.open_study import open_study, quiet_optuna
from splittune.signals import deferred
from splittune.split import BatchSplit, SplitSpace

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

Measure = Callable[[BatchSplit], Measurement]


def find_best_split(
    space: SplitSpace,
    measure: Measure,
    *,
    max_trials: int = 32,
    timeout_s: float | None = None,
    storage: str | os.PathLike[str] | None = None,
    seed: int = 0,
    sampler: str | BaseSampler | None = None,
    min_headroom_bytes: int | Sequence[int] = 0,
    confirm: Measure | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    study_name: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the split of `space` with the most samples/s among those that keep their headroom.

    `sampler` chooses what to measure. Even splits among it find the baseline: the one at the fewest
    accumulation steps that fits and is not foretold to be slower than another. No split is searched
    twice. None is tried that a failure has ruled out. At the end the baseline and up to three of the
    best are measured once more, and in turn those too close to call, until little is at stake. The
    fastest wins, by all its measurements; within the noise the one with more headroom.

    Args:
        space: the legal splits.
        measure: measures one split. A split that lacks memory or crashes is an `Outcome`, and the
            search goes on. Any exception is the caller's own: it leaves unchanged, and so does
            KeyboardInterrupt. The trials finished before that are in `storage`, and `on_trial` has
            been given each.
        max_trials: splits to search at most, those read back from `storage` included.
            Confirmations, four at most where all fit again, come on top.
        timeout_s: seconds after which no further split is searched. The one being measured is
            finished, and the finalists are confirmed.
        storage: where trials are kept, so that a search that was stopped goes on: None is memory
            only; else a path (.db, .sqlite, .sqlite3: SQLite; any other: an Optuna journal file) or
            an Optuna URL. One search at a time has a study.
        seed: for the samplers that draw, "random", "tpe" and "gp".
        sampler: "guided" (the default), "tpe", "gp", "random", "grid", or an Optuna sampler. It
            sees the parameters `accumulation_steps` and `gpu0_share`, or a share of every device;
            what a plain one proposes is moved to the nearest split that is neither measured nor
            ruled out. "gp" sets torch to one thread.
        min_headroom_bytes: what every device must keep free, or one number for each. Trials read
            back from `storage` are judged by it anew.
        confirm: measures the finalists, where that should differ from `measure`: longer, say.
        on_trial: called with every finished trial, in order; those read back from `storage` first.
        study_name: the study in `storage`. Each search, of one model on one set of devices, needs
            its own.
        clock: seconds, for `timeout_s` and `Trial.elapsed_s`.

    Raises:
        NoFeasibleSplitError: nothing fits, or nothing that fits was found in time.
        ConfigError: an argument is unusable, or the study in `storage` belongs to another search.
    """
    check_limits(max_trials, timeout_s)
    demands = headroom_demands(min_headroom_bytes, space.num_devices)
    chosen = make_sampler(sampler, space, seed, demands)
    with quiet_optuna(), open_study(storage, study_name, chosen, asdict(space)) as study:
        records.demand(study, demands)
        search = _Search(study=study, sampler=chosen, space=space, demands=demands, on_trial=on_trial, clock=clock)
        search.resume()
        stopped = search.run(measure, max_trials, timeout_s)
        return search.conclude(confirm or measure, stopped)


@dataclass(slots=True, kw_only=True)
class _Search:
    """One search under way: the study, and what was measured so far."""

    study: optuna.Study
    sampler: GuidedSampler | FilteredSampler
    space: SplitSpace
    demands: tuple[int, ...]
    on_trial: Callable[[Trial], None] | None
    clock: Callable[[], float]
    judged: list[JudgedTrial] = field(default_factory=list)
    """The searched splits, oldest first."""
    trials: list[Trial] = field(default_factory=list)
    """What is handed back: the same, then the confirmations."""

    def resume(self) -> None:
        """Read back the finished trials of an earlier run."""
        for stored in records.finished_trials(self.study):
            judged = records.judged_trial_of(stored, self.demands)
            reason, elapsed_s = stored.user_attrs["reason"], stored.user_attrs["elapsed_s"]
            self._finish_search_trial(judged, reason, elapsed_s, is_resumed=True)

    def run(self, measure: Measure, max_trials: int, timeout_s: float | None) -> Stopped:
        """Search until a limit is reached; says which."""
        started = self.clock()
        while True:
            if len(self.judged) >= max_trials:
                return "max_trials"
            if timeout_s is not None and self.clock() - started >= timeout_s:
                return "timeout"
            stopped = self.sampler.why_stop(self.judged)
            if stopped is not None:
                return stopped
            self._search_one(measure)

    def conclude(self, confirm: Measure, stopped: Stopped) -> SearchResult:
        """Confirm the finalists and choose."""
        round_of = len(self.judged)

        def measure_again(split: BatchSplit, reason: str, turn: int) -> Measurement:
            return self._confirm_one(confirm, split, reason, f"{round_of}:{turn}")

        confirmed = confirm_finalists(even_table(self.space).splits(), self.judged, measure_again)
        if confirmed.best is None:
            raise no_feasible_split(self.trials, stopped, self.demands)
        return SearchResult(
            best=confirmed.best,
            baseline=confirmed.baseline,
            trials=tuple(self.trials),
            stopped=stopped,
            warnings=self.sampler.warnings(self.judged),
        )

    def _search_one(self, measure: Measure) -> None:
        trial = self.study.ask(distributions_of(self.space))
        reason = self.sampler.reason
        try:
            measurement, elapsed_s = self._measure(measure, split_of(self.space, trial.params))
        except BaseException:
            with suppress(StorageInternalError):  # the error to see is the one of the trial
                self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise
        with deferred():  # Ctrl-C does not undo what was measured
            judged = JudgedTrial.of(measurement, self.demands)
            try:
                trial.set_user_attr("elapsed_s", elapsed_s)
                records.tell(self.study, trial, judged, min_headroom_bytes=self.demands, reason=reason)
            finally:  # where it cannot be stored, the caller has it all the same
                self._finish_search_trial(judged, reason, elapsed_s, is_resumed=False)

    def _confirm_one(self, confirm: Measure, split: BatchSplit, reason: str, round_of: str) -> Measurement:
        """Confirmations belong to the search as it was: when it goes on, all are measured anew."""
        key = f"confirm:{round_of}:{split.accumulation_steps}x{'+'.join(map(str, split.shard_sizes))}"
        stored = self.study.user_attrs.get(key)
        if stored is not None:
            measurement = Measurement.from_dict(stored["measurement"])
            self._report("confirm", measurement, reason, stored["elapsed_s"], is_resumed=True)
            return measurement
        measurement, elapsed_s = self._measure(confirm, split)
        with deferred():
            try:
                self.study.set_user_attr(key, {"measurement": measurement.to_dict(), "elapsed_s": elapsed_s})
            finally:
                self._report("confirm", measurement, reason, elapsed_s, is_resumed=False)
        return measurement

    def _measure(self, measure: Measure, split: BatchSplit) -> tuple[Measurement, float]:
        started = self.clock()
        measurement = measure(split)
        elapsed_s = self.clock() - started
        if measurement.split != split:
            raise ConfigError(
                f"measure was asked for {split} and returned a measurement of {measurement.split}: expected the split "
                "it was given."
            )
        return measurement.judged(self.demands), elapsed_s

    def _finish_search_trial(self, judged: JudgedTrial, reason: str, elapsed_s: float, *, is_resumed: bool) -> None:
        self.judged.append(judged)
        self._report("search", judged.measurement, reason, elapsed_s, is_resumed=is_resumed)

    def _report(
        self,
        kind: Literal["search", "confirm"],
        measurement: Measurement,
        reason: str,
        elapsed_s: float,
        *,
        is_resumed: bool,
    ) -> None:
        trial = Trial(
            number=len(self.trials),
            kind=kind,
            measurement=measurement,
            reason=reason,
            elapsed_s=elapsed_s,
            is_resumed=is_resumed,
        )
        self.trials.append(trial)
        if self.on_trial is not None:
            self.on_trial(trial)
