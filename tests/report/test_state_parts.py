"""Parameters and optimizer state within what no batch size changes."""

from __future__ import annotations

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.memory_parts import memory_parts
from splittune.report.ranks import parts_of_ranks
from splittune.report.state_parts import ModelBytes, PartsOfTrials, model_bytes_of
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.units import MIB

MODEL = ModelBytes(parameter_bytes=10 * MIB, gradient_bytes=10 * MIB)


def run(steps: int, *shares: int, resting_mib: int | None = 40) -> Measurement:
    """50 MiB and 2 a sample; GPU 0 half of one for each of the micro-batch besides."""
    split = BatchSplit(global_batch_size=steps * sum(shares), accumulation_steps=steps, shard_sizes=shares)
    memory = tuple(
        DeviceMemory(
            device=device,
            total_bytes=1000 * MIB,
            outside_bytes=0,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            micro_step_peak_bytes=peak,
            resting_bytes=None if resting_mib is None else resting_mib * MIB,
        )
        for device, share in enumerate(shares)
        for peak in [(50 + 2 * share) * MIB + (0 if device else split.micro_batch_size * MIB // 2)]
    )
    return Measurement(split=split, outcome=Outcome.OK, whole_step_times_s=(1.0,), memory=memory)


def trials(*runs: Measurement) -> tuple[Trial, ...]:
    return tuple(Trial(number=i, kind="search", measurement=run, reason="") for i, run in enumerate(runs))


RUNS = (run(2, 2, 4), run(2, 4, 8), run(2, 3, 9), run(2, 6, 6))


def test_what_rests_besides_parameters_and_waiting_gradients_is_the_optimizers() -> None:
    """Of 40 MiB at rest 10 are parameters and, where steps accumulate, 10 gradients; other cards update nothing."""
    first, second = PartsOfTrials(trials(*RUNS), "dp", MODEL).of(RUNS[-1])
    assert (first.parameter_bytes, first.optimizer_bytes) == (10 * MIB, 20 * MIB)
    assert (second.parameter_bytes, second.optimizer_bytes) == (10 * MIB, 0)
    assert (first.gradient_bytes, second.gradient_bytes) == (10 * MIB, 10 * MIB)
    single = run(1, 6, 6, resting_mib=30)
    assert PartsOfTrials(trials(*RUNS, single), "dp", MODEL).of(single)[0].optimizer_bytes == 20 * MIB


def test_an_output_that_the_loop_keeps_is_none_of_the_optimizers() -> None:
    """The larger the batch was, the more rests; and on GPU 0 gradients wait though it had no sample."""
    kept = (run(2, 2, 4, resting_mib=41), run(2, 4, 8, resting_mib=42), run(1, 12, 24, resting_mib=36))
    idle = run(2, 0, 6, resting_mib=41)
    parts = PartsOfTrials(trials(*kept, idle), "dp", MODEL)
    assert [parts.of(one)[0].optimizer_bytes for one in (*kept, idle)] == [21 * MIB] * 4


def test_ranks_have_buckets_as_large_as_gradients_at_rest() -> None:
    """On every card: of 40 MiB 10 are parameters, 10 gradients, 10 buckets."""
    parts = PartsOfTrials(trials(*RUNS), "ddp", MODEL).of(RUNS[0])
    assert [part.optimizer_bytes for part in parts] == [10 * MIB, 10 * MIB]
    assert [part.gradient_bytes for part in parts] == [20 * MIB, 20 * MIB]


def test_no_part_is_more_than_there_is_room_for() -> None:
    """Of a model and gradients as large as all that no batch changes, and more: what is left is 0, not below."""
    for size in (25, 45, 90):
        large = ModelBytes(parameter_bytes=size * MIB, gradient_bytes=size * MIB)
        for strategy in ("dp", "ddp"):
            for part in PartsOfTrials(trials(*RUNS), strategy, large).of(RUNS[0]):
                assert part.fixed_bytes is not None
                pieces = (part.parameter_bytes, part.optimizer_bytes, part.gradient_bytes)
                assert all(piece is not None and piece >= 0 for piece in pieces)
                assert sum(piece or 0 for piece in pieces) <= part.fixed_bytes


def test_without_the_models_size_the_parts_are_those_of_the_trials() -> None:
    """The growth that is worked out once gives what `memory_parts` and `parts_of_ranks` give each time."""
    for strategy, parts_of in (("dp", memory_parts), ("ddp", parts_of_ranks)):
        parts = PartsOfTrials(trials(*RUNS), strategy, None)
        assert [parts.of(each) for each in RUNS] == [parts_of(trials(*RUNS), each) for each in RUNS]
    assert model_bytes_of(None, 1) is None
    assert model_bytes_of(2, 1) == ModelBytes(parameter_bytes=2, gradient_bytes=1)


def test_what_is_not_known_stays_so() -> None:
    """No reading of what rests, no memory at all, or a failed trial."""
    silent = [run(2, 2, 4, resting_mib=None), run(2, 4, 8, resting_mib=None)]
    parts = PartsOfTrials(trials(*silent), "dp", MODEL)
    assert [part.optimizer_bytes for part in parts.of(silent[0])] == [None, None]
    failed = Measurement(split=RUNS[0].split, outcome=Outcome.OUT_OF_MEMORY)
    assert parts.of(failed) == ()
