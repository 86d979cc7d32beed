"""Part 10 of `benchmarks.gpu`: twenty models that people train, measured, beside what a plan foretells of them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import quantiles
from typing import Any

import torch

from benchmarks.gpu.stage import Findings, Measured, Stage, mib, percent, relative, room_of, split_of
from benchmarks.jobs.gpu_models import make
from benchmarks.jobs.zoo import ZOO, ZooModel, why_missing
from splittune.cards import module_of
from splittune.errors import DeviceError
from splittune.hardware.oom import is_sticky
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.twins import twins_of
from splittune.profiling.measurement import Measurement, Outcome
from splittune.runners.foretell import foretell
from splittune.split import BatchSplit
from splittune.units import GIB

# The whole batch, and in two: times and peaks grow from one to the other.
STEPS = (2, 1)
# Made, measured twice, foretold twice. A guess, until a card has run it.
MODEL_S = 12.0
FORETELL_S = 20.0
# The batches of `ZOO` are for such a card; larger ones take up to twice as many samples, for what a small batch takes
# is the host's time, and smaller ones fewer.
ROOM_BYTES = 24 * GIB
MOST_TIMES = 2
# The aims of `benchmarks.truth`, for models that nothing was fitted to.
MEDIAN_ERROR, P90_ERROR, FIT_PART, LACK_PART = 0.08, 0.20, 0.99, 0.80
_FIGURES = ("step_time", "peak_allocated", "peak_reserved")


def run(stage: Stage, findings: Findings, *, models: Sequence[ZooModel] | None = None) -> None:
    """A row for each split of each model, or one with the reason; at the end how far off the plan was."""
    chosen = list(models if models is not None else tiny(stage) if stage.is_rehearsal else ZOO)
    for library in dict.fromkeys(model.library for model in chosen):
        reason = why_missing(library)
        if reason is not None:
            left_out = [model.name for model in chosen if model.library == library]
            chosen = [model for model in chosen if model.library != library]
            stage.say(f"{library} cannot be used here ({reason}): without {', '.join(left_out)}")
            findings.check(f"{library} is there for {len(left_out)} models", None, reason)
    for number, model in enumerate(chosen):
        if not stage.has_time(MODEL_S if not stage.is_rehearsal else 0):
            findings.cut_short = f"{len(chosen) - number} of {len(chosen)} models, from {model.name} on"
            break
        findings.rows += _rows_of(stage, model)
        stage.say(_line(findings.rows[-1]))
    _summarise(stage, findings)


def tiny(stage: Stage) -> list[ZooModel]:
    """Two models that stand in for the twenty, in a rehearsal."""
    return [
        ZooModel(
            name=name,
            library="",
            make=lambda family=family: family.model,  # type: ignore[misc]
            batch_size=family.batch_size,
            draw=family.draw,
            loss_fn=family.loss_fn,
            in_half=False,
        )
        for name, family in ((name, make(name, stage.sizes, stage.seed)) for name in ("MLP", "GPT"))
    ]


def _rows_of(stage: Stage, model: ZooModel) -> list[dict[str, Any]]:
    """Of a model that fails in whatever way one row that says how; an error that spoils the card ends the part."""
    try:
        return _measured_rows(stage, model)
    except Exception as error:
        if is_sticky(error):
            raise
        return [
            _job_cells(stage, model) | {"why": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
        ]
    finally:
        gc.collect()
        stage.hardware.recover(thoroughly=True)


def _measured_rows(stage: Stage, model: ZooModel) -> list[dict[str, Any]]:
    task = model.task(_batch_size(stage, model), seed=stage.seed, half=_half(stage))
    cells = _job_cells(stage, model) | {"num_parameters": sum(each.numel() for each in task.model.parameters())}
    rows = []
    with Measured(task, stage.hardware) as job:
        for accumulation_steps in STEPS:
            split = split_of(job.global_batch_size, accumulation_steps)
            measured = job.profiler.measure(split)
            planned, why = _foretold(stage, job, measured)
            rows.append(cells | _split_cells(split, measured, planned) | {"why": why})
    return rows


def _foretold(stage: Stage, job: Measured, measured: Measurement) -> tuple[Measurement | None, str]:
    """The same split on a virtual card of the same kind; None, and why, where that cannot be told."""
    try:
        cards = _virtual(stage, measured)
    except DeviceError as error:
        return None, str(error)
    found = foretell(job.task, job.samples, cards, [(measured.split, "output")], budget_s=FORETELL_S)
    return next(iter(found.planned), None), found.why


def _virtual(stage: Stage, measured: Measurement) -> VirtualHardware:
    if isinstance(stage.hardware, VirtualHardware):
        return stage.hardware
    with stage.hardware.metered():
        return twins_of(stage.hardware.devices, measured.memory or stage.hardware.memory())


def _batch_size(stage: Stage, model: ZooModel) -> int:
    """Worked: 64 samples on a card with 24 GiB of room, 128 on one with 79 GiB, 26 on one with 10 GiB."""
    if not model.library:
        return model.batch_size
    times = min(MOST_TIMES, room_of(stage.hardware) / ROOM_BYTES)
    return max(2, int(times * model.batch_size))


def _half(stage: Stage) -> torch.dtype:
    """bfloat16 on cards that compute in it (from 8.0 on), else float16, without a scaler: no weight is looked at."""
    if stage.is_rehearsal or module_of(stage.torch_device).get_device_properties(stage.torch_device).major >= 8:
        return torch.bfloat16
    return torch.float16


def _job_cells(stage: Stage, model: ZooModel) -> dict[str, Any]:
    half = str(_half(stage)).removeprefix("torch.")
    return {
        "model": model.name,
        "library": model.library,
        "library_version": _version(model.library),
        "dtype": half if model.in_half else "float32",
        "optimizer": model.optimizer,
    }


def _version(library: str) -> str:
    try:
        return version(library) if library else ""
    except PackageNotFoundError:
        return "unknown"


def _split_cells(split: BatchSplit, measured: Measurement, planned: Measurement | None) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "global_batch_size": split.global_batch_size,
        "accumulation_steps": split.accumulation_steps,
        "outcome": measured.outcome.value,
        "planned_outcome": None if planned is None else planned.outcome.value,
    }
    figures, foretold = _figures(measured), _figures(planned)
    for name in _FIGURES:
        cells |= {
            f"{name}_{_unit(name)}": figures[name],
            f"planned_{name}_{_unit(name)}": foretold[name],
            f"{name}_error": relative(foretold[name], figures[name]),
        }
    return cells


def _unit(figure: str) -> str:
    return "s" if figure == "step_time" else "mib"


def _figures(measurement: Measurement | None) -> dict[str, float | None]:
    """Of a trial that ran; None where it did not."""
    if measurement is None or measurement.step_time_s is None or not measurement.memory:
        return dict.fromkeys(_FIGURES)
    memory = measurement.memory[0]
    peaks = mib(memory.peak_allocated_bytes), mib(memory.peak_reserved_bytes)
    return dict(zip(_FIGURES, (measurement.step_time_s, *peaks), strict=True))


def _line(row: dict[str, Any]) -> str:
    if row.get("step_time_error") is None:
        return f"{row['model']:<30} {row.get('outcome', 'failed')}, foretold {row.get('planned_outcome')}: {row['why']}"
    return (
        f"{row['model']:<30} step {1e3 * row['step_time_s']:.1f} ms, foretold {percent(row['step_time_error'])}; "
        f"allocated {row['peak_allocated_mib']:.0f} MiB, foretold {percent(row['peak_allocated_error'])}; reserved "
        f"{percent(row['peak_reserved_error'])}"
    )


def errors_of(rows: Sequence[dict[str, Any]], figure: str) -> tuple[float, float] | None:
    """Median and 90th percentile of the error's size; None where there are not two.

    Worked: errors of -10 %, 0, +10 % and +30 % have a median of 10 % and a 90th percentile of 24 %.
    """
    sizes = [abs(row[f"{figure}_error"]) for row in rows if row.get(f"{figure}_error") is not None]
    if len(sizes) < 2:
        return None
    deciles = quantiles(sizes, n=10, method="inclusive")
    return deciles[4], deciles[8]


def _summarise(stage: Stage, findings: Findings) -> None:
    """Checks on a card; a rehearsal compares virtual cards with themselves, and stand-ins have no times."""
    can_judge = not stage.is_rehearsal and stage.torch_device.type == "cuda"
    for figure in _FIGURES:
        found = errors_of(findings.rows, figure)
        detail = "too few models ran" if found is None else f"median {found[0]:.1%}, 90th percentile {found[1]:.1%}"
        told = (
            f"{figure.replace('_', ' ')} is foretold to {MEDIAN_ERROR:.0%} in the median, {P90_ERROR:.0%} at the 90th"
        )
        passed = None if found is None or not can_judge else found[0] <= MEDIAN_ERROR and found[1] <= P90_ERROR
        findings.check(told, passed, detail)
    for outcome, least, said in ((Outcome.OK, FIT_PART, "fit"), (Outcome.OUT_OF_MEMORY, LACK_PART, "not fit")):
        rows = [row for row in findings.rows if row.get("outcome") == outcome.value and row["planned_outcome"]]
        right = [row for row in rows if row["planned_outcome"] == outcome.value]
        findings.check(
            f"of what {'ran' if outcome is Outcome.OK else 'did not'} at least {least:.0%} is said to {said}",
            len(right) >= least * len(rows) if rows and can_judge else None,
            f"{len(right)} of {len(rows)}",
        )
    failed = [row["model"] for row in findings.rows if "outcome" not in row]
    if failed:
        findings.check("every model runs", None, f"not {', '.join(failed)}: their rows say why")
