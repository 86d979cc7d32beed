"""The measured steps, traced, foretold by factors that were fitted to other families, and judged."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.truth.fit import Model, Workload
from benchmarks.truth.measured import BUILT_OTHERWISE, MeasuredStep
from benchmarks.truth.memory import needed_bytes, usable_bytes
from benchmarks.truth.models import architecture_of
from benchmarks.truth.trace import Trace, trace_step
from benchmarks.truth.works import step_s, work_of_call
from splittune.hardware.virtual.roofline import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A measured step and what was foretold of it by factors fitted to other families."""

    measured: MeasuredStep
    architecture: str
    foretold_s: float
    needed_bytes: int
    usable_bytes: int
    """Of the card, as found on the other families."""
    next_needed_bytes: int | None
    """None above 512, or where that size has not been traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A row with its traces."""

    measured: MeasuredStep
    architecture: str
    works: tuple[Work, ...]
    order: NDArray[np.int32]
    needed_bytes: int
    next_needed_bytes: int | None


class Traces:
    """Traces in a folder, made where they are missing: a broken run goes on where it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._needed_path = folder / "needed.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._needed: dict[str, int] = json.loads(self._needed_path.read_text()) if self._needed_path.exists() else {}

    def make(self, steps: Iterable[MeasuredStep]) -> None:
        """First every measured size, then the next ones; in an order that mixes families."""
        rows = [(architecture, step) for step in steps if (architecture := architecture_of(step.model)) is not None]
        random.Random(0).shuffle(rows)
        sizes = [(architecture, step.batch_size, step.image_size) for architecture, step in rows]
        sizes += [(a, size, step.image_size) for a, step in rows if (size := step.next_batch_size) is not None]
        missing = [each for each in dict.fromkeys(sizes) if not self._path(*each).exists()]
        for number, each in enumerate(missing, start=1):
            trace_step(*each).save(self._path(*each))
            print(f"\rtraced {number} of {len(missing)}: {each[0]} at {each[1]}".ljust(79), end="", flush=True)
        if missing:
            print()

    def read(self, step: MeasuredStep) -> Traced | None:
        """None where the model is timm's no more, or its trace is missing."""
        architecture = architecture_of(step.model)
        if architecture is None or not self._path(architecture, step.batch_size, step.image_size).exists():
            return None
        trace = Trace.load(self._path(architecture, step.batch_size, step.image_size))
        after = step.next_batch_size
        return Traced(
            measured=step,
            architecture=architecture,
            works=tuple(map(work_of_call, trace.calls)),
            order=trace.order,
            needed_bytes=self._needed_bytes(architecture, step.batch_size, step.image_size) or 0,
            next_needed_bytes=None if after is None else self._needed_bytes(architecture, after, step.image_size),
        )

    def keep(self) -> None:
        """Write down what replays have found."""
        self._needed_path.write_text(json.dumps(self._needed, indent=0, sort_keys=True))

    def _needed_bytes(self, architecture: str, batch_size: int, image_size: int) -> int | None:
        path = self._path(architecture, batch_size, image_size)
        if path.stem not in self._needed:
            if not path.exists():
                return None
            self._needed[path.stem] = needed_bytes(Trace.load(path))
        return self._needed[path.stem]

    def _path(self, architecture: str, batch_size: int, image_size: int) -> Path:
        return self._folder / f"{architecture}-{batch_size}-{image_size}.npz"


class Judge:
    """Fits to some families and foretells the others."""

    def __init__(self, rows: Sequence[Traced]) -> None:
        self._rows = rows
        alike = Counter((row.architecture, row.measured.batch_size, row.measured.image_size) for row in rows)
        self._weights = np.array(
            [alike[row.architecture, row.measured.batch_size, row.measured.image_size] ** -0.5 for row in rows]
        )
        self._measured_s = np.array([row.measured.step_s for row in rows])
        self._families = np.array([row.measured.family for row in rows])
        self.model = Model(
            [
                Workload(works=row.works, counts=np.bincount(row.order, minlength=len(row.works)), step_s=s)
                for row, s in zip(rows, self._measured_s, strict=True)
            ]
        )

    def fit_all(self) -> NDArray[np.float64]:
        """The factors that all families agree on best."""
        return self.model.fit(self._measured_s, self._weights)

    def across_families(self) -> list[Judged]:
        """Every row, foretold by what the other families say of time and of usable memory."""
        judged = []
        for family in sorted(set(self._families)):
            own = self._families == family
            logs = self.model.fit(self._measured_s, np.where(own, 0.0, self._weights))
            others = [row for row, is_own in zip(self._rows, own, strict=True) if not is_own]
            usable = usable_bytes(
                [row.needed_bytes for row in others if not row.measured.model.startswith(BUILT_OTHERWISE)]
            )
            judged += [self._foretell(row, logs, usable) for row, is_own in zip(self._rows, own, strict=True) if is_own]
        places = {id(row.measured): place for place, row in enumerate(self._rows)}
        return sorted(judged, key=lambda each: places[id(each.measured)])

    def _foretell(self, row: Traced, logs: NDArray[np.float64], usable: int) -> Judged:
        kernels = Model([Workload(works=[work], counts=np.array([1]), step_s=0.0) for work in row.works])
        return Judged(
            measured=row.measured,
            architecture=row.architecture,
            foretold_s=step_s(kernels.times_s(logs)[0], row.order),
            needed_bytes=row.needed_bytes,
            usable_bytes=usable,
            next_needed_bytes=row.next_needed_bytes,
        )
