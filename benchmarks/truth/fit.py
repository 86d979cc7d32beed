"""The factors of `splittune.hardware.virtual.efficiency`, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.efficiency import EFFICIENCIES, Efficiency, Kind
from splittune.hardware.virtual.roofline import Work

_GPU = find_gpu("RTX3090")
_PRODUCTS: tuple[Kind, ...] = ("product", "batched product")
_CONVOLUTIONS: tuple[Kind, ...] = ("convolution", "grouped convolution")
# Not among the measured: no fused attention then, and SGD went parameter by parameter.
_UNMEASURED: dict[Kind, Kind] = {"attention": "batched product", "update": "elementwise"}
# Measured elsewhere: on an H100.
_NOT_FITTED: tuple[Kind, ...] = ("batch norm without cuDNN",)
# An error of a twentieth counts less than its square, and larger ones less and less: what is measured of a few models
# cannot be had from shapes.
_SCALE = 0.05


class Parameter(NamedTuple):
    """One factor: where it starts, how far it is let go (in its logarithm), and what is physically the least."""

    kind: Kind | None
    field: str
    start: float
    spread: float
    least: float


def parameters() -> list[Parameter]:
    """Every factor that is fitted.

    No class is faster than 95 % of the published bandwidth, and no product than 1.18 times the published peak: clocks
    reach 2.0 GHz where 1.7 are published.
    """
    found = [Parameter(None, "kernel_s", 4e-6, 0.5, 1e-6)]
    for kind in get_args(Kind):
        if kind in _UNMEASURED or kind in _NOT_FITTED:
            continue
        start, spread = {"copy": (1.18, 0.15), "elementwise": (1.15, 0.1)}.get(kind, (1.4, 0.3))
        found.append(Parameter(kind, "per_byte", start, spread, 1.05))
        if kind in _CONVOLUTIONS or kind in _PRODUCTS:
            found.append(Parameter(kind, "per_flop", 1.1 if kind in _CONVOLUTIONS else 1.0, 0.2, 0.85))
            found.append(Parameter(kind, "by_depth", 40, 0.7, 1e-3))
            found.append(Parameter(kind, "by_columns", 40, 0.7, 1e-3))
        if kind in _CONVOLUTIONS:
            found.append(Parameter(kind, "by_both", 3000, 1.5, 1e-3))
        if kind == "depthwise convolution":
            found.append(Parameter(kind, "per_flop", 30, 0.7, 0.85))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The works of one step, each with how often it is done, and the measured time."""

    works: Sequence[Work]
    counts: NDArray[np.int64]
    step_s: float
    weight: float = 1.0
    """Below 1 where several rows are of one architecture."""


class Model:
    """Times of many workloads as a function of the factors' logarithms, with its derivative."""

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self.parameters = parameters()
        self._at = {(each.kind, each.field): place for place, each in enumerate(self.parameters)}
        self._num = len(workloads)
        rows = np.concatenate([np.full(len(each.works), row) for row, each in enumerate(workloads)])
        counts = np.concatenate([each.counts for each in workloads]).astype(float)
        works = [work for each in workloads for work in each.works]
        kinds = np.array([work.kind for work in works])
        bytes_s = np.array([float(work.moved_bytes) for work in works]) / _GPU.memory_bandwidth_bytes_per_s
        flops_s = np.array(
            [work.num_flops / (_GPU.half_flops_per_s if work.is_half else _GPU.fp32_flops_per_s) for work in works]
        )
        depth = np.array([max(work.depth, 1) for work in works], dtype=float)
        columns = np.array([max(work.num_columns, 1) for work in works], dtype=float)
        by_field = {
            "per_byte": bytes_s,
            "per_flop": flops_s,
            "by_depth": flops_s / depth,
            "by_columns": flops_s / columns,
            "by_both": flops_s / (depth * columns),
        }
        self._linear = np.zeros((self._num, len(self.parameters)))
        self._overlapping: list[tuple[list[int], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]] = []
        for place, (kind, field, *_) in enumerate(self.parameters):
            if kind is None:
                self._linear[:, place] = np.bincount(rows, weights=counts, minlength=self._num)
            elif kind not in _PRODUCTS:
                ours = kinds == kind
                self._linear[:, place] = np.bincount(
                    rows[ours], weights=(counts * by_field[field])[ours], minlength=self._num
                )
        for kind in _PRODUCTS:
            ours = kinds == kind
            fields = [field for other, field, *_ in self.parameters if other == kind]
            terms = np.stack([by_field[field][ours] for field in fields], axis=1)
            self._overlapping.append(([self._at[kind, field] for field in fields], terms, rows[ours], counts[ours]))

    def times_s(self, logs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of each workload's kernels, and their derivatives by the logarithms."""
        factors = np.exp(logs)
        slopes = self._linear * factors
        times = slopes.sum(axis=1)
        for places, terms, rows, counts in self._overlapping:
            parts = terms * factors[places]  # the first is per_byte
            flops_s = parts[:, 1:].sum(axis=1)
            both_s = np.hypot(parts[:, 0], flops_s) + 1e-15
            times = times + np.bincount(rows, weights=counts * both_s, minlength=self._num)
            for column, place in enumerate(places):
                slope = parts[:, column] * (parts[:, 0] if column == 0 else flops_s) / both_s
                slopes[:, place] += np.bincount(rows, weights=counts * slope, minlength=self._num)
        return times, slopes

    def fit(self, measured_s: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The logarithms at which the relative errors are least; a row of weight 0 takes no part."""
        starts = np.log([each.start for each in self.parameters])
        spreads = np.array([each.spread for each in self.parameters])
        least = np.log([each.least for each in self.parameters])
        used = weights > 0

        def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
            misses = weights * np.log(self.times_s(logs)[0] / measured_s) / _SCALE
            return np.concatenate([misses[used], (logs - starts) / spreads])

        def slopes(logs: NDArray[np.float64]) -> NDArray[np.float64]:
            times, by_log = self.times_s(logs)
            return np.concatenate([(weights / times / _SCALE)[used, None] * by_log[used], np.diag(1 / spreads)])

        bounds = (least, np.full(len(least), np.inf))
        found = least_squares(
            errors, np.maximum(starts, least + 1e-6), jac=slopes, bounds=bounds, loss="cauchy", max_nfev=100
        )
        return np.asarray(found.x)

    def factors(self, logs: NDArray[np.float64]) -> tuple[float, dict[Kind, Efficiency]]:
        """The time of a kernel and each class's factors, to three digits, as efficiency.py holds them."""
        values = {key: float(f"{np.exp(logs[place]):.3g}") for key, place in self._at.items()}
        table: dict[Kind, Efficiency] = {}
        for kind in get_args(Kind):
            if kind in _NOT_FITTED:
                table[kind] = EFFICIENCIES[kind]
                continue
            source = _UNMEASURED.get(kind, kind)
            fields = {field: value for (other, field), value in values.items() if other == source}
            table[kind] = Efficiency(**fields, overlaps=source in _PRODUCTS)
        return values[None, "kernel_s"], table
