"""The default sampler: the few splits where an uneven share can win first, then ever finer around the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from splittune.search.attempt import Attempt, best_attempt
from splittune.search.moves import directions, distance, moved, rebalanced
from splittune.search.sampler import CandidateSampler, Proposal
from splittune.search.shares import Group, Limits, ShareFinder, groups_of, limits_of
from splittune.search.view import View

if TYPE_CHECKING:
    from splittune.search.candidates import Candidates

PATIENCE = 3
"""Uneven splits to try at one number of accumulation steps, where none fits, before looking elsewhere."""


class CoarseToFineSampler(CandidateSampler):
    """Deterministic search in four stages, each a pure function of what was measured. The baseline comes before.

    1. Fewer steps than the baseline: there a smaller share for the device that lacks memory may let the micro-batch
       fit. A single step first, then the middle between steps that gain nothing and steps that do. At each, the
       largest share that fits is found by doubling and bisection, to 1/16 of an even share.
    2. Around the best: shares in proportion to the devices' measured speed, then moves of samples from one device to
       another, longer while they gain and halved when they do not; then one step fewer and one more.
    3. The same moves, down to single samples.
    4. The even splits with more steps than the baseline, as long as they gain; then what stage 1 put off, and whatever
       is open nearest to the best.

    It needs no seed: no choice is left to chance, and equals go to the first.
    """

    def __init__(self, candidates: Candidates) -> None:
        super().__init__(candidates)
        self._groups = groups_of(candidates.space)

    def propose(self, attempts: Sequence[Attempt]) -> Proposal:
        view = View(self.candidates, attempts)
        for stage in (
            self._fewer_steps,
            self._around_best,
            self._single_samples,
            self._more_steps,
            self._put_off,
            self._any,
        ):
            proposal = next(stage(view), None)
            if proposal is not None:
                return proposal
        return Proposal(index=0, reason="every candidate is measured or ruled out")

    # Each stage yields what it would measure, best first; only the first is taken, since the next call knows more.

    def _fewer_steps(self, view: View) -> Iterator[Proposal]:
        all_steps = self.candidates.steps
        upper = len(all_steps)
        if view.baseline is not None:
            upper = all_steps.index(view.baseline.split.accumulation_steps)
        else:
            for place in reversed(range(len(all_steps))):
                yield from self._largest_shares(view, all_steps[place])
                upper = place
                if view.throughput_at(all_steps[place]) > 0:
                    break
        if upper == 0:
            return
        yield from self._largest_shares(view, all_steps[0])
        reached = view.throughput_at(all_steps[upper])
        lower, upper = (-1, 0) if view.throughput_at(all_steps[0]) > reached else (0, upper)
        while upper - lower > 1:
            middle = (lower + upper) // 2
            yield from self._largest_shares(view, all_steps[middle])
            gains = view.throughput_at(all_steps[middle]) > view.throughput_at(all_steps[upper])
            lower, upper = (lower, middle) if gains else (middle, upper)

    def _around_best(self, view: View) -> Iterator[Proposal]:
        if view.best is None:
            return
        split = view.best.split
        shards = rebalanced(split.shard_sizes, view.best.measurement.device_busy_s, self._groups)
        index = None if shards is None else view.open_at(split.accumulation_steps, shards)
        if index is not None:
            reason = f"k={split.accumulation_steps}: shares in proportion to the speed each device showed"
            yield Proposal(index=index, reason=reason)
        yield from self._moves(view, view.best, self._resolution(split.micro_batch_size))
        place = self.candidates.steps.index(split.accumulation_steps)
        for steps in (*self.candidates.steps[max(0, place - 1) : place], *self.candidates.steps[place + 1 : place + 2]):
            yield from self._largest_shares(view, steps)

    def _single_samples(self, view: View) -> Iterator[Proposal]:
        if view.best is not None:
            yield from self._moves(view, view.best, 1)

    def _more_steps(self, view: View) -> Iterator[Proposal]:
        if view.baseline is None:
            return
        fewest, reached = view.baseline.split.accumulation_steps, view.baseline.throughput
        for split in self.candidates.even_splits:
            if split.accumulation_steps <= fewest:
                continue
            if view.is_open(split):
                reason = f"even split at k={split.accumulation_steps}: more steps than the baseline"
                yield Proposal(index=self.candidates.index(split), reason=reason)
            if view.throughput_of(split) <= reached:
                return
            reached = view.throughput_of(split)

    def _put_off(self, view: View) -> Iterator[Proposal]:
        if view.best is not None:
            place = self.candidates.steps.index(view.best.split.accumulation_steps)
            for steps in reversed(self.candidates.steps[:place]):
                yield from self._largest_shares(view, steps, patience=len(self.candidates))

    def _any(self, view: View) -> Iterator[Proposal]:
        centre = self.candidates.even_splits[-1] if view.best is None else view.best.split
        fewest = centre.accumulation_steps
        for steps in sorted(self.candidates.steps, key=lambda steps: (abs(steps - fewest), steps)):
            open_ones = [index for index in self.candidates.at(steps) if view.is_open(self.candidates[index])]
            index = self.candidates.nearest(centre.shard_sizes, open_ones)
            if index is not None:
                yield Proposal(index=index, reason=f"k={steps}: the open split nearest to {centre}")

    def _resolution(self, micro_batch_size: int) -> int:
        """Samples that make no difference yet: 1/16 of an even share."""
        return max(1, micro_batch_size // (16 * self.candidates.space.num_devices))

    def _largest_shares(self, view: View, steps: int, patience: int = PATIENCE) -> Iterator[Proposal]:
        """The most even split that fits in this many steps, or the next trial on the way to it.

        Where nothing fitted in `patience` uneven trials, there may be nothing that fits: this is put off.
        """
        finder = self._finder(view, steps)
        if _cannot_gain(view, finder, steps) or _is_in_vain(view, steps, patience):
            return
        shards = finder.wanted()
        index = None if shards is None else view.open_at(steps, shards)
        if index is not None:
            yield Proposal(index=index, reason=f"k={steps}: the most even shares that may fit ({_describe(finder)})")

    def _finder(self, view: View, steps: int) -> ShareFinder:
        space = self.candidates.space
        micro_batch_size = -(-space.global_batch_size // steps)
        nearest = min(
            (attempt.split for attempt in view.attempts if attempt.fits),
            key=lambda split: abs(split.accumulation_steps - steps),
            default=None,
        )
        return ShareFinder(
            groups=self._groups,
            limits=tuple(
                limits_of(group, view.attempts, steps, micro_batch_size, space.min_shard_size) for group in self._groups
            ),
            guesses=tuple(
                None if nearest is None else max(nearest.shard_sizes[device] for device in group)
                for group in self._groups
            ),
            micro_batch_size=micro_batch_size,
            smallest=space.min_shard_size,
            resolution=self._resolution(micro_batch_size),
            num_fitting=sum(attempt.fits for attempt in view.at(steps)),
        )

    def _moves(self, view: View, start: Attempt, resolution: int) -> Iterator[Proposal]:
        """Moves between two groups from `start`, longest first, none shorter than `resolution`.

        Where a split further along was measured, and is worse, half the way to it is tried; else twice as far as the
        nearest one behind, so that a gain is followed by a longer step.
        """
        split = start.split
        steps, shards = split.accumulation_steps, split.shard_sizes
        smallest = self.candidates.space.min_shard_size
        proposals: list[tuple[int, Proposal]] = []
        for source, target in directions(self._groups, start.measurement.device_busy_s):
            along = [distance(shards, attempt.split.shard_sizes, source, target) for attempt in view.at(steps)]
            beyond = min((places for places in along if places > 0), default=None)
            behind = min((-places for places in along if places < 0), default=0)
            length = beyond // 2 if beyond else max(2 * behind, 2 * resolution, split.micro_batch_size // 32)
            while length >= resolution:
                wanted = moved(shards, source, target, length, smallest)
                index = None if wanted is None else view.open_at(steps, wanted)
                if index is not None:
                    samples = "1 sample" if length == 1 else f"{length} samples"
                    reason = f"k={steps}: {samples} from {_name(source)} to {_name(target)} of {split}"
                    proposals.append((length, Proposal(index=index, reason=reason)))
                    break
                length //= 2
        yield from (proposal for _, proposal in sorted(proposals, key=lambda pair: -pair[0]))


def _is_in_vain(view: View, steps: int, patience: int) -> bool:
    """True when `patience` trials in this many steps, the even split aside, found nothing that fits."""
    failures = sum(not view.is_even(attempt.split) for attempt in view.at(steps))
    return failures >= patience and view.throughput_at(steps) == 0


def _cannot_gain(view: View, finder: ShareFinder, steps: int) -> bool:
    """True when larger shares in this many steps cannot beat the best, however many fit.

    No device's time shrinks by more than its shard does, so neither does a step's.
    """
    reached = best_attempt(view.at(steps))
    if reached is None or view.best is None:
        return False
    hoped = replace(finder, limits=tuple(Limits(fits=limit.fails - 1, fails=limit.fails) for limit in finder.limits))
    shards = hoped.wanted()
    if shards is None:
        return False
    pairs = zip(shards, reached.split.shard_sizes, strict=True)
    shrinks_to = min([1.0, *(wanted / own for wanted, own in pairs if own)])
    return reached.throughput <= view.best.throughput * shrinks_to


def _describe(finder: ShareFinder) -> str:
    """What the proposed shares are based on."""
    parts = []
    for group, limit in zip(finder.groups, finder.limits, strict=True):
        if limit.fails <= finder.micro_batch_size:
            known = f"{limit.fits} fits, " if limit.fits >= finder.smallest else ""
            parts.append(f"{_name(group)}: {known}{limit.fails} lacks memory")
    return "; ".join(parts) or "no limit is known"


def _name(group: Group) -> str:
    return f"GPU {group[0]}" if len(group) == 1 else f"each of GPUs {group[0]} to {group[-1]}"
