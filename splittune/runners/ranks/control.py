"""The group of their own over which ranks agree: gloo on the host, whatever the job's own group is."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from splittune.errors import RanksError

# Seconds for which ranks wait for one another at most: the slowest one's trial, and what rank 0 thinks between two. A
# choice, that of a trial in a process of its own; doubled, a rank that hangs is noticed as much later.
DEFAULT_WAIT_S = 300.0


class ControlGroup:
    """All ranks of the default group, in a gloo group beside it. Make it on every rank, and `close` it in any case.

    A trial that fails leaves it as it was, for trials use no collective of its. Once a rank is lost, or has not come
    within `wait_s`, it is of no use any more: `is_broken`.

    Args:
        wait_s: seconds for which any rank waits for the others at most.

    Raises:
        RanksError: a rank has not come, or is lost.
    """

    def __init__(self, *, wait_s: float = DEFAULT_WAIT_S) -> None:
        self.rank, self.num_ranks, self.wait_s = dist.get_rank(), dist.get_world_size(), wait_s
        self.is_broken = False
        with _Lost(self):
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    def broadcast(self, thing: Any = None) -> Any:
        """What rank 0 gives, on every rank; picklable."""
        box = [thing]
        with _Lost(self):
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, thing: Any) -> list[Any]:
        """What each rank gives, by rank, on all of them; picklable."""
        things: list[Any] = [None] * self.num_ranks
        with _Lost(self):
            dist.all_gather_object(things, thing, group=self._group)
        return things

    def close(self) -> None:
        """Give it up; the default group stays."""
        dist.destroy_process_group(self._group)


class _Lost:
    """Tells a broken group's error from others: it becomes a `RanksError`."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def __enter__(self) -> None:
        if self._control.is_broken:
            raise RanksError("the ranks are not together any more: one of them was lost before.")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):  # gloo's own is one, DistBackendError's and DistStoreError's base too
            self._control.is_broken = True
            raise RanksError(
                f"a rank was lost, or has not come within {self._control.wait_s:g} s ({first_line(error)}). Expected "
                f"all {self._control.num_ranks} to take part in every trial. Look for an earlier error on the others."
            ) from error


def first_line(error: BaseException) -> str:
    """What an error says, in a line; of gloo's without the place in its source."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+:\d+\] ", "", line)
