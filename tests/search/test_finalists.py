from __future__ import annotations

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.attempt import Attempt
from splittune.search.finalists import confirm_finalists
from splittune.split import BatchSplit, SplitSpace

SPACE = SplitSpace(global_batch_size=12, num_devices=2)
EVENS = list(SPACE.even_splits())


def uneven(gpu0_bsz: int) -> BatchSplit:
    return BatchSplit.with_gpu0(global_batch_size=12, accumulation_steps=1, num_devices=2, gpu0_bsz=gpu0_bsz)


def ran(split: BatchSplit, step_time_s: float, headroom_bytes: int = 0) -> Measurement:
    memory = tuple(
        DeviceMemory(
            device=device,
            total_bytes=1000,
            outside_bytes=0,
            peak_allocated_bytes=1000 - headroom_bytes,
            peak_reserved_bytes=1000 - headroom_bytes,
        )
        for device in range(2)
    )
    return Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(step_time_s,), memory=memory)


def failed(split: BatchSplit) -> Measurement:
    return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY)


class Again:
    """Measures again what it was given, in the order asked."""

    def __init__(self, *measurements: Measurement) -> None:
        self.answers = {measurement.split: measurement for measurement in measurements}
        self.asked: list[BatchSplit] = []

    def __call__(self, split: BatchSplit, reason: str) -> Measurement:
        self.asked.append(split)
        return self.answers[split]


def attempts(*measurements: Measurement) -> list[Attempt]:
    return [Attempt(measurement=measurement) for measurement in measurements]


def test_the_three_fastest_and_the_baseline_are_measured_again() -> None:
    """Besides the baseline, which comes first, the best three are confirmed and no other."""
    searched = [ran(EVENS[1], 9.0), *(ran(uneven(share), float(share)) for share in (5, 2, 4, 3))]
    again = Again(*searched)
    confirmed = confirm_finalists(EVENS, attempts(*searched), again)
    assert again.asked == [EVENS[1], uneven(2), uneven(3), uneven(4)]
    assert confirmed.best == ran(uneven(2), 2.0)
    assert confirmed.baseline == ran(EVENS[1], 9.0)


def test_the_fastest_as_confirmed_wins() -> None:
    """What was fastest in the search loses to what is fastest when measured again, the baseline included."""
    searched = [ran(EVENS[1], 9.0), ran(uneven(2), 2.0), ran(uneven(3), 3.0)]
    confirmed = confirm_finalists(
        EVENS, attempts(*searched), Again(ran(EVENS[1], 4.0), ran(uneven(2), 8.0), ran(uneven(3), 5.0))
    )
    assert confirmed.best == confirmed.baseline == ran(EVENS[1], 4.0)


def test_a_finalist_that_does_not_fit_again_gives_way_to_the_next() -> None:
    """A finalist that fails drops out, and the next best is confirmed in its place."""
    searched = [ran(EVENS[1], 9.0), *(ran(uneven(share), float(share)) for share in (2, 3, 4, 5))]
    again = Again(searched[0], failed(uneven(2)), *searched[2:])
    confirmed = confirm_finalists(EVENS, attempts(*searched), again)
    assert again.asked == [EVENS[1], uneven(2), uneven(3), uneven(4), uneven(5)]
    assert confirmed.best == ran(uneven(3), 3.0)


def test_a_baseline_that_does_not_fit_again_gives_way_to_more_steps() -> None:
    """The baseline is then the measured even split with the next more steps."""
    searched = [ran(EVENS[1], 2.0), ran(EVENS[3], 4.0)]
    confirmed = confirm_finalists(EVENS, attempts(*searched), Again(failed(EVENS[1]), ran(EVENS[3], 4.0)))
    assert confirmed.baseline == confirmed.best == ran(EVENS[3], 4.0)


def test_equals_go_to_more_headroom() -> None:
    """Of two equally fast splits the one that leaves more memory free wins."""
    searched = [ran(uneven(2), 2.0, headroom_bytes=10), ran(uneven(3), 2.0, headroom_bytes=20)]
    assert confirm_finalists(EVENS, attempts(*searched), Again(*searched)).best == searched[1]


def test_nothing_is_confirmed_when_nothing_fits_again() -> None:
    """Where every confirmation fails there is no best and no baseline."""
    searched = [ran(EVENS[1], 2.0), ran(uneven(3), 4.0)]
    confirmed = confirm_finalists(EVENS, attempts(*searched), Again(failed(EVENS[1]), failed(uneven(3))))
    assert confirmed.best is None
    assert confirmed.baseline is None
