from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.truth.fit import Model, Workload, parameters
from benchmarks.truth.judge import memory_verdicts, time_errors
from benchmarks.truth.measured import LADDER, MeasuredStep, family_of, read_measured
from benchmarks.truth.memory import needed_bytes, usable_bytes
from benchmarks.truth.run import Judge, Traced
from benchmarks.truth.trace import Trace
from benchmarks.truth.works import step_s
from splittune.hardware.virtual import efficiency
from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.efficiency import EFFICIENCIES, KERNEL_S
from splittune.hardware.virtual.roofline import Work, kernel_time_s
from splittune.hardware.virtual.timeline import LAUNCH_S
from splittune.units import GIB, MIB

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "truth.csv"
RTX3090 = find_gpu("RTX3090")
WORKS = (
    Work("elementwise", 0, 10**9),
    Work("convolution", 10**12, 10**8, is_half=True, depth=576, num_columns=64),
    Work("product", 10**12, 10**9, is_half=True, depth=768, num_columns=3072),
    Work("batched product", 10**9, 10**8, is_half=True, depth=64, num_columns=197),
    Work("depthwise convolution", 10**10, 10**8, is_half=True, depth=9, num_columns=1),
    Work("softmax", 0, 10**8),
)


def step(model: str, batch_size: int = 64, step_s: float = 1.0) -> MeasuredStep:
    return MeasuredStep(model=model, batch_size=batch_size, image_size=224, step_s=step_s)


def trace(events: list[int], num_before: int = 0) -> Trace:
    return Trace(
        calls=(),
        order=np.zeros(0, dtype=np.int32),
        events=np.array(events, dtype=np.int64),
        places=np.zeros(len(events), dtype=np.int32),
        num_before=num_before,
    )


def test_every_measured_row_is_read_with_its_family() -> None:
    """563 rows, sizes of the ladder alone, a family for each."""
    rows = read_measured()
    assert len(rows) == 563
    assert {row.batch_size for row in rows} <= set(LADDER)
    assert len({row.family for row in rows}) == 33


@pytest.mark.parametrize(
    ("models", "family"),
    [
        (
            ["tf_efficientnet_b0_ap", "efficientnet_lite0", "mobilenetv3_rw", "hardcorenas_a", "fbnetc_100"],
            "efficientnet",
        ),
        (["resnet50", "gluon_seresnext50_32x4d", "legacy_senet154", "tv_resnet34", "wide_resnet50_2"], "resnet"),
        (["vit_base_patch16_224_miil", "deit3_small_patch16_224"], "vit"),
        (["swinv2_cr_tiny_224", "swinv2_base_window8_256"], "swin"),
    ],
)
def test_one_lineage_is_one_family(models: list[str], family: str) -> None:
    """Whatever the prefix says about who trained it."""
    assert {family_of(model) for model in models} == {family}


def test_an_unknown_family_is_named() -> None:
    """A model of no known family would be judged by its own kin."""
    with pytest.raises(ValueError, match="'davit_tiny' is of no family"):
        family_of("davit_tiny")


def test_the_next_size_is_the_ladders() -> None:
    """192 comes after 128; after 512 comes nothing."""
    assert step("vgg11", 128).next_batch_size == 192
    assert step("vgg11", 512).next_batch_size is None


def test_errors_are_worked_by_hand() -> None:
    """Of 1.1, 0.8 and 1.0 s for 1 s each: 10 %, 20 % and 0; two of three pairs of throughputs in order."""
    errors = time_errors(np.array([1.1, 1.6, 4.0]), np.array([1.0, 2.0, 4.0]), np.array([1, 1, 4]))
    assert errors.median == pytest.approx(0.1)
    assert errors.p90 == pytest.approx(0.18)  # four fifths of the way from 10 % to 20 %
    # throughputs 0.909, 0.625, 1 for 1, 0.5, 1: one pair is tied as measured, two are in order
    assert errors.tau == pytest.approx(2 / (3 * 2) ** 0.5)


def test_verdicts_are_counted() -> None:
    """Needs of 20 and 23 for 22: one fits. Next needs of 21 and 30, one not traced: one does not fit."""
    verdicts = memory_verdicts([20, 23, 10], [21, 30, None], [22, 22, 22])
    assert (verdicts.num_said_to_fit, verdicts.num_measured) == (2, 3)
    assert (verdicts.num_next_said_not_to, verdicts.num_next) == (1, 2)


def test_needed_is_less_than_reserved_where_the_cache_can_be_handed_back() -> None:
    """12 GiB freed, then 13: without a limit 25 GiB are reserved, and 13 are enough."""
    needed = needed_bytes(trace([12 * GIB, 0, 13 * GIB, -1]))
    assert 13 * GIB <= needed <= 13 * GIB + 128 * MIB


def test_usable_memory_is_what_measured_steps_needed() -> None:
    """Of 1,000 steps that ran, 995 fit in 22.1 GiB: in steps of a half 22.5 GiB are usable."""
    assert usable_bytes([20 * GIB] * 900 + [int(22.1 * GIB)] * 95 + [30 * GIB] * 5) == 22.5 * GIB


def test_a_step_takes_its_kernels_or_its_launches() -> None:
    """Two kernels of 1 ms start once the first is launched; of two of 1 us the launches decide."""
    order = np.array([0, 0], dtype=np.int32)
    assert step_s(np.array([1e-3]), order) == pytest.approx(LAUNCH_S + 2e-3)
    assert step_s(np.array([1e-6]), order) == pytest.approx(2 * LAUNCH_S + 1e-6)


def test_the_model_that_is_fitted_is_the_one_that_is_used() -> None:
    """With the kept factors it gives each operation the time that a virtual RTX 3090 does."""
    model = Model([Workload(works=[work], counts=np.array([3]), step_s=1.0) for work in WORKS])
    logs = [
        np.log(KERNEL_S if kind is None else max(getattr(EFFICIENCIES[kind], field), 1e-12))
        for kind, field, *_ in parameters()
    ]
    times, _ = model.times_s(np.array(logs))
    assert times == pytest.approx([3 * kernel_time_s(work, RTX3090) for work in WORKS], rel=1e-6)


def test_derivatives_are_right() -> None:
    """Those of the fit, against differences."""
    model = Model([Workload(works=WORKS, counts=np.arange(1, 7), step_s=1.0)])
    logs = np.log([each.start for each in parameters()])
    times, slopes = model.times_s(logs)
    for place in range(len(logs)):
        moved = logs.copy()
        moved[place] += 1e-6
        assert slopes[0, place] == pytest.approx((model.times_s(moved)[0][0] - times[0]) / 1e-6, rel=1e-3, abs=1e-12)


def test_a_family_is_foretold_without_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each fit the rows of one family have no weight, and every row is foretold once."""
    names = ["resnet18", "resnet34", "vgg11", "vgg13", "vit_base_patch16_224"]
    rows = [
        Traced(
            measured=step(name),
            architecture=name,
            works=WORKS,
            order=np.arange(6, dtype=np.int32),
            needed_bytes=GIB,
            next_needed_bytes=None,
        )
        for name in names
    ]
    left_out = []

    def fit(self: Model, measured_s: np.ndarray, weights: np.ndarray) -> np.ndarray:
        left_out.append([name for name, weight in zip(names, weights, strict=True) if weight == 0])
        return np.log([each.start for each in self.parameters])

    monkeypatch.setattr(Model, "fit", fit)
    judged = Judge(rows).across_families()
    assert left_out == [["resnet18", "resnet34"], ["vgg11", "vgg13"], ["vit_base_patch16_224"]]
    assert [each.measured.model for each in judged] == names


def test_the_stated_error_is_that_of_the_kept_rows() -> None:
    """The constants beside modelled times say what the results say."""
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    foretold, measured = (np.array([float(row[key]) for row in rows]) for key in ("foretold_s", "measured_s"))
    errors = time_errors(foretold, measured, np.array([int(row["batch_size"]) for row in rows]))
    assert round(errors.median, 3) == efficiency.MEDIAN_TIME_ERROR
    assert round(errors.p90, 3) == efficiency.P90_TIME_ERROR
