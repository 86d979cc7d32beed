"""What the environment says of this process: whether it is a rank that a launcher started, and whose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from splittune.errors import ConfigError

FOLDER_VARIABLE = "SPLITTUNE_LAUNCH_FOLDER"
LAUNCHER_VARIABLE = "SPLITTUNE_LAUNCHER_PID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among those of one launch."""

    rank: int
    world_size: int
    num_starts: int
    """How often these ranks were started before, by a launcher that starts them again."""
    folder: Path | None
    """Where the launch keeps what outlives its processes; None where torchrun, or alike, started them."""
    launcher_pid: int
    """The process without which this one has no purpose."""

    @property
    def is_first(self) -> bool:
        """Whether it is the rank that searches, prints and writes."""
        return self.rank == 0


def place_of(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place among ranks; None where no launcher started it.

    Worked: ``{"RANK": "1", "WORLD_SIZE": "4"}`` is rank 1 of 4.

    Raises:
        ConfigError: half of it is there, or it is no number.
    """
    given = {name: environment.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")}
    if not any(given.values()):
        return None
    try:
        rank, world_size = (int(text) for text in given.values())
    except ValueError:
        raise ConfigError(
            f"the environment has RANK={given['RANK']!r} and WORLD_SIZE={given['WORLD_SIZE']!r}: expected two whole "
            "numbers, as torchrun sets them, or neither. Start it with torchrun, or unset both."
        ) from None
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={world_size}: expected a rank from 0 to {world_size - 1}. "
            "Start it with torchrun, or unset both."
        )
    folder = environment.get(FOLDER_VARIABLE)
    return Place(
        rank=rank,
        world_size=world_size,
        num_starts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        folder=Path(folder) if folder else None,
        launcher_pid=int(environment.get(LAUNCHER_VARIABLE, os.getppid())),
    )


def refuse_nested(place: Place, what: str) -> NoReturn:
    """Say that a rank starts no ranks of its own.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{what} was asked for in a process that a launcher started, rank {place.rank} of {place.world_size}: expected "
        f"one launcher. Leave {what} out, or start the command without torchrun."
    )
