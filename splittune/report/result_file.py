"""result.json: what the tables of a search do not hold, for whoever reads its folder: the winner with all its runs.

The split is measured several times; `best` and `baseline` are all of those together, with their raw times. JSON with a
schema number, read with suspicion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splittune.config.files import read_text
from splittune.errors import ConfigError
from splittune.profiling.measurement import Measurement
from splittune.report.memory_parts import MemoryParts
from splittune.training.module_memory import ModuleMemory

SCHEMA = 1
AGAIN = "Tune again, or restore the folder as `splittune tune` left it."
_WORDS = ("job", "stopped", "remedy", "explanation", "foretold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The winner and its baseline, what fills their cards, and what the search says of them."""

    best: Measurement
    baseline: Measurement | None
    best_parts: tuple[MemoryParts, ...] = ()
    """What each card's peak is made of at `best`; empty where memory was not read."""
    baseline_parts: tuple[MemoryParts, ...] = ()
    job: str = ""
    """``"ByteGPT of 812800 parameters"``."""
    stopped: str = ""
    """Why the search ended, as `TuneResult.stopped` has it."""
    facts: tuple[str, ...] = ()
    """What matters most, a sentence or two each."""
    notes: tuple[str, ...] = ()
    """What to see to before training; of two strategies which is faster, and why."""
    remedy: str = ""
    explanation: str = ""
    foretold: str = ""
    """What a plan for these cards said, beside what was measured; empty where there is none."""
    modules: tuple[ModuleMemory, ...] = ()
    """What the model's modules hold, most first."""

    def to_text(self) -> str:
        """As JSON that ends in a newline."""
        data: dict[str, Any] = {"schema": SCHEMA, **{name: getattr(self, name) for name in _WORDS}}
        data |= {
            "facts": list(self.facts),
            "notes": list(self.notes),
            "best": self.best.to_dict(),
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "best_parts": [asdict(parts) for parts in self.best_parts],
            "modules": [asdict(module) for module in self.modules],
            "baseline_parts": [asdict(parts) for parts in self.baseline_parts],
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Found:
        """What `to_text` wrote.

        Raises:
            ConfigError: no such file, half-written, or of another schema.
        """
        text = read_text(path, AGAIN)
        try:
            data = json.loads(text)
            schema = data["schema"]
            if schema == SCHEMA:
                baseline = data["baseline"]
                return cls(
                    best=Measurement.from_dict(data["best"]),
                    baseline=None if baseline is None else Measurement.from_dict(baseline),
                    best_parts=_parts(data["best_parts"]),
                    baseline_parts=_parts(data["baseline_parts"]),
                    modules=tuple(ModuleMemory(**module) for module in data["modules"]),
                    facts=tuple(map(str, data["facts"])),
                    notes=tuple(map(str, data["notes"])),
                    **{name: str(data[name]) for name in _WORDS},
                )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is half-written or edited: {type(error).__name__}: {error}. {AGAIN}") from error
        raise ConfigError(
            f"{path}: schema is {schema!r}, expected {SCHEMA}, which this splittune reads. Upgrade splittune, or tune "
            "again."
        )


def _parts(data: Sequence[dict[str, Any]]) -> tuple[MemoryParts, ...]:
    return tuple(MemoryParts(**each) for each in data)
