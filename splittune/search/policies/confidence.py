"""The split with most to gain, if it is worth a trial and its risk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.candidates.acquisition import CandidateScores
from splittune.search.choices import CONFIDENCE, LIKELY, SIGNIFICANT
from splittune.search.policies.base import Proposal, SearchState
from splittune.units import format_bytes


@dataclass(frozen=True, slots=True)
class UpperConfidenceBound:
    """The most to gain, less what an OOM costs: a search ends where that is little.

    A split that cannot run out of memory is worth what it gains if its prediction is off by as much as may be, the
    upper confidence bound, times the probability to keep its headroom. Where the latest predictions were off by more
    than their deviations, the bound is that much further away (`Calibration`), and while they were off by more than
    `SIGNIFICANT`, splits that surely fit are measured whatever they promise: a search does not end on models that were
    wrong just now.

    A risk is worth the expected improvement times the probability of feasibility, less the probability of an OOM times
    its price. Worked: 0.3 that keeps its headroom with a chance of 0.7, and runs with one of 0.8, is worth
    ``0.7 x 0.3 - 0.2 x 0.35 = 0.14``, and a trial; with chances of 0.4 and 0.5 it is worth none. Each trial that
    ran out of memory makes the next one dearer, by the chance with which it was foretold to run: by so much it shows
    that risks are larger here than they look. After one such chance of 1 an OOM costs a quarter more, after two twice
    as much, after four five times. Those before one ran do not: nothing was foretold of them.

    Before a risk comes what is worth a trial, too, gives a device more than any had, and is the likeliest to run: what
    it takes tells more of the risk. Worked: after one sample on each device four on some promise most, and run with a
    chance of 0.82; two on one cannot run out of memory, and show what each further sample takes.

    Models that few trials have tested are not believed to the last: before `min_trials` ran, what surely fits and
    may be as little as `most_lost` behind the best is measured, too, first what gives a device just more than any trial
    did: a logarithm of shares counts as one of time. Where nothing such is left, a risk that likely fits counts by an
    upper confidence bound, too, of `risk_deviations`, and so does one that gives a device its first share, or GPU 0
    more than its only one: nothing tells how fast that is.
    """

    min_gain: float = 0.01
    """Worth, in logarithms of time, of a trial. A choice: the regret that a search aims at. Smaller: more
    trials before the search ends."""
    oom_price: float = 0.35
    """What a trial that runs out of memory costs, in logarithms of time; more for each that did. A choice:
    of 0.35, 0.4 and 0.7 the one with which the fewest searches ended behind a split that they did not dare, and nearly
    as few trials ran out of memory. Larger: fewer risks, and more such searches."""
    doubling_ooms: float = 2.0
    """After so many that were foretold to run for sure the price is doubled, and by their square it is dearer: one may
    be a surprise, of which the model of memory learns, and more are none. A choice: with the price doubled by one two
    more of 12,000 searches ended over 5 % behind, with as many OOMs. Larger: more risks after an OOM."""
    blind_oom_price: float = 0.1
    """The price where trials do not tell what is held at rest: running out of memory is then the only way to
    learn what fits, so it stays the same. A choice."""
    deviations: float = CONFIDENCE
    """The optimism: faster than predicted by this many standard deviations."""
    risk_deviations: float = 1.0
    """The optimism about what may run out of memory, before `min_trials` ran. A choice: of 79 searches with an OOM or
    over 3 % behind as many ended behind with 1 as with 1.65, after 60 OOMs for 68; with 0.5 after 53, and one by 81 %.
    Larger: more risks are taken."""
    min_trials: int = 7
    """A choice: of the 28 of 6,000 searches that ended over 2 % behind 17 had had six or fewer. With 7 for 6 of 480
    others 3 for 2 end over 1 % behind. Larger: more trials where models fitted at once, 0.4 for one more."""
    most_lost: float = 0.1
    """In logarithms of time. A choice: what is further behind, by all that is known, tells nothing of the best."""

    def propose(self, state: SearchState) -> Proposal | None:
        scores = state.scores
        if scores is None or not state.any_fits:
            return None
        bound = scores.upper_bound(self.deviations * state.doubt)
        gain, price, fits = bound, self.blind_oom_price, _fits(state, scores)
        if state.memory.knows_rest:
            # that the models were wrong is a reason to measure what surely fits or runs, and none to risk an OOM
            gain = np.where(scores.cannot_oom, bound, scores.expected_improvement())
            price = self.oom_price * (1 + (state.memory.unforeseen_ooms / self.doubling_ooms) ** 2)
        worth = self._worth(state, scores, fits * gain, price)
        if state.doubt > SIGNIFICANT:
            worth = np.where(scores.surely_feasible, worth + 1.0, worth)
        num_ran = sum(trial.ran for trial in state.trials)
        if worth.max() < self.min_gain and num_ran < self.min_trials:
            is_near = scores.surely_feasible & (bound > -self.most_lost)
            worth = np.where(is_near, 1.0 + bound + scores.just_beyond, -np.inf)
            if worth.max() < self.min_gain:
                tells_much = (fits >= LIKELY) | state.is_untold_share(scores.table)
                gain = fits * scores.upper_bound(self.risk_deviations)
                worth = np.where(tells_much, self._worth(state, scores, gain, price), -np.inf)
        row = self._next(state, scores, worth)
        if worth[row] < self.min_gain:
            return None
        split, reason = scores.table.split(row), self._prediction(state, scores, row)
        if scores.surely_feasible[row]:
            device = int((scores.limits - scores.needed.most[row]).argmin())
            most, limit = (format_bytes(float(b[device])) for b in (scores.needed.most[row], scores.limits))
            return Proposal(split=split, kind="improve", reason=f"{reason}; GPU {device} at most at {most} of {limit}")
        chances = f"runs with a chance of {scores.runs[row]:.0%}, keeps its headroom with one of {fits[row]:.0%}"
        return Proposal(split=split, kind="risky", reason=f"{reason}; worth a risk: {chances}")

    def _next(self, state: SearchState, scores: CandidateScores, worth: FloatArray) -> int:
        """The row that is `worth`, (N,), most; where that is a risk, the likeliest to run of what tells more of it.

        Where trials do not tell what is held at rest risks are taken as they come: they are the way to learn what fits.
        """
        most = int(worth.argmax())
        if scores.cannot_oom[most] or not state.memory.knows_rest:
            return most
        tells_more = (worth >= self.min_gain) & (scores.times.beyond > 0)
        tells_more[most] = True
        return int(np.lexsort((worth, np.where(tells_more, scores.runs, -1.0)))[-1])

    @staticmethod
    def _worth(state: SearchState, scores: CandidateScores, gain: FloatArray, price: float) -> FloatArray:
        """(N,) what a trial of each is worth if it brings so much `gain`, (N,), on average, and an OOM costs `price`.

        All in logarithms of time. What leaps is worth none, while anything else is left.
        """
        worth, grows_slowly = gain - price * (1 - scores.runs), state.is_grown_slowly(scores.table)
        return np.where(grows_slowly | ~grows_slowly.any(), worth, -np.inf)

    @staticmethod
    def _prediction(state: SearchState, scores: CandidateScores, row: int) -> str:
        throughput, deviation = state.throughput(scores, row), scores.times.deviation[row]
        gain = np.expm1(scores.best_log_s - scores.times.log_s[row])
        return f"predicted {throughput:,.0f} samples/s ({gain:+.1%}, give or take {deviation:.1%})"


def _fits(state: SearchState, scores: CandidateScores) -> FloatArray:
    """(N,) probability to keep headroom."""
    return np.where(scores.surely_feasible, 1.0, scores.needed.chance_below(state.limits))
