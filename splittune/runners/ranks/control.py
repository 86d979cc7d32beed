"""The group of their own over which ranks agree: gloo on the host, whatever the job's own group is."""

from __future__ import annotations

import pickle
import re
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splittune.errors import RanksError
from splittune.signals import deferred

# Seconds for which ranks wait for one another at most: the slowest one's trial, and what rank 0 thinks between two. A
# choice, that of a trial in a process of its own; doubled, a rank that hangs is noticed as much later.
DEFAULT_WAIT_S = 300.0


# What is told in a single collective, with its length; what is longer takes a second one. A choice: an order has some
# hundred bytes, what a trial measured one or two thousand.
SLOT_BYTES = 8192
_LENGTH_BYTES = 8


class ControlGroup:
    """All ranks of the default group, in a gloo group beside it. Make it on every rank, and `close` it in any case.

    Ctrl-C and SIGTERM take effect once a collective has ended, so that no rank leaves the others in it. A trial that
    fails leaves the group as it was, for trials use no collective of its. Once a rank is lost, has not come within
    `wait_s`, or has left a collective by an exception (it had no memory for what it says, or a signal handler of the
    job's raised), it is of no use any more: `is_broken`.

    Args:
        wait_s: seconds for which any rank waits for the others at most.

    Raises:
        RanksError: a rank has not come, or is lost.
    """

    def __init__(self, *, wait_s: float = DEFAULT_WAIT_S) -> None:
        self.rank, self.num_ranks, self.wait_s = dist.get_rank(), dist.get_world_size(), wait_s
        self.is_broken = False
        self.heard: Any = None
        """What was broadcast last: known also where Ctrl-C was pressed while it came."""
        with _Lost(self):
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    def broadcast(self, thing: Any = None) -> Any:
        """What rank 0 gives, on every rank; picklable."""
        packed = pickle.dumps(thing) if self.rank == 0 else b""
        with deferred(), _Lost(self):
            slot = _slot_of(packed, SLOT_BYTES)
            dist.broadcast(slot, src=0, group=self._group)
            if _length_of(slot) > SLOT_BYTES:
                slot = _slot_of(packed, _length_of(slot))
                dist.broadcast(slot, src=0, group=self._group)
            self.heard = _unpacked(slot)
        return self.heard

    def gather(self, thing: Any) -> list[Any]:
        """What each rank gives, by rank, on all of them; picklable."""
        with deferred(), _Lost(self):
            packed = pickle.dumps(thing)
            slots = self._gathered(packed, SLOT_BYTES)
            longest = max(map(_length_of, slots))
            if longest > SLOT_BYTES:
                slots = self._gathered(packed, longest)
        return [_unpacked(slot) for slot in slots]

    def _gathered(self, packed: bytes, room_bytes: int) -> list[Tensor]:
        own = _slot_of(packed, room_bytes)
        slots = [torch.empty_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(slots, own, group=self._group)
        return slots

    def close(self) -> None:
        """Give it up, so that whoever still waits in it is freed; the default group stays."""
        group, self._group = self._group, None
        dist.destroy_process_group(group)


def _slot_of(packed: bytes, room_bytes: int) -> Tensor:
    """The length, then as much of the content as there is room for."""
    slot = torch.zeros(_LENGTH_BYTES + room_bytes, dtype=torch.uint8)
    content = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed[:room_bytes]
    slot[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return slot


def _length_of(slot: Tensor) -> int:
    return int.from_bytes(slot[:_LENGTH_BYTES].numpy().tobytes(), "little")


def _unpacked(slot: Tensor) -> Any:
    content = slot[_LENGTH_BYTES : _LENGTH_BYTES + _length_of(slot)].numpy().tobytes()
    return pickle.loads(content)  # noqa: S301  from a rank of this very job, which runs the same code


class _Lost:
    """A broken group's error becomes a `RanksError`; by any other the group is broken too, and it passes through.

    Whoever raises in a collective is not where the others are: the next one would pair with theirs.
    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def __enter__(self) -> None:
        if self._control.is_broken:
            raise RanksError("the ranks are not together any more: one of them was lost before.")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._control.is_broken = True
            traceback.clear_frames(error.__traceback__)  # they hold the group, and `close` could not free the others
        if isinstance(error, RuntimeError):  # gloo's own is one, DistBackendError's and DistStoreError's base too
            raise RanksError(
                f"a rank was lost, or has not come within {self._control.wait_s:g} s ({first_line(error)}). Expected "
                f"all {self._control.num_ranks} to take part in every trial. Look for an earlier error on the others."
            ) from error


def first_line(error: BaseException) -> str:
    """What an error says, in a line; of gloo's without the place in its source, and without its advice."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically caused")[0]
